// The score step of every kernel: from products q . k to scores, and from the gradients of scores to those of products.
//
// ScoreStep<score config, coordinates> does this for all scores of a lane's fragment. Coordinates give the (b, h, i, j)
// of each element of the fragment. A kernel adds only these coordinates and the points at which the step's functions
// are called. The options themselves are in score/options.cuh.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/options.cuh"
#include "tessera/attention/score/program_rows.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// Rows are queries and columns are keys (tile/fragment.cuh), as in the forward pass. `Coordinates` has
//
//   kRows, kN        rows of a lane, and tiles of 8 keys
//   kAheadRows       rows whose entries are in registers at once: kRows, or 1
//   kLaneOrder       the keys of the tile are in lane order (tile/shared_tile.cuh)
//   kFused           add_term
//   kOneHead         all rows have the same head
//   kDiagonalRegisters   registers for what a program has of i - j, loaded ahead of the product; 0: it is not
//   p, key0          the problem, and the tile's first key
//   row(i)           a number for a lane's i-th row; past the sequence's last query it is the last query's
//   sequence(), batch(), head(row), query(row), col()
template <ScoreConfig kCfg, class Coordinates>
struct ScoreStep {
  using Options = ScoreOptions<kCfg>;
  using Row = typename Options::Row;
  static constexpr int kN = Coordinates::kN;
  // kLoads: entries may be loaded ahead of the product. kPlain: nothing at all is done between a product and its
  // exponential. kByKeys: apply_by_keys() serves.
  static constexpr bool kLoads = kCfg.entry_pairs(), kPlain = !kCfg.entries() && !kCfg.has_step(),
                        kByKeys = kCfg.program && !kCfg.entries();

  typename Options::template Fragment<Coordinates::kAheadRows, kN, Coordinates::kLaneOrder> entries;
  // Whether a lane's two rows share what a program computes, and whether what it has of i - j is loaded ahead.
  TESSERA_DEVICE static constexpr bool shares_rows() { return Coordinates::kOneHead && !Coordinates::kLaneOrder; }
  TESSERA_DEVICE static constexpr bool loads_diagonals() {
    if constexpr (kCfg.program && Coordinates::kDiagonalRegisters > 0) {
      constexpr int kBytes = 2 * (kN + 1) * static_cast<int>(sizeof(typename Row::Diagonal));
      return shares_rows() && Row::Program::kStepsAlongDiagonal && kBytes <= 4 * Coordinates::kDiagonalRegisters;
    } else {
      return false;
    }
  }
  ProgramDiagonals<loads_diagonals(), kN, Row> diagonals;

  TESSERA_DEVICE static Row row(const Coordinates& at, int row) {
    return {at.p, at.sequence(), at.batch(), at.head(row), at.query(row)};
  }

  // Loads the entries of all rows, ahead of their products. The tile must end within the sequence, and p.bias_mask_keys
  // must be at least 2.
  TESSERA_DEVICE void load(const Coordinates& at) {
    static_assert(Coordinates::kAheadRows == Coordinates::kRows);
#pragma unroll
    for (int i = 0; i < Coordinates::kRows; ++i) load_row(at, i, row(at, at.row(i)));
  }
  // Loads what a program has of i - j, likewise ahead, of any tile.
  TESSERA_DEVICE void load_diagonals(const Coordinates& at) {
    if constexpr (loads_diagonals()) diagonals.load(row(at, at.row(0)), at.key0 + at.col());
  }
  TESSERA_DEVICE void load_row(const Coordinates& at, int i, const Row& of) {
    entries.load(i % Coordinates::kAheadRows, at.p, of, at.key0);
  }

  // Turns products into scores. loaded: uses the entries of load(). full: every row sees all keys of the tile by
  // position, which must be so if entries are loaded. shows_all: a program's mask shows all of the scores.
  template <int kM>
  TESSERA_DEVICE void apply(float (&s)[kM][kN][4], const Coordinates& at, [[maybe_unused]] bool loaded, bool full,
                            [[maybe_unused]] bool shows_all = false) const {
    if constexpr (!kCfg.entries()) {
      if constexpr (kByKeys) {
        apply_by_keys(s, at, shows_all);
      } else if constexpr (kCfg.scaled()) {
        apply_rows(s, at);
      }
      if (!full) hide(s, at);
    } else if (loaded) {
      apply_rows(s, at);
    } else {
      apply_each(s, at);
    }
  }

