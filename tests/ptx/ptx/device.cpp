#include "device_test.hpp"

namespace tessera::testing {

static const DeviceTests kTests({
    {.name = "uniform",
     .header = "tessera/ptx/device.cuh",
     .threads = 64,
     .expected = words(64, [](int t) { return t < 32 ? 100u : 132u; }),
     .body = "out[t] = uniform(100 + t);"},
    {.name = "not_hoisted",
     .header = "tessera/ptx/device.cuh",
     .expected = numbered(32),
     .body = "out[t] = not_hoisted(static_cast<uint32>(t));"},
    // Offsets between shared addresses are bytes; memory is read again after the fence of the compiler.
    {.name = "shared_address",
     .header = "tessera/ptx/device.cuh",
     .expected = words(32, [](int t) { return static_cast<uint32_t>(4 * t); }),
     .body = R"(
  __shared__ uint32 s[32];
  s[t] = shared_address(s + t) - shared_address(s);
  reload_memory();
  out[t] = s[t];)"},
});

}  // namespace tessera::testing
