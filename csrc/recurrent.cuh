// In a vLLM branch: csrc/mamba/gdn/recurrent.cuh.
//
// One token of the gated delta rule, and the only place where its arithmetic is written.
//
// A value head keeps a state S of V rows by K columns in fp32.  With raw (not normalised) bf16 k, q and v,
//
//     rk = 1 / sqrt(k.k + eps)      rq = 1 / sqrt(q.q + eps) / sqrt(K)
//     alpha = exp(-exp(A_log) * softplus(a + dt_bias))      beta = sigmoid(b)
//     t = v - alpha rk (S k)
//     o = alpha rq (S q) + beta rk rq (k.q) t
//     S <- alpha S + beta rk t k^T
//
// Normalisation, gating and scale are scalars of a token, so that no element of k or q is rounded before it
// meets the state, and both products are taken of the state before the token: the reduction of one hides
// behind the arithmetic of the other.
//
// THE ORDER.  All kernels keep it, whatever their tile, so a token's bits are those of its inputs and of the
// state before it.  8 neighbouring lanes share a row of S; lane l holds its 16 elements 4 (l + 8 j) + i for
// j = 0..3 and i = 0..3, in this order.
//   1. Products over K (S k, S q, k.k, q.q, k.q): each lane sums its elements from the first to the last,
//      one fused multiply-add each, starting from a rounded product; then lane l adds lane l ^ d for
//      d = 4, 2, 1.  Addition commutes, so both lanes of a pair get the same bits.
//   2. Scalars: see `finish`.
//   3. A state element becomes fma(w, k, alpha * s), the inner product rounded first.
// Every operation is an intrinsic, or a libdevice function compiled without contraction (-fmad=false), so
// the compiler has no choice in rounding.  How many rows a lane holds (COLS) changes no bit.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace recurrent {

constexpr int kDim = 128;  // K and V
constexpr int kLanes = 8;  // lanes that share a row of S: part of the order
constexpr float kEps = 1e-6f;
constexpr float kScale = 0.08838834764831845f;  // 1 / sqrt(K)
constexpr float kSoftplusThreshold = 20.0f;     // above it softplus(x) is x
constexpr unsigned kWarp = 0xffffffffu;

// What the host passes, by value.  Strides are in elements.  The twin is `Arguments` in recurrent_cuda.py.
struct Arguments {
  const __nv_bfloat16* mixed_qkv;  // (T, 2 H K + G V)
  const void* a;                   // (T, G)
  const void* b;                   // (T, G)
  const void* A_log;               // (G,)
  const void* dt_bias;             // (G,)
  float* state;                    // (slots, G, V, K)
  __nv_bfloat16* out;              // (T, G, V)
  const int* slots;                // (N,), or (N, states_kept)
  const int* initial_slots;        // (N,) or null
  const int* num_accepted;         // (N,) or null
  const int* cu_seqlens;           // (N + 1,), or null for one token a sequence
  const uint8_t* has_initial_state;  // (N,) or null
  int64_t qkv_stride, a_stride, b_stride, state_stride, out_stride, slots_stride;
  int sequences, key_heads, value_heads;
  int states_kept;  // 0: the last state goes to slots[n]; else token j's state goes to slots[n, j]
  int longest;      // at least the tokens of the longest sequence
  int A_log_is_fp32, dt_bias_is_fp32, ab_is_fp32;
};

// What a token needs besides k, q and v.
struct alignas(16) Scalars {
  float decay;      // alpha
  float read;       // -alpha rk, on S k
  float write;      // beta rk, on t, for the state
  float out_state;  // alpha rq, on S q
  float out_write;  // beta rk rq (k.q), on t, for the output
  float unused[3];
};

struct Sums {
  float kk, qq, kq;
};

struct Gates {
  float decay, beta;
};

__device__ __forceinline__ float load_either(const void* p, int64_t i, int is_fp32) {
  return is_fp32 ? static_cast<const float*>(p)[i]
                 : __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}

// What `gates_of` takes, as it comes from memory.
struct RawGates {
  float a, b, A_log, dt_bias;
};

__device__ __forceinline__ RawGates load_gates(const Arguments& g, int64_t row, int head) {
  return {load_either(g.a, row * g.a_stride + head, g.ab_is_fp32),
          load_either(g.b, row * g.b_stride + head, g.ab_is_fp32),
          load_either(g.A_log, head, g.A_log_is_fp32), load_either(g.dt_bias, head, g.dt_bias_is_fp32)};
}

__device__ __forceinline__ Gates gates_of(const RawGates& raw) {
  const float x = __fadd_rn(raw.a, raw.dt_bias);
  const float softplus = x <= kSoftplusThreshold ? log1pf(expf(x)) : x;
  const float rate = expf(raw.A_log);
  return {expf(-__fmul_rn(rate, softplus)), __frcp_rn(__fadd_rn(1.0f, expf(-raw.b)))};
}

