#include "device_test.hpp"

namespace tessera::testing {

static const DeviceTests kTests({
    // Each block sends 16 bytes a lane, then 512 bytes at once, to the other.
    {.name = "st_async",
     .header = "tessera/ptx/async_copy.cuh",
     .archs = Archs::kHopperOn,
     .blocks = 2,
     .expected = words(512,
                       [](int i) {
                         const uint32_t from = i / 256 == 0 ? 1 : 0, at = static_cast<uint32_t>(i % 256);
                         return at < 128 ? from * 1000 + at : from * 1000 + 500 + at - 128;
                       }),
     .body = R"(
  alignas(16) __shared__ uint32 sent[128], first[128], second[128];
  alignas(8) __shared__ unsigned long long barrier;
  const uint32 full = shared_address(&barrier), rank = ptx::cluster_ctarank(), other = rank ^ 1;
  for (int i = 0; i < 4; ++i) sent[lane * 4 + i] = rank * 1000 + 500 + lane * 4 + i;
  if (t == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(full, 2 * 512);
  }
  ptx::fence_proxy_async();
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  const uint32 at = rank * 1000 + lane * 4, x[4] = {at, at + 1, at + 2, at + 3};
  ptx::st_async_v4_b32(ptx::mapa(shared_address(first + lane * 4), other), x, ptx::mapa(full, other));
  if (t == 0) {
    ptx::cp_async_bulk_shared_cluster(ptx::mapa(shared_address(second), other), shared_address(sent), 512,
                                      ptx::mapa(full, other));
  }
  ptx::mbarrier_wait_parity(full, 0);
  for (int i = lane; i < 128; i += 32) {
    out[blockIdx.x * 256 + i] = first[i];
    out[blockIdx.x * 256 + 128 + i] = second[i];
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();)"},
});

}  // namespace tessera::testing
