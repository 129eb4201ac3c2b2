// Barriers in shared memory that count arrivals and bytes, as used on Hopper. A wait is for the parity of a phase: a
// fresh barrier is in phase 0, so waiting for parity 1 returns at once.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

TESSERA_DEVICE void mbarrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy and, in a cluster, to the other blocks.
TESSERA_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

TESSERA_DEVICE void mbarrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at a barrier of any block of the cluster, given by its address from mapa(). It omits .release.cluster, which
// would be a fence over the whole GPU at each arrival: it orders reads before a bulk copy, not writes.
TESSERA_DEVICE void mbarrier_arrive_shared_cluster(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

TESSERA_DEVICE void mbarrier_arrive_expect_tx(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Adds bytes to those expected in the phase, before the arrival that ends it.
TESSERA_DEVICE void mbarrier_expect_tx(uint32 barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

TESSERA_DEVICE bool mbarrier_try_wait_parity(uint32 barrier, int parity) {
  uint32 done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns once the phase with this parity is complete.
TESSERA_DEVICE void mbarrier_wait_parity(uint32 barrier, int parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

}  // namespace tessera::ptx
