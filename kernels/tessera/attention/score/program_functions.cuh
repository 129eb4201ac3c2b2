// The operations of score programs: functions that the generated text calls (core/score/cuda_text.hpp).
#pragma once

#include "tessera/ptx/math.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// Each function of floats is within 4 ulp of the exact value for every operand, including infinities and subnormal
// numbers.
namespace program {

TESSERA_DEVICE float not_a_number() { return __int_as_float(0x7fc00000); }

// ---- arithmetic of floats ----

TESSERA_DEVICE float divide(float a, float b) { return a / b; }

// A divisor b that all pairs share: a / b = a factor / size, where size and its reciprocal are normal if b is neither 0
// nor infinite.
struct SharedDivisor {
  float size, reciprocal, factor;

  TESSERA_DEVICE explicit SharedDivisor(float b) {
    const float power = fabsf(b) < 0x1p-64f ? 0x1p64f : fabsf(b) > 0x1p64f ? 0x1p-64f : 1.0f;
    size = fabsf(b) * power, reciprocal = 1.0f / size, factor = copysignf(power, b);
  }
};
// a / b without the branch of a division. It is correctly rounded unless a or the result is nearly subnormal.
TESSERA_DEVICE float divide_by(float a, const SharedDivisor& b) {
  const float dividend = a * b.factor, approximation = dividend * b.reciprocal;
  const float quotient = corrected_quotient(approximation, dividend, b.size, b.reciprocal);
  return quotient == quotient ? quotient : approximation;
}
// The same within 1.5 ulp.
TESSERA_DEVICE float divide_near(float a, const SharedDivisor& b) { return a * b.factor * b.reciprocal; }
// If an operand is NaN, the result is NaN.
TESSERA_DEVICE float min_nan(float a, float b) { return a < b || a != a ? a : b; }
TESSERA_DEVICE float max_nan(float a, float b) { return b < a || a != a ? a : b; }
TESSERA_DEVICE float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

TESSERA_DEVICE float exp_(float x) { return expf(x); }
TESSERA_DEVICE float exp2_(float x) { return exp2f(x); }
TESSERA_DEVICE float log_(float x) { return logf(x); }
TESSERA_DEVICE float sqrt_(float x) { return sqrtf(x); }
TESSERA_DEVICE float rsqrt_(float x) { return rsqrtf(x); }
// tanh x for |x| < kSmallTanh, where 1 - 2 / (1 + e^2x) would lose digits. Relative error of the polynomial: 8.4e-8.
inline constexpr float kSmallTanh = 0.6f;
TESSERA_DEVICE float small_tanh(float x) {
  const float square = x * x;
  float small = fmaf(0x1.ff9814p-7f, square, -0x1.abb810p-5f);
  small = fmaf(fmaf(small, square, 0x1.10a712p-3f), square, -0x1.555368p-2f) * square;
  return fmaf(small, x, x);
}
// Both forms are computed, since a branch for each element costs more.
TESSERA_DEVICE float tanh_(float x) {
  const float size = fabsf(x), small = small_tanh(size);
  const float large = fmaf(-2.0f, ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(size * (2.0f * kLog2e))), 1.0f);
  return copysignf(size < kSmallTanh ? small : large, x);
}
// Uses the exponential that does not overflow: no digits are lost for either sign of x.
TESSERA_DEVICE float sigmoid_(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// x = remainder + quarter turns x pi / 2, |remainder| <= pi / 4 but for rounding. CUDA's own sine keeps a table in
// local memory for large angles, which would cost every kernel a stack.
struct Angle {
  float remainder;
  int quarters;  // modulo 4
};
// Cody and Waite: exact except for the last of three steps, for angles whose quarter turns have at most 17 bits.
inline constexpr float kLargestReducedByParts = 105615.0f;
TESSERA_DEVICE Angle reduced_by_parts(float x) {
  constexpr float kTwoOverPi = 0x1.45f306p-1f;
  constexpr float kHigh = 0x1.921fb6p+0f, kMiddle = -0x1.777a5cp-25f, kLow = -0x1.ee59dap-50f;  // of pi / 2
  const float k = rintf(x * kTwoOverPi);
  return {fmaf(k, -kLow, fmaf(k, -kMiddle, fmaf(k, -kHigh, x))), static_cast<int>(k)};
}
// Payne and Hanek: the digits of 2 / pi that matter, selected by the exponent, times the mantissa.
TESSERA_DEVICE Angle reduced_by_digits(float x) {
  using uint64 = unsigned long long;
  const uint32 bits = __float_as_uint(fabsf(x));
  const uint32 mantissa = (bits & 0x7fffffu) | 0x800000u;
  // |x| = mantissa x 2^e. The first e - 2 bits of 2 / pi, after 32 zeros, give whole turns and are skipped.
  const int e = static_cast<int>(bits >> 23) - 150, skipped = e - 2 + 32, first = skipped >> 5, shift = skipped & 31;
  const auto digits = [first](uint32 at0, uint32 at1, uint32 at2, uint32 at3, uint32 at4) {
    return first == 0 ? at0 : first == 1 ? at1 : first == 2 ? at2 : first == 3 ? at3 : at4;
  };
  constexpr uint32 k0 = 0, k1 = 0xa2f9836e, k2 = 0x4e441529, k3 = 0xfc2757d1, k4 = 0xf534ddc0, k5 = 0xdb629599,
                   k6 = 0x3c439041, k7 = 0xfe5163ab;
  const uint32 a = digits(k0, k1, k2, k3, k4), b = digits(k1, k2, k3, k4, k5), c = digits(k2, k3, k4, k5, k6),
               d = digits(k3, k4, k5, k6, k7);
  const auto window = [shift](uint32 high, uint32 low) {
    return static_cast<uint32>((((static_cast<uint64>(high) << 32) | low) << shift) >> 32);
  };
  // The product modulo 2^96, without its lowest 32 bits: 2 bits of quarter turns, then the fraction of one.
  const uint64 m = mantissa;
  const uint64 turns = (m * window(a, b) << 32) + m * window(b, c) + (m * window(c, d) >> 32);
  const uint64 nearest = (turns + (1ull << 61)) >> 62;
  const float remainder = static_cast<float>(static_cast<int64>(turns - (nearest << 62))) * 0x1.921fb6p-62f;
  const int quarters = static_cast<int>(nearest);
  return x < 0.0f ? Angle{-remainder, -quarters} : Angle{remainder, quarters};
}
TESSERA_DEVICE Angle reduced(float x) {
  return fabsf(x) < kLargestReducedByParts ? reduced_by_parts(x) : reduced_by_digits(x);
}
// Sine (quarters even) or cosine of the remainder, with the sign of its quarter.
TESSERA_DEVICE float sine_of(const Angle& angle) {
  const float r = angle.remainder, z = r * r;
  float sine = fmaf(-0x1.994cfap-13f, z, 0x1.11075cp-7f);
  sine = fmaf(fmaf(sine, z, -0x1.555546p-3f) * z, r, r);
  float cosine = fmaf(0x1.9a00ccp-16f, z, -0x1.6c0c86p-10f);
  cosine = fmaf(fmaf(fmaf(cosine, z, 0x1.55554ap-5f), z, -0.5f), z, 1.0f);
  const float y = angle.quarters & 1 ? cosine : sine;
  return angle.quarters & 2 ? -y : y;
}
TESSERA_DEVICE bool is_finite(float x) { return fabsf(x) < infinity(); }
TESSERA_DEVICE float sin_(float x) { return is_finite(x) ? sine_of(reduced(x)) : not_a_number(); }
TESSERA_DEVICE float cos_(float x) {
  if (!is_finite(x)) return not_a_number();
  const Angle angle = reduced(x);
  return sine_of({angle.remainder, angle.quarters + 1});
}

// ---- arithmetic of integers: 32 bits, with wrap-around ----

TESSERA_DEVICE int wrap_add(int a, int b) { return static_cast<int>(static_cast<uint32>(a) + static_cast<uint32>(b)); }
TESSERA_DEVICE int wrap_sub(int a, int b) { return static_cast<int>(static_cast<uint32>(a) - static_cast<uint32>(b)); }
TESSERA_DEVICE int wrap_mul(int a, int b) { return static_cast<int>(static_cast<uint32>(a) * static_cast<uint32>(b)); }
TESSERA_DEVICE int wrap_abs(int a) { return a < 0 ? wrap_sub(0, a) : a; }
// They round down; a divisor of 0 gives 0. The smallest integer divided by -1 wraps.
TESSERA_DEVICE int floor_div(int a, int b) {
  if (b == 0) return 0;
  if (b == -1) return wrap_sub(0, a);
  const int quotient = a / b, rest = a % b;
  return rest != 0 && (rest ^ b) < 0 ? quotient - 1 : quotient;
}
TESSERA_DEVICE int floor_mod(int a, int b) {
  if (b == 0 || b == -1) return 0;
  const int rest = a % b;
  return rest != 0 && (rest ^ b) < 0 ? rest + b : rest;
}
// Shifts by 32 or more, or by a negative number, shift out all bits.
TESSERA_DEVICE int shift_left(int a, int b) {
  return static_cast<uint32>(b) > 31u ? 0 : static_cast<int>(static_cast<uint32>(a) << b);
}
TESSERA_DEVICE int shift_right(int a, int b) { return a >> (static_cast<uint32>(b) > 31u ? 31 : b); }
// An integer as a float. The compiler knows `offset`, so that integers that differ in it alone share one conversion:
// exact up to 2^24, within 1 ulp beyond.
TESSERA_DEVICE float float_at(int x, int offset) {
  return static_cast<float>(wrap_sub(x, offset)) + static_cast<float>(offset);
}
// Rounds toward zero; values outside 32 bits give the nearest integer, and NaN gives 0.
TESSERA_DEVICE int to_int(float x) {
  if (x != x) return 0;
  return x >= 0x1p31f ? 0x7fffffff : x <= -0x1p31f ? -0x7fffffff - 1 : static_cast<int>(x);
}

}  // namespace program
}  // namespace tessera
