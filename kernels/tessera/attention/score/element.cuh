// Scores: the units in which they and a row's log-sum-exp are held, the place of a score, and what all of its options
// use.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/attention/sequence.cuh"
#include "tessera/tile/fragment.cuh"
#include "tessera/types.hpp"

namespace tessera {

// ---- units ----------------------------------------------------------------------------------------------------------
//
// The units in which scores are held and compared, for finite scores of any size.

// The factors of a score as it is held in registers: `natural` gives the score as tessera.h defines it, and `log2` that
// times log2(e), in the instruction that subtracts its row's maximum.
struct ScoreUnit {
  float natural, log2;
};

// A row whose maximum has at least this magnitude is huge: its scores are rounded to float32 in natural units, because
// a finite score times log2(e) may be infinite, and its maximum, one of them, is subtracted before the difference is
// multiplied by log2(e). In other rows one instruction multiplies and subtracts, and the weights are those of unrounded
// scores.
inline constexpr float kHugeScore_log2 = 0x1p16f;
TESSERA_DEVICE bool is_huge(float score_log2) { return !(fabsf(score_log2) < kHugeScore_log2); }

// A maximum in natural units, which are the units of a huge row's maximum.
TESSERA_DEVICE float natural_max(float max, bool huge) { return huge ? max : max * kLn2; }

// ---- the log-sum-exp of a row ---------------------------------------------------------------------------------------
//
// A log-sum-exp in two floats: high + low has twice the digits. Scores near a large number need `low`.

struct TwoFloats {
  float high, low;
};

// a + b rounded, and the rounding error (Knuth, TAOCP 2, 4.2.2, theorem B). The additions are those of one float each:
// where a or b is a product, the compiler would otherwise join it to the sum, and low could exceed half an ulp of high.
TESSERA_DEVICE TwoFloats two_sum(float a, float b) {
  const float high = __fadd_rn(a, b), of_b = __fsub_rn(high, a);
  const float low = __fadd_rn(__fsub_rn(a, __fsub_rn(high, of_b)), __fsub_rn(b, of_b));
  return {high, fabsf(high) < infinity() ? low : 0.0f};
}

TESSERA_DEVICE TwoFloats unseen_lse() { return {-infinity(), 0.0f}; }

// Stores to a call's lse and lse_low, as far as they are requested.
template <class Params>
TESSERA_DEVICE void store_lse(const Params& p, int batch, int head, int64 row, TwoFloats lse) {
  if (p.lse.data) *p.lse.at(batch, head, row) = lse.high;
  if (p.lse_low.data) *p.lse_low.at(batch, head, row) = lse.low;
}

// The LSE that an earlier call saved; without lse_low it has the error bound of one float.
template <class Params>
TESSERA_DEVICE TwoFloats load_lse(const Params& p, int batch, int head, int64 row) {
  return {*p.lse.at(batch, head, row), p.lse_low.data ? *p.lse_low.at(batch, head, row) : 0.0f};
}

// ---- options --------------------------------------------------------------------------------------------------------
//
// The place of a score, its values between the product and the softmax, and the default behaviour of an option.

// A row of scores: the sequence b, the query head h, and the query i, counted from 0 in its sequence; and the numbers
// of the sequence's queries and keys.
struct ScorePlace {
  int batch, head, query, len_q, len_k;
};

struct Score {
  float value;                  // after all options, in units of score_unit; -inf if the key is not visible
  float slope;                  // d(reshaped score) / d(product x scale): the factor of its gradient
  float before_program = 0.0f;  // the score before a score program
};

// The values that tensors have for one score. Each option adds its own members.
struct ScoreEntryBase {
  bool visible = true;
};

// value x unit + term, or value + term if an earlier option has already multiplied by the unit. kFused: by one
// instruction. Its operand `term` is then prepared before the product arrives, for which not every kernel has
// registers.
template <bool kScaled, bool kFused = true>
TESSERA_DEVICE float add_term(float value, float unit, float term) {
  if constexpr (kScaled) return value + term;
  return kFused ? fmaf(value, unit, term) : __fmul_rn(value, unit) + term;
}

// The key of column i of the n-th block of 8 columns, within a tile (tile/shared_tile.cuh).
template <bool kLaneOrder>
TESSERA_DEVICE constexpr int key_at(int n, int i) {
  return kLaneOrder ? n / 4 * 32 + i / 2 * 8 + n % 4 * 2 + i % 2 : n * 8 + i;
}

// An option of the score; each file in builtin/ defines one. All of its functions are element-wise: they depend on the
// score so far and on the place (b, h, i, j) of the element. Functions that an option does not define do nothing.
//
//   Row            the values common to the scores of one query: computed once for each row
//   Entry          what the option reads for one score; load_entry reads it for any key
//   Fragment       the entries of a lane's part of a tile, loaded ahead of the product by pairs of keys or by eights
//   reshape        product -> score, before anything is added to it
//   apply          score -> score. kScaled: an earlier option has already multiplied by the scale
//   KeyFragment    the entries of a lane's part of a tile whose rows are keys, on Hopper, in each option's own format
//   slope_of       d(reshaped score) / d(product x scale) from the score, when the product is no longer available
//   collect        sums of dScore for the gradient of the option's own tensor
//   range          the keys of a tile that the option may hide from some of its queries
//   hide           -inf for the scores of a row that the option hides, if it is positional
template <class Self, ScoreFacts kTheFacts>
struct ScoreOptionDefaults {
  static constexpr ScoreFacts kFacts = kTheFacts;
  static constexpr int kEntryBytes = 0;            // bytes for each key of the entries in a Fragment
  static constexpr bool kPackedAddend = false;     // a Fragment has two addends in a register
  static constexpr bool kHidesByPosition = false;  // the option defines range and hide

