// Clusters: blocks that run at the same time and reach each other's shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// This block's rank in its cluster.
TESSERA_DEVICE uint32 cluster_ctarank() {
  uint32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address, in block `rank` of the cluster, that corresponds to `shared` in this block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-mapa
TESSERA_DEVICE uint32 mapa(uint32 shared, uint32 rank) {
  uint32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Stores to an address from mapa().
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
TESSERA_DEVICE void st_shared_cluster_s32(uint32 cluster_address, int x) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(cluster_address), "r"(x) : "memory");
}

// All threads of the cluster arrive, and wait for all. Executed by all threads of a warp together.
TESSERA_DEVICE void barrier_cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }

// Orders no memory accesses, which is sufficient after fence_mbarrier_init().
TESSERA_DEVICE void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

TESSERA_DEVICE void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

}  // namespace tessera::ptx
