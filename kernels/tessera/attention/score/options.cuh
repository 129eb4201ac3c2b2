// All options of a score together: ScoreOptions<score config> has those for which a kernel is compiled, and combines
// each of their functions. A kernel calls them through ScoreStep (score/step.cuh), which knows the coordinates of its
// scores.
//
//   scale, softcap, bias, ALiBi, score program, masks     in tessera.h's order; an option's file defines its meaning
#pragma once

#include "tessera/attention/score/element.cuh"
#include "tessera/attention/sequence.cuh"

#define TESSERA_SCORE_FILES_GPU 1
#include "tessera/attention/score/list.hpp"

namespace tessera {

// ---- the options of a kernel ----

template <class... Options>
struct OptionList;

// Appends those options of the second list that are given to the first list.
template <class... Kept>
TESSERA_DEVICE constexpr auto given_options(OptionList<Kept...>*, OptionList<>*) {
  return static_cast<OptionList<Kept...>*>(nullptr);
}
template <class... Kept, class First, class... Rest>
TESSERA_DEVICE constexpr auto given_options(OptionList<Kept...>*, OptionList<First, Rest...>*) {
  OptionList<Rest...>* const rest = nullptr;
  if constexpr (First::kGiven) {
    return given_options(static_cast<OptionList<Kept..., First>*>(nullptr), rest);
  } else {
    return given_options(static_cast<OptionList<Kept...>*>(nullptr), rest);
  }
}
template <class T>
struct PointedTo;
template <class T>
struct PointedTo<T*> {
  using Type = T;
};

// The end of the list.
struct NoOption {
  static constexpr bool kGiven = false;
};

// In the order in which they change a score.
#define TESSERA_CLASS(Class, ...) Class<kCfg>,
template <ScoreConfig kCfg>
using GivenOptions = typename PointedTo<decltype(given_options(
    static_cast<OptionList<>*>(nullptr),
    static_cast<OptionList<TESSERA_SCORE_OPTIONS(TESSERA_CLASS, TESSERA_CLASS, TESSERA_CLASS) NoOption>*>(
        nullptr)))>::Type;
#undef TESSERA_CLASS

// The values common to the scores of one query, in addition to those of the options.
struct PositionRow {
  int query;
  KeyRange keys;  // visible by position
};

template <ScoreConfig kCfg, class List = GivenOptions<kCfg>>
struct ScoreOptions;

template <ScoreConfig kCfg, class... Options>
struct ScoreOptions<kCfg, OptionList<Options...>> {
  // Bytes for each key of the entries in a Fragment.
  static constexpr int kEntryBytes = (Options::kEntryBytes + ... + 0);
  static constexpr bool kPackedAddend = (Options::kPackedAddend || ... || false);
  static constexpr bool kHidesByPosition = (Options::kHidesByPosition || ... || false);
  // Whether reshaped() multiplies by the scale.
  static constexpr bool kScalesFirst = kCfg.scale_first && !kCfg.adds() && !kCfg.facts().reshapes;
  static constexpr bool kAddsEntries = ((Options::kFacts.adds && Options::kFacts.entries) || ... || false);

  struct Row : PositionRow, Options::Row... {
    TESSERA_DEVICE Row(const ProblemParams& p, const Sequence& s, [[maybe_unused]] int batch, [[maybe_unused]] int head,
                       int query)
        : PositionRow{query, visible_keys<kCfg>(p, s, query)},
          Options::Row(p, ScorePlace{batch, head, query, s.sq, s.sk})... {}
  };

  struct Entry : ScoreEntryBase, Options::Entry... {};
  TESSERA_DEVICE static Entry load_entry([[maybe_unused]] const ProblemParams& p, [[maybe_unused]] const Row& row,
                                         [[maybe_unused]] int key) {
    Entry entry;
    (Options::load_entry(entry, p, row, key), ...);
    return entry;
  }

  // For queries first ... last: the keys that some of them see, and the keys that all of them see.
  TESSERA_DEVICE static TileRange range(const ProblemParams& p, const Sequence& s, int first, int last) {
    TileRange range = visible_keys<kCfg>(p, s, first, last);
    (Options::range(range, s), ...);
    return range;
  }

  // ---- units ----

