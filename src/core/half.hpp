// Conversion of float16 and bfloat16 to float32, exactly, and back, rounded to nearest, ties to even. Subnormals,
// infinities and NaN (always quiet) are preserved.
#pragma once

#include <bit>
#include <cstdint>

namespace tessera::core {

constexpr float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

constexpr uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

constexpr float float16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = bits >> 10 & 0x1Fu;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0) {
    constexpr float kSubnormalStep = 0x1p-24f;
    const float magnitude = static_cast<float>(mantissa) * kSubnormalStep;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | mantissa << 13 | (mantissa ? 0x400000u : 0u));
  return std::bit_cast<float>(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
}

constexpr uint16_t float_to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | (magnitude >> 13 & 0x1FFu));
  constexpr uint32_t kOverflow = 0x477FF000u;        // 65520, halfway from the largest float16 to the next step
  constexpr uint32_t kSmallestNormal = 0x38800000u;  // 2^-14
  if (magnitude >= kOverflow) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < kSmallestNormal) {
    // Adding 0.5 makes the hardware round to the step of subnormals: the last place of 0.5 is 2^-24.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
  }
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  return static_cast<uint16_t>(sign | (magnitude - kRebias + 0xFFFu + (magnitude >> 13 & 1u)) >> 13);
}

}  // namespace tessera::core
