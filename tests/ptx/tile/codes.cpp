#include <cmath>
#include <limits>

#include "core/float8.hpp"
#include "device_test.hpp"

namespace tessera::testing {
namespace {

// Ties to even between normal and between subnormal numbers, the least ones, what is too large, infinity, zeros.
constexpr int kNumbers = 64;
float number(bool e4m3, int i) {
  const float step = e4m3 ? 0x1p-9f : 0x1p-16f, largest = e4m3 ? 448.0f : 57344.0f;
  constexpr float kFactors[] = {0.0f, 0.5f, 0.5000001f, 1.0f, 1.5f, 2.5f, 7.5f, 8.5f, 17.0f, 19.0f, 100.0f};
  constexpr float kOfLargest[] = {0.9f, 1.0f, 1.04f, 2.0f, std::numeric_limits<float>::infinity()};
  const int n = i / 2 % 16;
  const float x = n < 11 ? kFactors[n] * step : kOfLargest[n - 11] * largest;
  return (i / 32 ? x * 0.75f : x) * (i % 2 ? -1.0f : 1.0f);
}

// Four numbers by one store, by the GPU's way, and each by the instructions that every GPU has.
DeviceTest stored(bool e4m3) {
  const core::Float8Format& format = e4m3 ? core::kE4M3 : core::kE5M2;
  const std::string codes = e4m3 ? "kFloat8E4M3" : "kFloat8E5M2";
  std::vector<uint32_t> in = words(kNumbers, [&](int i) { return word(number(e4m3, i)); });
  in.push_back(word(std::numeric_limits<float>::quiet_NaN()));
  return {.name = "codes_of_" + codes,
          .header = "tessera/tile/codes.cuh",
          .in = in,
          .expected = words(2 * kNumbers / 4 + 2,
                            [&](int i) -> uint32_t {
                              if (i == 2 * kNumbers / 4) return word(e4m3 ? 448.0f : 57344.0f);
                              if (i == 2 * kNumbers / 4 + 1) return 0x7f7f;  // NaN, its sign left out
                              uint32_t four = 0;
                              for (int n = 3; n >= 0; --n)
                                four =
                                    four << 8 | core::float_to_float8(format, number(e4m3, i % (kNumbers / 4) * 4 + n));
                              return four;
                            }),
          .body = "constexpr Dtype kCodes = Dtype::" + codes + R"(;
  if (t < 16) {
    float x[4];
    for (int n = 0; n < 4; ++n) x[n] = __uint_as_float(in[4 * t + n]);
    store_codes<kCodes, 4>(out, 4 * t, x);
    for (int n = 0; n < 4; ++n) reinterpret_cast<unsigned char*>(out)[64 + 4 * t + n] = to_code<kCodes>(x[n]);
  }
  if (t == 0) {
    const float nan = __uint_as_float(in[64]);
    out[32] = __float_as_uint(largest_code(kCodes));
    out[33] = (to_codes<kCodes>(nan, nan) | to_code<kCodes>(nan)) & 0x7f7f;
  })"};
}

const DeviceTests kTests([] { return std::vector{stored(true), stored(false)}; }());

}  // namespace
}  // namespace tessera::testing
