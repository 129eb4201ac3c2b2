// ALiBi: s -= slope_h |i + Sk - Sq - j|.
#pragma once

#include "tessera/attention/score/element.cuh"

namespace tessera {

template <ScoreConfig kCfg>
struct Alibi : ScoreOptionDefaults<Alibi<kCfg>, kAlibiFacts> {
  static constexpr bool kGiven = kCfg.alibi;

  struct Row {
    float slope;

    TESSERA_DEVICE Row(const ProblemParams& p, const ScorePlace& place) {
      slope = p.alibi_slopes[p.alibi_batch * place.batch + p.alibi_head * place.head];
    }
  };

  // Several scores share `key` and its conversion to float32; the compiler knows their offsets from it. The distance is
  // exact, and the slope, of either sign, multiplies it once, as on the CPU.
  template <bool kScaled, bool kFused, class ScoreRow, class ScoreEntry>
  TESSERA_DEVICE static void apply(Score& r, float unit, const Sequence& s, const ScoreRow& row, int key, int offset,
                                   const ScoreEntry&) {
    const float from_key = static_cast<float>(row.query + s.sk - s.sq - key);
    const float slopes = -row.slope * fabsf(from_key - static_cast<float>(offset));
    r.value = add_term<kScaled>(r.value, unit, slopes);
  }
};

}  // namespace tessera
