// The score step of Hopper's backward kernels: rows are keys, and dP takes the registers of the product.
#pragma once

#include "tessera/attention/score/head_factor.cuh"
#include "tessera/attention/score/step.cuh"

namespace tessera {

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
//   kDividesByFactor, kDtype   such a gradient is made of dQ, and dS of the type includes HeadFactor::in_ds alone
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
  // Whether a program's factor of the head is part of unit(): its only change, and without a mask, since a score that
  // it hides could become +inf.
  static constexpr bool kFactorInUnit = is_affine_program<kCfg>() && scales_by_head<kCfg>() && !kMakesSlopes;
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

  // The units of the scores that apply() makes.
  TESSERA_DEVICE static ScoreUnit unit(const Coordinates& at) {
    if constexpr (kFactorInUnit) {
      const typename Options::Row row(at.p, at.sequence(), at.batch(), at.head(), at.row0());
      const float natural = ProgramOption<kCfg>::head_factor(row) * at.p.scale;
      return {natural, natural * kLog2e};
    } else {
      return score_unit<kCfg>(at.p);
    }
  }

  // Turns products into scores, as if all were visible by position. shows_all: a program's mask shows all of them.
  TESSERA_DEVICE void apply(const Coordinates& at, float (&s)[kM][4], [[maybe_unused]] bool shows_all = false) {
    if constexpr (kFactorInUnit) {
      return;
    } else if constexpr (kCfg.program) {
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
    if constexpr (Coordinates::kDividesByFactor) {
      const typename Options::Row row(at.p, at.sequence(), at.batch(), at.head(), at.row0());
      return HeadFactor::of<Coordinates::kDtype>(ProgramOption<kCfg>::head_factor(row));
    } else if constexpr (kCfg.program) {
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
    if constexpr (!Program::kPassesGradient && !Coordinates::kDividesByFactor) {
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

}  // namespace tessera
