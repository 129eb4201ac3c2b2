// bfloat16 as bits on the host.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace serve {

inline float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// To nearest, ties to even.
inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  bits += 0x7fff + (bits >> 16 & 1);
  return static_cast<std::uint16_t>(bits >> 16);
}

}  // namespace serve
