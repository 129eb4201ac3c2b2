// The tree mask of drafted tokens: of the keys from Sk - Sq on a bit each, which says whether a query sees it. Tiles before
// those keys know nothing of it.
#pragma once

#include "tessera/attention/score/fragment.cuh"

namespace tessera {

// Bits `bit` ... bit + 31 of a query's words; where there is none, 1.
TESSERA_DEVICE uint32 tree_bits(const PositionMasks& masks, const uint32* row, int bit) {
  const int at = bit >> 5;
  const auto word = [&](int n) { return n >= 0 && n < masks.tree_words ? row[n * masks.tree_mask_word] : ~uint32{}; };
  return __funnelshift_r(word(at), word(at + 1), bit);
}

// Of a lane's scores of one row, in tiles of 8 keys from key0 on: those that the query's bits hide become -inf.
template <bool kLaneOrder, int kN, class Params>
TESSERA_DEVICE void mask_tree(float (&s)[kN][4], int half, const Params& p, const Sequence& sequence, int batch,
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

}  // namespace tessera
