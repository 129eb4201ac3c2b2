// Numbers in 8 bits, e4m3 and e5m2 ("8-bit Floating Point (OFP8)"): rounded to nearest, ties to even; what is too
// large, infinities included, becomes the largest finite number; NaN stays NaN. Every way gives the same codes, but for
// the sign of a NaN.
#pragma once

#include "tessera/ptx/math.cuh"

namespace tessera {

TESSERA_DEVICE constexpr float largest_code(Dtype code) { return code == Dtype::kFloat8E4M3 ? 448.0f : 57344.0f; }

// In bits 0 ... 7, by instructions that every GPU has.
template <Dtype kCode>
TESSERA_DEVICE uint32 to_code(float x) {
  constexpr int kMantissa = kCode == Dtype::kFloat8E4M3 ? 3 : 2, kLeast = kCode == Dtype::kFloat8E4M3 ? -6 : -14;
  const float magnitude = fminf(fabsf(x), largest_code(kCode));
  // Added to a number whose last place is the format's step at this exponent, it is rounded to whole steps; the first
  // binade and what is below it have the same step.
  const int exponent = max(static_cast<int>(__float_as_uint(magnitude) >> 23), 127 + kLeast);
  const uint32 steps_of = static_cast<uint32>(exponent + 23 - kMantissa) << 23;
  const uint32 steps = __float_as_uint(__fadd_rn(magnitude, __uint_as_float(steps_of))) - steps_of;
  const uint32 code = x == x ? steps + (static_cast<uint32>(exponent - 127 - kLeast) << kMantissa) : 0x7fu;
  return code | (__float_as_uint(x) >> 24 & 0x80u);
}

// Two of them, `low` in bits 0 ... 7.
template <Dtype kCode>
TESSERA_DEVICE uint32 to_codes(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return kCode == Dtype::kFloat8E4M3 ? ptx::cvt_rn_satfinite_e4m3x2(low, high)
                                     : ptx::cvt_rn_satfinite_e5m2x2(low, high);
#else
  return to_code<kCode>(low) | to_code<kCode>(high) << 8;
#endif
}

// kWidth neighbouring numbers, 1 or 4, by one access.
template <Dtype kCode, int kWidth>
TESSERA_DEVICE void store_codes(void* data, int64 index, const float* x) {
  static_assert(kWidth == 1 || kWidth == 4);
  unsigned char* const at = static_cast<unsigned char*>(data) + index;
  if constexpr (kWidth == 1) {
    *at = static_cast<unsigned char>(to_codes<kCode>(x[0], x[0]));
  } else {
    *reinterpret_cast<uint32*>(at) = to_codes<kCode>(x[0], x[1]) | to_codes<kCode>(x[2], x[3]) << 16;
  }
}

}  // namespace tessera
