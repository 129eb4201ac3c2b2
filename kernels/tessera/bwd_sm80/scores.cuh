// Scores and their gradients in the backward pass: turns a warp's S^T and dP^T into P^T and dS^T.
#pragma once

#include "tessera/attention/backward/rows.cuh"
#include "tessera/attention/dropout.cuh"
#include "tessera/attention/score/step.cuh"
#include "tessera/bwd_sm80/shared.cuh"
#include "tessera/tile/fragment.cuh"
#include "tessera/tile/product.cuh"

namespace tessera {

// Dropout bits if a lane's row is a key and its columns are two queries, `query` and the next: bits[e][t] are those of
// query `query` + e and keys 32 group + row + {16 t, 16 t + 8}, in the low and the high half. One call of Philox gives
// the words of two neighbouring keys, of which each lane needs one, so two neighbouring lanes make one call each and
// exchange halves. Called by all lanes of a warp.
template <class Keys>
TESSERA_DEVICE void transposed_dropout_bits(uint32 (&bits)[2][2], const Keys& keys, int head, int query, int group,
                                            int row) {
  const bool odd = row % 2 != 0;
  const PhiloxWords words = dropout_words(keys, head, query + odd, group, row / 2);
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const uint32 low = __byte_perm(words.word[2 * t], words.word[2 * t + 1], 0x5410);
    const uint32 high = __byte_perm(words.word[2 * t], words.word[2 * t + 1], 0x7632);
    const uint32 mine = odd ? high : low, got = __shfl_xor_sync(0xffffffff, odd ? low : high, 4);
    bits[0][t] = odd ? got : mine, bits[1][t] = odd ? mine : got;
  }
}

// The coordinates, LSE and delta of a warp's scores S^T and dP^T of one query tile.
struct ScoreTile {
  int batch, head;
  int query, key;                         // of the warp's first column and row
  const float *row_lse_log2, *row_delta;  // from the first column's query on
};

// The rows of a warp's tile that the query of column `col` sees: keys low ... high, relative to the lane's first key.
template <ScoreConfig kScore = ScoreConfig{}>
TESSERA_DEVICE KeyRange visible_rows(const ProblemParams& p, const Sequence& s, const ScoreTile& tile, int col) {
  const KeyRange keys = visible_keys<kScore>(p, s, tile.query + col);
  const int first = tile.key + lane_row();
  return {keys.low - first, tile.query + col < s.sq ? keys.high - first : -1};
}

// Whether the query tile is marked as far: attention/backward/rows.cuh.
TESSERA_DEVICE bool is_far(const ScoreTile& tile) { return is_far(tile.row_lse_log2[0]); }

// probabilities() of a query tile that is marked as far.
template <bool kMasked, bool kRaised, int kM, int kN>
TESSERA_DEVICE void far_probabilities(const BwdParams& p, const Sequence& s, const ScoreTile& tile,
                                      float (&rP)[kM][kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      reload_memory();  // one row after another, to save registers
      const int col = n * 8 + lane_col() + e;
      const FarRow row(p, s, tile.batch, tile.head, tile.query + col, score_unit<ScoreConfig{}>(p));
      [[maybe_unused]] KeyRange seen;
      if constexpr (kMasked) seen = visible_rows(p, s, tile, col);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = rP[m][n][2 * half + e];
          x = ptx::ex2_approx_ftz(row.log2_weight(x) + (kRaised ? kBwdRaise_log2 : 0.0f));
          if (kMasked && (m * 16 + half * 8 < seen.low || m * 16 + half * 8 > seen.high)) x = 0.0f;
        }
    }
}

// Replaces S^T (the products) by P^T. kMasked: a positional mask or a sequence's end may cross the tile, and elements
// that a query does not see become 0; otherwise the caller sets them to 0. kRaised: scaled up by kBwdRaise_log2.
template <bool kMasked, bool kRaised = false, int kM, int kN>
TESSERA_DEVICE void probabilities(const BwdParams& p, const Sequence& s, const ScoreTile& tile,
                                  float (&rP)[kM][kN][4]) {
  if (is_far(tile)) [[unlikely]] {
    far_probabilities<kMasked, kRaised>(p, s, tile, rP);
    return;
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 lse = *reinterpret_cast<const float2*>(tile.row_lse_log2 + n * 8 + lane_col());
    const float2 minus =
        kRaised ? make_float2(kBwdRaise_log2 - lse.x, kBwdRaise_log2 - lse.y) : make_float2(-lse.x, -lse.y);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      [[maybe_unused]] KeyRange seen;
      if constexpr (kMasked) seen = visible_rows(p, s, tile, n * 8 + lane_col() + e);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = rP[m][n][2 * half + e];
          x = ptx::ex2_approx_ftz(fmaf(x, p.scale_log2, e == 0 ? minus.x : minus.y));
          if (kMasked && (m * 16 + half * 8 < seen.low || m * 16 + half * 8 > seen.high)) x = 0.0f;
        }
    }
  }
}

