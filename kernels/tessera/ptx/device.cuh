// What every device file needs: how functions are declared, and addresses in shared memory.
#pragma once

#include "tessera/types.hpp"

#define TESSERA_DEVICE __device__ __forceinline__

namespace tessera {

// The 32-bit address of a generic pointer into shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvta
TESSERA_DEVICE uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// The first lane's value, which the compiler then knows for the whole warp's: a loop over it is uniform, what is made from it
// lives in uniform registers, and after a branch on it the lanes are known to be together. By all lanes of a warp.
template <class T>
TESSERA_DEVICE T uniform(T x) {
  return __shfl_sync(0xffffffff, x, 0);
}

// The same value, of which the compiler knows nothing: what is made from it is made anew each time, and not kept in
// registers over a loop.
TESSERA_DEVICE uint32 not_hoisted(uint32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// What memory holds is read again after this, and kept in no register across it.
TESSERA_DEVICE void reload_memory() { asm volatile("" ::: "memory"); }

}  // namespace tessera
