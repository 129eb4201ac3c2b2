#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline uint32 cluster_ctarank() { return static_cast<uint32>(emulated::here().rank()); }
inline uint32 mapa(uint32 shared, uint32 rank) {
  if (shared >> emulated::kRankShift != 0) emulated::here().fail("mapa of 0x%x, which is of the cluster", shared);
  if (rank >= emulated::here().cluster().blocks.size()) emulated::here().fail("mapa of rank %u", rank);
  return emulated::in_block(shared, static_cast<int>(rank));
}
inline void st_shared_cluster_s32(uint32 cluster_address, int x) {
  std::memcpy(emulated::here().cluster_shared(cluster_address, sizeof x, sizeof x), &x, sizeof x);
}

// Executed by a warp together.
inline void barrier_cluster_arrive() {
  emulated::Block& block = emulated::here();
  block.sync_warp("barrier.cluster.arrive");
  block.thread().cluster_phase = block.cluster().phase;
  block.cluster().arrive();
}
inline void barrier_cluster_arrive_relaxed() { barrier_cluster_arrive(); }
inline void barrier_cluster_wait() {
  emulated::Block& block = emulated::here();
  block.wait({.kind = emulated::Wait::Kind::kCluster,
              .value = static_cast<int64>(block.thread().cluster_phase),
              .counter = &block.cluster().phase});
  block.sync_warp("barrier.cluster.wait");
}

}  // namespace tessera::ptx
