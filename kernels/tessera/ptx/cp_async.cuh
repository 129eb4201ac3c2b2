// Asynchronous copies from global to shared memory, Ampere and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// Copies 16 bytes to shared memory, bypassing L1: the first `source_bytes` are read, the others are filled with zeros.
TESSERA_DEVICE void cp_async_cg_16(uint32 shared, const void* global, int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
}

// The same, with a hint to fetch the 128 bytes around it into the L2 cache.
TESSERA_DEVICE void cp_async_cg_16_l2_128b(uint32 shared, const void* global, int source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
               : "memory");
}

// The same for all 16 bytes. Without the byte count, a copy needs no address but its own.
TESSERA_DEVICE void cp_async_cg_16_l2_128b(uint32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

TESSERA_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest kPending groups of this thread are complete.
template <int kPending>
TESSERA_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all copies of this thread are complete, including those that belong to no group.
TESSERA_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace tessera::ptx
