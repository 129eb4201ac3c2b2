// ALiBi: s -= slope_h |i + Sk - Sq - j|, with places in the whole.
#pragma once

#include "tessera/attention/score/element.cuh"

namespace tessera {

template <ScoreConfig kCfg>
struct Alibi : ScoreOptionDefaults<Alibi<kCfg>, kAlibiFacts> {
  static constexpr bool kGiven = kCfg.alibi;

  struct Row {
    float slope;
    int bottom_right;  // with places

    TESSERA_DEVICE Row(const ProblemParams& p, const ScorePlace& place) {
      if constexpr (kCfg.places) bottom_right = p.bottom_right;
      slope = p.alibi_slopes[p.alibi_batch * place.batch + p.alibi_head * place.head];
    }
  };

  // Several scores share `key` and its conversion to float32; the compiler knows their offsets from it. The distance is
  // exact, and the slope, of either sign, multiplies it once, as on the CPU.
  template <bool kScaled, bool kFused, class ScoreRow, class ScoreEntry>
  TESSERA_DEVICE static void apply(Score& r, float unit, const Sequence& s, const ScoreRow& row, int key, int offset,
                                   const ScoreEntry&) {
    const int position = row.query + (kCfg.places ? row.bottom_right : s.sk - s.sq);
    const float from_key = static_cast<float>(position - key);
    const float slopes = -row.slope * fabsf(from_key - static_cast<float>(offset));
    r.value = add_term<kScaled>(r.value, unit, slopes);
  }
};

}  // namespace tessera
