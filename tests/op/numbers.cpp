#include "numbers.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "tessera/tessera.h"

namespace tessera::testing {
namespace {

double round_to_binary(double value, int precision, int smallest_exponent, double largest) {
  if (!std::isfinite(value) || value == 0) return value;
  const int exponent = std::max(std::ilogb(value), smallest_exponent);
  const double ulp = std::ldexp(1.0, exponent - precision + 1);
  const double rounded = std::nearbyint(value / ulp) * ulp;
  return std::fabs(rounded) > largest ? std::copysign(std::numeric_limits<double>::infinity(), value) : rounded;
}

uint16_t encode_float16(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (std::isinf(value)) return sign | 0x7c00;
  if (magnitude < 0x1p-14) return static_cast<uint16_t>(sign | static_cast<uint16_t>(magnitude * 0x1p24));
  const int exponent = std::ilogb(magnitude);
  const auto fraction = static_cast<uint16_t>((std::ldexp(magnitude, -exponent) - 1) * 0x1p10);
  return static_cast<uint16_t>(sign | ((exponent + 15) << 10) | fraction);
}

double decode_float16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  double magnitude = std::ldexp(fraction + (exponent ? 1024 : 0), (exponent ? exponent : 1) - 25);
  if (exponent == 31) magnitude = fraction ? std::numeric_limits<double>::quiet_NaN() : HUGE_VAL;
  return bits & 0x8000 ? -magnitude : magnitude;
}

// The code of a number that the format holds.
uint8_t encode_float8(double value, int mantissa_bits, int bias, bool has_infinity) {
  const auto sign = static_cast<uint8_t>(std::signbit(value) ? 0x80 : 0);
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7f;
  if (std::isinf(value) && has_infinity) return sign | 0x7c;
  const int least = 1 - bias;
  if (magnitude < std::ldexp(1.0, least)) {
    return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::ldexp(magnitude, mantissa_bits - least)));
  }
  const int exponent = std::ilogb(magnitude);
  const auto fraction = static_cast<uint8_t>(std::ldexp(std::ldexp(magnitude, -exponent) - 1, mantissa_bits));
  return static_cast<uint8_t>(sign | ((exponent + bias) << mantissa_bits) | fraction);
}

template <class T>
void put(T value, std::byte* element) {
  std::memcpy(element, &value, sizeof value);
}

template <class T>
T get(const std::byte* element) {
  T value;
  std::memcpy(&value, element, sizeof value);
  return value;
}

}  // namespace

double round_to(int32_t dtype, double value) {
  switch (dtype) {
    case TESSERA_FLOAT32:
      return static_cast<float>(value);
    case TESSERA_FLOAT16:
      return round_to_binary(value, 11, -14, 65504);
    case TESSERA_BFLOAT16:
      return round_to_binary(value, 8, -126, 0x1.FEp127);
    case TESSERA_FLOAT8_E4M3:
      return std::clamp(round_to_binary(value, 4, -6, 1e300), -448.0, 448.0);
    case TESSERA_FLOAT8_E5M2:
      return std::isinf(value) ? value : std::clamp(round_to_binary(value, 3, -14, 1e300), -57344.0, 57344.0);
    case TESSERA_INT8:
      return std::clamp(std::nearbyint(value), -127.0, 127.0);
    default:
      return value;
  }
}

double epsilon(int32_t dtype) {
  switch (dtype) {
    case TESSERA_FLOAT32:
      return 0x1p-23;
    case TESSERA_FLOAT16:
      return 0x1p-10;
    case TESSERA_BFLOAT16:
      return 0x1p-7;
    default:
      return 0x1p-52;
  }
}

void encode(int32_t dtype, double value, std::byte* element) {
  switch (dtype) {
    case TESSERA_FLOAT32:
      return put(static_cast<float>(value), element);
    case TESSERA_FLOAT16:
      return put(encode_float16(value), element);
    case TESSERA_BFLOAT16:
      return put(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16), element);
    case TESSERA_FLOAT8_E4M3:
      return put(encode_float8(value, 3, 7, false), element);
    case TESSERA_FLOAT8_E5M2:
      return put(encode_float8(value, 2, 15, true), element);
    case TESSERA_INT8:
      return put(std::isnan(value) ? int8_t{-1} : static_cast<int8_t>(value), element);
    case TESSERA_FLOAT64:
      return put(value, element);
    case TESSERA_INT32:
      return put(static_cast<int32_t>(value), element);
    case TESSERA_INT16:
      return put(static_cast<int16_t>(value), element);
    case TESSERA_INT64:
      return put(static_cast<int64_t>(value), element);
    default:
      return put(static_cast<uint8_t>(value), element);
  }
}

double decode(int32_t dtype, const std::byte* element) {
  switch (dtype) {
    case TESSERA_FLOAT32:
      return get<float>(element);
    case TESSERA_FLOAT16:
      return decode_float16(get<uint16_t>(element));
    case TESSERA_BFLOAT16:
      return std::bit_cast<float>(static_cast<uint32_t>(get<uint16_t>(element)) << 16);
    case TESSERA_FLOAT64:
      return get<double>(element);
    case TESSERA_INT32:
      return get<int32_t>(element);
    case TESSERA_INT16:
      return get<int16_t>(element);
    case TESSERA_INT64:
      return static_cast<double>(get<int64_t>(element));
    default:
      return get<uint8_t>(element);
  }
}

}  // namespace tessera::testing
