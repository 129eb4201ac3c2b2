#include "device_test.hpp"

namespace tessera::testing {
namespace {

const DeviceTests kTests({
    // Rows in lane order: row r = 8 c + 2 n + e is stored at 8 n + 2 c + e.
    {.name = "lane_order",
     .header = "tessera/tile/shared_tile.cuh",
     .expected = words(32, [](int r) { return static_cast<uint32_t>(r / 2 % 4 * 8 + r / 8 * 2 + r % 2); }),
     .body = "out[t] = SharedTile<Dtype::kBFloat16, 32, 16, true>::place(t);"},
    {.name = "lanes_of", .header = "tessera/tile/shared_tile.cuh", .expected = {1, 2, 4, 4, 8, 32}, .body = R"(
  constexpr int kLoads[] = {1, 2, 3, 4, 5, 40};
  if (t == 0)
    for (int i = 0; i < 6; ++i) out[i] = lanes_of(kLoads[i]);)"},
});

}  // namespace
}  // namespace tessera::testing
