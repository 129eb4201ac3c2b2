#include "device_test.hpp"

namespace tessera::testing {
namespace {

// Stage and parity of the positions of a ring: ten steps of one, then steps of two.
DeviceTest positions(int stages) {
  std::vector<uint32_t> expected;
  for (int i = 0; i < 10; ++i) expected.push_back(static_cast<uint32_t>(i % stages * 10 + i / stages % 2));
  const int last = 10 + (stages > 1 ? 2 : 1);
  expected.push_back(static_cast<uint32_t>(last % stages * 10 + last / stages % 2));
  return {.name = "ring_position_" + std::to_string(stages),
          .header = "tessera/tile/pipeline.cuh",
          .archs = Archs::kHopperOn,
          .expected = expected,
          .body = "constexpr int kStages = " + std::to_string(stages) + R"(;
  if (t == 0) {
    RingPosition<kStages> at;
    for (int i = 0; i < 10; ++i, at.advance()) out[i] = at.stage() * 10 + at.parity;
    at.advance(min(kStages, 2));
    out[10] = at.stage() * 10 + at.parity;
  })"};
}

const DeviceTests kTests({positions(1), positions(2), positions(3)});

}  // namespace
}  // namespace tessera::testing
