// The units in which scores are held and compared, for finite scores of any size.
#pragma once

#include "tessera/tile/element.cuh"

namespace tessera {

// The factors of a score as it is held in registers: `natural` gives the score as tessera.h defines it, and `log2` that
// times log2(e), in the instruction that subtracts its row's maximum.
struct ScoreUnit {
  float natural, log2;
};

// A row whose maximum has at least this magnitude is huge: its scores are rounded to float32 in natural units, because
// a finite score times log2(e) may be infinite, and its maximum, one of them, is subtracted before the difference is
// multiplied by log2(e). In other rows one instruction multiplies and subtracts, and the weights are those of unrounded
// scores.
inline constexpr float kHugeScore_log2 = 0x1p16f;
TESSERA_DEVICE bool is_huge(float score_log2) { return !(fabsf(score_log2) < kHugeScore_log2); }

// A maximum in natural units, which are the units of a huge row's maximum.
TESSERA_DEVICE float natural_max(float max, bool huge) { return huge ? max : max * kLn2; }

}  // namespace tessera
