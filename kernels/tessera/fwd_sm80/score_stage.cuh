// From S = Q K^T in a warp's registers to P: options, mask, online softmax, dropout. Tiles of 16 rows, kRowStep apart, from row
// `row0` of the sequence on.
#pragma once

#include "tessera/attention/dropout.cuh"
#include "tessera/attention/score/fragment.cuh"
#include "tessera/attention/softmax.cuh"
#include "tessera/attention/tree_mask.cuh"
#include "tessera/fwd_sm80/block.cuh"
#include "tessera/tile/product.cuh"

namespace tessera {

// -inf for keys that a row does not see by its position.
template <FwdConfig kCfg, int kRowStep = 16, int kM, int kN>
TESSERA_DEVICE void apply_mask(float (&rS)[kM][kN][4], const FwdParams& p, const FwdBlock<kCfg>& b, int row0,
                               int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(row0 + m * kRowStep + half * 8 + lane_row(), b.map.rows - 1);
      const KeyRange keys = visible_keys<kCfg.score>(p, b.s, b.map.query(row));
      mask_outside(rS[m], half, keys.low - key0 - lane_col(), keys.high - key0 - lane_col());
      if constexpr (kCfg.score.tree_mask) {
        mask_tree<false>(rS[m], half, p, b.s, b.work.batch, b.map.query(row), key0);
      }
    }
}

// What the elements of a lane's row share: of a tile of 16 rows the first half or the second.
template <int kRowStep, FwdConfig kCfg>
TESSERA_DEVICE ScoreRow<kCfg.score> score_row(const FwdParams& p, const FwdBlock<kCfg>& b, int row0, int m, int half) {
  const int row = min(row0 + m * kRowStep + half * 8 + lane_row(), b.map.rows - 1);
  return {p, b.s, b.work.batch, b.map.head(row), b.map.query(row)};
}

// Products to scores with every option, attention/score/score.
template <FwdConfig kCfg, int kRowStep = 16, int kM, int kN>
TESSERA_DEVICE void apply_scores(float (&rS)[kM][kN][4], const FwdParams& p, const FwdBlock<kCfg>& b, int row0,
                                 int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ScoreRow<kCfg.score> row = score_row<kRowStep>(p, b, row0, m, half);
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = rS[m][n][2 * half + e];
          const int key = key0 + key_at<kCfg.score.lane_order(kCfg.block_n)>(n, lane_col() + e);
          x = score<kCfg.score>(p, b.s, row, key, x).value;
        }
      if constexpr (kCfg.score.tree_mask) {
        mask_tree<kCfg.score.lane_order(kCfg.block_n)>(rS[m], half, p, b.s, b.work.batch, row.query, key0);
      }
    }
}

// The same for a full tile, or one whose mask is applied afterwards, with the bias and mask that load_bias_mask loaded.
template <FwdConfig kCfg, int kM, int kN>
using FwdBiasMask = BiasMaskFragment<kCfg.score, kM * 2, kN, kCfg.score.lane_order(kCfg.block_n)>;

template <FwdConfig kCfg, int kM, int kN>
TESSERA_DEVICE void load_bias_mask(FwdBiasMask<kCfg, kM, kN>& bias_mask, const FwdParams& p, const FwdBlock<kCfg>& b,
                                   int row0, int key0) {
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) bias_mask.load(i, p, score_row<16>(p, b, row0, i / 2, i % 2), key0);
}
template <FwdConfig kCfg, int kM, int kN>
TESSERA_DEVICE void apply_full_scores(float (&rS)[kM][kN][4], const FwdBiasMask<kCfg, kM, kN>& bias_mask,
                                      const FwdParams& p, const FwdBlock<kCfg>& b, int row0, int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias_mask.apply(rS[m], half, m * 2 + half, p, b.s, score_row<16>(p, b, row0, m, half), key0);
    }
}

// Zero for what dropout takes away.
template <FwdConfig kCfg, int kRowStep = 16, int kM, int kN>
TESSERA_DEVICE void drop(float (&rP)[kM][kN][4], const FwdParams& p, const FwdBlock<kCfg>& b, int row0, int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + m * kRowStep + half * 8 + lane_row();
      tessera::drop<kCfg.score.dropout_state>(rP[m], half, p, b.work.batch * p.heads_q + b.map.head(row),
                                              b.map.query(row), key0);
    }
}

// S = Q K^T of a tile without options -> P in place of S, and O rescaled. Against the stale max first, where that may serve
// (attention/softmax); else, or if a sum passes the bound, with the rows' maxima. full: every row sees all of the tile's keys.
template <FwdConfig kCfg, int kRowStep = 16, class QTile, class KTile, int kM, int kN, int kD>
TESSERA_DEVICE void score_tile(float (&rS)[kM][kN][4], OnlineSoftmax<kM>& softmax, float (&rO)[kM][kD][4], QTile& sQ,
                               KTile& sK, const FwdParams& p, const FwdBlock<kCfg>& b, int row, int key0, bool full) {
  for (bool stale_max = full && softmax.ready;; stale_max = false) {
    clear(rS);
    product_abt<kRowStep>(rS, sQ, row, sK, 0);
    if (stale_max) {
      if (softmax.try_stale_max(rS, score_unit<kCfg.score>(p))) break;
      continue;
    }
    if (!full) apply_mask<kCfg, kRowStep>(rS, p, b, b.row0 + row, key0);
    softmax.update(rS, score_unit<kCfg.score>(p), rO, 0.0f);
    break;
  }
}

}  // namespace tessera
