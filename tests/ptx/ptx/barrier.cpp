#include "device_test.hpp"

namespace tessera::testing {

static const DeviceTests kTests({
    // Warp 0 arrives and continues; warp 1 waits for its writes. Both wait at a second barrier.
    {.name = "barrier",
     .header = "tessera/ptx/synchronization.cuh",
     .threads = 64,
     .expected = words(64, [](int t) { return t < 32 ? 2000u : 1000u + static_cast<uint32_t>(t) - 32; }),
     .body = R"(
  __shared__ uint32 first[32], second;
  if (t < 32) {
    first[lane] = 1000 + lane;
    ptx::barrier_arrive(1, 64);
    ptx::barrier_sync(2, 64);
    out[t] = second;
  } else {
    ptx::barrier_sync(1, 64);
    out[t] = first[lane];
    if (lane == 0) second = 2000;
    ptx::barrier_sync(2, 64);
  })"},
    // Lanes that took different paths read one another's writes.
    {.name = "reconverge_warp",
     .header = "tessera/ptx/synchronization.cuh",
     .expected = words(32,
                       [](int t) { return t % 2 ? 130u - static_cast<uint32_t>(t) : 30u - static_cast<uint32_t>(t); }),
     .body = R"(
  __shared__ uint32 values[32];
  if (lane % 2) {
    values[lane] = lane - 1;
  } else {
    values[lane] = 100 + lane - 1;
  }
  ptx::reconverge_warp();
  out[t] = values[31 - lane];)"},
});

}  // namespace tessera::testing
