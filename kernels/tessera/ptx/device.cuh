// Function attributes and shared-memory addresses, for every device file.
#pragma once

#include "tessera/types.hpp"

#define TESSERA_DEVICE __device__ __forceinline__

namespace tessera {

// The 32-bit address of a generic pointer into shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvta
TESSERA_DEVICE uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// The first lane's value. The compiler then knows that it is uniform across the warp: a loop over it is uniform, values
// derived from it live in uniform registers, and the lanes are converged after a branch on it. Called by all lanes of a
// warp.
template <class T>
TESSERA_DEVICE T uniform(T x) {
  return __shfl_sync(0xffffffff, x, 0);
}

// Returns x, opaque to the compiler: values derived from it are recomputed for each use and occupy no registers across
// a loop.
TESSERA_DEVICE uint32 not_hoisted(uint32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Forces values in memory to be read again after this point: the compiler keeps none in registers across it.
TESSERA_DEVICE void reload_memory() { asm volatile("" ::: "memory"); }

}  // namespace tessera
