// The scores of a K/V tile in decode_sm90: S = Q K^T, options, mask and online softmax.
#pragma once

#include "tessera/attention/score/step.cuh"
#include "tessera/attention/softmax.cuh"
#include "tessera/decode_sm90/codes.cuh"
#include "tessera/decode_sm90/schedule.cuh"

namespace tessera {

// The coordinates (b, h, i, j) of the scores of a K/V tile.
template <DecodeSm90Config kCfg>
struct DecodeCoordinates {
  static constexpr int kRows = kCfg.row_tiles() * kCfg.row_halves(), kAheadRows = kRows, kN = kCfg.block_n / 8,
                       kDiagonalRegisters = 0;
  static constexpr bool kLaneOrder = false, kFused = true;

  const DecodeSm90Params& p;
  const Segment& segment;
  DecodeRows rows;
  int key0;

  TESSERA_DEVICE DecodeCoordinates(const DecodeSm90Params& p, const Segment& segment, int key0)
      : p(p), segment(segment), rows(p, segment.head_kv), key0(key0) {}
  TESSERA_DEVICE const Sequence& sequence() const { return segment.s; }
  TESSERA_DEVICE int batch() const { return segment.batch; }
  TESSERA_DEVICE int head(int row) const { return rows.head(p, row); }
  TESSERA_DEVICE int query(int row) const { return rows.query(p, row); }
  TESSERA_DEVICE static int col() { return lane_col(); }
  TESSERA_DEVICE int row(int i) const { return segment.row0 + min(i * 8 + lane_row(), segment.rows - 1); }
};

// Turns the scores of the tile that begins at key key0 into P, in place, and rescales O if the stale max is replaced.
// `full`: all rows see all keys of the tile.
template <DecodeSm90Config kCfg, class Queries, class Tile>
TESSERA_DEVICE void score_stage(DecodeScoreTile<kCfg>& rS, DecodeSoftmax<kCfg>& softmax, DecodeOutput<kCfg>& output,
                                const Queries& queries, const Tile& sK, DecodeScales<kCfg>& scales,
                                const DecodeSm90Params& p, const Segment& segment, int key0, bool full) {
  constexpr ScoreConfig kScore = kCfg.score;
  ScoreStep<kScore, DecodeCoordinates<kCfg>> scores;
  const DecodeCoordinates<kCfg> at(p, segment, key0);
  const ScoreUnit unit = score_unit<kScore>(p);
  bool stale_max = keeps_stale_max<kScore>() && full && softmax.ready;
  for (;; stale_max = false) {
    queries.product(rS, sK);
    scales.scale_scores(rS);
#pragma unroll
    for (int i = 0; i < at.kRows; ++i) {
      const int row = at.row(i);
      if constexpr (!scores.kPlain) scores.apply_row(rS[i / 2], at, i, scores.row(at, row));
      if (!full) scores.hide_row(rS[i / 2], at, i, row);
    }
    scales.prepare_weights(rS, output);
    if (!stale_max) break;
    if (softmax.try_stale_max(rS, unit)) return;
  }
  float alpha[kCfg.row_tiles()][kCfg.row_halves()];
  const bool is_zero = softmax.fresh();
  const bool moves = softmax.update_max(rS, unit, alpha, keeps_stale_max<kScore>() ? 0.0f : kRescaleThreshold_log2);
  output.rescale(alpha, moves && !is_zero);
  softmax.exponentiate(rS, unit);
}

}  // namespace tessera
