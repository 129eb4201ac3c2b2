// Conversion of elements of every type to float64, exactly, and back, rounded to nearest, ties to even (half.hpp).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/float8.hpp"
#include "core/half.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

// Converts to float32, rounding to odd: rounding the result again to a shorter format equals rounding the double
// directly.
inline float double_to_float_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (std::isnan(value) || static_cast<double>(nearest) == value) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) --bits;  // towards zero, also from infinity
  return std::bit_cast<float>(bits | 1u);
}

inline double load(int32_t dtype, const void* data, int64_t index) {
  switch (dtype) {
    case TESSERA_FLOAT32:
      return static_cast<const float*>(data)[index];
    case TESSERA_FLOAT16:
      return float16_to_float(static_cast<const uint16_t*>(data)[index]);
    case TESSERA_BFLOAT16:
      return bfloat16_to_float(static_cast<const uint16_t*>(data)[index]);
    case TESSERA_FLOAT8_E4M3:
      return float8_to_float(kE4M3, static_cast<const uint8_t*>(data)[index]);
    case TESSERA_FLOAT8_E5M2:
      return float8_to_float(kE5M2, static_cast<const uint8_t*>(data)[index]);
    case TESSERA_INT8:
      return static_cast<const int8_t*>(data)[index];
    default:
      return static_cast<const double*>(data)[index];
  }
}

inline void store(int32_t dtype, void* data, int64_t index, double value) {
  switch (dtype) {
    case TESSERA_FLOAT32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case TESSERA_FLOAT16:
      static_cast<uint16_t*>(data)[index] = float_to_float16(double_to_float_odd(value));
      break;
    case TESSERA_BFLOAT16:
      static_cast<uint16_t*>(data)[index] = float_to_bfloat16(double_to_float_odd(value));
      break;
    case TESSERA_FLOAT8_E4M3:
      static_cast<uint8_t*>(data)[index] = float_to_float8(kE4M3, double_to_float_odd(value));
      break;
    case TESSERA_FLOAT8_E5M2:
      static_cast<uint8_t*>(data)[index] = float_to_float8(kE5M2, double_to_float_odd(value));
      break;
    default:
      static_cast<double*>(data)[index] = value;
      break;
  }
}

}  // namespace tessera::core
