// Barriers 1 ... 15 among some of a block's warps; barrier 0 is that of __syncthreads. Memory accesses before an
// arrival are visible after a wait for it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// Arrives, and waits until `threads` threads have arrived.
TESSERA_DEVICE void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives without waiting.
TESSERA_DEVICE void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace tessera::ptx
