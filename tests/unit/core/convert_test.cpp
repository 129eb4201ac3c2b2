// float16, bfloat16 and the 8-bit formats compared with arithmetic that does not use bits.
#include "core/convert.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace tessera::core {
namespace {

struct Format {
  int32_t dtype;
  int mantissa_bits, exponent_bits;
  double (*decode)(uint16_t);
  uint16_t (*encode)(float);
};

const Format kFormats[] = {
    {TESSERA_FLOAT16, 10, 5, [](uint16_t bits) -> double { return float16_to_float(bits); }, float_to_float16},
    {TESSERA_BFLOAT16, 7, 8, [](uint16_t bits) -> double { return bfloat16_to_float(bits); }, float_to_bfloat16},
};

// The value of an encoding by the definition of IEEE 754.
double value_of(const Format& format, uint16_t bits) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = bits >> format.mantissa_bits & ((1 << format.exponent_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << format.exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  return sign * std::ldexp((1 << format.mantissa_bits) + mantissa, exponent - bias - format.mantissa_bits);
}

uint16_t stored(const Format& format, double value) {
  uint16_t bits[4] = {};  // as wide as the widest element, which the compiler cannot tell is not stored
  store(format.dtype, bits, 0, value);
  return bits[0];
}

TEST(Convert, EveryEncodingDecodesAndComesBack) {
  for (const Format& format : kFormats) {
    for (uint32_t code = 0; code < 65536; ++code) {
      const uint16_t bits = static_cast<uint16_t>(code);
      const double expected = value_of(format, bits), decoded = format.decode(bits);
      const uint16_t in_memory[4] = {bits};
      ASSERT_EQ(load(format.dtype, in_memory, 0) == decoded, !std::isnan(decoded));
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(decoded)) << code;
        const uint16_t back = format.encode(static_cast<float>(decoded));
        ASSERT_TRUE(std::isnan(value_of(format, back))) << code;
        ASSERT_EQ(back & 0x8000, bits & 0x8000) << code;
        continue;
      }
      ASSERT_EQ(decoded, expected) << code;
      ASSERT_EQ(std::signbit(decoded), std::signbit(expected)) << code;
      ASSERT_EQ(format.encode(static_cast<float>(decoded)), bits) << code;
      ASSERT_EQ(stored(format, decoded), bits) << code;
    }
  }
}

// Between two neighbours, the closer one is chosen, and the even one from the middle; also slightly off the middle,
// where rounding by way of float32 would be wrong.
TEST(Convert, RoundsToNearestTiesToEven) {
  for (const Format& format : kFormats) {
    const uint16_t largest = static_cast<uint16_t>((((1 << format.exponent_bits) - 1) << format.mantissa_bits) - 1);
    for (uint32_t code = 0; code < largest; ++code) {
      const uint16_t low = static_cast<uint16_t>(code), high = static_cast<uint16_t>(code + 1);
      const double a = value_of(format, low), b = value_of(format, high), middle = (a + b) / 2;
      const uint16_t even = code % 2 == 0 ? low : high;
      ASSERT_EQ(stored(format, middle), even) << code;
      ASSERT_EQ(stored(format, std::nextafter(middle, a)), low) << code;
      ASSERT_EQ(stored(format, std::nextafter(middle, b)), high) << code;
      ASSERT_EQ(stored(format, -middle), even | 0x8000) << code;
      ASSERT_EQ(stored(format, -std::nextafter(middle, a)), low | 0x8000) << code;
      const float quarter = static_cast<float>(a + (b - a) / 4), three_quarters = static_cast<float>(b - (b - a) / 4);
      ASSERT_EQ(format.encode(quarter), low) << code;
      ASSERT_EQ(format.encode(three_quarters), high) << code;
      ASSERT_EQ(format.encode(static_cast<float>(middle)), even) << code;
    }
    const double last_step = value_of(format, largest) - value_of(format, static_cast<uint16_t>(largest - 1));
    const double halfway = value_of(format, largest) + last_step / 2;
    const uint16_t infinite = static_cast<uint16_t>(largest + 1);
    EXPECT_EQ(stored(format, halfway), infinite);
    EXPECT_EQ(stored(format, std::nextafter(halfway, 0.0)), largest);
    EXPECT_EQ(stored(format, 1e300), infinite);
    EXPECT_EQ(stored(format, -1e300), infinite | 0x8000);
    EXPECT_EQ(stored(format, 1e-300), 0);
    EXPECT_EQ(stored(format, -1e-300), 0x8000);
  }
}

