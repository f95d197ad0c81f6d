// In a vLLM branch: csrc/mamba/gdn/recurrent_kernels.cuh.
//
// The gated delta rule, token by token, for prefill, decode and verification.  recurrent.cuh holds the
// arithmetic and its order; this file only moves data.  Two kernels:
//
//   direct   a warp works alone: it reads a token's inputs from memory and makes the scalars itself.
//            For sequences of a few tokens, where reading and writing the state is all that costs.
//   tiled    one set of warps makes tiles of fp32 k, q, v and scalars in shared memory, the other walks
//            the tokens.  For prefill, where arithmetic is all that costs.

#pragma once

#include "barrier.cuh"
#include "recurrent.cuh"

namespace recurrent {

// Element offsets of a token's row in mixed_qkv.  The grid is (parts of a head * value heads of a key head, key
// heads, sequences), so no division is needed to know the key head.
struct Heads {
  int head;        // value head
  int64_t q, k, v;

  __device__ __forceinline__ Heads(const Arguments& g, int parts) {
    const int key_head = blockIdx.y;
    head = key_head * (gridDim.x / parts) + blockIdx.x / parts;
    q = static_cast<int64_t>(key_head) * kDim;
    k = static_cast<int64_t>(g.key_heads + key_head) * kDim;
    v = static_cast<int64_t>(2 * g.key_heads + head) * kDim;
  }
};

__device__ __forceinline__ float* head_state(const Arguments& g, int slot, int head) {
  return g.state + slot * g.state_stride + static_cast<int64_t>(head) * (kDim * kDim);
}

// The compiler moves no load across this.
__device__ __forceinline__ void issue_loads() { asm volatile("" ::: "memory"); }

// ---- direct --------------------------------------------------------------------------------------

// A block is a warp.  It makes the scalars of TOGETHER tokens at once: of one, or of one for each group of lanes.
template <int COLS, int MIN_BLOCKS_, int TOGETHER_>
struct Direct {
  using R = Rows<COLS, false>;
  static constexpr int MIN_BLOCKS = MIN_BLOCKS_, THREADS = 32, SHARED = 0;
  static constexpr int PARTS = kDim / R::COLUMNS;  // blocks of a head
  static constexpr int TOGETHER = TOGETHER_;
  static constexpr bool KEEPS_STATES = true;
  static_assert(TOGETHER == 1 || TOGETHER == R::GROUPS);
};

__device__ __forceinline__ Scalars from_lane(const Scalars& x, int lane) {
  return {__shfl_sync(kWarp, x.decay, lane), __shfl_sync(kWarp, x.read, lane),
          __shfl_sync(kWarp, x.write, lane), __shfl_sync(kWarp, x.out_state, lane),
          __shfl_sync(kWarp, x.out_write, lane)};
}

// Grid: that of `Heads`.
//
// A load behind the state's comes back no sooner than they, so a token's inputs are asked for before the state, and
// its scalars are made while the state is on its way.  The less a warp does once the state has come, the more of the
// time its registers are a state in flight.
template <class D>
__global__ void __launch_bounds__(D::THREADS, D::MIN_BLOCKS) direct(const __grid_constant__ Arguments g) {
  using R = typename D::R;
  const int lane = threadIdx.x;
  const Heads h(g, D::PARTS);
  const int row = blockIdx.x % D::PARTS * R::COLUMNS + lane / kLanes * R::COLS;
  const int column = row + R::first(lane);
  const bool writes_out = lane % R::COPIES == 0;
  const Sequence seq = sequence_of(g, blockIdx.z);
  if (seq.tokens <= 0) return;
  using Own = Packed<R::OWN>;
  Own* out = reinterpret_cast<Own*>(g.out + seq.row * g.out_stride + h.head * kDim + column);
  const int64_t next_out = g.out_stride / R::OWN;

  RawVector raw_k, raw_q, group_k, group_q;
  Own raw_v;
  RawGates raw_gates;
  const auto fetch = [&](int i) {
    const __nv_bfloat16* x = g.mixed_qkv + (seq.row + i) * g.qkv_stride;
    raw_k.load(x + h.k, lane);
    raw_q.load(x + h.q, lane);
    raw_v = *reinterpret_cast<const Own*>(x + h.v + column);
    if (D::TOGETHER == 1) raw_gates = load_gates(g, seq.row + i, h.head);
  };
  const auto fetch_groups = [&](int i) {
    // A group without a token repeats the last one.
    const int64_t token = seq.row + min(i + lane / kLanes, seq.tokens - 1);
    const __nv_bfloat16* x = g.mixed_qkv + token * g.qkv_stride;
    group_k.load(x + h.k, lane);
    group_q.load(x + h.q, lane);
    raw_gates = load_gates(g, token, h.head);
  };
  if (D::TOGETHER > 1) fetch_groups(0);
  fetch(0);
  issue_loads();

  if (seq.padding) {
    const Own zeros = {};
    for (int i = 0; i < seq.tokens; ++i, out += next_out)
      if (writes_out) *out = zeros;
    return;
  }

  float s[R::COLS][R::E];
  // Even where it is not started from: the compiler makes scalars before a branch, and loads in it would wait.
  R::load(s, head_state(g, seq.starts_from_state ? seq.read : seq.write, h.head), row, lane);
  issue_loads();
  const int* slots = g.slots + blockIdx.z * g.slots_stride;
  Scalars group;
  for (int i = 0; i < seq.tokens; ++i, out += next_out) {
    float k[R::E], q[R::E], v[R::OWN], o[R::OWN];
    if (D::TOGETHER > 1 && i % D::TOGETHER == 0) {
      if (i > 0) fetch_groups(i);
      group_k.widen(k);
      group_q.widen(q);
      group = finish(sums_of(k, q), gates_of(raw_gates));
    }
    raw_k.widen(k);
    raw_q.widen(q);
    const Scalars now = D::TOGETHER > 1 ? from_lane(group, i % D::TOGETHER * kLanes)
                                        : finish(sums_of(k, q), gates_of(raw_gates));
#pragma unroll
    for (int c = 0; c < R::OWN; ++c) v[c] = raw_v[c];
    if (i + 1 < seq.tokens) fetch(i + 1);
    if (i == 0 && !seq.starts_from_state) R::zero(s);
    R::step(s, k, q, now, v, o);
    Own packed;
#pragma unroll
    for (int c = 0; c < R::OWN; ++c) packed.set(c, o[c]);
    if (writes_out) *out = packed;
    if (i < g.states_kept && slots[i] > 0) R::store(s, head_state(g, slots[i], h.head), row, lane);
  }
  if (!g.states_kept) R::store(s, head_state(g, seq.write, h.head), row, lane);
}

// ---- tiled ---------------------------------------------------------------------------------------

// ns between two looks of a maker at a full ring; a ring lasts several times as long.
constexpr int kNap = 200;

// Tokens in shared memory, a ring of STAGES tiles.
template <int COLUMNS, int TOKENS, int STAGES>
struct Ring {
  float kq[STAGES][TOKENS][2 * kDim];
  float v[STAGES][TOKENS][COLUMNS];
  Scalars scalars[STAGES][TOKENS];
  uint64_t full[STAGES], empty[STAGES];
};

// WARPS walk, MAKERS make.  UNROLL tokens are scheduled together; a ring is STAGES tiles of TOKENS.
template <int COLS, int WARPS_, int MAKERS_, int MIN_BLOCKS_, int UNROLL_, int TOKENS_, int STAGES_>
struct Tiling {
  static constexpr int WARPS = WARPS_, MAKERS = MAKERS_, MIN_BLOCKS = MIN_BLOCKS_, UNROLL = UNROLL_;
  static constexpr int TOKENS = TOKENS_, STAGES = STAGES_;
  using R = Rows<COLS, true>;
  static constexpr int COLUMNS = R::COLUMNS * WARPS;
  static constexpr int PARTS = kDim / COLUMNS;  // blocks of a head
  static constexpr int THREADS = (WARPS + MAKERS) * 32;
  static constexpr int SHARE = TOKENS / MAKERS;          // tokens of a tile a maker makes
  static constexpr int ROUNDS = SHARE / R::GROUPS;       // it makes GROUPS at a time
  static constexpr int AHEAD = ROUNDS < 4 ? ROUNDS : 4;  // rounds whose loads are in flight together
  using Shared = Ring<COLUMNS, TOKENS, STAGES>;
  static constexpr int SHARED = sizeof(Shared);
  static constexpr bool KEEPS_STATES = false;
  static_assert(PARTS >= 1 && SHARE <= 32 && ROUNDS >= 1 && ROUNDS % AHEAD == 0);
};

// A maker's share of one tile: tokens first .. first + SHARE of the `count` that the tile has.
template <class T>
__device__ __forceinline__ void make_tile(const Arguments& g, const Heads& h, typename T::Shared& ring,
                                          int stage, int64_t row, int count, int first, int part, int lane) {
  using R = typename T::R;
  constexpr int kVector = T::COLUMNS / kLanes;
  const int group = lane / kLanes, l = lane % kLanes;
#pragma unroll 1
  for (int round = 0; round < T::ROUNDS; round += T::AHEAD) {
    RawVector raw_k[T::AHEAD], raw_q[T::AHEAD];
    Packed<kVector> raw_v[T::AHEAD];
#pragma unroll
    for (int i = 0; i < T::AHEAD; ++i) {
      // A tile's unused tokens repeat its last one: they are never read.
      const int token = min(first + (round + i) * R::GROUPS + group, count - 1);
      const __nv_bfloat16* x = g.mixed_qkv + (row + token) * g.qkv_stride;
      raw_k[i].load(x + h.k, lane);
      raw_q[i].load(x + h.q, lane);
      raw_v[i] = *reinterpret_cast<const Packed<kVector>*>(x + h.v + part * T::COLUMNS + l * kVector);
    }
#pragma unroll
    for (int i = 0; i < T::AHEAD; ++i) {
      const int token = first + (round + i) * R::GROUPS + group;
      float k[R::E], q[R::E];
      raw_k[i].widen(k);
      raw_q[i].widen(q);
      float4* to = reinterpret_cast<float4*>(ring.kq[stage][token]);
#pragma unroll
      for (int j = 0; j < R::E / 4; ++j) {
        to[l + kLanes * j] = make_float4(k[4 * j], k[4 * j + 1], k[4 * j + 2], k[4 * j + 3]);
        to[kDim / 4 + l + kLanes * j] = make_float4(q[4 * j], q[4 * j + 1], q[4 * j + 2], q[4 * j + 3]);
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) ring.v[stage][token][l * kVector + j] = raw_v[i][j];
      const Sums sums = sums_of(k, q);
      if (l == 0) {
        ring.scalars[stage][token].decay = sums.kk;
        ring.scalars[stage][token].read = sums.qq;
        ring.scalars[stage][token].write = sums.kq;
      }
    }
  }
  __syncwarp();
  // A lane a token: the transcendental functions cost as much for one token as for 32.
  if (lane < T::SHARE && first + lane < count) {
    Scalars* x = &ring.scalars[stage][first + lane];
    *x = finish({x->decay, x->read, x->write}, gates_of(load_gates(g, row + first + lane, h.head)));
  }
  __syncwarp();
}

template <class T>
__device__ __forceinline__ void make(const Arguments& g, const Heads& h, typename T::Shared& ring,
                                     const Sequence& seq, int part, int maker, int lane) {
  int stage = 0, parity = 1;
  for (int start = 0; start < seq.tokens; start += T::TOKENS) {
    // Sleep: a maker that polls takes issue slots from the walkers.
    while (!barrier_passed(&ring.empty[stage], parity)) __nanosleep(kNap);
    const int count = min(T::TOKENS, seq.tokens - start);
    make_tile<T>(g, h, ring, stage, seq.row + start, count, maker * T::SHARE, part, lane);
    if (lane == 0) barrier_arrive(&ring.full[stage]);
    if (++stage == T::STAGES) stage = 0, parity ^= 1;
  }
}

template <int E>
__device__ __forceinline__ void load_shared(float (&x)[E], const float* vector, int lane) {
#pragma unroll
  for (int j = 0; j < E / 4; ++j) {
    const float4 y = reinterpret_cast<const float4*>(vector)[lane % kLanes + kLanes * j];
    x[4 * j] = y.x, x[4 * j + 1] = y.y, x[4 * j + 2] = y.z, x[4 * j + 3] = y.w;
  }
}

template <class T>
__device__ __forceinline__ void walk(const Arguments& g, const Heads& h, typename T::Shared& ring,
                                     const Sequence& seq, int part, int warp, int lane) {
  using R = typename T::R;
  const int in_block = warp * R::COLUMNS + lane / kLanes * R::COLS;
  const int row = part * T::COLUMNS + in_block;
  const int column = in_block + R::first(lane);
  const bool writes_out = lane % R::COPIES == 0;
  float s[R::COLS][R::E];
  if (seq.starts_from_state) R::load(s, head_state(g, seq.read, h.head), row, lane);
  else R::zero(s);
  __nv_bfloat16* out = g.out + seq.row * g.out_stride + h.head * kDim + part * T::COLUMNS + column;
  int stage = 0, parity = 0;
  for (int start = 0; start < seq.tokens; start += T::TOKENS) {
    const int count = min(T::TOKENS, seq.tokens - start);
    while (!barrier_passed(&ring.full[stage], parity)) {
    }
#pragma unroll T::UNROLL
    for (int i = 0; i < count; ++i, out += g.out_stride) {
      float k[R::E], q[R::E];
      load_shared(k, ring.kq[stage][i], lane);
      load_shared(q, ring.kq[stage][i] + kDim, lane);
      const float v[1] = {ring.v[stage][i][column]};
      float o[1];
      R::step(s, k, q, ring.scalars[stage][i], v, o);
      if (writes_out) *out = __float2bfloat16_rn(o[0]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&ring.empty[stage]);
    if (++stage == T::STAGES) stage = 0, parity ^= 1;
  }
  R::store(s, head_state(g, seq.write, h.head), row, lane);
}

// The same in all lanes, and known to be: what depends on it does not diverge.
__device__ __forceinline__ int warp_index() { return __shfl_sync(kWarp, threadIdx.x / 32, 0); }

// Grid: that of `Heads`.
template <class T>
__global__ void __launch_bounds__(T::THREADS, T::MIN_BLOCKS) tiled(const __grid_constant__ Arguments g) {
  extern __shared__ __align__(16) unsigned char bytes[];
  typename T::Shared& ring = *reinterpret_cast<typename T::Shared*>(bytes);
  const int lane = threadIdx.x % 32, warp = warp_index();
  const int part = blockIdx.x % T::PARTS;
  const Heads h(g, T::PARTS);
  const Sequence seq = sequence_of(g, blockIdx.z);
  if (seq.padding) {
    __nv_bfloat16* out = g.out + seq.row * g.out_stride + h.head * kDim + part * T::COLUMNS;
    for (int i = threadIdx.x; i < seq.tokens * T::COLUMNS; i += T::THREADS)
      out[i / T::COLUMNS * g.out_stride + i % T::COLUMNS] = __float2bfloat16_rn(0.0f);
    return;
  }
  if (seq.tokens <= 0) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::STAGES; ++i) {
      barrier_init(&ring.full[i], T::MAKERS);
      barrier_init(&ring.empty[i], T::WARPS);
    }
    barrier_publish();
  }
  __syncthreads();
  if (warp < T::WARPS) {
    walk<T>(g, h, ring, seq, part, warp, lane);
  } else {
    make<T>(g, h, ring, seq, part, warp - T::WARPS, lane);
  }
}

// ---- launch shapes -------------------------------------------------------------------------------
//
// Picked by times on an H200, which benchmarks/recurrent_table.py takes of every shape.  A shape moves no bit:
// it says which rows of S share a warp and a block.

using Decode = Direct<2, 16, 1>;              // one token, or every token's state kept
using Few = Direct<4, 12, 4>;                 // a few tokens
using Narrow = Tiling<2, 4, 4, 1, 8, 64, 2>;  // 4 blocks a head, one a multiprocessor
using Middle = Tiling<4, 4, 2, 2, 2, 16, 3>;  // 2 blocks a head, two a multiprocessor
using Wide = Tiling<8, 4, 2, 2, 1, 16, 3>;    // one block a head, two a multiprocessor

}  // namespace recurrent
