#include <algorithm>

#include "device_test.hpp"

namespace tessera::testing {
namespace {

// Lane t holds 3 t % 17: each of the four lanes of a row gets their sum, or their maximum.
float of_lane(int t) { return static_cast<float>(3 * t % 17); }

// An 8 x 8 matrix of which lane t holds two neighbours of row t / 4, and after the transpose two neighbours of column
// t / 4. Its elements are numbers of one, two or four bytes.
uint32_t element(int row, int col, uint32_t unit) { return static_cast<uint32_t>(row * 8 + col + 1) * unit; }
uint32_t of_row(int t, int next, uint32_t unit) { return element(t / 4, t % 4 * 2 + next, unit); }
uint32_t of_column(int t, int next, uint32_t unit) { return element(t % 4 * 2 + next, t / 4, unit); }

// Dividends whose quotient by 3 the approximation alone often misses.
float dividend(int t) { return 1.0f + static_cast<float>(t) * 0x1.3p-5f; }

const DeviceTests kTests({
    {.name = "corrected_quotient",
     .header = "tessera/tile/fragment.cuh",
     .in = words(32, [](int t) { return word(dividend(t)); }),
     .expected = words(32, [](int t) { return word(dividend(t) / 3.0f); }),
     .body = R"(
  const float x = __uint_as_float(in[t]), reciprocal = 1.0f / 3.0f;
  out[t] = __float_as_uint(corrected_quotient(x * reciprocal, x, 3.0f, reciprocal));)"},
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
    {.name = "transposed_pair",
     .header = "tessera/tile/fragment.cuh",
     .in = words(32, [](int t) { return of_row(t, 0, 0x102) | of_row(t, 1, 0x102) << 16; }),
     .expected = words(32, [](int t) { return of_column(t, 0, 0x102) | of_column(t, 1, 0x102) << 16; }),
     .body = "out[t] = transposed_pair(in[t]);"},
    {.name = "transposed_pair_of_words",
     .header = "tessera/tile/fragment.cuh",
     .in = words(64, [](int i) { return of_row(i / 2, i % 2, 0x1020304); }),
     .expected = words(64, [](int i) { return of_column(i / 2, i % 2, 0x1020304); }),
     .body = R"(
  const float2 pair = transposed_pair(make_float2(__uint_as_float(in[2 * t]), __uint_as_float(in[2 * t + 1])));
  out[2 * t] = __float_as_uint(pair.x), out[2 * t + 1] = __float_as_uint(pair.y);)"},
    {.name = "transposed_bytes",
     .header = "tessera/tile/fragment.cuh",
     .in = words(32, [](int t) { return of_row(t, 0, 1) | of_row(t, 1, 1) << 8; }),
     .expected = words(32, [](int t) { return of_column(t, 0, 1) | of_column(t, 1, 1) << 16; }),
     .body = "out[t] = transposed_bytes(in[t]);"},
});

}  // namespace
}  // namespace tessera::testing
