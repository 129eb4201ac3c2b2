// Bounds of a score program's values over a tile of pairs (interval arithmetic), for the text that is generated for its
// mask (core/score/cuda_text.hpp). The host has the same for blocks of a CPU's keys (core/score/operations.cpp); bounds
// here may be wider, which only leaves more tiles to be evaluated entry by entry.
#pragma once

#include "tessera/attention/score/program.cuh"

namespace tessera::program {

// low <= x <= high; none of these if low > high.
struct IntBounds {
  int low, high;
};
// Both ends NaN: any float, also NaN. Comparisons with NaN are false, so nothing is concluded from such bounds.
struct FloatBounds {
  float low, high;
};
struct BoolBounds {
  int low, high;  // 0 or 1
};

// The coordinates of a tile's pairs, by the names of the language.
struct PlaceBounds {
  IntBounds b, h, h_kv, i, j, q_pos, len_q, len_k;
};

inline constexpr int kLargestInt = 0x7fffffff, kSmallestInt = -0x7fffffff - 1;

TESSERA_DEVICE IntBounds bounds_exactly(int x) { return {x, x}; }
TESSERA_DEVICE FloatBounds bounds_exactly(float x) { return {x, x}; }
TESSERA_DEVICE BoolBounds bounds_exactly(bool x) { return {x, x}; }
TESSERA_DEVICE IntBounds any_int() { return {kSmallestInt, kLargestInt}; }
TESSERA_DEVICE FloatBounds any_float() { return {not_a_number(), not_a_number()}; }
TESSERA_DEVICE BoolBounds any_bool() { return {0, 1}; }

// ---- bounds of values that are known one by one ----

TESSERA_DEVICE void bounds_clear(IntBounds& x) { x = {kLargestInt, kSmallestInt}; }
TESSERA_DEVICE void bounds_clear(FloatBounds& x) { x = {infinity(), -infinity()}; }
TESSERA_DEVICE void bounds_clear(BoolBounds& x) { x = {1, 0}; }

TESSERA_DEVICE void bounds_join(IntBounds& x, IntBounds y) { x = {min(x.low, y.low), max(x.high, y.high)}; }
TESSERA_DEVICE void bounds_join(FloatBounds& x, FloatBounds y) { x = {min_nan(x.low, y.low), max_nan(x.high, y.high)}; }
TESSERA_DEVICE void bounds_join(BoolBounds& x, BoolBounds y) { x = {min(x.low, y.low), max(x.high, y.high)}; }

// ---- integers: 32 bits, with wrap-around ----

TESSERA_DEVICE IntBounds bounds_wrapped(int64 low, int64 high) {
  if (low < kSmallestInt || high > kLargestInt) return any_int();
  return {static_cast<int>(low), static_cast<int>(high)};
}
TESSERA_DEVICE IntBounds bounds_add(IntBounds x, IntBounds y) {
  return bounds_wrapped(static_cast<int64>(x.low) + y.low, static_cast<int64>(x.high) + y.high);
}
TESSERA_DEVICE IntBounds bounds_sub(IntBounds x, IntBounds y) {
  return bounds_wrapped(static_cast<int64>(x.low) - y.high, static_cast<int64>(x.high) - y.low);
}
TESSERA_DEVICE IntBounds bounds_mul(IntBounds x, IntBounds y) {
  const int64 a = static_cast<int64>(x.low) * y.low, b = static_cast<int64>(x.low) * y.high,
              c = static_cast<int64>(x.high) * y.low, d = static_cast<int64>(x.high) * y.high;
  return bounds_wrapped(min(min(a, b), min(c, d)), max(max(a, b), max(c, d)));
}
TESSERA_DEVICE IntBounds bounds_negated(IntBounds x) {
  return bounds_wrapped(-static_cast<int64>(x.high), -static_cast<int64>(x.low));
}
TESSERA_DEVICE IntBounds bounds_absolute(IntBounds x) {
  const int64 low = x.low, high = x.high;
  return bounds_wrapped(low > 0 ? low : high < 0 ? -high : 0, max(low < 0 ? -low : low, high < 0 ? -high : high));
}
TESSERA_DEVICE IntBounds bounds_least(IntBounds x, IntBounds y) { return {min(x.low, y.low), min(x.high, y.high)}; }
TESSERA_DEVICE IntBounds bounds_largest(IntBounds x, IntBounds y) { return {max(x.low, y.low), max(x.high, y.high)}; }
TESSERA_DEVICE IntBounds bounds_floor_div(IntBounds x, IntBounds y) {
  if ((y.low <= 0 && y.high >= 0) || (x.low == kSmallestInt && y.high < 0)) return any_int();
  const int a = floor_div(x.low, y.low), b = floor_div(x.high, y.low);
  if (y.low == y.high) return {min(a, b), max(a, b)};
  const int c = floor_div(x.low, y.high), d = floor_div(x.high, y.high);
  return {min(min(a, b), min(c, d)), max(max(a, b), max(c, d))};
}
TESSERA_DEVICE IntBounds bounds_floor_mod(IntBounds x, IntBounds y) {
  if (y.low != y.high || y.low <= 0) return {min(0, y.low), max(0, y.high)};
  const int low = floor_mod(x.low, y.low), high = floor_mod(x.high, y.low);
  // All within one period of the divisor, or else any remainder.
  const bool one_period = static_cast<int64>(x.high) - x.low == static_cast<int64>(high) - low;
  return one_period ? IntBounds{low, high} : IntBounds{0, y.low - 1};
}
TESSERA_DEVICE IntBounds bounds_shift_right(IntBounds x, IntBounds y) {
  if (y.low != y.high || y.low < 0 || y.low > 31) return any_int();
  return {x.low >> y.low, x.high >> y.low};
}
// The result of & has no bit that a non-negative operand lacks.
TESSERA_DEVICE IntBounds bounds_both(IntBounds x, IntBounds y) {
  if (x.low < 0 && y.low < 0) return any_int();
  return {0, x.low < 0 ? y.high : y.low < 0 ? x.high : min(x.high, y.high)};
}
TESSERA_DEVICE IntBounds bounds_complement(IntBounds x) { return {~x.high, ~x.low}; }

// ---- floats ----

TESSERA_DEVICE bool is_any(FloatBounds x) { return x.low != x.low || x.high != x.high; }
TESSERA_DEVICE bool is_bounded(FloatBounds x) { return is_finite(x.low) && is_finite(x.high); }
// Wider than the rounding of an operation, whose result a kernel may round once less, by fused multiply-add.
TESSERA_DEVICE FloatBounds bounds_widened(float low, float high) {
  constexpr float kRelative = 0x1p-20f, kSmallest = 0x1p-126f;
  const FloatBounds x{low - (fabsf(low) * kRelative + kSmallest), high + (fabsf(high) * kRelative + kSmallest)};
  return is_any(x) ? any_float() : x;
}
TESSERA_DEVICE FloatBounds bounds_add(FloatBounds x, FloatBounds y) {
  if (!is_bounded(x) || !is_bounded(y)) return any_float();
  return bounds_widened(x.low + y.low, x.high + y.high);
}
TESSERA_DEVICE FloatBounds bounds_negated(FloatBounds x) { return {-x.high, -x.low}; }
TESSERA_DEVICE FloatBounds bounds_sub(FloatBounds x, FloatBounds y) { return bounds_add(x, bounds_negated(y)); }
TESSERA_DEVICE FloatBounds bounds_mul(FloatBounds x, FloatBounds y) {
  if (!is_bounded(x) || !is_bounded(y)) return any_float();
  const float a = x.low * y.low, b = x.low * y.high, c = x.high * y.low, d = x.high * y.high;
  return bounds_widened(fminf(fminf(a, b), fminf(c, d)), fmaxf(fmaxf(a, b), fmaxf(c, d)));
}
TESSERA_DEVICE FloatBounds bounds_absolute(FloatBounds x) {
  if (is_any(x)) return x;
  return {x.low > 0.0f ? x.low : x.high < 0.0f ? -x.high : 0.0f, fmaxf(fabsf(x.low), fabsf(x.high))};
}
TESSERA_DEVICE FloatBounds bounds_least(FloatBounds x, FloatBounds y) {
  return {min_nan(x.low, y.low), min_nan(x.high, y.high)};
}
TESSERA_DEVICE FloatBounds bounds_largest(FloatBounds x, FloatBounds y) {
  return {max_nan(x.low, y.low), max_nan(x.high, y.high)};
}
TESSERA_DEVICE FloatBounds bounds_floored(FloatBounds x) { return {floorf(x.low), floorf(x.high)}; }
TESSERA_DEVICE FloatBounds bounds_sign(FloatBounds x) { return {sign(x.low), sign(x.high)}; }
TESSERA_DEVICE BoolBounds bounds_is_nan(FloatBounds x) { return {0, is_any(x)}; }

// ---- conversions: none of them decreases ----

TESSERA_DEVICE FloatBounds bounds_to_float(IntBounds x) {
  return {static_cast<float>(x.low), static_cast<float>(x.high)};
}
TESSERA_DEVICE FloatBounds bounds_to_float(BoolBounds x) {
  return {static_cast<float>(x.low), static_cast<float>(x.high)};
}
TESSERA_DEVICE IntBounds bounds_to_int(FloatBounds x) {
  return is_any(x) ? any_int() : IntBounds{to_int(x.low), to_int(x.high)};
}
TESSERA_DEVICE IntBounds bounds_to_int(BoolBounds x) { return {x.low, x.high}; }

// ---- comparisons and logic ----

template <class Bounds>
TESSERA_DEVICE BoolBounds bounds_less(Bounds x, Bounds y) {
  return {x.high < y.low, !(x.low >= y.high)};
}
template <class Bounds>
TESSERA_DEVICE BoolBounds bounds_less_equal(Bounds x, Bounds y) {
  return {x.high <= y.low, !(x.low > y.high)};
}
template <class Bounds>
TESSERA_DEVICE BoolBounds bounds_equal(Bounds x, Bounds y) {
  return {x.low == x.high && y.low == y.high && x.low == y.low, !(x.high < y.low || y.high < x.low)};
}
TESSERA_DEVICE BoolBounds bounds_complement(BoolBounds x) { return {1 - x.high, 1 - x.low}; }
template <class Bounds>
TESSERA_DEVICE BoolBounds bounds_not_equal(Bounds x, Bounds y) {
  return bounds_complement(bounds_equal(x, y));
}
TESSERA_DEVICE BoolBounds bounds_both(BoolBounds x, BoolBounds y) { return {min(x.low, y.low), min(x.high, y.high)}; }
TESSERA_DEVICE BoolBounds bounds_either(BoolBounds x, BoolBounds y) { return {max(x.low, y.low), max(x.high, y.high)}; }
template <class Bounds>
TESSERA_DEVICE Bounds bounds_where(BoolBounds condition, Bounds x, Bounds y) {
  if (condition.low == 1) return x;
  if (condition.high == 1) bounds_join(y, x);
  return y;
}

}  // namespace tessera::program
