// In which units scores are held and compared, at any finite size of them.
#pragma once

#include "tessera/tile/numbers.cuh"

namespace tessera {

// What a score, as it is held in registers, is multiplied by: `natural` gives the score as tessera.h defines it, `log2` that times log2(e),
// in the instruction that subtracts its row's maximum. Maxima are kept as scores are held: times log2(e) a finite score may be infinite.
struct ScoreUnit {
  float natural, log2;
};

// From here on a row's scores are rounded to float32 and its maximum, one of them, is subtracted before the difference is multiplied by
// log2(e). Below, one instruction multiplies and subtracts, and its weights are those of scores that are not rounded.
inline constexpr float kHugeScore_log2 = 0x1p16f;
TESSERA_DEVICE bool is_huge(float score_log2) { return !(fabsf(score_log2) < kHugeScore_log2); }

// From weights against some maximum to weights against `to`. No product is fused: each is what exponentials had.
struct Rescaling {
  float first, then, taken;
  TESSERA_DEVICE Rescaling(float to, ScoreUnit unit) {
    const bool huge = is_huge(__fmul_rn(to, unit.log2));
    first = huge ? unit.natural : unit.log2, then = huge ? kLog2e : 1.0f;
    taken = __fmul_rn(to, first);
  }
  TESSERA_DEVICE float log2_from(float max) const { return (__fmul_rn(max, first) - taken) * then; }
};

}  // namespace tessera