  struct Row {
    TESSERA_DEVICE Row(const ProblemParams&, const ScorePlace&) {}
  };
  struct Entry {};
  template <int kRows, int kKeys>
  struct Fragment {
    template <class ScoreRow>
    TESSERA_DEVICE void load_eights(int, int, const ScoreRow&, int64) {}
    template <bool kLaneOrder, class ScoreRow>
    TESSERA_DEVICE void load_pairs(int, const ScoreRow&, int64) {}
    template <class ScoreEntry>
    TESSERA_DEVICE void entry(ScoreEntry&, int, int, bool) const {}
    TESSERA_DEVICE void transpose() {}
  };

  template <class ScoreEntry, class ScoreRow>
  TESSERA_DEVICE static void load_entry(ScoreEntry&, const ProblemParams&, const ScoreRow&, int) {}
  template <bool kScaled, bool kFused, class ScoreRow, class ScoreEntry>
  TESSERA_DEVICE static void apply(Score&, float, const Sequence&, const ScoreRow&, int, int, const ScoreEntry&) {}
  // The entries of queries 8 m + 2 c, 8 m + 2 c + 1 and keys g, g + 8 of a lane's tile, with g = lane / 4 and c = lane
  // % 4. `Place` has
  //
  //   p, sequence(), batch(), head()   the problem, the tile's sequence and head
  //   row0(), key(), lane()            the tile's first query, the warp's first key, and the lane
  //   pairs(row0)                      whether the tile's keys and queries all exist and entries may be read by pairs
  template <int kM, int kHeld>
  struct KeyFragment {
    template <class Place>
    TESSERA_DEVICE void load_bits(const Place&) {}
    template <int kFirst, class Place>
    TESSERA_DEVICE void load(const Place&) {}
    template <class Place>
    TESSERA_DEVICE void transpose(const Place&) {}
    template <class ScoreEntry>
    TESSERA_DEVICE void entry(ScoreEntry&, int, int, int) const {}
    TESSERA_DEVICE bool hides(int, int, int) const { return false; }
  };

  // For kernels that have the dScore of every score: collects the gradients for sequence b and head h. kAlone: no other
  // thread adds at the same time. Gradients of entries that all queries read are summed in `sum`, one number for each
  // key, and added at the end.
  template <class Params>
  struct Collector {
    TESSERA_DEVICE Collector(const Params&, int, int) {}
    template <bool kAlone>
    TESSERA_DEVICE void add(const Params&, float&, bool, int, int, float) const {}
    template <bool kAlone>
    TESSERA_DEVICE void add_sum(const Params&, int, float) const {}
  };
  template <class Place>
  TESSERA_DEVICE static void collect_pair(const Place&, int, int, float2, const float (&)[2], float) {}

  template <class TileRange>
  TESSERA_DEVICE static void range(TileRange&, const Sequence&) {}
  template <bool kLaneOrder, int kN, class Params>
  TESSERA_DEVICE static void hide(float (&)[kN][4], int, const Params&, const Sequence&, int, int, int) {}
};

}  // namespace tessera
