// Powers of two and their rounding to bfloat16, overlapped with AMX's products: for float32 vectors, and for pairs of
// bfloat16 by 16-bit integers.
#pragma once

#include "cpu/amx_tile.hpp"
#include "cpu/simd.hpp"

namespace tessera::cpu {
namespace {

constexpr float kFixedPointOne = 8388608.0f;  // 2^23

// Forces the computation here; gcc would otherwise postpone it.
template <class V>
TESSERA_INLINE void compute_here(V& v) {
  asm volatile("" : "+v"(v));
}

// 2^x from the representation of floats. x in fixed point with 23 fractional bits holds the exponent in its upper bits
// and 1 + the fraction as a mantissa. A polynomial of degree 4 (3.0e-6 relative, far below P's rounding to bfloat16) or
// 5 (1.9e-7) computes the fraction's power of two, exactly at integers. Out of range (x < -127, x >= 129, NaN) the
// result has its sign set, or is an infinity or NaN. Seven or eight of its operations use the multiply-add ports, of
// which one is free beside AMX's products.
template <int kDegree>
class FixedPointExp2 {
  static_assert(kDegree == 4 || kDegree == 5);

 public:
  TESSERA_INLINE FixedPointExp2() {
    static constexpr float kCoefficients[2][6] = {
        {0.50941962f, 0.31350508f, 0.16511291f, -0.0014642763f, 0.013426687f},
        {0.4983631f, 0.3534897f, 0.10819555f, 0.038403124f, -0.00031863153f, 0.0018671317f}};
    const float* c = opaque(kCoefficients[kDegree - 4]);
#pragma GCC unroll 6
    for (int i = 0; i <= kDegree; ++i) c_[i] = splat(c[i]);
    // Loaded from memory; otherwise gcc would recreate them beside every product.
    static constexpr uint32_t kParts[3] = {0x007fffffu, 0x3f800000u, 0xff800000u};
    const uint32_t* parts = opaque(kParts);
    mantissa_ = splat(parts[0]), one_ = splat(parts[1]), exponent_ = splat(parts[2]);
  }
  // 2^x, with x in units of 2^-23.
  TESSERA_INLINE __m512i operator()(VecF units) const {
    const __m512i x = _mm512_cvtps_epi32((__m512)units);
    VecU exponent = (VecU)x & exponent_;
    compute_here(exponent);  // otherwise x would be copied for it
    const VecF m =
        (VecF)_mm512_ternarylogic_epi32(x, (__m512i)mantissa_, (__m512i)one_, 0xea);  // (x & mantissa_) | one_
    VecF q = c_[kDegree];
#pragma GCC unroll 5
    for (int i = kDegree - 1; i >= 0; --i) q = fma(q, m, c_[i]);
    return _mm512_add_epi32((__m512i)q, (__m512i)exponent);
  }

 private:
  VecF c_[kDegree + 1];
  VecU mantissa_, one_, exponent_;
};

// float32 rounded to bfloat16 in the upper half: half a unit has been added, and the lower half must be discarded.
struct Rounded {
  __m512i bits;
  TESSERA_INLINE explicit Rounded(__m512i v) : bits(_mm512_add_epi32(v, _mm512_set1_epi32(0x8000))) {}
};

// Joins the upper (or the lower) halves of two vectors' words as the low and the high half of a word, with a masked
// shuffle of bytes. Its constants are loaded from memory; otherwise gcc would recreate them beside every product.
template <bool kUpper>
class JoinHalves {
 public:
  TESSERA_INLINE JoinHalves() {
    alignas(16) static constexpr uint8_t kBytes[2][16] = {{0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13},
                                                          {2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15}};
    static constexpr __mmask64 kLowHalves[1] = {0x3333333333333333};
    bytes_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(opaque(kBytes[kUpper]))));
    moved_ = kUpper ? *opaque(kLowHalves) : ~*opaque(kLowHalves);
  }
  // The half that is not moved is already in its place.
  TESSERA_INLINE __m512i operator()(__m512i low, __m512i high) const {
    return kUpper ? _mm512_mask_shuffle_epi8(high, moved_, low, bytes_)
                  : _mm512_mask_shuffle_epi8(low, moved_, high, bytes_);
  }

 private:
  __m512i bytes_;
  __mmask64 moved_;
};

