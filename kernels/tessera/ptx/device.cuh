// What every device file needs: how functions are declared, and addresses in shared memory.
#pragma once

#include "tessera/config.hpp"
#include "tessera/params.hpp"

#define TESSERA_DEVICE __device__ __forceinline__

namespace tessera {

// The 32-bit address of a generic pointer into shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvta
TESSERA_DEVICE uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

namespace ptx {

// The thread's number in its warp. What is computed from it is computed behind this place, not in front of a loop around.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-laneid
TESSERA_DEVICE int laneid_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace ptx
}  // namespace tessera
