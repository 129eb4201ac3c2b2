#include <cmath>

#include "core/float8.hpp"
#include "device_test.hpp"

namespace tessera::testing {
namespace {

const std::vector<float> kNumbers = {0.0f, 1.0f, -1.0f, 0.5f, 3.25f, -7.75f, 20.125f, -30.5f};
std::vector<uint32_t> each(float (*f)(float)) {
  return words(8, [f](int i) { return word(f(kNumbers[static_cast<size_t>(i)])); });
}
const std::vector<float> kPositive = {1.0f, 2.0f, 0.125f, 3.0f, 10.0f, 1000.0f, 0.3f, 65504.0f};
std::vector<uint32_t> positive(float (*f)(float)) {
  return words(8, [f](int i) { return word(f(kPositive[static_cast<size_t>(i)])); });
}
std::string one_each(const std::string& call) {
  return "if (t < 8) out[t] = __float_as_uint(ptx::" + call + "(__uint_as_float(in[t])));";
}
float same(float x) { return x; }

constexpr float kForE4m3[16] = {0.0f,   -0.0f, 1.0f,      1.0625f, 1.1875f,  -3.25f,    255.9f,    256.0f,
                                447.0f, 1e6f,  -INFINITY, 0x1p-9f, 0x1p-10f, 0x1.8p-9f, 0x1.1p-7f, -0x1p-30f};
constexpr float kForE5m2[16] = {0.0f,     -0.0f, 1.0f,      1.125f,   1.375f,   -3.4f,      511.0f,     512.0f,
                                57344.0f, 1e6f,  -INFINITY, 0x1p-16f, 0x1p-17f, 0x1.8p-16f, 0x1.1p-14f, -0x1p-30f};

const DeviceTests kTests({
    {.name = "ex2_approx_ftz",
     .header = "tessera/ptx/math.cuh",
     .in = each(same),
     .expected = each([](float x) { return std::exp2(x); }),
     .tolerance = 0x1p-21,
     .body = one_each("ex2_approx_ftz")},
    {.name = "ex2_of_infinity",
     .header = "tessera/ptx/math.cuh",
     .in = {word(-INFINITY), word(-127.0f)},
     .expected = {0, 0},
     .body = "if (t < 2) out[t] = __float_as_uint(ptx::ex2_approx_ftz(__uint_as_float(in[t])));"},
    {.name = "lg2_approx_ftz",
     .header = "tessera/ptx/math.cuh",
     .in = positive(same),
     .expected = positive([](float x) { return std::log2(x); }),
     .tolerance = 0x1p-21,
     .body = one_each("lg2_approx_ftz")},
    {.name = "lg2_of_zero",
     .header = "tessera/ptx/math.cuh",
     .in = {0},
     .expected = {word(-INFINITY)},
     .body = "if (t == 0) out[0] = __float_as_uint(ptx::lg2_approx_ftz(__uint_as_float(in[0])));"},
    {.name = "rcp_approx_ftz",
     .header = "tessera/ptx/math.cuh",
     .in = positive(same),
     .expected = positive([](float x) { return 1 / x; }),
     .tolerance = 0x1p-22,
     .body = one_each("rcp_approx_ftz")},
    // Rounded to nearest: 1 + 2^-9 is not a bfloat16, 2049 no float16.
    {.name = "cvt_pairs",
     .header = "tessera/ptx/math.cuh",
     .in = {word(1.001953125f), word(-2049.0f)},
     .expected = {half_pair(1.001953125f, -2049.0f, false), half_pair(1.001953125f, -2049.0f, true), word(-2048.0f)},
     .body = R"(
  if (t == 0) {
    const float low = __uint_as_float(in[0]), high = __uint_as_float(in[1]);
    out[0] = ptx::cvt_rn_f16x2(low, high);
    out[1] = ptx::cvt_rn_bf16x2(low, high);
    out[2] = __float_as_uint(ptx::cvt_f32_f16(static_cast<unsigned short>(out[0] >> 16)));
  })"},
    // What is too large, or negative, is cut off.
    {.name = "cvt_pairs_clipped",
     .header = "tessera/ptx/math.cuh",
     .in = {word(1e6f), word(-2.0f)},
     .expected = {half_pair(65504.0f, -2.0f, false), half_pair(0.0f, 0.0f, true), half_pair(2.0f, 0.0f, false),
                  half_pair(2.0f, -2.0f, true)},
     .body = R"(
  if (t == 0) {
    const float large = __uint_as_float(in[0]), negative = __uint_as_float(in[1]);
    out[0] = ptx::cvt_rn_satfinite_f16x2(large, negative);
    out[1] = ptx::cvt_rn_relu_bf16x2(negative, negative);
    out[2] = ptx::max_f16x2(ptx::cvt_rn_f16x2(-negative, negative), 0);
    out[3] = ptx::max_bf16x2(ptx::cvt_rn_bf16x2(-negative, negative), 0xff80ff80u);
  })"},
    // Normal and subnormal factors and results.
    {.name = "multiplied_pairs",
     .header = "tessera/ptx/math.cuh",
     .in = {half_pair(3.5f, -0x1p-24f, false), half_pair(-0.125f, 0x1p8f, false), half_pair(0x1p-133f, -3.5f, true),
            half_pair(0x1p120f, 0.125f, true), half_pair(0.0f, 1.0f, true)},
     .expected = {half_pair(-0.4375f, -0x1p-16f, false), half_pair(0x1p-13f, 0.5625f, true)},
     .body = "if (t == 0) out[0] = ptx::mul_f16x2(in[0], in[1]), out[1] = ptx::fma_rn_bf16x2(in[2], in[3], in[4]);"},
    // Ties to even, subnormals, what is too large, infinity.
    {.name = "cvt_e4m3_pairs",
     .header = "tessera/ptx/math.cuh",
     .archs = Archs::kHopperOn,
     .in = words(16, [](int i) { return word(kForE4m3[i]); }),
     .expected = words(8,
                       [](int i) {
                         const auto code = [](float x) { return uint32_t{core::float_to_float8(core::kE4M3, x)}; };
                         return code(kForE4m3[2 * i]) | code(kForE4m3[2 * i + 1]) << 8;
                       }),
     .body = R"(
  if (t < 8) {
    out[t] = ptx::cvt_rn_satfinite_e4m3x2(__uint_as_float(in[2 * t]), __uint_as_float(in[2 * t + 1]));
  })"},
    // The same of e5m2.
    {.name = "cvt_e5m2_pairs",
     .header = "tessera/ptx/math.cuh",
     .archs = Archs::kHopperOn,
     .in = words(16, [](int i) { return word(kForE5m2[i]); }),
     .expected = words(8,
                       [](int i) {
                         const auto code = [](float x) { return uint32_t{core::float_to_float8(core::kE5M2, x)}; };
                         return code(kForE5m2[2 * i]) | code(kForE5m2[2 * i + 1]) << 8;
                       }),
     .body = R"(
  if (t < 8) {
    out[t] = ptx::cvt_rn_satfinite_e5m2x2(__uint_as_float(in[2 * t]), __uint_as_float(in[2 * t + 1]));
  })"},
    // All codes, in both places of a pair, and the pair in both halves of a word.
    {.name = "cvt_pairs_of_codes",
     .header = "tessera/ptx/math.cuh",
     .archs = Archs::kHopperOn,
     .in = words(256,
                 [](int i) {
                   const uint32_t pair = static_cast<uint32_t>(i) | static_cast<uint32_t>(255 - i) << 8;
                   return pair | (pair ^ 0x5a5a) << 16;
                 }),
     .expected = words(1024,
                       [](int i) {
                         const core::Float8Format& format = i % 2 == 0 ? core::kE4M3 : core::kE5M2;
                         const auto value = [&](int code) {
                           const float x = core::float8_to_float(format, static_cast<uint8_t>(code));
                           return std::isnan(x) ? NAN : x;  // of either sign
                         };
                         const int code = i / 4, mask = i % 4 < 2 ? 0 : 0x5a;
                         return half_pair(value(code ^ mask), value((255 - code) ^ mask), false);
                       }),
     .body = R"(
  for (int i = static_cast<int>(t); i < 256; i += 32) {
    const auto nan_of = [](uint32 pair) {  // one NaN for all: the host's
      if ((pair & 0x7fffu) > 0x7c00u) pair = (pair & 0xffff0000u) | 0x7e00u;
      if ((pair >> 16 & 0x7fffu) > 0x7c00u) pair = (pair & 0xffffu) | 0x7e000000u;
      return pair;
    };
    out[4 * i] = nan_of(ptx::cvt_rn_f16x2_e4m3x2<false>(in[i]));
    out[4 * i + 1] = nan_of(ptx::cvt_rn_f16x2_e5m2x2<false>(in[i]));
    out[4 * i + 2] = nan_of(ptx::cvt_rn_f16x2_e4m3x2<true>(in[i]));
    out[4 * i + 3] = nan_of(ptx::cvt_rn_f16x2_e5m2x2<true>(in[i]));
  })"},
    {.name = "prmt",
     .header = "tessera/ptx/math.cuh",
     .in = {0x33221100u, 0x77665544u},
     .expected = {0x66442200u, 0x77553311u, 0x00776655u},
     .body = R"(
  if (t == 0) {
    out[0] = ptx::prmt<0x6420>(in[0], in[1]);
    out[1] = ptx::prmt<0x7531>(in[0], in[1]);
    out[2] = ptx::prmt<0x0765>(in[0], in[1]);
  })"},
    // 10 bits of mantissa, ties away from zero.
    {.name = "cvt_rna_tf32",
     .header = "tessera/ptx/math.cuh",
     .in = {word(1.0f + 0x1p-11f), word(-1.0f - 0x1p-11f), word(1.0f + 0x1p-12f), word(3.0f)},
     .expected = {word(1.0f + 0x1p-10f), word(-1.0f - 0x1p-10f), word(1.0f), word(3.0f)},
     .body = "if (t < 4) out[t] = ptx::cvt_rna_tf32(__uint_as_float(in[t])) & 0xffffe000u;"},
});

}  // namespace
}  // namespace tessera::testing
