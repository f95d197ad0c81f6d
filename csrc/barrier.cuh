// In a vLLM branch: csrc/mamba/gdn/barrier.cuh.
//
// Barriers in shared memory between warps that fill a ring and warps that empty it (Hopper's mbarrier).

#ifndef VLLM_INVARIANT_BARRIER_CUH
#define VLLM_INVARIANT_BARRIER_CUH

#include <cstdint>

namespace recurrent {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count));
}

// Before another thread uses a barrier that this thread has initialised; __syncthreads() comes after.
__device__ __forceinline__ void barrier_publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

// Whether the phase of this parity is over; waits for a moment.
__device__ __forceinline__ bool barrier_passed(uint64_t* bar, int parity) {
  int passed;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.s32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(passed)
      : "r"(shared_address(bar)), "r"(parity)
      : "memory");
  return passed;
}

}  // namespace recurrent

#endif
