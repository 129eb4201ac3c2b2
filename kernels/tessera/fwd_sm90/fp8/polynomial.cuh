// Powers of two without MUFU, whose 16 results a clock of a multiprocessor bound the softmax beside 8-bit products.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera {

// The exponent of the result is 128 x, in steps of one in the last place of this number.
inline constexpr float kExponentRange = 128.0f, kRoundToExponent = 0x1.8p16f;

// 2^(128 (x - 1) + 8) for 0 <= x <= 1, off by at most 1.1e-4 of it, exact at x = 1: 128 x is an integer n and f with
// |f| <= 1/2; 2^f is a polynomial, and n is added to its exponent.
TESSERA_DEVICE float weight_by_polynomial(float x) {
  constexpr float kFirst = 0x1p-120f, k = kExponentRange;
  constexpr float k1 = 0.69328292f * k * kFirst, k2 = 0.24221076f * k * k * kFirst,
                  k3 = 0.05500875f * k * k * k * kFirst;
  const float n = x + kRoundToExponent;
  const float f = x - (n - kRoundToExponent);  // 1/128 of it
  const float power = fmaf(fmaf(fmaf(f, k3, k2), f, k1), f, kFirst);
  return __uint_as_float(__float_as_uint(power) + (__float_as_uint(n) << 23));
}

}  // namespace tessera
