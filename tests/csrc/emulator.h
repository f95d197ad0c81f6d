// CUDA's words for a host compiler, and threads of a block as fibers: enough to run csrc/ without a GPU.
//
// Fibers take turns, and give way where CUDA's threads wait for each other.  Odd blocks take turns in reverse
// order, so that an exchange without a barrier reads the wrong value in one of the two.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(...)

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx, gridDim;

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// A GPU faults on an unaligned vector.
template <class T>
const T& aligned(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T)) std::abort();
  return *p;
}
template <class T>
T __ldcs(const T* p) { return aligned(p); }
template <class T>
void __stcs(T* p, T x) { const_cast<T&>(aligned(p)) = x; }

template <class To, class From>
To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t u = bits_of<uint32_t>(x);
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }

namespace emulator {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 << 10);
  bool done = false;
};
struct Warp {
  uint32_t given[32], taken[32];
  int arrived = 0;
  unsigned generation = 0;
};
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline unsigned current, arrived, generation;

inline void give_way() {
  const unsigned self = current;
  swapcontext(&fibers[self].context, &scheduler);
  threadIdx = {self, 0, 0};
}

// Every lane of the warp hands in a value and gets that of lane `source`.
inline uint32_t exchange(uint32_t x, int source) {
  Warp& warp = warps[current / 32];
  const unsigned before = warp.generation;
  warp.given[current % 32] = x;
  if (++warp.arrived == 32) {
    std::memcpy(warp.taken, warp.given, sizeof warp.taken);
    warp.arrived = 0;
    ++warp.generation;
  }
  while (warp.generation == before) give_way();
  return warp.taken[source];
}

inline void run_fiber() {
  threadIdx = {current, 0, 0};
  body();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void start(unsigned threads) {
  fibers = std::vector<Fiber>(threads);
  warps = std::vector<Warp>(threads / 32);
  arrived = 0;
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, run_fiber, 0);
  }
}

// Run a grid, one block after the other.  Returns false if a block's threads wait for ever.
inline bool launch(Index grid, unsigned threads, std::function<void()> kernel) {
  constexpr int kTurns = 10'000'000;
  body = kernel;
  gridDim = grid;
  for (unsigned block = 0; block < grid.x * grid.y * grid.z; ++block) {
    blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    start(threads);
    unsigned left = threads;
    for (int turn = 0; left; ++turn) {
      if (turn == kTurns) return false;
      for (unsigned i = 0; i < threads; ++i) {
        current = block % 2 ? threads - 1 - i : i;
        if (fibers[current].done) continue;
        swapcontext(&scheduler, &fibers[current].context);
        left -= fibers[current].done;
      }
    }
  }
  return true;
}

}  // namespace emulator

inline float __shfl_xor_sync(unsigned, float x, int distance) {
  return bits_of<float>(emulator::exchange(bits_of<uint32_t>(x), (emulator::current % 32) ^ distance));
}
inline float __shfl_sync(unsigned, float x, int source) {
  return bits_of<float>(emulator::exchange(bits_of<uint32_t>(x), source));
}
inline unsigned __shfl_sync(unsigned, unsigned x, int source) { return emulator::exchange(x, source); }
inline void __syncwarp() { emulator::exchange(0, 0); }
inline void __syncthreads() {
  const unsigned before = emulator::generation;
  if (++emulator::arrived == emulator::fibers.size()) emulator::arrived = 0, ++emulator::generation;
  while (emulator::generation == before) emulator::give_way();
}
inline void __nanosleep(unsigned) { emulator::give_way(); }