__device__ __forceinline__ Scalars finish(Sums s, Gates gates) {
  const float rk = __frcp_rn(__fsqrt_rn(__fadd_rn(s.kk, kEps)));
  const float rq = __fmul_rn(__frcp_rn(__fsqrt_rn(__fadd_rn(s.qq, kEps))), kScale);
  Scalars x;
  x.decay = gates.decay;
  x.read = -__fmul_rn(gates.decay, rk);
  x.write = __fmul_rn(gates.beta, rk);
  x.out_state = __fmul_rn(gates.decay, rq);
  x.out_write = __fmul_rn(x.write, __fmul_rn(rq, s.kq));
  return x;
}

// A lane's part of a product over K.
template <int E>
__device__ __forceinline__ float dot(const float (&x)[E], const float (&y)[E]) {
  float sum = __fmul_rn(x[0], y[0]);
#pragma unroll
  for (int e = 1; e < E; ++e) sum = __fmaf_rn(x[e], y[e], sum);
  return sum;
}

// The same for several rows with one vector, element by element: neighbouring instructions share y[e] and do
// not wait for each other.
template <int ROWS, int E>
__device__ __forceinline__ void dots(const float (&x)[ROWS][E], const float (&y)[E], float (&sums)[ROWS]) {
#pragma unroll
  for (int e = 0; e < E; ++e)
#pragma unroll
    for (int c = 0; c < ROWS; ++c)
      sums[c] = e == 0 ? __fmul_rn(x[c][0], y[0]) : __fmaf_rn(x[c][e], y[e], sums[c]);
}

// Sum over the lanes of a row; every lane gets it.
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int d = kLanes / 2; d >= 1; d /= 2) x = __fadd_rn(x, __shfl_xor_sync(kWarp, x, d));
  return x;
}

template <int E>
__device__ __forceinline__ Sums sums_of(const float (&k)[E], const float (&q)[E]) {
  return {sum_lanes(dot(k, k)), sum_lanes(dot(q, q)), sum_lanes(dot(k, q))};
}

// The COLS rows of S that 8 lanes share.
//
// In order, slot c of every lane is row c, and after a sum over lanes each lane has the sums of all rows: for
// states that come from memory, as full lines.
//
// Permuted, slot c of lane l is row c ^ first(l).  The sum over lanes then halves the number of rows at each
// of its first steps without a select: partners keep different rows, and the same pairs are added as in
// `sum_lanes`.  In the end lane l has the sum of row first(l), and COPIES lanes have the same one.
template <int COLS_, bool PERMUTED_>
struct Rows {
  static constexpr int LANES = kLanes, COLS = COLS_;
  static constexpr bool PERMUTED = PERMUTED_;
  static_assert(COLS <= LANES && LANES <= 32 && (LANES & (LANES - 1)) == 0 && (COLS & (COLS - 1)) == 0);
  static constexpr int E = kDim / LANES;
  static constexpr int GROUPS = 32 / LANES;                  // groups of lanes in a warp
  static constexpr int COLUMNS = GROUPS * COLS;              // rows of S a warp holds: value columns
  static constexpr int OWN = PERMUTED ? 1 : COLS;            // rows whose sums a lane has
  static constexpr int COPIES = LANES / (COLS / OWN);        // lanes that have the same sums

  // The first row whose sum the lane has.
  static __device__ __forceinline__ int first(int lane) { return PERMUTED ? (lane % LANES) / COPIES : 0; }

  // Sums over the lanes of the OWN rows.
  static __device__ __forceinline__ void reduce(float (&x)[COLS], float (&sums)[OWN]) {
    int rows = COLS;
#pragma unroll
    for (int d = LANES / 2; d >= 1; d /= 2) {
      const bool halve = PERMUTED && rows > 1;
      if (halve) rows /= 2;
#pragma unroll
      for (int c = 0; c < COLS; ++c)
        if (c < rows) x[c] = __fadd_rn(x[c], __shfl_xor_sync(kWarp, x[halve ? c + rows : c], d));
    }
#pragma unroll
    for (int c = 0; c < OWN; ++c) sums[c] = x[c];
  }