// Replaces dP^T by dS^T; probability(m, n, half) is P^T at elements 2 half and 2 half + 1. Hidden elements are set to
// 0, not multiplied by 0, because their dP may be NaN.
template <bool kMasked, int kM, int kN, class Probability>
TESSERA_DEVICE void score_gradients(const ProblemParams& p, const Sequence& s, const ScoreTile& tile,
                                    float (&rdS)[kM][kN][4], Probability&& probability) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 delta = *reinterpret_cast<const float2*>(tile.row_delta + n * 8 + lane_col());
    [[maybe_unused]] KeyRange seen[2];
    if constexpr (kMasked) {
#pragma unroll
      for (int e = 0; e < 2; ++e) seen[e] = visible_rows(p, s, tile, n * 8 + lane_col() + e);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = probability(m, n, half);
        float &x = rdS[m][n][2 * half], &y = rdS[m][n][2 * half + 1];
        x = pair.x * (x - delta.x), y = pair.y * (y - delta.y);
        if constexpr (kMasked) {
          const int row = m * 16 + half * 8;
          if (row < seen[0].low || row > seen[0].high) x = 0.0f;
          if (row < seen[1].low || row > seen[1].high) y = 0.0f;
        }
      }
  }
}

// Calls body(m, n, e) for the elements that their queries do not see. The body must set them to 0, not multiply by 0,
// because they may be NaN.
template <int kM, int kN, ScoreConfig kScore = ScoreConfig{}, class Body>
TESSERA_DEVICE void for_masked(const ProblemParams& p, const Sequence& s, const ScoreTile& tile, Body&& body) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const KeyRange seen = visible_rows<kScore>(p, s, tile, n * 8 + lane_col() + e);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = m * 16 + half * 8;
          if (row >= seen.low && row <= seen.high) continue;
          body(m, n, 2 * half + e);
        }
    }
}

// The coordinates (b, h, i, j) of the scores of a warp's tile.
template <BwdConfig kCfg, int kM, int kTiles>
struct BwdCoordinates {
  static constexpr bool kTransposed = true, kKeepsProduct = true;
  static constexpr int kKeys = kM * 2, kN = kTiles;
  static constexpr bool kLaneOrder = BwdWarps<kCfg>::kLaneOrder, kAlone = kCfg.deterministic;

  const BwdParams& p;
  const Sequence& s;
  const ScoreTile& tile;

  TESSERA_DEVICE const Sequence& sequence() const { return s; }
  TESSERA_DEVICE int batch() const { return tile.batch; }
  TESSERA_DEVICE int head() const { return tile.head; }
  TESSERA_DEVICE int query() const { return tile.query; }
  TESSERA_DEVICE int key() const { return tile.key; }
};
template <BwdConfig kCfg, int kM, int kN>
using BwdScoreStep = ScoreStep<kCfg.score, BwdCoordinates<kCfg, kM, kN>>;

// Whether one text serves query tiles that are marked as far and those of which some query does not see all keys: that
// of a program with gradients of its tensors is long. Sums in fixed point leave it too few registers.
template <BwdConfig kCfg>
inline constexpr bool kFarOrPartial = kCfg.d_captured && !kCfg.deterministic && !kCfg.score.entries();

