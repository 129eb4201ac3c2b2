// In which units scores are held and compared, at any finite size of them.
#pragma once

#include "tessera/tile/numbers.cuh"

namespace tessera {

// What a score, as it is held in registers, is multiplied by: `natural` gives the score as tessera.h defines it, `log2`
// that times log2(e), in the instruction that subtracts its row's maximum.
struct ScoreUnit {
  float natural, log2;
};

// From here on a row is huge: its scores are rounded to float32 in natural units, since times log2(e) a finite score
// may be infinite, and its maximum, one of them, is subtracted before the difference is multiplied by log2(e). Below,
// one instruction multiplies and subtracts, and its weights are those of scores that are not rounded.
inline constexpr float kHugeScore_log2 = 0x1p16f;
TESSERA_DEVICE bool is_huge(float score_log2) { return !(fabsf(score_log2) < kHugeScore_log2); }

// A maximum in natural units, which huge rows' are in.
TESSERA_DEVICE float natural_max(float max, bool huge) { return huge ? max : max * kLn2; }

}  // namespace tessera
