// The score step of every kernel: from products q . k to scores, and from the gradients of scores to those of products.
//
// ScoreStep<score config, coordinates> does this for all scores of a lane's fragment. Coordinates give the (b, h, i, j)
// of each element of the fragment. A kernel adds only these coordinates and the points at which the step's functions
// are called. The options themselves are in score/options.cuh.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/options.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// Rows are queries and columns are keys (tile/fragment.cuh), as in the forward pass. `Coordinates` has
//
//   kRows, kN        rows of a lane, and tiles of 8 keys
//   kAheadRows       rows whose entries are in registers at once: kRows, or 1
//   kLaneOrder       the keys of the tile are in lane order (tile/shared_tile.cuh)
//   kFused           add_term
//   kOneHead         all rows have the same head
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
  TESSERA_DEVICE static void apply_by_keys(float (&s)[kM][kN][4], const Coordinates& at, bool shows_all) {
    using Program = typename ProgramTypes<kCfg.program>::Program;
    constexpr bool kHidesAfterwards = !Program::kMaskNeedsS;
    if constexpr (kCfg.scaled() || !kHidesAfterwards) {
      const int key = at.key0 + at.col();
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        auto rows = program_rows(at, m, key);
        rows.of[0].shows_all = rows.of[1].shows_all = kHidesAfterwards || shows_all;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int offset = key_at<Coordinates::kLaneOrder>(n, e);
            rows.at_key(key, offset, e, [&](const Row& row, int half) {
              float& x = s[m][n][2 * half + e];
              x = Options::visible_score(at.p, at.sequence(), row, key, offset, Options::reshaped(at.p, x), {}).value;
            });
          }
      }
    }
    if constexpr (kHidesAfterwards) apply_mask_by_keys(s, at, shows_all);
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
    constexpr bool kShares = Coordinates::kOneHead && !Coordinates::kLaneOrder;
    return ProgramRows<kShares, Row>(row(at, at.row(2 * m)), row(at, at.row(2 * m + 1)), key);
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

