// By how much the scores of a row grow from tile to tile, where a term that is known ahead is added to them: ALiBi's,
// or a program's that is linear in the key. A stale max (attention/softmax) is raised by it, so that the tile needs no
// maximum of its own. Any growth gives correct results: a tile that it does not fit is computed again.
#pragma once

#include "tessera/attention/score/options.cuh"

namespace tessera {

template <ScoreConfig kCfg>
TESSERA_DEVICE constexpr bool has_known_growth() {
  if (kCfg.facts().entries) return false;
  if constexpr (kCfg.program && !kCfg.only_hides) {
    return ProgramTypes<kCfg.program>::Program::kGrowsLinearly && !kCfg.alibi;
  } else {
    return kCfg.alibi && !kCfg.program;
  }
}

// By how much a row's term may grow (log2 units) before its stale max is raised. Every growth costs a multiplication of
// O; weights of float16 have less room than those of bfloat16, whose exponents are float32's.
template <Dtype kDtype>
inline constexpr float kMostGrowth_log2 = kDtype == Dtype::kBFloat16 ? 32.0f : 8.0f;

// The largest terms of a row, and of the row eight queries after it, for the keys first ... last.
template <ScoreConfig kCfg, class Row>
TESSERA_DEVICE void largest_terms(float (&terms)[2], const Sequence& s, Row row, int first, int last) {
  if constexpr (kCfg.program) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1) row.move_by(8);
      terms[half] = fmaxf(ProgramOption<kCfg>::term(row, first), ProgramOption<kCfg>::term(row, last));
    }
  } else {
    const int position = Alibi<kCfg>::position(s, row);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int before = position - last + half * 8, after = first - position - half * 8;
      const int distance =
          row.slope > 0.0f ? max(0, max(before, after)) : max(last - first - before, last - first - after);
      terms[half] = -row.slope * static_cast<float>(distance);
    }
  }
}

}  // namespace tessera
