// From S = Q K^T in a warp's registers to P: options, mask, online softmax, dropout. The warp's tiles of 16 rows are
// kRowStep apart, from row `row0` of the sequence on.
#pragma once

#include "tessera/attention/dropout.cuh"
#include "tessera/attention/score/step.cuh"
#include "tessera/attention/softmax.cuh"
#include "tessera/fwd_sm80/shared.cuh"
#include "tessera/tile/product.cuh"

namespace tessera {

// The coordinates (b, h, i, j) of a warp's scores: its tiles of 16 rows are kRowStep apart, from row `row0` of the
// sequence on.
template <FwdSm80Config kCfg, int kM, int kTiles, int kRowStep = 16>
struct FwdCoordinates {
  static constexpr int kRows = kM * 2, kAheadRows = kRows, kN = kTiles, kDiagonalRegisters = 0;
  static constexpr bool kLaneOrder = kCfg.score.lane_order(kCfg.block_n), kFused = true, kOneHead = !kCfg.pack_gqa;

  const FwdSm80Params& p;
  const FwdBlock<kCfg>& b;
  int row0, key0;

  TESSERA_DEVICE const Sequence& sequence() const { return b.s; }
  TESSERA_DEVICE int batch() const { return b.work.batch; }
  TESSERA_DEVICE int head(int row) const { return b.map.head(row); }
  TESSERA_DEVICE int query(int row) const { return b.map.query(row); }
  TESSERA_DEVICE static int col() { return lane_col(); }
  TESSERA_DEVICE int row(int i) const { return min(row0 + i / 2 * kRowStep + i % 2 * 8 + lane_row(), b.map.rows - 1); }
};
template <FwdSm80Config kCfg, int kM, int kN, int kRowStep = 16>
using FwdScoreStep = ScoreStep<kCfg.score, FwdCoordinates<kCfg, kM, kN, kRowStep>>;

// Sets scores to -inf for keys that a row does not see by position.
template <FwdSm80Config kCfg, int kRowStep = 16, int kM, int kN>
TESSERA_DEVICE void apply_mask(float (&rS)[kM][kN][4], const FwdSm80Params& p, const FwdBlock<kCfg>& b, int row0,
                               int key0) {
  FwdScoreStep<kCfg, kM, kN, kRowStep>::hide(rS, {p, b, row0, key0});
}

// Sets the weights that dropout drops to zero.
template <FwdSm80Config kCfg, int kRowStep = 16, int kM, int kN>
TESSERA_DEVICE void drop(float (&rP)[kM][kN][4], const FwdSm80Params& p, const FwdBlock<kCfg>& b, int row0, int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + m * kRowStep + half * 8 + lane_row();
      const int head = dropout_head<kCfg.score>(p, b.work.batch, b.map.head(row));
      tessera::drop<kCfg.score.dropout_state>(rP[m], half, p, head,
                                              dropout_query<kCfg.score>(p, b.work.batch, b.map.query(row)),
                                              dropout_key<kCfg.score>(p, b.work.batch, key0));
    }
}

// For a tile without options: S = Q K^T, then P replaces S, and O is rescaled. In a full tile the stale max is tried
// first (attention/softmax); otherwise, or if a sum exceeds the bound, the rows' maxima are computed. full: every row
// sees all keys of the tile.
template <FwdSm80Config kCfg, int kRowStep = 16, class QTile, class KTile, int kM, int kN, int kD>
TESSERA_DEVICE void score_tile(float (&rS)[kM][kN][4], OnlineSoftmax<kM>& softmax, float (&rO)[kM][kD][4], QTile& sQ,
                               KTile& sK, const FwdSm80Params& p, const FwdBlock<kCfg>& b, int row, int key0,
                               bool full) {
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
