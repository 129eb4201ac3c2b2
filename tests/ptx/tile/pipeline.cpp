#include "device_test.hpp"

namespace tessera::testing {
namespace {

const DeviceTests kTests({
    // Warp 0 produces 20 numbers, warps 1 and 2 consume each of them; a stage is filled again when both have released
    // it.
    {.name = "ring",
     .header = "tessera/tile/pipeline.cuh",
     .archs = Archs::kHopperOn,
     .threads = 96,
     .expected = words(40, [](int i) { return 100u + static_cast<uint32_t>(i % 20); }),
     .body = R"(
  __shared__ Ring<3> ring;
  __shared__ uint32 stage[3];
  if (t == 0) {
    ring.init(2);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  RingPosition<3> at;
  for (int i = 0; i < 20; ++i, at.advance()) {
    if (t == 0) {
      ring.wait_empty(at);
      stage[at.stage()] = 100 + i;
      ptx::mbarrier_arrive(ring.full[at.stage()].address());
    }
    if (t >= 32) {
      ring.wait_full(at);
      if (lane == 0) out[(t / 32 - 1) * 20 + i] = stage[at.stage()];
      if (i % 2 == 0) {
        ring.release(at);
      } else {
        __syncwarp();
        if (lane == 0) ring.release_alone(at);
      }
    }
  })"},
    // Bulk copies fill the stages; acquire() announces their bytes, or expect() after the wait.
    {.name = "ring_bytes",
     .header = "tessera/tile/pipeline.cuh",
     .archs = Archs::kHopperOn,
     .in = numbered(160),
     .expected = numbered(160),
     .body = R"(
  __shared__ Ring<2> ring;
  alignas(16) __shared__ uint32 stage[2][32];
  if (t == 0) {
    ring.init(1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  RingPosition<2> at;
  for (int i = 0; i < 5; ++i, at.advance()) {
    if (t == 0) {
      if (i % 2 == 0) {
        ring.acquire(at, 128);
      } else {
        ring.wait_empty(at);
        ring.expect(at, 128);
      }
      ptx::cp_async_bulk_load(shared_address(stage[at.stage()]), in + i * 32, 128, ring.full[at.stage()].address());
    }
    ring.wait_full(at);
    out[i * 32 + t] = stage[at.stage()][t];
    ring.release(at);
  })"},
});

}  // namespace
}  // namespace tessera::testing
