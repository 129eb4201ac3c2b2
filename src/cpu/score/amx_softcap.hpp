// Softcap in AMX's stages: tanh without a division, which would occupy the ports of the tile products.
#pragma once

#include "cpu/amx_pack.hpp"
#include "cpu/score/softcap.hpp"

namespace tessera::cpu {
namespace {

// tanh as in simd.hpp, with a reciprocal and a Newton step instead of the division, which alone would take 16 cycles.
TESSERA_INLINE VecF tanh_by_reciprocal(VecF x) {
  x = min(splat(9.0f), max(splat(-9.0f), x));
  const TanhRatio ratio(x);
  const VecF estimate = (VecF)_mm512_rcp14_ps((__m512)ratio.denominator);
  const VecF reciprocal = estimate * fma(-ratio.denominator, estimate, splat(2.0f));
  return select(x * x == 81.0f, x * splat(1.0f / 9.0f), ratio.numerator * reciprocal);
}

// tanh(x) = x T(x^2) for |x| <= 0.4, minimax (9.8e-8 relative), without division or bounds. x = cap s, and the cap is
// folded into the coefficients.
constexpr float kSmallTanh = 0.4f;
constexpr float kLeastCap = 1e-5f;  // its seventh power is a normal number
class TanhOfSmall {
  static constexpr int kTerms = 4;

 public:
  TESSERA_INLINE TanhOfSmall(float factor, float cap) {
    static constexpr float kCoefficients[kTerms] = {0.99999988f, -0.33331361f, 0.13270977f, -0.047553603f};
    const float* c = opaque(kCoefficients);
    float power = factor * cap;
#pragma GCC unroll 4
    for (int i = 0; i < kTerms; ++i, power *= cap * cap) c_[i] = splat(c[i] * power);
  }
  // factor tanh(cap s) / s
  TESSERA_INLINE VecF ratio(VecF s) const {
    const VecF z = s * s;
    VecF t = fma(c_[3], z, c_[2]);
    t = fma(t, z, c_[1]);
    return fma(t, z, c_[0]);
  }

 private:
  VecF c_[kTerms];
};

// Whether every number of a stage's S is at most `bound` in magnitude, and none is NaN.
TESSERA_INLINE bool all_within(const float* s, float bound) {
  __mmask16 within = 0xffff;
  const __m512 limit = _mm512_set1_ps(bound);
  for (int64_t n = 0; n < kStageKeys * kBlockM; n += 4 * kLanes) {
    const auto at = [&](int i) TESSERA_LAMBDA_INLINE { return (__m512)load(s + n + i * kLanes); };
    constexpr int kLargerMagnitude = 0x0b;  // of both, without its sign
    const __m512 ab = _mm512_range_ps(at(0), at(1), kLargerMagnitude);
    const __m512 cd = _mm512_range_ps(at(2), at(3), kLargerMagnitude);
    within &= _mm512_cmp_ps_mask(_mm512_range_ps(ab, cd, kLargerMagnitude), limit, _CMP_LE_OQ);
  }
  return within == 0xffff;
}

}  // namespace
}  // namespace tessera::cpu
