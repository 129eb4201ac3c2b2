// A head's factor of the scores of a program, in the backward pass.
#pragma once

#include "tessera/tile/fragment.cuh"

namespace tessera {

// The factor d(score) / ds of a head's scores in the backward pass where the gradient of what it is made of is
// requested: that is q . dQ over the factor (LoadSum::kProducts), which then must not be 0, nor make dS so small that
// it loses digits.
struct HeadFactor {
  float in_ds;  // dS includes it
  float after;  // dQ and dK are to be multiplied by it: 1, or a power of two, or 0

  template <Dtype kDtype>
  TESSERA_DEVICE static HeadFactor of(float factor) {
    constexpr bool kNarrow = kDtype == Dtype::kFloat16;  // its smallest numbers have few digits
    constexpr float kLeast = kNarrow ? 0x1p-2f : 0x1p-60f, kMost = kNarrow ? 0x1p8f : 0x1p60f;
    const float size = fabsf(factor);
    if (!(size < kLeast || (size > kMost && size < infinity()))) return {factor, 1.0f};
    const uint32 bits = __float_as_uint(factor), exponent = bits & 0x7f800000u;
    if (exponent == 0) return {1.0f, 0.0f};
    return {__uint_as_float((bits & 0x807fffffu) | 0x3f800000u), __uint_as_float(exponent)};
  }
};

}  // namespace tessera
