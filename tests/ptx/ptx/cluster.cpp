#include "device_test.hpp"

namespace tessera::testing {

static const DeviceTests kTests({
    // Each block arrives at the other's barrier, by mapa().
    {.name = "cluster",
     .header = "tessera/ptx/synchronization.cuh",
     .archs = Archs::kHopperOn,
     .blocks = 2,
     .expected = {10, 11},
     .body = R"(
  alignas(8) __shared__ unsigned long long barrier;
  const uint32 address = shared_address(&barrier), rank = ptx::cluster_ctarank();
  if (t == 0) {
    ptx::mbarrier_init(address, 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::barrier_cluster_arrive_relaxed();
  ptx::barrier_cluster_wait();
  if (t == 0) ptx::mbarrier_arrive_shared_cluster(ptx::mapa(address, rank ^ 1));
  ptx::mbarrier_wait_parity(address, 0);
  if (t == 0) out[blockIdx.x] = 10 + rank;
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();)"},
    // Each block writes its number into the other.
    {.name = "st_shared_cluster_s32",
     .header = "tessera/ptx/synchronization.cuh",
     .archs = Archs::kHopperOn,
     .blocks = 2,
     .expected = {21, 20},
     .body = R"(
  __shared__ int word;
  const uint32 rank = ptx::cluster_ctarank();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (t == 0) ptx::st_shared_cluster_s32(ptx::mapa(shared_address(&word), rank ^ 1), 20 + rank);
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (t == 0) out[blockIdx.x] = *const_cast<volatile int*>(&word);)"},
});

}  // namespace tessera::testing