// P^T and dS^T with every option. P^T is left after dropout, but without the factor 1 / (1 - p). The gradients of the
// options' tensors use dS before the gradient of a reshaped score: it is added at once if every query has its own
// elements, or summed in `sums` if all queries have the same. kFull: every query sees all keys of the tile, and `step`
// holds its bias and mask fragment, transposed; or the caller sets the hidden elements to 0. kFar: the query tile is
// marked as far, or with kFarOrPartial may be.
template <BwdConfig kCfg, bool kFull, bool kFar, int kM, int kN>
TESSERA_DEVICE void differentiate_options(const BwdParams& p, const Sequence& s, const ScoreTile& tile,
                                          const BwdScoreStep<kCfg, kM, kN>& step, float (&rP)[kM][kN][4],
                                          float (&rdS)[kM][kN][4], float (&sums)[kM][2]) {
  using Step = BwdScoreStep<kCfg, kM, kN>;
  const BwdCoordinates<kCfg, kM, kN> at{p, s, tile};
  constexpr bool kMasks = !kFull || kCfg.score.entries() || kCfg.score.program;
  const ScoreUnit unit = score_unit<kCfg.score>(p);
  [[maybe_unused]] const typename Step::Collector collector(p, tile.batch, tile.head);
  auto program_gradients = [&p] {
    if constexpr (kCfg.d_captured) {
      return ProgramGradients<kCfg.score, kCfg.deterministic, 2 * kM>(p);
    } else {
      return NoProgramGradients{};
    }
  }();
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    [[maybe_unused]] uint32 bits[(kM + 1) / 2][2][2];
    if constexpr (kCfg.score.dropout) {
      const DropoutKeys<kCfg.score.dropout_state> keys(p);
#pragma unroll
      for (int m = 0; m < kM; m += 2) {
        transposed_dropout_bits(bits[m / 2], keys, dropout_head<kCfg.score>(p, tile.batch, tile.head),
                                dropout_query<kCfg.score>(p, tile.batch, tile.query + n * 8 + lane_col()),
                                dropout_key<kCfg.score>(p, tile.batch, tile.key + m * 16) / 32, lane_row());
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int col = n * 8 + lane_col() + e, query = tile.query + col;
      const float lse = tile.row_lse_log2[col], delta = tile.row_delta[col];
      const typename Step::Row score_row = Step::row(at, kFull ? query : min(query, s.sq - 1));
      const auto log2_weight = [&] {
        if constexpr (kFar && kFarOrPartial<kCfg>) {
          const bool far = is_far(tile);
          float first = 1.0f, second = unit.log2, high = lse, to_log2 = 1.0f, low_log2 = 0.0f;  // not far: as below
          if (far) {
            const FarRow row(p, s, tile.batch, tile.head, query, unit);
            first = row.first, second = row.second, high = row.high, to_log2 = kLog2e, low_log2 = row.low_log2;
          }
          return [=](float score) {
            const float x = fmaf(fmaf(__fmul_rn(score, first), second, -high), to_log2, -low_log2);
            return far && x > 0.0f ? 0.0f : x;
          };
        } else if constexpr (kFar) {
          const FarRow row(p, s, tile.batch, tile.head, query, unit);
          return [row](float score) { return row.log2_weight(score); };
        } else {
          return [unit, lse](float score) { return fmaf(score, unit.log2, -lse); };
        }
      }();
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        // Which half of the 32 keys that a call of Philox decides.
        const bool upper = kM == 1 ? tile.key % 32 != 0 : m % 2 != 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key0 = Step::first_key(at), block = m * 2 + half;
          float &x = rP[m][n][2 * half + e], &d = rdS[m][n][2 * half + e];
          const Score score = step.template apply<kFull>(at, score_row, key0, n, block, e, x);
          const bool visible = !kMasks || (score.value != -infinity() && (kFull || query < s.sq));
          const float probability = ptx::ex2_approx_ftz(log2_weight(score.value));
          bool kept = true;
          float d_probability = d;
          if constexpr (kCfg.score.dropout) {
            const uint32 pair = upper ? bits[m / 2][e][1] : bits[m / 2][e][0];
            kept = half ? keeps_high(pair, p.dropout_threshold) : keeps_low(pair, p.dropout_threshold);
            d_probability = kept ? d * p.dropout_scale : 0.0f;
          }
          x = visible && kept ? probability : 0.0f;
          d = visible ? probability * (d_probability - delta) : 0.0f;
          const int key = key0 + Step::key_offset(block);
          if constexpr (kCfg.d_captured) program_gradients.begin_block(block);
          d = Step::program_gradient(score, score_row, key, visible, d, program_gradients);
          if constexpr (kCfg.d_bias) {
            collector.template add<at.kAlone>(p, sums[m][half], visible, query, key, d);
          }
          d = Step::gradient(score, visible, d);
        }
      }
      if constexpr (kCfg.d_captured) program_gradients.end_query(score_row);
    }
  }
  if constexpr (kCfg.d_captured) {
    const typename Step::Row row = Step::row(at, min(tile.query, s.sq - 1));
    program_gradients.end(row, [&](int block) { return Step::first_key(at) + Step::key_offset(block); });
  }
}

// The same for a query tile that is marked as far, eight queries at a time: such tiles are rare, and this is the code
// of eight queries. All elements pass through the registers of the first eight queries.
template <BwdConfig kCfg, int kM, int kN>
TESSERA_DEVICE void differentiate_far_program(const BwdParams& p, const Sequence& s, const ScoreTile& tile,
                                              float (&rP)[kM][kN][4], float (&rdS)[kM][kN][4], float (&sums)[kM][2]) {
  const auto pass = [](float(&elements)[kM][kN][4], const float(&eight)[kM][1][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int n = 1; n < kN; ++n) elements[m][n - 1][i] = elements[m][n][i];
        elements[m][kN - 1][i] = eight[m][0][i];
      }
  };
#pragma unroll 1
  for (int query = 0; query < 8 * kN; query += 8) {
    const ScoreTile of{
        tile.batch, tile.head, tile.query + query, tile.key, tile.row_lse_log2 + query, tile.row_delta + query};
    BwdScoreStep<kCfg, kM, 1> no_entries;
    float P[kM][1][4], dS[kM][1][4];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) P[m][0][i] = rP[m][0][i], dS[m][0][i] = rdS[m][0][i];
    differentiate_options<kCfg, false, true>(p, s, of, no_entries, P, dS, sums);
    pass(rP, P), pass(rdS, dS);
  }
}

}  // namespace tessera
