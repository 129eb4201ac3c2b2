// The softcap: c tanh(scale q.k / c), without a branch for each element. Small scores avoid the special function unit,
// which the softmax's exponentials need.
#pragma once

#include "tessera/attention/score/element.cuh"
#include "tessera/ptx/math.cuh"

namespace tessera {

// 4 tanh(x / 4) with a relative error of 4e-7: by a polynomial where 4 - 8 / (1 + e^(x / 2)) would lose digits. kSmall:
// |x| < 2.
template <bool kSmall>
TESSERA_DEVICE float quadruple_tanh(float x) {
  const float square = x * x;
  float small = fmaf(0x1.0aa1dap-22f, square, -0x1.aecab4p-17f);
  small = fmaf(fmaf(small, square, 0x1.10c82p-11f), square, -0x1.55542cp-6f) * square;
  small = fmaf(small, x, x);
  if constexpr (kSmall) return small;
  const float large = fmaf(-8.0f, ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(x * (0.5f * kLog2e))), 4.0f);
  return fabsf(x) < 2.0f ? small : large;  // both are computed: a branch for each element costs more
}

// The capped score is capped_unit x quadruple_tanh(softcap_input).
TESSERA_DEVICE float softcap_input(const ProblemParams& p, float product) {
  return product * (4.0f * p.scale / p.softcap);
}
TESSERA_DEVICE float capped_unit(const ProblemParams& p) { return 0.25f * p.softcap; }

// Whether all of a lane's inputs are below 2, as is nearly always so: bit 30 of such a float is 0.
template <int kN>
TESSERA_DEVICE bool small_inputs(const ProblemParams& p, const float (&products)[kN][4], int half) {
  uint32 bits = 0;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    bits |= __float_as_uint(softcap_input(p, products[n][2 * half])) |
            __float_as_uint(softcap_input(p, products[n][2 * half + 1]));
  }
  return (bits & 0x40000000u) == 0;
}

template <ScoreConfig kCfg>
struct Softcap : ScoreOptionDefaults<Softcap<kCfg>, kSoftcapFacts> {
  static constexpr bool kGiven = kCfg.softcap;

  TESSERA_DEVICE static float unit(const ProblemParams& p) { return capped_unit(p); }
  template <int kN>
  TESSERA_DEVICE static bool small_inputs(const ProblemParams& p, const float (&products)[kN][4], int half) {
    return tessera::small_inputs(p, products, half);
  }

  template <bool kSmall>
  TESSERA_DEVICE static Score reshape(const ProblemParams& p, float product) {
    const float t = quadruple_tanh<kSmall>(softcap_input(p, product));
    return {t, fmaf(t, -0.0625f * t, 1.0f)};  // 1 - tanh^2
  }
  // The derivative of a capped score that is known and was changed by no other option. It is 0 for a weight of 0, whose
  // score is -inf.
  TESSERA_DEVICE static float slope_of(const ProblemParams& p, float score_log2) {
    const float tanh = score_log2 * (kLn2 / p.softcap);
    return __saturatef(fmaf(-tanh, tanh, 1.0f));
  }
};

}  // namespace tessera
