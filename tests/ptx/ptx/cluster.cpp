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
    // Each block reads what the other wrote to its own shared memory.
    {.name = "ld_shared_cluster",
     .header = "tessera/ptx/synchronization.cuh",
     .archs = Archs::kHopperOn,
     .blocks = 2,
     .expected = {1234, 34, 234, 4},
     .body = R"(
  alignas(16) __shared__ float words[4];
  const uint32 rank = ptx::cluster_ctarank(), other = ptx::mapa(shared_address(words), rank ^ 1);
  if (t < 4) words[t] = rank == 0 && t == 0 ? 0.0f : t + 1.0f;
  ptx::fence_release_shared_cluster();
  __syncwarp();
  ptx::barrier_cluster_arrive_relaxed();
  ptx::barrier_cluster_wait();
  const float4 all = ptx::ld_shared_cluster_f32x4(other);
  const float2 last = ptx::ld_shared_cluster_f32x2(other + 8);
  if (t == 0) {
    out[2 * blockIdx.x] = static_cast<int>(1000 * all.x + 100 * all.y + 10 * all.z + all.w);
    out[2 * blockIdx.x + 1] = static_cast<int>(10 * last.x * (1 - rank) + last.y);
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();)"},
});

}  // namespace tessera::testing
