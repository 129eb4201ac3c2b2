// The emulated GPUs, as described by the environment, and their contexts.
//   EMULATED_GPU_ARCH             compute capability, by default 90
//   EMULATED_GPU_MULTIPROCESSORS  by default 6: few, so that persistent kernels process several tiles
//   EMULATED_GPU_DEVICES          number of GPUs, by default 1, at most 8
#pragma once

#include <cstddef>

#include "result.hpp"

namespace tessera::emulated {

inline constexpr int kMostDevices = 8;
inline constexpr size_t kMemoryBytes = size_t{4} << 30;  // per GPU; tests that need more need a real GPU

// A GPU's primary context; it has no other.
struct Context {
  int device = 0;
  CUresult lost = kSuccess;  // the error of a kernel, which every later call returns
};

int devices();
int compute_capability();  // 90
int multiprocessors();
int smem_bytes_per_block();  // the maximum of dynamic and static memory of a block that opts in

Context* context_of_device(int device);
// The current context of this thread; NULL if there is none.
Context* current_context();
// Success, an error if no context is current, or the error by which it was lost.
CUresult check_context();

}  // namespace tessera::emulated
