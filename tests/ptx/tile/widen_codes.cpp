#include <cmath>

#include "core/float8.hpp"
#include "device_test.hpp"

namespace tessera::testing {
namespace {

// All codes, as 16 rows of 16, four times, so that a thread's vectors have the same ones: some threads have infinities
// and NaN, others only finite numbers. Exactly, in rows that a warp's loads wrote. NaN is one of either sign.
DeviceTest widened(bool e4m3, bool bfloat16) {
  const core::Float8Format& format = e4m3 ? core::kE4M3 : core::kE5M2;
  const auto value = [&](int code) {
    const float x = core::float8_to_float(format, static_cast<uint8_t>(code));
    return std::isnan(x) ? NAN : x;
  };
  const std::string codes = e4m3 ? "kFloat8E4M3" : "kFloat8E5M2", to = bfloat16 ? "kBFloat16" : "kFloat16";
  return {
      .name = "widen_" + codes + "_to_" + to,
      .header = "tessera/tile/widen_codes.cuh",
      .in = words(64,
                  [](int i) {
                    uint32_t four = 0;
                    for (int n = 3; n >= 0; --n) four = four << 8 | static_cast<uint32_t>(4 * i + n);
                    return four;
                  }),
      .expected = words(512, [&](int i) { return half_pair(value(i % 128 * 2), value(i % 128 * 2 + 1), bfloat16); }),
      .body = "constexpr Dtype kCodes = Dtype::" + codes + ", kTo = Dtype::" + to + R"(;
  __shared__ SharedTile<kCodes, 64, 16> sCodes;
  __shared__ SharedTile<kTo, 64, 16> sTile;
  for (int i = static_cast<int>(lane); i < 256; i += 32) {
    *reinterpret_cast<uint32*>(sCodes.pointer(i / 4, i % 4 * 4)) = in[i % 64];
  }
  __syncwarp();
  widen_tile<32>(sTile, sCodes);
  __syncwarp();
  constexpr bool kHalf = kTo == Dtype::kFloat16;
  constexpr uint32 kInfinity = kHalf ? 0x7c00 : 0x7f80, kNan = kHalf ? 0x7e00 : 0x7fc0;
  for (int i = static_cast<int>(lane); i < 512; i += 32) {
    uint32 pair = *reinterpret_cast<const uint32*>(sTile.pointer(i / 8, i % 8 * 2));
    if ((pair & 0x7fff) > kInfinity) pair = (pair & 0xffff0000) | kNan;
    if ((pair >> 16 & 0x7fff) > kInfinity) pair = (pair & 0xffff) | kNan << 16;
    out[i] = pair;
  })"};
}

const DeviceTests kTests([] {
  std::vector<DeviceTest> tests;
  for (const bool e4m3 : {true, false})
    for (const bool bfloat16 : {true, false}) tests.push_back(widened(e4m3, bfloat16));
  return tests;
}());

}  // namespace
}  // namespace tessera::testing
