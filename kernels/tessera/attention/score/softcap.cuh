// The softcap: c tanh(scale q.k / c) without a branch for each element, and of small scores without the slow unit that
// makes the exponentials.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/ptx/math.cuh"
#include "tessera/tile/numbers.cuh"

namespace tessera {

// 4 tanh(x / 4), to 4e-7 of itself: where 4 - 8 / (1 + e^(x / 2)) would lose digits, by a polynomial. kSmall: |x| < 2.
template <bool kSmall>
TESSERA_DEVICE float quadruple_tanh(float x) {
  const float square = x * x;
  float small = fmaf(0x1.0aa1dap-22f, square, -0x1.aecab4p-17f);
  small = fmaf(fmaf(small, square, 0x1.10c82p-11f), square, -0x1.55542cp-6f) * square;
  small = fmaf(small, x, x);
  if constexpr (kSmall) return small;
  const float large = fmaf(-8.0f, ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(x * (0.5f * kLog2e))), 4.0f);
  return fabsf(x) < 2.0f ? small : large;  // both: a branch an element costs more
}

// What a product's score is the quadruple_tanh of, but for a factor.
TESSERA_DEVICE float softcap_input(const ProblemParams& p, float product) {
  return product * (4.0f * p.scale / p.softcap);
}
TESSERA_DEVICE float capped_unit(const ProblemParams& p) { return 0.25f * p.softcap; }

// Whether all of a lane's inputs are below 2, as nearly always: below it bit 30 of a float is 0.
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

}  // namespace tessera