  // The factor of a product's score if no addition follows whose instruction could multiply too.
  TESSERA_DEVICE static float product_unit(const ProblemParams& p) {
    float unit = p.scale;
    (reshaped_unit<Options>(unit, p), ...);
    return unit;
  }
  // The factor that a score is still to be multiplied by. If nothing is added to it, this is the whole scale, or the
  // factor of a reshaped product; otherwise it is only log2(e), so that a finite bias gives a finite score.
  TESSERA_DEVICE static ScoreUnit unit(const ProblemParams& p) {
    if constexpr (kCfg.adds()) return {1.0f, kLog2e};
    if constexpr (kCfg.facts().reshapes) return {product_unit(p), product_unit(p) * kLog2e};
    if constexpr (kCfg.scale_first) return {1.0f, kLog2e};
    return {p.scale, p.scale_log2};
  }

  // ---- one score ----

  // Whether all of a lane's products of one row are small enough to be reshaped by the simpler formula.
  template <int kN>
  TESSERA_DEVICE static bool small_inputs([[maybe_unused]] const ProblemParams& p,
                                          [[maybe_unused]] const float (&products)[kN][4], [[maybe_unused]] int half) {
    bool small = true;
    (all_small<Options>(small, p, products, half), ...);
    return small;
  }

  // Reshapes a product, and scales it unless a following addition can do so in the same instruction.
  template <bool kSmall = false>
  TESSERA_DEVICE static Score reshaped(const ProblemParams& p, float product) {
    Score r{kScalesFirst ? product * p.scale : product, 1.0f};
    (reshape<Options, kSmall>(r, p), ...);
    return r;
  }

  // The score of key + offset, which the query sees by position. Scores with the same `key` and offsets known to the
  // compiler have instructions in common.
  template <bool kFused = true>
  TESSERA_DEVICE static Score visible_score(const ProblemParams& p, const Sequence& s, const Row& row, int key,
                                            int offset, Score r, const Entry& entry) {
    if constexpr (sizeof...(Options) > 0) {
      apply_all<kScalesFirst, kFused, Options...>(r, product_unit(p), s, row, key, offset, entry);
    }
    if constexpr (kCfg.facts().hides) {
      if (!entry.visible) r.value = -infinity();
    }
    return r;
  }

  // The score of any key: its entries are loaded here, and it may be hidden.
  template <bool kFused = true>
  TESSERA_DEVICE static Score score(const ProblemParams& p, const Sequence& s, const Row& row, int key, float product) {
    const Score r = reshaped(p, product);
    const bool visible = key >= row.keys.low && key <= row.keys.high;
    if (!visible) return {-infinity(), r.slope};
    return visible_score<kFused>(p, s, row, key, 0, r, load_entry(p, row, key));
  }

  // Sets a lane's scores of one row to -inf if an option hides them by position.
  template <bool kLaneOrder, int kN, class Params>
  TESSERA_DEVICE static void hide([[maybe_unused]] float (&s)[kN][4], [[maybe_unused]] int half,
                                  [[maybe_unused]] const Params& p, [[maybe_unused]] const Sequence& sequence,
                                  [[maybe_unused]] int batch, [[maybe_unused]] int query, [[maybe_unused]] int key0) {
    (Options::template hide<kLaneOrder>(s, half, p, sequence, batch, query, key0), ...);
  }

  // ---- entries ahead of the product ----

  // A lane's part of kRows x kKeys blocks of 8 queries and 8 keys: of each block, query lane / 4 and keys 2 (lane % 4)
  // and the next; in lane order, eight neighbours of four blocks (SharedTile). All keys of the tile exist, so there is
  // no bound to test and no branch: all loads are issued at once, long before the scores that they change.
  template <int kRows, int kKeys, bool kLaneOrder>
  struct Fragment : Options::template Fragment<kRows, kKeys>... {
    static_assert(kKeys % (kLaneOrder ? 4 : 2) == 0);

    // Loads the entries of one query, from the tile's first key, `key`, on. Requires p.bias_mask_keys >= 2.
    TESSERA_DEVICE void load([[maybe_unused]] int row, const ProblemParams& p, [[maybe_unused]] const Row& from,
                             int64 key) {
      if (kLaneOrder && p.bias_mask_keys == 8) {
        key += lane_col() * 4;
#pragma unroll
        for (int k = 0; k < kKeys; k += 4, key += 32) {
          (Options::template Fragment<kRows, kKeys>::load_eights(row, k, from, key), ...);
        }
        return;
      }
      key += key_at<kLaneOrder>(0, lane_col());
      (Options::template Fragment<kRows, kKeys>::template load_pairs<kLaneOrder>(row, from, key), ...);
    }
    // The entry of a pair's first key, or of its second.
    TESSERA_DEVICE Entry of([[maybe_unused]] int row, [[maybe_unused]] int k, [[maybe_unused]] bool second) const {
      Entry entry;
      (Options::template Fragment<kRows, kKeys>::entry(entry, row, k, second), ...);
      return entry;
    }
    // Transposes the blocks: a lane then has key lane / 4 and queries 2 (lane % 4) and the next.
    TESSERA_DEVICE void transpose() { (Options::template Fragment<kRows, kKeys>::transpose(), ...); }
  };

