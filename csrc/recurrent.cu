// In a vLLM branch: csrc/mamba/gdn/recurrent.cu.
//
// The choice of a launch shape, the launch, and the C interface that recurrent_cuda.py loads.

#include "recurrent_kernels.cuh"

#include <cuda_runtime.h>

namespace recurrent {

template <class S>
dim3 grid_of(const Arguments& g) {
  return dim3(g.value_heads / g.key_heads * S::PARTS, g.key_heads, g.sequences);
}

template <class D>
cudaError_t launch_direct(const Arguments& g, cudaStream_t stream) {
  direct<D><<<grid_of<D>(g), D::THREADS, 0, stream>>>(g);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_tiled(const Arguments& g, cudaStream_t stream) {
  if (g.states_kept) return cudaErrorNotSupported;
  const cudaError_t error =
      cudaFuncSetAttribute(tiled<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::SHARED);
  if (error != cudaSuccess) return error;
  tiled<T><<<grid_of<T>(g), T::THREADS, T::SHARED, stream>>>(g);
  return cudaGetLastError();
}

struct Shape {
  const char* name;
  cudaError_t (*launch)(const Arguments&, cudaStream_t);
};

enum { kDecode, kFew, kNarrow, kMiddle, kWide, kShapes };
constexpr Shape kTable[kShapes] = {
    {"decode", launch_direct<Decode>}, {"few", launch_direct<Few>},   {"narrow", launch_tiled<Narrow>},
    {"middle", launch_tiled<Middle>},  {"wide", launch_tiled<Wide>},
};
constexpr int kFewTokens = 8;

// Where states are written for every token, bytes are all that costs, as in decode.  For a prefill, the shape
// with the most work a block that still leaves no multiprocessor idle.
int choose(const Arguments& g, int multiprocessors) {
  if (g.longest <= 1 || g.states_kept) return kDecode;
  if (g.longest <= kFewTokens) return kFew;
  const int64_t heads = static_cast<int64_t>(g.sequences) * g.value_heads;
  if (heads * Narrow::PARTS <= multiprocessors) return kNarrow;
  if (heads * Middle::PARTS <= 2 * multiprocessors) return kMiddle;
  return kWide;
}

cudaError_t run(const Arguments& g, int shape, int device, cudaStream_t stream) {
  int current = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = kTable[shape < 0 ? choose(g, multiprocessors) : shape].launch(g, stream);
  if (current != device) cudaSetDevice(current);
  return error;
}

}  // namespace recurrent

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int recurrent_arguments_size() { return sizeof(recurrent::Arguments); }

// The name of a launch shape, null past the last one.
EXPORT const char* recurrent_shape(int shape) {
  return shape >= 0 && shape < recurrent::kShapes ? recurrent::kTable[shape].name : nullptr;
}

// Null, or what went wrong.  A negative shape is chosen here.
EXPORT const char* recurrent_launch(const recurrent::Arguments* g, int shape, int device, void* stream) {
  if (shape >= recurrent::kShapes) return "there is no such launch shape";
  const cudaError_t error = recurrent::run(*g, shape, device, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
