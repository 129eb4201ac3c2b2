// The instructions' results, exactly rounded.
#pragma once

#include <limits>

#include "core/float8.hpp"
#include "core/half.hpp"
#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline float ex2_approx_ftz(float x) {
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
}
inline float lg2_approx_ftz(float x) { return std::log2(x); }
inline float rcp_approx_ftz(float x) { return 1.0f / x; }

inline float cvt_f32_f16(unsigned short bits) { return core::float16_to_float(bits); }
inline uint32 cvt_rn_f16x2(float low, float high) {
  return core::float_to_float16(low) | uint32{core::float_to_float16(high)} << 16;
}
// NaN becomes a NaN, as in the version without saturation.
inline uint32 cvt_rn_satfinite_f16x2(float low, float high) {
  constexpr float kLargest = 65504;
  const auto clamp = [](float x) { return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x; };
  return cvt_rn_f16x2(clamp(low), clamp(high));
}
inline uint32 cvt_rn_bf16x2(float low, float high) {
  return core::float_to_bfloat16(low) | uint32{core::float_to_bfloat16(high)} << 16;
}
inline uint32 cvt_rn_relu_bf16x2(float low, float high) {
  const auto relu = [](float x) { return x < 0 ? 0.0f : x; };
  return cvt_rn_bf16x2(relu(low), relu(high));
}

inline unsigned short cvt_rn_satfinite_e4m3x2(float low, float high) {
  const auto code = [](float x) { return core::float_to_float8(core::kE4M3, x); };
  return static_cast<unsigned short>(code(low) | code(high) << 8);
}
inline unsigned short cvt_rn_satfinite_e5m2x2(float low, float high) {
  const auto code = [](float x) { return core::float_to_float8(core::kE5M2, x); };
  return static_cast<unsigned short>(code(low) | code(high) << 8);
}
template <bool kHigh>
uint32 cvt_rn_f16x2_of_codes(const core::Float8Format& format, uint32 codes) {
  const auto value = [&](int n) {
    return core::float8_to_float(format, static_cast<uint8_t>(codes >> 8 * (n + (kHigh ? 2 : 0))));
  };
  return cvt_rn_f16x2(value(0), value(1));
}
template <bool kHigh>
uint32 cvt_rn_f16x2_e4m3x2(uint32 codes) {
  return cvt_rn_f16x2_of_codes<kHigh>(core::kE4M3, codes);
}
template <bool kHigh>
uint32 cvt_rn_f16x2_e5m2x2(uint32 codes) {
  return cvt_rn_f16x2_of_codes<kHigh>(core::kE5M2, codes);
}
template <uint32 kBytes>
uint32 prmt(uint32 a, uint32 b) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  uint32 bytes = 0;
  for (int n = 0; n < 4; ++n) bytes |= static_cast<uint32>(both >> 8 * (kBytes >> 4 * n & 7) & 0xff) << 8 * n;
  return bytes;
}

// A product of two such numbers is exact in float32; so is the sum, where it needs no more than 24 bits.
inline uint32 mul_f16x2(uint32 a, uint32 b) {
  const auto at = [](uint32 pair, int n) { return cvt_f32_f16(static_cast<unsigned short>(pair >> (16 * n))); };
  return cvt_rn_f16x2(at(a, 0) * at(b, 0), at(a, 1) * at(b, 1));
}
inline uint32 fma_rn_bf16x2(uint32 a, uint32 b, uint32 c) {
  const auto at = [](uint32 pair, int n) { return __uint_as_float(pair >> (16 * n) << 16); };
  return cvt_rn_bf16x2(at(a, 0) * at(b, 0) + at(c, 0), at(a, 1) * at(b, 1) + at(c, 1));
}

inline uint32 max_f16x2(uint32 a, uint32 b) {
  const auto at = [](uint32 pair, int n) { return cvt_f32_f16(static_cast<unsigned short>(pair >> (16 * n))); };
  return cvt_rn_f16x2(max(at(a, 0), at(b, 0)), max(at(a, 1), at(b, 1)));
}
inline uint32 max_bf16x2(uint32 a, uint32 b) {
  const auto at = [](uint32 pair, int n) { return __uint_as_float(pair >> (16 * n) << 16); };
  return cvt_rn_bf16x2(max(at(a, 0), at(b, 0)), max(at(a, 1), at(b, 1)));
}

// Rounds to 10 bits of mantissa, ties away from zero. Infinity and NaN are unchanged.
inline uint32 cvt_rna_tf32(float x) {
  const uint32 bits = __float_as_uint(x);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}

}  // namespace tessera::ptx