  // Turns the products of a lane's query with a tile's keys, elements 2 half and 2 half + 1, into scores, with the
  // entries of row `row` of the fragment. The query sees all of the keys, or the caller applies the mask afterwards.
  template <bool kFused, int kRows, int kKeys, bool kLaneOrder>
  TESSERA_DEVICE static void apply(float (&s)[kKeys][4], int half, int row, const ProblemParams& p,
                                   const Sequence& sequence, const Row& score_row, int key,
                                   const Fragment<kRows, kKeys, kLaneOrder>& entries) {
    if (kCfg.facts().reshapes && __all_sync(0xffffffff, small_inputs(p, s, half))) {
      apply_row<true, kFused>(s, half, row, p, sequence, score_row, key, entries);
    } else {
      apply_row<false, kFused>(s, half, row, p, sequence, score_row, key, entries);
    }
  }

  // ---- tiles whose rows are keys, on Hopper ----

  template <int kM, int kHeld>
  struct KeyFragment : Options::template KeyFragment<kM, kHeld>... {
    // load_bits() loads the entries that are kept as bits; load() loads the other entries of queries 8 kFirst ... 8
    // (kFirst + kHeld) - 1.
    template <class Place>
    TESSERA_DEVICE void load_bits([[maybe_unused]] const Place& at) {
      (Options::template KeyFragment<kM, kHeld>::load_bits(at), ...);
    }
    template <int kFirst, class Place>
    TESSERA_DEVICE void load([[maybe_unused]] const Place& at) {
      (Options::template KeyFragment<kM, kHeld>::template load<kFirst>(at), ...);
    }
    // Turns entries loaded by pairs of keys into pairs of queries.
    template <class Place>
    TESSERA_DEVICE void transpose([[maybe_unused]] const Place& at) {
      (Options::template KeyFragment<kM, kHeld>::transpose(at), ...);
    }
    TESSERA_DEVICE Entry of([[maybe_unused]] int m, [[maybe_unused]] int half, [[maybe_unused]] int second) const {
      Entry entry;
      (Options::template KeyFragment<kM, kHeld>::entry(entry, m, half, second), ...);
      return entry;
    }
    TESSERA_DEVICE bool hides([[maybe_unused]] int m, [[maybe_unused]] int half, [[maybe_unused]] int e) const {
      return (Options::template KeyFragment<kM, kHeld>::hides(m, half, e) || ... || false);
    }
  };

  // ---- gradients ----

  // d(score) / d(product x scale) from a score to which nothing was added, when the product is no longer available.
  TESSERA_DEVICE static float slope_of([[maybe_unused]] const ProblemParams& p, [[maybe_unused]] float score_log2) {
    float slope = 1.0f;
    (reshaped_slope<Options>(slope, p, score_log2), ...);
    return slope;
  }

  // Collects dScore for the gradients of the options' own tensors: ScoreOptionDefaults.
  template <class Params>
  struct Collector : Options::template Collector<Params>... {
    TESSERA_DEVICE Collector(const Params& p, int batch, int head)
        : Options::template Collector<Params>(p, batch, head)... {}
    template <bool kAlone>
    TESSERA_DEVICE void add(const Params& p, float& sum, bool visible, int query, int key, float d) const {
      (Options::template Collector<Params>::template add<kAlone>(p, sum, visible, query, key, d), ...);
    }
    template <bool kAlone>
    TESSERA_DEVICE void add_sum(const Params& p, int key, float sum) const {
      (Options::template Collector<Params>::template add_sum<kAlone>(p, key, sum), ...);
    }
  };
  template <class Place>
  TESSERA_DEVICE static void collect_pair(const Place& at, int query, int key, float2 weights, const float (&ds)[2],
                                          float unit) {
    (Options::collect_pair(at, query, key, weights, ds, unit), ...);
  }