  // One token: v and out are of the lane's first OWN slots.
  static __device__ __forceinline__ void step(float (&s)[COLS][E], const float (&k)[E], const float (&q)[E],
                                              const Scalars& x, const float (&v)[OWN], float (&out)[OWN]) {
    float part[COLS], sk[OWN], sq[OWN], t[OWN], w[OWN];
    dots(s, k, part);
    reduce(part, sk);
    dots(s, q, part);
    reduce(part, sq);
#pragma unroll
    for (int c = 0; c < COLS; ++c)
#pragma unroll
      for (int e = 0; e < E; ++e) s[c][e] = __fmul_rn(x.decay, s[c][e]);
#pragma unroll
    for (int c = 0; c < OWN; ++c) {
      t[c] = __fmaf_rn(x.read, sk[c], v[c]);
      w[c] = __fmul_rn(x.write, t[c]);
      out[c] = __fmaf_rn(x.out_write, t[c], __fmul_rn(x.out_state, sq[c]));
    }
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      const float row_w = c < OWN ? w[c % OWN] : __shfl_xor_sync(kWarp, w[0], c * COPIES);
#pragma unroll
      for (int e = 0; e < E; ++e) s[c][e] = __fmaf_rn(row_w, k[e], s[c][e]);
    }
  }

  // Move the rows between registers and a head's (V, K) state; `row` is the first of the COLS rows.  Where rows are in
  // order a lane makes one address: the distances from it are constants of the instructions.  Permuted, one address
  // only moves the walkers' registers: see benchmarks/results/recurrent-profile-h200.md.
  template <class Float4, class Float>
  static __device__ __forceinline__ Float4* at(Float* head, int row, int c, int j, int lane) {
    if (PERMUTED)
      return reinterpret_cast<Float4*>(head + ((row + (c ^ first(lane))) * kDim + 4 * (lane % LANES) + 4 * LANES * j));
    Float4* own = reinterpret_cast<Float4*>(head) + (static_cast<int64_t>(row) * (kDim / 4) + lane % LANES);
    return own + (c * (kDim / 4) + LANES * j);
  }
  static __device__ __forceinline__ void load(float (&s)[COLS][E], const float* head, int row, int lane) {
#pragma unroll
    for (int c = 0; c < COLS; ++c)
#pragma unroll
      for (int j = 0; j < E / 4; ++j) {
        const float4 x = __ldcs(at<const float4>(head, row, c, j, lane));
        s[c][4 * j] = x.x, s[c][4 * j + 1] = x.y, s[c][4 * j + 2] = x.z, s[c][4 * j + 3] = x.w;
      }
  }
  static __device__ __forceinline__ void store(const float (&s)[COLS][E], float* head, int row, int lane) {
#pragma unroll
    for (int c = 0; c < COLS; ++c)
#pragma unroll
      for (int j = 0; j < E / 4; ++j)
        __stcs(at<float4>(head, row, c, j, lane),
               make_float4(s[c][4 * j], s[c][4 * j + 1], s[c][4 * j + 2], s[c][4 * j + 3]));
  }
  static __device__ __forceinline__ void zero(float (&s)[COLS][E]) {
#pragma unroll
    for (int c = 0; c < COLS; ++c)
#pragma unroll
      for (int e = 0; e < E; ++e) s[c][e] = 0.0f;
  }
};

// N consecutive bf16, an even number, as they lie in memory.  In words: halves would take a register each.
template <int N>
struct alignas(N * 2 < 16 ? N * 2 : 16) Packed {
  static_assert(N % 2 == 0);
  uint32_t x[N / 2];
  __device__ __forceinline__ float operator[](int i) const {
    return __uint_as_float(i % 2 ? x[i / 2] & 0xffff0000u : x[i / 2] << 16);
  }
  __device__ __forceinline__ void set(int i, float y) {
    const uint32_t half = __bfloat16_as_ushort(__float2bfloat16_rn(y));
    x[i / 2] = i % 2 ? x[i / 2] & 0xffffu | half << 16 : x[i / 2] & 0xffff0000u | half;
  }
};

// A lane's elements of k or q, raw.
struct RawVector {
  static constexpr int E = kDim / kLanes;
  Packed<4> part[E / 4];

  __device__ __forceinline__ void load(const __nv_bfloat16* vector, int lane) {
    const Packed<4>* own = reinterpret_cast<const Packed<4>*>(vector) + lane % kLanes;
#pragma unroll
    for (int j = 0; j < E / 4; ++j) part[j] = own[kLanes * j];
  }
  __device__ __forceinline__ void widen(float (&x)[E]) const {
#pragma unroll
    for (int e = 0; e < E; ++e) x[e] = part[e / 4][e % 4];
  }
};

// A sequence of the batch, as one block sees it.
struct Sequence {
  int64_t row;   // of its first token in mixed_qkv, a, b and out
  int tokens;
  int read, write;  // slots; `write` is not used where states are kept for each token
  bool padding;
  bool starts_from_state;
};

__device__ __forceinline__ Sequence sequence_of(const Arguments& g, int n) {
  Sequence s;
  s.row = g.cu_seqlens ? g.cu_seqlens[n] : n;
  s.tokens = g.cu_seqlens ? g.cu_seqlens[n + 1] - static_cast<int>(s.row) : 1;
  const int* slots = g.slots + n * g.slots_stride;
  const int last_accepted = g.num_accepted ? max(g.num_accepted[n] - 1, 0) : 0;
  s.write = slots[0];
  s.read = g.initial_slots ? g.initial_slots[n] : slots[last_accepted];
  s.starts_from_state = !g.has_initial_state || g.has_initial_state[n];
  s.padding = s.write <= 0 || (s.starts_from_state && s.read <= 0);
  return s;
}

}  // namespace recurrent
