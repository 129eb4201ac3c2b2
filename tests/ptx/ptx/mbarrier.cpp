#include "device_test.hpp"

namespace tessera::testing {

static const DeviceTests kTests({
    // A fresh barrier is in phase 0: parity 1 has passed, parity 0 passes with the last of two arrivals.
    {.name = "mbarrier_arrivals",
     .header = "tessera/ptx/synchronization.cuh",
     .archs = Archs::kHopperOn,
     .expected = {1, 0, 0, 1, 0},
     .body = R"(
  alignas(8) __shared__ unsigned long long barrier;
  const uint32 at = shared_address(&barrier);
  if (t == 0) {
    ptx::mbarrier_init(at, 2);
    ptx::fence_mbarrier_init();
    out[0] = ptx::mbarrier_try_wait_parity(at, 1);
    out[1] = ptx::mbarrier_try_wait_parity(at, 0);
    ptx::mbarrier_arrive(at);
    out[2] = ptx::mbarrier_try_wait_parity(at, 0);
    ptx::mbarrier_arrive(at);
    ptx::mbarrier_wait_parity(at, 0);
    out[3] = ptx::mbarrier_try_wait_parity(at, 0);
    out[4] = ptx::mbarrier_try_wait_parity(at, 1);
  })"},
    // A phase ends when its arrivals and its bytes have come: the bytes of two copies, announced one by one.
    {.name = "mbarrier_bytes",
     .header = "tessera/ptx/synchronization.cuh",
     .archs = Archs::kHopperOn,
     .in = numbered(64),
     .expected = {0, 3, 60},
     .body = R"(
  alignas(16) __shared__ uint32 s[64];
  alignas(8) __shared__ unsigned long long barrier;
  const uint32 at = shared_address(&barrier);
  if (t == 0) {
    ptx::mbarrier_init(at, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_expect_tx(at, 128);
    ptx::mbarrier_arrive_expect_tx(at, 128);
    out[0] = ptx::mbarrier_try_wait_parity(at, 0);
    ptx::cp_async_bulk_load(shared_address(s), in, 128, at);
    ptx::cp_async_bulk_load(shared_address(s + 32), in + 32, 128, at);
  }
  __syncwarp();
  ptx::mbarrier_wait_parity(at, 0);
  if (t == 0) out[1] = s[3], out[2] = s[60];)"},
});

}  // namespace tessera::testing