// Joins two vectors of float32 as pairs of bfloat16, in the low and the high half of a word.
class JoinRounded {
 public:
  TESSERA_INLINE JoinRounded() {
    static constexpr uint32_t kHalfUnit[1] = {0x8000u};
    half_unit_ = splat(*opaque(kHalfUnit));
  }
  TESSERA_INLINE VecU operator()(__m512i low, __m512i high) const {
    const auto rounded = [&](__m512i v) TESSERA_LAMBDA_INLINE { return (__m512i)((VecU)v + half_unit_); };
    return (VecU)upper_halves_(rounded(low), rounded(high));
  }

 private:
  VecU half_unit_;
  JoinHalves<true> upper_halves_;
};

// 2^x of two vectors as pairs of bfloat16, by 16-bit integers, 32 numbers for each instruction. Usable if the row sums
// may be those of rounded weights. A multiply-add leaves x in the mantissa of a float32 between 512 and 1024, in units
// of 2^-16: its upper half is the exponent, its lower half the fraction f, and 2^f - 1 = f (c0 + f (c1 + f c2)) within
// 1.9e-4, exact at f = 0. So a weight has the error of one rounding (1.67e-3 relative RMS; the exact weight has
// 1.66e-3). Scores below -119 give zeros; below -247, and from 9 on, they are out of range.
class PairExp2 {
 public:
  // The argument is kOne x + kZero. kLeast is an argument whose weight is 0.
  static constexpr float kOne = 4.0f, kZero = 988.0f, kLeast = 0.0f;

  TESSERA_INLINE PairExp2() {
    // Loaded from memory; otherwise gcc would recreate them beside every product.
    static constexpr uint16_t kNumbers[6] = {45522, 15002, 5002, 256, kFirstExponent, 0x3f80};
    const uint16_t* n = opaque(kNumbers);
    for (int i = 0; i < 3; ++i) c_[i] = _mm512_set1_epi16(static_cast<int16_t>(n[i]));
    half_unit_ = _mm512_set1_epi16(static_cast<int16_t>(n[3]));
    first_exponent_ = _mm512_set1_epi16(static_cast<int16_t>(n[4]));
    ones_ = _mm512_set1_epi16(static_cast<int16_t>(n[5]));
  }
  // `low`, `high`: arguments. `most`: the largest exponents so far; out of range compares as larger than all others.
  TESSERA_INLINE VecU operator()(VecF low, VecF high, VecU& most) const {
    const __m512i f = lower_halves_((__m512i)low, (__m512i)high);
    const __m512i exponent = _mm512_subs_epu16(upper_halves_((__m512i)low, (__m512i)high), first_exponent_);
    most = (VecU)_mm512_max_epu16((__m512i)most, exponent);
    __m512i g = _mm512_add_epi16(_mm512_mulhi_epu16(f, c_[2]), c_[1]);
    g = _mm512_add_epi16(_mm512_mulhi_epu16(f, g), c_[0]);
    // A result that would be rounded to the next power of two stays one unit below it.
    g = _mm512_adds_epu16(_mm512_mulhi_epu16(f, g), half_unit_);
    return (VecU)_mm512_shldi_epi16(exponent, g, 7);
  }
  // sum + both weights of each pair
  TESSERA_INLINE VecF add(VecF sum, VecU pair) const {
    return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)ones_);
  }
  // Weights that are not below those of `most`, as pairs; sign set: out of range.
  TESSERA_INLINE static VecU weights_of(VecU most) {
    const __m512i exponent = _mm512_min_epu16((__m512i)most, _mm512_set1_epi16(0x1ff));
    return (VecU)_mm512_or_si512(_mm512_slli_epi16(exponent, 7), _mm512_set1_epi16(0x7f));
  }

 private:
  static constexpr uint16_t kBiasAbove = 8;  // x = 0 has exponent 127; the mantissa holds exponents below 128
  static constexpr uint16_t kFirstExponent = 0x4400 - kBiasAbove;
  static_assert(kZero == 512.0f + kOne * (127 - kBiasAbove));

  __m512i c_[3], half_unit_, first_exponent_, ones_;
  JoinHalves<true> upper_halves_;
  JoinHalves<false> lower_halves_;
};

}  // namespace
}  // namespace tessera::cpu