// The value of an 8-bit code by the definition of the OCP specification.
double value_of_float8(int32_t dtype, int code) {
  const bool e4m3 = dtype == TESSERA_FLOAT8_E4M3;
  const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  const int mantissa = code % (1 << mantissa_bits), exponent = code % 128 >> mantissa_bits;
  const double sign = code >= 128 ? -1 : 1, nan = std::numeric_limits<double>::quiet_NaN();
  if (e4m3 && code % 128 == 127) return nan;
  if (!e4m3 && exponent == 31) return mantissa ? nan : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

int stored_code(int32_t dtype, double value) {
  uint8_t codes[8] = {};
  store(dtype, codes, 0, value);
  return codes[0];
}

double loaded(int32_t dtype, int code) {
  const uint8_t codes[8] = {static_cast<uint8_t>(code)};
  return load(dtype, codes, 0);
}

struct Largest {
  int32_t dtype;
  double value;
  int code;
};
constexpr Largest kLargest[] = {{TESSERA_FLOAT8_E4M3, 448, 0x7E}, {TESSERA_FLOAT8_E5M2, 57344, 0x7B}};

TEST(Convert, EveryCodeOf8BitsDecodesAndComesBack) {
  for (const Largest& largest : kLargest) {
    for (int code = 0; code < 256; ++code) {
      const double expected = value_of_float8(largest.dtype, code), decoded = loaded(largest.dtype, code);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(decoded)) << code;
        ASSERT_TRUE(std::isnan(value_of_float8(largest.dtype, stored_code(largest.dtype, decoded)))) << code;
        continue;
      }
      ASSERT_EQ(decoded, expected) << code;
      ASSERT_EQ(std::signbit(decoded), std::signbit(expected)) << code;
      const int saturated = largest.code | (code & 0x80);
      ASSERT_EQ(stored_code(largest.dtype, decoded), std::isinf(expected) ? saturated : code);
    }
  }
  for (int code = -128; code < 128; ++code) ASSERT_EQ(loaded(TESSERA_INT8, code & 0xFF), code);
}

TEST(Convert, RoundsTo8BitsToNearestTiesToEvenAndSaturates) {
  for (const auto& [dtype, most, last] : kLargest) {
    for (int code = 0; code < last; ++code) {
      const double a = value_of_float8(dtype, code), b = value_of_float8(dtype, code + 1), middle = (a + b) / 2;
      const int even = code % 2 == 0 ? code : code + 1;
      ASSERT_EQ(stored_code(dtype, middle), even) << code;
      ASSERT_EQ(stored_code(dtype, std::nextafter(middle, a)), code);
      ASSERT_EQ(stored_code(dtype, std::nextafter(middle, b)), code + 1);
      ASSERT_EQ(stored_code(dtype, -std::nextafter(middle, a)), code | 0x80);
    }
    for (const double huge : {std::nextafter(most, 1e9), 1.5 * most, 1e300, HUGE_VAL}) {
      EXPECT_EQ(stored_code(dtype, huge), last);
      EXPECT_EQ(stored_code(dtype, -huge), last | 0x80);
    }
    EXPECT_EQ(stored_code(dtype, 1e-300), 0);
    EXPECT_EQ(stored_code(dtype, -1e-300), 0x80);
  }
}

TEST(Convert, Float32AndFloat64) {
  float narrow = 0;
  store(TESSERA_FLOAT32, &narrow, 0, 0.1);
  EXPECT_EQ(narrow, 0.1f);
  EXPECT_EQ(load(TESSERA_FLOAT32, &narrow, 0), static_cast<double>(0.1f));
  double wide = 0;
  store(TESSERA_FLOAT64, &wide, 0, 0.1);
  EXPECT_EQ(wide, 0.1);
}

}  // namespace
}  // namespace tessera::core