  // The same for row i alone: apply_row() uses the loaded entries, and apply_each_row() loads the entries here, for
  // scores that may be hidden.
  TESSERA_DEVICE void apply_row(float (&s)[kN][4], const Coordinates& at, int i, const Row& of) const {
    Options::template apply<Coordinates::kFused>(s, i % 2, i % Coordinates::kAheadRows, at.p, at.sequence(), of,
                                                 at.key0, entries);
  }
  TESSERA_DEVICE static void apply_each_row(float (&s)[kN][4], const Coordinates& at, int i, const Row& of) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[n][i % 2 * 2 + e];
        const int key = at.key0 + key_at<Coordinates::kLaneOrder>(n, at.col() + e);
        x = Options::template score<Coordinates::kFused>(at.p, at.sequence(), of, key, x).value;
      }
  }

  // Turns products into scores key by key: what a program reads or computes for a key, or for a distance i - j, serves
  // a lane's two rows, and needs no registers for all keys of the tile. shows_all: the program's mask shows all of the
  // scores. A mask that does not depend on the score is applied afterwards, and costs nothing where it shows all.
  template <int kM>
  TESSERA_DEVICE void apply_by_keys(float (&s)[kM][kN][4], const Coordinates& at, bool shows_all) const {
    using Program = typename ProgramTypes<kCfg.program>::Program;
    constexpr bool kHidesAfterwards = !Program::kMaskNeedsS, kCapsLater = kHidesAfterwards && Program::kCapped;
    if constexpr (kCfg.scaled() || !kHidesAfterwards) {
      const int key = at.key0 + at.col();
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        auto rows = program_rows(at, m, key);
        rows.of[0].shows_all = rows.of[1].shows_all = kHidesAfterwards || shows_all;
        rows.of[0].caps_later = rows.of[1].caps_later = kCapsLater;
        const auto apply = [&](int n, int e, const Row& row, int half) {
          const int offset = key_at<Coordinates::kLaneOrder>(n, e);
          float& x = s[m][n][2 * half + e];
          x = Options::visible_score(at.p, at.sequence(), row, key, offset, Options::reshaped(at.p, x), {}).value;
        };
        if constexpr (loads_diagonals()) {
          static_assert(kM == 1, "those of two rows");
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              rows.at_key(key, 8 * n + e, diagonals.upper(n, e), diagonals.lower(n, e),
                          [&](const Row& row, int half) { apply(n, e, row, half); });
            }
        } else {
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              rows.at_key(key, key_at<Coordinates::kLaneOrder>(n, e), e,
                          [&](const Row& row, int half) { apply(n, e, row, half); });
            }
        }
        if constexpr (kCapsLater) cap(s[m], rows.of);
      }
    }
    if constexpr (kHidesAfterwards) apply_mask_by_keys(s, at, shows_all);
  }

  // Turns the inner values of a lane's two rows into capped scores, by the cheaper form if all of the warp's are small.
  TESSERA_DEVICE static void cap(float (&s)[kN][4], const Row (&rows)[2]) {
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(s[n][i]));
    if (__all_sync(0xffffffff, most < program::kSmallTanh)) {
      cap_all<true>(s, rows);
    } else {
      cap_all<false>(s, rows);
    }
  }
  template <bool kSmall>
  TESSERA_DEVICE static void cap_all(float (&s)[kN][4], const Row (&rows)[2]) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = ProgramOption<kCfg>::template cap<kSmall>(rows[i / 2], s[n][i]);
  }

  // Only hides what the program's mask hides.
  template <int kM>
  TESSERA_DEVICE static void apply_mask_by_keys(float (&s)[kM][kN][4], const Coordinates& at, bool shows_all) {
    if constexpr (ProgramTypes<kCfg.program>::Program::kHasMask) {
      if (!shows_all) hide_by_program(s, at);
    }
  }

  // Sets scores to -inf for keys that a program hides whose mask does not depend on the score. The mask is kept as
  // bits, so that its code is that of a few keys, not of a tile.
  template <int kM>
  TESSERA_DEVICE static void hide_by_program(float (&s)[kM][kN][4], const Coordinates& at) {
    constexpr int kStep = kM == 1 && kN % 4 == 0 ? 4 : kN % 2 == 0 ? 2 : 1;
    static_assert(2 * kN <= 32, "a bit for each key");
    using Column = typename Row::Column;
    constexpr bool kOneOrder = Coordinates::kOneHead && !Coordinates::kLaneOrder && kStep == 4;
    constexpr bool kByLanes = kOneOrder && LaneValues<Column, 1>::kFits;
    const int key0 = at.key0 + at.col();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      auto rows = program_rows(at, m, key0);
      const LaneValues<Column, kByLanes ? kN / 4 : 0> columns([&](int n) { return rows.of[0].column_of(at.key0 + n); });
      uint32 shown[2] = {};
#pragma unroll 1
      for (int first = 0; first < kN; first += kStep) {
        uint32 bits[2] = {};
        [[maybe_unused]] uint32 word = 0;
        if constexpr (kByLanes) word = columns.word(static_cast<uint32>(first) / 4);
#pragma unroll
        for (int k = 0; k < 2 * kStep; ++k) {
          [[maybe_unused]] Column column;
          if constexpr (kByLanes) {
            column = columns.of_lane(word, static_cast<uint32>(at.col() + 8 * (k / 2) + k % 2));
            rows.of[0].column = &column;
          }
          const int key = key0 + key_at<Coordinates::kLaneOrder>(first + k / 2, k % 2);
          rows.at_key(key, 0, k % 2, [&](const Row& row, int half) {
            if (row.shows(key)) bits[half] |= 1u << k;
          });
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) shown[half] |= bits[half] << (2 * first);
      }
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!(shown[i / 2] >> (2 * n + i % 2) & 1)) s[m][n][i] = -infinity();
        }
    }
  }

  // Sets scores to -inf for keys that a row does not see by position.
  template <int kM>
  TESSERA_DEVICE static void hide(float (&s)[kM][kN][4], const Coordinates& at) {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) hide_row(s[i / 2], at, i, at.row(i));
  }
  TESSERA_DEVICE static void hide_row(float (&s)[kN][4], const Coordinates& at, int i, int row) {
    static_assert(!Coordinates::kLaneOrder);
    const int query = at.query(row);
    const KeyRange keys = visible_keys<kCfg>(at.p, at.sequence(), query);
    mask_outside(s, i % 2, keys.low - at.key0 - at.col(), keys.high - at.key0 - at.col());
    hide_by_options(s, at, i, query);
  }
  // Does so only for keys that options hide by position.
  TESSERA_DEVICE static void hide_by_options(float (&s)[kN][4], const Coordinates& at, int i, int query) {
    Options::template hide<Coordinates::kLaneOrder>(s, i % 2, at.p, at.sequence(), at.batch(), query, at.key0);
  }

 private:
  TESSERA_DEVICE static auto program_rows(const Coordinates& at, int m, int key) {
    return ProgramRows<shares_rows(), Row>(row(at, at.row(2 * m)), row(at, at.row(2 * m + 1)), key);
  }
  template <int kM>
  TESSERA_DEVICE void apply_rows(float (&s)[kM][kN][4], const Coordinates& at) const {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) apply_row(s[i / 2], at, i, row(at, at.row(i)));
  }
  template <int kM>
  TESSERA_DEVICE static void apply_each(float (&s)[kM][kN][4], const Coordinates& at) {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const Row of = row(at, at.row(i));
      apply_each_row(s[i / 2], at, i, of);
      hide_by_options(s[i / 2], at, i, of.query);
    }
  }
};

