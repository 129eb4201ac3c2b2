#include "device_test.hpp"

namespace tessera::testing {

// As fwd_sm90's three warpgroups: 168 registers a thread at the launch, then 40 of one and 232 of two.
static const DeviceTests kTests({
    {.name = "setmaxnreg",
     .header = "tessera/ptx/wgmma.cuh",
     .archs = Archs::kHopperAlone,
     .threads = 384,
     .expected = numbered(384),
     .body = R"(
  if (t < 128) {
    ptx::setmaxnreg_dec<40>();
  } else {
    ptx::setmaxnreg_inc<232>();
  }
  out[t] = t;)"},
});

}  // namespace tessera::testing
