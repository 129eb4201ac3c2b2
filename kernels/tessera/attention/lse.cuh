// A log-sum-exp in two floats: high + low has twice the digits. Scores near a large number need `low`.
#pragma once

#include "tessera/tile/numbers.cuh"
#include "tessera/types.hpp"

namespace tessera {

struct TwoFloats {
  float high, low;
};

// a + b rounded, and the rounding error (Knuth, TAOCP 2, 4.2.2, theorem B). The additions are those of one float each:
// where a or b is a product, the compiler would otherwise join it to the sum, and low could exceed half an ulp of high.
TESSERA_DEVICE TwoFloats two_sum(float a, float b) {
  const float high = __fadd_rn(a, b), of_b = __fsub_rn(high, a);
  const float low = __fadd_rn(__fsub_rn(a, __fsub_rn(high, of_b)), __fsub_rn(b, of_b));
  return {high, fabsf(high) < infinity() ? low : 0.0f};
}

TESSERA_DEVICE TwoFloats unseen_lse() { return {-infinity(), 0.0f}; }

// Stores to a call's lse and lse_low, as far as they are requested.
template <class Params>
TESSERA_DEVICE void store_lse(const Params& p, int batch, int head, int64 row, TwoFloats lse) {
  if (p.lse.data) *p.lse.at(batch, head, row) = lse.high;
  if (p.lse_low.data) *p.lse_low.at(batch, head, row) = lse.low;
}

// The LSE that an earlier call saved; without lse_low it has the error bound of one float.
template <class Params>
TESSERA_DEVICE TwoFloats load_lse(const Params& p, int batch, int head, int64 row) {
  return {*p.lse.at(batch, head, row), p.lse_low.data ? *p.lse_low.at(batch, head, row) : 0.0f};
}

}  // namespace tessera
