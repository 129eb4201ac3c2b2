// Additions in global memory, and the loads and stores that order them between blocks.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

TESSERA_DEVICE void red_add_f32(float* global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

TESSERA_DEVICE void red_add_u64(unsigned long long* global, unsigned long long x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(global), "l"(x) : "memory");
}

TESSERA_DEVICE void red_or_b32(uint32* global, uint32 x) {
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Adds four neighbouring floats; the address is a multiple of 16 bytes. Hopper and later.
TESSERA_DEVICE void red_add_v4_f32(float* global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
#endif

// A thread that acquires the value sees everything that this thread, and the threads synchronised with it, wrote
// before.
TESSERA_DEVICE void red_release_add_s32(int* global, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

TESSERA_DEVICE int ld_acquire_s32(const int* global) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
  return x;
}

// Returns the previous value. Acquires what other threads released by it, and releases what this thread and the threads
// synchronised with it wrote.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-atom
TESSERA_DEVICE unsigned long long atom_acq_rel_add_u64(unsigned long long* global, unsigned long long x) {
  unsigned long long old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(global), "l"(x) : "memory");
  return old;
}
TESSERA_DEVICE unsigned long long atom_acq_rel_cas_u64(unsigned long long* global, unsigned long long expected,
                                                       unsigned long long desired) {
  unsigned long long old;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(global), "l"(expected), "l"(desired)
               : "memory");
  return old;
}

}  // namespace tessera::ptx
