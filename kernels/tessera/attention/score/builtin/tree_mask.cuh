// The tree mask of drafted tokens: for each query a bit for every key from Sk - Sq on, which says whether the query
// sees it. Earlier keys are visible, so that only the last tiles of keys apply it.
#pragma once

#include "tessera/attention/score/element.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// Bits `bit` ... bit + 31 of a query's words; bits outside the words are 1.
TESSERA_DEVICE uint32 tree_bits(const PositionMasks& masks, const uint32* row, int bit) {
  const int at = bit >> 5;
  const auto word = [&](int n) { return n >= 0 && n < masks.tree_words ? row[n * masks.tree_mask_word] : ~uint32{}; };
  return __funnelshift_r(word(at), word(at + 1), bit);
}

template <ScoreConfig kCfg>
struct TreeMask : ScoreOptionDefaults<TreeMask<kCfg>, ScoreFacts{}> {
  static constexpr bool kGiven = kCfg.tree_mask;
  static constexpr bool kHidesByPosition = true;

  // All queries see all keys only before Sk - Sq.
  template <class TileRange>
  TESSERA_DEVICE static void range(TileRange& range, const Sequence& s) {
    range.all.high = min(range.all.high, s.sk - s.sq - 1);
  }

  // A lane's scores of one row, in tiles of 8 keys from key0 on.
  template <bool kLaneOrder, int kN, class Params>
  TESSERA_DEVICE static void hide(float (&s)[kN][4], int half, const Params& p, const Sequence& sequence, int batch,
                                  int query, int key0) {
    const PositionMasks& masks = p.masks;
    const int bit0 = key0 - (sequence.sk - sequence.sq);
    if (bit0 + kN * 8 <= 0) return;
    const uint32* row = masks.tree_mask + masks.tree_mask_batch * batch +
                        masks.tree_mask_row * (static_cast<int64>(sequence.q_begin) + query);
#pragma unroll
    for (int group = 0; group < kN; group += 4) {
      const uint32 bits = tree_bits(masks, row, bit0 + group * 8) >> key_at<kLaneOrder>(0, lane_col());
#pragma unroll
      for (int n = group; n < min(group + 4, kN); ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!(bits >> key_at<kLaneOrder>(n - group, e) & 1)) s[n][2 * half + e] = -infinity();
        }
    }
  }
};

}  // namespace tessera
