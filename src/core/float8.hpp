// Conversion of the 8-bit formats of the OCP specification "8-bit Floating Point (OFP8)", e4m3 and e5m2, to float32,
// exactly, and back, rounded to nearest, ties to even. Numbers too large, infinities included, become the largest
// finite number; NaN stays NaN.
#pragma once

#include <bit>
#include <cstdint>

namespace tessera::core {

struct Float8Format {
  int mantissa_bits, bias;
  bool has_infinity;  // the largest exponent is for infinity and NaN; otherwise only its last code is, for NaN
  float largest;
};
inline constexpr Float8Format kE4M3{3, 7, false, 448.0f}, kE5M2{2, 15, true, 57344.0f};

constexpr float float8_to_float(const Float8Format& format, uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24, magnitude = code & 0x7F;
  const uint32_t mantissa_mask = (1u << format.mantissa_bits) - 1;
  const uint32_t exponent = magnitude >> format.mantissa_bits, mantissa = magnitude & mantissa_mask;
  const uint32_t shifted = mantissa << (23 - format.mantissa_bits);
  const bool of_last = format.has_infinity ? exponent == 0x7Fu >> format.mantissa_bits : magnitude == 0x7F;
  if (of_last) {
    const bool infinite = format.has_infinity && mantissa == 0;
    return std::bit_cast<float>(sign | (infinite ? 0x7F800000u : 0x7FC00000u));
  }
  if (exponent == 0) {
    const float step = std::bit_cast<float>(static_cast<uint32_t>(127 + 1 - format.bias - format.mantissa_bits) << 23);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(mantissa) * step) | sign);
  }
  return std::bit_cast<float>(sign | (exponent + 127 - static_cast<uint32_t>(format.bias)) << 23 | shifted);
}

constexpr uint8_t float_to_float8(const Float8Format& format, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = bits >> 24 & 0x80u, dropped = static_cast<uint32_t>(23 - format.mantissa_bits);
  const uint32_t rebias = static_cast<uint32_t>(127 - format.bias) << 23;
  if (magnitude > 0x7F800000u) return static_cast<uint8_t>(sign | 0x7Fu);
  const uint32_t limited =
      magnitude < std::bit_cast<uint32_t>(format.largest) ? magnitude : std::bit_cast<uint32_t>(format.largest);
  if (limited < rebias + (1u << 23)) {
    // Adding this number makes the hardware round to the step of subnormals, which is its last place.
    const uint32_t magic = static_cast<uint32_t>(127 + 1 - format.bias - format.mantissa_bits + 23) << 23;
    const float shifted = std::bit_cast<float>(limited) + std::bit_cast<float>(magic);
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - magic));
  }
  const uint32_t half = (1u << (dropped - 1)) - 1;
  return static_cast<uint8_t>(sign | (limited - rebias + half + (limited >> dropped & 1u)) >> dropped);
}

}  // namespace tessera::core