// Rows are keys and columns are queries, and the products are still available when the gradients are computed, as in
// bwd_sm80. `Coordinates` has
//
//   kTransposed, kKeepsProduct   true, true
//   kKeys, kN        blocks of 8 keys, and of 8 queries
//   kLaneOrder       the keys of the tile are in lane order (tile/shared_tile.cuh)
//   kAlone           no other thread adds to the gradients of the options' tensors at the same time
//   p, sequence(), batch(), head(), query(), key()   the problem, and the warp's first query and key
template <ScoreConfig kCfg, class Coordinates>
requires(Coordinates::kTransposed&& Coordinates::kKeepsProduct) struct ScoreStep<kCfg, Coordinates> {
  using Options = ScoreOptions<kCfg>;
  using Row = typename Options::Row;
  using Collector = typename Options::template Collector<BwdParams>;
  static constexpr bool kLoads = kCfg.entry_pairs();

  typename Options::template Fragment<Coordinates::kN, Coordinates::kKeys, Coordinates::kLaneOrder> entries;

  TESSERA_DEVICE static Row row(const Coordinates& at, int query) {
    return {at.p, at.sequence(), at.batch(), at.head(), query};
  }
  // load() loads the entries of a tile whose keys every query sees, ahead of the products; transpose(), before they are
  // used, moves each entry to the lane of its score.
  TESSERA_DEVICE void load(const Coordinates& at) {
#pragma unroll
    for (int n = 0; n < Coordinates::kN; ++n) {
      entries.load(n, at.p, row(at, at.query() + n * 8 + lane_row()), at.key());
    }
  }
  TESSERA_DEVICE void transpose() { entries.transpose(); }

  // The lane's first key, and the offset of its key in the k-th block from that.
  TESSERA_DEVICE static int first_key(const Coordinates& at) {
    return at.key() + key_at<Coordinates::kLaneOrder>(0, lane_row());
  }
  TESSERA_DEVICE static constexpr int key_offset(int k) { return key_at<Coordinates::kLaneOrder>(k, 0); }

  // Turns the product of query 8 n + 2 c + e and the k-th block's key into the score. kFull: the query sees all keys of
  // the tile, and its entries are those of load(), transposed; or the caller sets hidden elements to 0.
  template <bool kFull>
  TESSERA_DEVICE Score apply(const Coordinates& at, const Row& row, int key0, int n, int k, int e,
                             float product) const {
    if constexpr (kFull) {
      return Options::visible_score(at.p, at.sequence(), row, key0, key_offset(k), Options::reshaped(at.p, product),
                                    entries.of(n, k, e != 0));
    } else {
      return Options::score(at.p, at.sequence(), row, key0 + key_offset(k), product);
    }
  }
  // Turns dScore into the gradient of the score before the program, which dBias is a sum of. `sink` receives the
  // gradients of the program's tensors.
  template <class Sink>
  TESSERA_DEVICE static float program_gradient([[maybe_unused]] const Score& score, [[maybe_unused]] const Row& row,
                                               [[maybe_unused]] int key, [[maybe_unused]] bool visible, float d,
                                               [[maybe_unused]] Sink& sink) {
    if constexpr (kCfg.program) d = visible ? ProgramOption<kCfg>::gradient(score, row, key, d, sink) : 0.0f;
    return d;
  }
  // Turns that into d(product x scale).
  TESSERA_DEVICE static float gradient([[maybe_unused]] const Score& score, [[maybe_unused]] bool visible, float d) {
    if constexpr (kCfg.facts().reshapes) return visible ? d * score.slope : 0.0f;
    return d;
  }

  // Adds the Collector's sums over the queries. kParts warps have a part of the queries each; for each key they add one
  // after another.
  template <int kParts, int kM>
  TESSERA_DEVICE static void collect_sums(const Coordinates& at, int part, const float (&sums)[kM][2]) {
    const Collector collector(at.p, at.batch(), at.head());
#pragma unroll
    for (int adder = 0; adder < kParts; ++adder) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float sum = row_sum(sums[m][half]);
          const int key = at.key() + key_at<Coordinates::kLaneOrder>(m * 2 + half, lane_row());
          if (part != adder || lane_col() != 0 || key >= at.sequence().sk) continue;
          collector.template add_sum<Coordinates::kAlone>(at.p, key, sum);
        }
      if constexpr (kParts > 1 && Coordinates::kAlone) __syncthreads();
    }
  }
};

}  // namespace tessera
