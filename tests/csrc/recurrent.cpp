// csrc/recurrent_kernels.cuh on the host, behind the C interface of csrc/recurrent.cu.

#define VLLM_INVARIANT_BARRIER_CUH  // its PTX is replaced here
#include "emulator.h"

namespace recurrent {

struct Barrier {
  uint16_t count, pending;
  uint32_t phase;
};
inline void barrier_init(uint64_t* bar, int count) {
  const Barrier fresh = {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0};
  std::memcpy(bar, &fresh, sizeof fresh);
}
inline void barrier_publish() {}
inline void barrier_arrive(uint64_t* bar) {
  Barrier* b = reinterpret_cast<Barrier*>(bar);
  if (--b->pending == 0) b->pending = b->count, ++b->phase;
}
inline bool barrier_passed(uint64_t* bar, int parity) {
  if (static_cast<int>(reinterpret_cast<Barrier*>(bar)->phase % 2) != parity) return true;
  emulator::give_way();
  return false;
}

alignas(16) unsigned char bytes[228 << 10];  // a block's shared memory

}  // namespace recurrent

#include "recurrent_kernels.cuh"

namespace recurrent {

template <class S>
Index grid_of(const Arguments& g) {
  return {unsigned(g.value_heads / g.key_heads * S::PARTS), unsigned(g.key_heads), unsigned(g.sequences)};
}

template <class S>
bool launch_direct(const Arguments& g) {
  return emulator::launch(grid_of<S>(g), S::THREADS, [&] { direct<S>(g); });
}

template <class S>
bool launch_tiled(const Arguments& g) {
  std::memset(bytes, 0xff, sizeof bytes);
  return emulator::launch(grid_of<S>(g), S::THREADS, [&] { tiled<S>(g); });
}

struct Shape {
  const char* name;
  bool (*launch)(const Arguments&);
};
constexpr Shape kTable[] = {
    {"decode", launch_direct<Decode>}, {"few", launch_direct<Few>},   {"narrow", launch_tiled<Narrow>},
    {"middle", launch_tiled<Middle>},  {"wide", launch_tiled<Wide>},
};
constexpr int kShapes = sizeof(kTable) / sizeof(kTable[0]);

}  // namespace recurrent

extern "C" int recurrent_arguments_size() { return sizeof(recurrent::Arguments); }

extern "C" const char* recurrent_shape(int shape) {
  return shape >= 0 && shape < recurrent::kShapes ? recurrent::kTable[shape].name : nullptr;
}

// Without a shape each launch takes the next one: there is nothing to choose by on a host.
extern "C" const char* recurrent_launch(const recurrent::Arguments* g, int shape, int, void*) {
  static int turn = 0;
  const bool direct_only = g->states_kept > 0;
  if (shape < 0) shape = turn++ % (direct_only ? 2 : recurrent::kShapes);
  return recurrent::kTable[shape].launch(*g) ? nullptr : "threads of a block wait for ever";
}
