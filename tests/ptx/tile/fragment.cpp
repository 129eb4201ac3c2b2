#include <algorithm>

#include "device_test.hpp"

namespace tessera::testing {
namespace {

// Lane t holds 3 t % 17: each of the four lanes of a row gets their sum, or their maximum.
float of_lane(int t) { return static_cast<float>(3 * t % 17); }

const DeviceTests kTests({
    {.name = "row_sum",
     .header = "tessera/tile/fragment.cuh",
     .expected = words(32,
                       [](int t) {
                         const int row = t / 4 * 4;
                         return word(of_lane(row) + of_lane(row + 1) + of_lane(row + 2) + of_lane(row + 3));
                       }),
     .body = "out[t] = __float_as_uint(row_sum(static_cast<float>(3 * t % 17)));"},
    {.name = "row_max",
     .header = "tessera/tile/fragment.cuh",
     .expected = words(32,
                       [](int t) {
                         const int row = t / 4 * 4;
                         return word(std::max({of_lane(row), of_lane(row + 1), of_lane(row + 2), of_lane(row + 3)}));
                       }),
     .body = "out[t] = __float_as_uint(row_max(static_cast<float>(3 * t % 17)));"},
});

}  // namespace
}  // namespace tessera::testing