// Rows are keys and columns are queries, and the products are no longer available when the gradients are computed, as
// in Hopper's backward kernels: a lane has the elements that ScoreOptionDefaults::KeyFragment describes. `Coordinates`
// is its Place, and has
//
//   kTransposed, kKeepsProduct   true, false
//   kM               sets of eight queries
//   kAhead           added entries have registers while the product runs; otherwise those of half of the queries are
//                    loaded after it, and those of the other half later
//   kCollects        the gradients of the options' tensors are needed, times kCollectUnit
//   kSums            the gradient of a program's tensor is needed
template <ScoreConfig kCfg, class Coordinates>
requires(Coordinates::kTransposed && !Coordinates::kKeepsProduct) struct ScoreStep<kCfg, Coordinates> {
  using Options = ScoreOptions<kCfg>;
  static constexpr int kM = Coordinates::kM;
  static constexpr bool kAhead = Coordinates::kAhead, kAddsEntries = Options::kAddsEntries;
  static constexpr int kHeld = !kAddsEntries ? 1 : kAhead ? kM : kM / 2;
  // Of a program: its score is affine in s, it has no mask, and no gradient of a tensor is needed, so that it costs
  // little more than ALiBi.
  static constexpr bool kIsAffine = is_affine_program<kCfg>() && !Coordinates::kSums;
  // Whether hidden scores are recognised by P = 0 instead of by position: a mask requires it, and softcap leaves no
  // registers for positions.
  static constexpr bool kHiddenByWeight = kCfg.facts().hides || kCfg.facts().reshapes || (kCfg.program && !kIsAffine);
  // Whether scores are made with their slopes, by SlopedScores: d(score) / d(product x scale) or, with kSums, by the
  // element of a tensor that all pairs of a head share.
  static constexpr bool kMakesSlopes = slope_needs_score<kCfg>() || Coordinates::kSums;
  // Whether gradient() does anything.
  static constexpr bool kHasGradient = kHiddenByWeight || changes_gradient<kCfg>();

  typename Options::template KeyFragment<kM, kHeld> entries;

  // Called while the product runs.
  TESSERA_DEVICE void load(const Coordinates& at) {
    if constexpr (kCfg.entries()) {
      entries.load_bits(at);
      if constexpr (kAhead) entries.template load<0>(at);
    }
  }
  // Whether a mask hides the score.
  TESSERA_DEVICE bool hides(int m, int half, int e) const { return entries.hides(m, half, e); }

  // Turns products into scores, as if all were visible by position. shows_all: a program's mask shows all of them.
  TESSERA_DEVICE void apply(const Coordinates& at, float (&s)[kM][4], [[maybe_unused]] bool shows_all = false) {
    if constexpr (kCfg.program) {
      apply_program(at, s, shows_all);
    } else if constexpr (kCfg.facts().reshapes) {
      const bool small = Options::small_inputs(at.p, s, 0) && Options::small_inputs(at.p, s, 1);
      if (__all_sync(0xffffffff, small)) {
        apply_rows<true, 0, kM>(at, s);
      } else {
        apply_rows<false, 0, kM>(at, s);
      }
    } else if constexpr (!kAddsEntries) {
      apply_rows<false, 0, kM>(at, s);
    } else if constexpr (kAhead) {
      entries.transpose(at);
      apply_rows<false, 0, kM>(at, s);
    } else {
      apply_half<0>(at, s);
      reload_memory();  // the loads of one half stay after the uses of the other
      apply_half<kHeld>(at, s);
    }
  }

  // Turns ds, dScore of queries 8 m + 2 c and the next and key `half`, whose weights are `weights`, into d(product x
  // scale). Hidden elements become 0, recognised by their weight. A reshaped score is log P + LSE, and `lse` returns
  // the LSE in log2 units.
  template <class Head, class Lse>
  TESSERA_DEVICE static void gradient(const Coordinates& at, [[maybe_unused]] const Head& head, int m, int half,
                                      float2 weights, Lse&& lse, float (&ds)[2]) {
    if constexpr (kHiddenByWeight) {
      if (weights.x == 0.0f) ds[0] = 0.0f;
      if (weights.y == 0.0f) ds[1] = 0.0f;
    }
    if constexpr (Coordinates::kCollects) {
      const int query = at.row0() + m * 8 + at.lane() % 4 * 2, key = at.key() + at.lane() / 4 + half * 8;
      Options::collect_pair(at, query, key, weights, ds, Coordinates::kCollectUnit);
    }
    if constexpr (kCfg.facts().reshapes) {
      const float2 pair = lse(m);
      ds[0] *= Options::slope_of(at.p, ptx::lg2_approx_ftz(fabsf(weights.x)) + pair.x);
      ds[1] *= Options::slope_of(at.p, ptx::lg2_approx_ftz(fabsf(weights.y)) + pair.y);
    }
    if constexpr (kCfg.program) program_gradient(at, head, m, half, weights, ds);
  }
  // `head` of the gradients of a tile: what a program computes of it.
  struct NoProgram {};
  TESSERA_DEVICE static auto gradient_head([[maybe_unused]] const Coordinates& at) {
    if constexpr (kCfg.program) {
      return ProgramOption<kCfg>::gradient_head(
          typename Options::Row(at.p, at.sequence(), at.batch(), at.head(), at.row0()));
    } else {
      return NoProgram{};
    }
  }

  // Makes the scores of a program and their slopes, as if all were visible.
  template <class Types = ProgramTypes<kCfg.program>>
  struct SlopedScores {
    using Program = typename Types::Program;
    static_assert(!kCfg.entries() && !kCfg.facts().reshapes && !kCfg.alibi, "of the product alone");

    const Coordinates& at;
    const int query0, key;  // the lane's first
    const typename Options::Row first;
    const typename Program::SlopeHead head;
    const typename Program::SlopeColumn columns[2];
    // The distance of a query to the second key is that of the query eight before to the first.
    typename Program::SlopeDiagonal second[2];

    TESSERA_DEVICE explicit SlopedScores(const Coordinates& at)
        : at(at),
          query0(at.row0() + at.lane() % 4 * 2),
          key(at.key() + at.lane() / 4),
          first(row_at(query0)),
          head(Program::slope_head(first.program, first.place)),
          columns{Program::slope_column(first.program, head, first.at(key)),
                  Program::slope_column(first.program, head, first.at(key + 8))},
          second{diagonal_of(first, key + 8), diagonal_of(row_at(query0 + 1), key + 8)} {}

    // Turns the products of queries 8 m + 2 c and the next into scores. Every m comes, in order.
    TESSERA_DEVICE void make(int m, float (&s)[4], float (&slopes)[4]) {
      const float unit = Options::product_unit(at.p);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const typename Options::Row row = row_at(query0 + m * 8 + e);
        const auto values = Program::slope_row(row.program, head, row.place);
        const typename Program::SlopeDiagonal diagonals[2] = {diagonal_of(row, key), second[e]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[2 * half + e];
          x = Program::score_and_slope(row.program, head, values, columns[half], diagonals[half],
                                       row.at(key + half * 8), x * unit, slopes[2 * half + e]);
        }
        second[e] = diagonals[0];
      }
    }
    // A bit 4 m + 2 half + e for each score: whether its query exists and a mask that does not depend on the score
    // shows its key. shows_all: the mask shows all of them.
    TESSERA_DEVICE uint32 shown([[maybe_unused]] bool shows_all) const {
      static_assert(kM == 8);
      uint32 bits = ~0u;
      if constexpr (Program::kHasMask && !Program::kMaskNeedsS) {
        if (!shows_all) {
          const typename Program::Column of_keys[2] = {first.column_of(key), first.column_of(key + 8)};
          const auto shows = [&](int query, int half) {
            typename Options::Row row = row_at(query);
            row.share_head(first);
            row.column = &of_keys[half];
            return row.shows(key + half * 8);
          };
          bits = bits_of<kM>(shows, query0);
        }
      }
      const int end = at.sequence().sq;
      if (at.row0() + 8 * kM > end) bits &= bits_of<kM>([end](int query, int) { return query < end; }, query0);
      return bits;
    }

   private:
    // Past the last query, too: no load reads outside of its tensor, and shown() hides what comes of it.
    TESSERA_DEVICE typename Options::Row row_at(int query) const {
      return {at.p, at.sequence(), at.batch(), at.head(), query};
    }
    TESSERA_DEVICE typename Program::SlopeDiagonal diagonal_of(const typename Options::Row& row, int of_key) const {
      return Program::slope_diagonal(row.program, head, row.at(of_key));
    }
  };

 private:
  // A program sees each score's own query and key. Those of queries past the last are hidden afterwards, and so is what
  // a mask hides that does not depend on the score: it costs nothing where it shows all.
  TESSERA_DEVICE static void apply_program(const Coordinates& at, float (&s)[kM][4], bool shows_all) {
    static_assert(!kCfg.entries() && !kCfg.facts().reshapes, "the program's score is of the product alone");
    using Program = typename ProgramTypes<kCfg.program>::Program;
    constexpr bool kHidesAfterwards = !Program::kMaskNeedsS;
    const int query0 = at.row0() + at.lane() % 4 * 2, key = at.key() + at.lane() / 4, end = at.sequence().sq;
    const typename Options::Row first(at.p, at.sequence(), at.batch(), at.head(), query0);
    const typename Program::Column columns[2] = {first.column_of(key), first.column_of(key, 8)};
    const auto row_of = [&](int offset) {
      typename Options::Row row = first;
      row.query += offset;
      row.move_by(offset);
      return row;
    };
    if constexpr (kCfg.scaled() || !kHidesAfterwards) {
      // The distance of a query to the second key is that of the query eight before to the first.
      typename Program::Diagonal second[2] = {row_of(0).diagonal_of(key, 8), row_of(1).diagonal_of(key, 8)};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        // The loads of one half stay after the uses of the other, to save registers: the assembler moves none across.
        if (m == kM / 2) __syncwarp();
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          typename Options::Row row = row_of(m * 8 + e);
          row.shows_all = kHidesAfterwards || shows_all;
          const typename Program::Diagonal diagonals[2] = {row.diagonal_of(key), second[e]};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            row.column = &columns[half], row.diagonal = &diagonals[half];
            float& x = s[m][2 * half + e];
            x = Options::visible_score(at.p, at.sequence(), row, key, half * 8, Options::reshaped(at.p, x), {}).value;
          }
          second[e] = diagonals[0];
        }
      }
    }
    if constexpr (kHidesAfterwards && Program::kHasMask) {
      if (!shows_all) {
        using Values = typename Program::Row;
        constexpr bool kByLanes = LaneValues<Values, 1>::kFits && kM % 4 == 0;
        const LaneValues<Values, kByLanes ? kM / 4 : 0> values([&](int n) {
          typename Options::Row row(at.p, at.sequence(), at.batch(), at.head(), min(at.row0() + n, end - 1));
          row.share_head(first);
          return row.values;
        });
        const auto shows = [&](int query, int half) {
          typename Options::Row row = row_of(query - query0);
          row.column = &columns[half];
          if constexpr (kByLanes) {
            const uint32 n = static_cast<uint32>(query - at.row0());
            row.values = values.of_lane(values.word(n / 32), n % 32);
          }
          return row.shows(key + half * 8);
        };
        hide(s, shows, query0);
      }
    }
    if (at.row0() + 8 * kM > end)
      hide(
          s, [end](int query, int) { return query < end; }, query0);
  }
  // Sets scores to -inf for pairs that `shows` does not show. They are kept as bits, so that its code is that of a few.
  template <class Shows>
  TESSERA_DEVICE static void hide(float (&s)[kM][4], Shows&& shows, int query0) {
    constexpr int kGroup = kM <= 8 ? kM : kM / 2;
    static_assert(kM % kGroup == 0 && kGroup <= 8, "a bit for each score");
#pragma unroll
    for (int group = 0; group < kM; group += kGroup) {
      const uint32 shown = bits_of<kGroup>(shows, query0 + group * 8);
#pragma unroll
      for (int m = 0; m < kGroup; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!(shown >> (4 * m + i) & 1)) s[group + m][i] = -infinity();
        }
    }
  }
  template <int kCount, class Shows>
  TESSERA_DEVICE static uint32 bits_of(Shows&& shows, int query0) {
    uint32 shown = 0;
#pragma unroll 1
    for (int m = 0; m < kCount; ++m) {
      uint32 bits = 0;
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (shows(query0 + m * 8 + e, half)) bits |= 1u << (2 * half + e);
        }
      shown |= bits << (4 * m);
    }
    return shown;
  }
  // Of a program whose slope does not need the score.
  template <class Head>
  TESSERA_DEVICE static void program_gradient(const Coordinates& at, const Head& head, int m, int half, float2 weights,
                                              float (&ds)[2]) {
    using Program = typename ProgramTypes<kCfg.program>::Program;
    static_assert(!slope_needs_score<kCfg>(), "the products are no longer available");
    if constexpr (!Program::kPassesGradient) {
      const int query = at.row0() + m * 8 + at.lane() % 4 * 2, key = at.key() + at.lane() / 4 + half * 8;
      NoProgramGradients none;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((e ? weights.y : weights.x) == 0.0f) continue;
        const typename Options::Row row(at.p, at.sequence(), at.batch(), at.head(), query + e);
        ds[e] = ProgramOption<kCfg>::gradient(head, Score{}, row, key, ds[e], none);
      }
    }
  }
  template <int kFirst>
  TESSERA_DEVICE void apply_half(const Coordinates& at, float (&s)[kM][4]) {
    entries.template load<kFirst>(at);
    entries.transpose(at);
    apply_rows<false, kFirst, kHeld>(at, s);
  }
  // For the queries from 8 kFirst on. Positions matter only as query - key: a query n later is treated as a key n
  // earlier.
  template <bool kSmall, int kFirst, int kRows>
  TESSERA_DEVICE void apply_rows(const Coordinates& at, float (&s)[kM][4]) {
    const typename Options::Row row(at.p, at.sequence(), at.batch(), at.head(), at.row0() + at.lane() % 4 * 2);
    const int key = at.key() + at.lane() / 4;
#pragma unroll
    for (int m = kFirst; m < kFirst + kRows; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[m][i];
        typename Options::Entry entry;
        if constexpr (kAddsEntries) entry = entries.of(m - kFirst, i / 2, i % 2);
        const Score r = Options::template reshaped<kSmall>(at.p, x);
        x = Options::visible_score(at.p, at.sequence(), row, key, i / 2 * 8 - m * 8 - i % 2, r, entry).value;
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
