// The functions of score programs on vectors of lanes: float32 within 4 units in the last place of the definitions in
// operations.cpp, over all float32 numbers including denormals. The coefficients of small tanh are from Moshier's
// Cephes library.
#pragma once

#include "cpu/simd.hpp"

namespace tessera::cpu {
namespace {
namespace score_functions {

TESSERA_INLINE VecF bits_as_float(VecU bits) { return (VecF)bits; }
TESSERA_INLINE VecF nan() { return splat(__builtin_nanf("")); }

// p 2^n for integral n in [-300, 300], by two powers, so that a denormal result is rounded once.
TESSERA_INLINE VecF times_power_of_two(VecF p, VecI n) {
  const VecI half = n >> 1;
  const VecF first = bits_as_float((VecU)(half + 127) << 23), second = bits_as_float((VecU)(n - half + 127) << 23);
  return p * first * second;
}

TESSERA_INLINE VecI nearest(VecF x) {  // |x| < 2^22
  constexpr float kMagic = 12582912.0f;
  return (VecI)(x + kMagic) - (VecI)splat(kMagic);
}

// 2^r e^0 = e^r, |r| <= ln(2) / 2, by its Taylor series to degree 7.
TESSERA_INLINE VecF exp_of_small(VecF r) {
  VecF p = fma(splat(1.0f / 5040), r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  return fma(p, r, splat(1.0f));
}

TESSERA_INLINE VecF exp(VecF x) {
  // ln(2) in two parts; the first has 16 bits, so that its product with n is exact.
  constexpr float kLog2e = 1.44269504f, kLn2High = 0.693145752f, kLn2Low = 1.42860677e-06f;
  const VecF bounded = min(splat(128.0f), max(splat(-128.0f), x));
  const VecI n = nearest(bounded * kLog2e);
  const VecF f = to_float(n);
  const VecF r = fma(f, splat(-kLn2Low), fma(f, splat(-kLn2High), bounded));
  return select(x == x, times_power_of_two(exp_of_small(r), n), x);
}

TESSERA_INLINE VecF exp2(VecF x) {
  constexpr float kLn2 = 0.693147182f;
  const VecF bounded = min(splat(160.0f), max(splat(-160.0f), x));
  const VecI n = nearest(bounded);
  const VecF r = (bounded - to_float(n)) * kLn2;
  return select(x == x, times_power_of_two(exp_of_small(r), n), x);
}

// x = 2^e m, sqrt(1/2) <= m < sqrt(2), and log(m) = 2 atanh(t), t = (m - 1) / (m + 1).
TESSERA_INLINE VecF log(VecF x) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3;
  constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-06f;
  const VecI denormal = x < 0x1p-126f;
  const VecU u = (VecU)select(denormal, x * 0x1p24f, x);
  const VecI e = (VecI)(u - kSqrtHalf) >> 23;
  const VecF m = bits_as_float(u - ((VecU)e << 23));
  const VecF t = (m - 1.0f) / (m + 1.0f), z = t * t;
  VecF p = fma(splat(2.0f / 9), z, splat(2.0f / 7));
  p = fma(p, z, splat(2.0f / 5));
  p = fma(p, z, splat(2.0f / 3));
  const VecF exponent = to_float(e - (denormal & 24));
  // 2 t is added exactly; the terms after it are smaller than its last place.
  const VecF small = fma(exponent, splat(kLn2Low), t * (z * p));
  const VecF of_finite = fma(exponent, splat(kLn2High), fma(splat(2.0f), t, small));
  const VecF of_zero = select(x == 0.0f, splat(-__builtin_inff()), nan());
  return select(x > 0.0f, select(x - x == 0.0f, of_finite, x), of_zero);
}

// e^x, -80 <= x <= 0: a normal number.
TESSERA_INLINE VecF exp_of_negative(VecF x) {
  constexpr float kLog2e = 1.44269504f, kLn2High = 0.693145752f, kLn2Low = 1.42860677e-06f;
  const VecI n = nearest(x * kLog2e);
  const VecF f = to_float(n), r = fma(f, splat(-kLn2Low), fma(f, splat(-kLn2High), x));
  return bits_as_float((VecU)exp_of_small(r) + ((VecU)n << 23));
}

TESSERA_INLINE VecF tanh(VecF x) {
  const VecF magnitude = abs(x);
  const VecF z = x * x;
  VecF p = fma(splat(-5.70498872745e-3f), z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const VecF of_small = fma(p * z, x, x);
  const VecF e = exp_of_negative(-2.0f * min(magnitude, splat(20.0f))), large = (1.0f - e) / (1.0f + e);
  const VecF signed_large = bits_as_float((VecU)large | ((VecU)x & 0x80000000u));
  return select(x == x, select(magnitude < 0.625f, of_small, signed_large), x);
}

TESSERA_INLINE VecF sigmoid(VecF x) {
  const VecF e = exp(-abs(x));
  return select(x == x, select(x < 0.0f, e, splat(1.0f)) / (1.0f + e), x);
}

TESSERA_INLINE VecF sqrt(VecF x) {
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
TESSERA_INLINE VecF rsqrt(VecF x) { return 1.0f / sqrt(x); }
TESSERA_INLINE VecF floor(VecF x) {
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_floorf(x[i]);
  return x;
}
// Rarely used: calls the C library lane by lane.
TESSERA_INLINE VecF sin(VecF x) {
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sinf(x[i]);
  return x;
}
TESSERA_INLINE VecF cos(VecF x) {
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_cosf(x[i]);
  return x;
}

// If either operand is NaN, so is the result.
TESSERA_INLINE VecF min_nan(VecF a, VecF b) { return select(a != a, a, select(b != b, b, a < b ? a : b)); }
TESSERA_INLINE VecF max_nan(VecF a, VecF b) { return select(a != a, a, select(b != b, b, a > b ? a : b)); }
TESSERA_INLINE VecF sign(VecF x) {
  return select(x == x, to_float((x < 0.0f) - (x > 0.0f)), x);  // a true comparison is -1
}

TESSERA_INLINE VecI where_int(VecI mask, VecI yes, VecI no) { return mask ? yes : no; }

// Rounds toward zero. Beyond 32 bits the result is the nearest integer; for NaN it is 0.
TESSERA_INLINE VecI to_int(VecF x) {
  const VecI above = x >= 2147483648.0f, below = x < -2147483648.0f, other = x != x;
  const VecI inside = __builtin_convertvector(select(above | below | other, VecF{}, x), VecI);
  return where_int(above, splat(INT32_MAX), where_int(below, splat(INT32_MIN), inside));
}

// Rounded down; for a divisor of 0 both are 0. The quotient of 32-bit integers in double is exact enough to truncate.
struct Quotient {
  VecI quotient, remainder;
};
TESSERA_INLINE Quotient divide_down(VecI a, VecI b) {
  typedef double VecD __attribute__((vector_size(kLanes * 8)));
  const VecI none = b == 0, divisor = where_int(none, splat(1), b);
  const VecD q = __builtin_convertvector(a, VecD) / __builtin_convertvector(divisor, VecD);
  const VecI cut = __builtin_convertvector(q, VecI);
  const VecI rest = (VecI)((VecU)a - (VecU)cut * (VecU)divisor);
  const VecI down = (rest != 0) & ((rest ^ divisor) < 0);
  return {~none & (VecI)((VecU)cut + (VecU)down), ~none & (VecI)((VecU)rest + (VecU)(down & divisor))};
}

TESSERA_INLINE VecI shift_left(VecI a, VecI count) {
  const VecI fits = (VecU)count < 32u;
  return fits & (VecI)((VecU)a << ((VecU)count & 31u));
}
TESSERA_INLINE VecI shift_right(VecI a, VecI count) { return a >> where_int((VecU)count < 32u, count, splat(31)); }
TESSERA_INLINE VecI abs_int(VecI a) { return where_int(a < 0, (VecI)(0u - (VecU)a), a); }

}  // namespace score_functions
}  // namespace
}  // namespace tessera::cpu