 private:
  template <class Option>
  TESSERA_DEVICE static void reshaped_unit(float& unit, const ProblemParams& p) {
    if constexpr (Option::kFacts.reshapes) unit = Option::unit(p);
  }
  template <class Option>
  TESSERA_DEVICE static void reshaped_slope(float& slope, const ProblemParams& p, float score_log2) {
    if constexpr (Option::kFacts.reshapes) slope = Option::slope_of(p, score_log2);
  }
  template <class Option, int kN>
  TESSERA_DEVICE static void all_small(bool& small, const ProblemParams& p, const float (&products)[kN][4], int half) {
    if constexpr (Option::kFacts.reshapes) small = small && Option::small_inputs(p, products, half);
  }
  template <class Option, bool kSmall>
  TESSERA_DEVICE static void reshape(Score& r, const ProblemParams& p) {
    if constexpr (Option::kFacts.reshapes) r = Option::template reshape<kSmall>(p, r.value);
  }
  template <bool kScaled, bool kFused, class First, class... Rest>
  TESSERA_DEVICE static void apply_all(Score& r, float unit, const Sequence& s, const Row& row, int key, int offset,
                                       const Entry& entry) {
    First::template apply<kScaled, kFused>(r, unit, s, row, key, offset, entry);
    if constexpr (sizeof...(Rest) > 0) {
      apply_all<kScaled || First::kFacts.adds, kFused, Rest...>(r, unit, s, row, key, offset, entry);
    }
  }
  template <bool kSmall, bool kFused, int kRows, int kKeys, bool kLaneOrder>
  TESSERA_DEVICE static void apply_row(float (&s)[kKeys][4], int half, int row, const ProblemParams& p,
                                       const Sequence& sequence, const Row& score_row, int key,
                                       const Fragment<kRows, kKeys, kLaneOrder>& entries) {
    key += key_at<kLaneOrder>(0, lane_col());
#pragma unroll
    for (int k = 0; k < kKeys; ++k)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[k][2 * half + e];
        const Score r = reshaped<kSmall>(p, x);
        x = visible_score<kFused>(p, sequence, score_row, key, key_at<kLaneOrder>(k, e), r, entries.of(row, k, e != 0))
                .value;
      }
  }
};

// Whether a tile may be exponentiated against the max of earlier tiles (attention/softmax): a program's text decides
// whether it may raise a row's scores from tile to tile.
template <ScoreConfig kCfg>
TESSERA_DEVICE constexpr bool keeps_stale_max() {
  if constexpr (kCfg.program) {
    ScoreConfig others = kCfg;
    others.program = false;
    return others.stale_max() && ProgramTypes<kCfg.program>::Program::kSteady;
  } else {
    return kCfg.stale_max();
  }
}

// Whether the slope of a program's score depends on the score, so that it is made with it.
template <ScoreConfig kCfg>
TESSERA_DEVICE constexpr bool slope_needs_score() {
  if constexpr (kCfg.program) {
    return ProgramTypes<kCfg.program>::Program::kSlopeNeedsS;
  } else {
    return false;
  }
}
// Whether a program's score is affine in the one before it (core/score/affine.hpp) and it has no mask.
template <ScoreConfig kCfg>
TESSERA_DEVICE constexpr bool is_affine_program() {
  if constexpr (kCfg.program) {
    using Program = typename ProgramTypes<kCfg.program>::Program;
    return Program::kAffine && !Program::kHasMask;
  } else {
    return false;
  }
}
// Whether a program multiplies the product by a factor of the head and nothing else changes it, so that the factor may
// be included in the scale.
template <ScoreConfig kCfg>
TESSERA_DEVICE constexpr bool scales_by_head() {
  if constexpr (kCfg.program && !kCfg.only_hides) {
    ScoreConfig others = kCfg;
    others.program = false;
    return ProgramTypes<kCfg.program>::Program::kScalesByHead && !others.adds() && !others.facts().reshapes &&
           !others.entries();
  } else {
    return false;
  }
}
// Whether the gradient of the score before a program differs from that of the score.
template <ScoreConfig kCfg>
TESSERA_DEVICE constexpr bool changes_gradient() {
  if constexpr (kCfg.program) {
    return !ProgramTypes<kCfg.program>::Program::kPassesGradient;
  } else {
    return false;
  }
}

template <ScoreConfig kCfg>
TESSERA_DEVICE ScoreUnit score_unit(const ProblemParams& p) {
  return ScoreOptions<kCfg>::unit(p);
}

}  // namespace tessera
