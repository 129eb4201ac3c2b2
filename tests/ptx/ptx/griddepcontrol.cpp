#include "device_test.hpp"

namespace tessera::testing {

// Launched without the attribute: both return at once.
static const DeviceTests kTests({
    {.name = "griddepcontrol",
     .header = "tessera/ptx/synchronization.cuh",
     .archs = Archs::kHopperOn,
     .expected = numbered(32),
     .body = R"(
  ptx::griddepcontrol_wait();
  out[t] = t;
  ptx::griddepcontrol_launch_dependents();)"},
});

}  // namespace tessera::testing
