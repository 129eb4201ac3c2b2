// Barriers among some of a block's warps, 1 ... 15: barrier 0 is __syncthreads's. Between an arrival and the end of a wait
// for it memory is ordered.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// Arrives, and waits until `threads` have.
TESSERA_DEVICE void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives only.
TESSERA_DEVICE void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace tessera::ptx
