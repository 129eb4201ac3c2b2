// The options of a score, in the order in which they are applied: scale, softcap, bias, ALiBi, a program, all masks.
// The members that an option's file declares define what it is:
//
//   kName, asked(problem), asked(params)     declared by all options
//   In<At>::scaled(product)                  replaces the product times the scale
//   In<At>::add(scaled, n, c)                adds to the score, fused with the last multiplication
//   In<At>::apply(score, n, c)               computes a new score
//   rewrite(params, at, scores, ...)         computes new scores of whole rows, -inf for hidden entries
//   In<At>::visible(n, c)                    hides keys
//   In<At>::load, begin_row; kLoadedTiles    reads ahead, for all rows of the scores or for one
//   sees(params, entry)                      whether it leaves an entry visible
//   slope, gradient                          its gradient depends on the product
//   collects(params), collect                it has a gradient of its own
//   last_full_key(sequence)                  the key up to which it hides nothing
//   range(params, at, begin, end)            the keys that it treats alike for all rows of a tile
//   kInAmxStages                             AMX's stages support it (amx_scores.hpp); otherwise vectors serve the call
//   hide(lanes, params, at, key, keys)       AMX's stages: clears the bits of hidden keys
//
// The facts by which kernels and plans decide are folded from these declarations.
#pragma once

#include "cpu/score/dropout.hpp"
#include "cpu/score/entry.hpp"

#define TESSERA_SCORE_FILES_CPU 1
#include "tessera/attention/score/list.hpp"

namespace tessera::cpu {
namespace {

template <class... Option>
struct OptionList {
  // Whether fact.operator()<Option>() holds for an option that a problem or a call uses.
  template <class Call, class Fact>
  TESSERA_INLINE static bool any(const Call& call, const Fact& fact) {
    return ((fact.template operator()<Option>() && Option::asked(call)) || ...);
  }
  template <class Fact>
  TESSERA_INLINE static bool all(const Fact& fact) {
    return (fact.template operator()<Option>() && ...);
  }
};
#define TESSERA_CLASS(Class, ...) Class,
using ScoreOptions = OptionList<TESSERA_SCORE_OPTIONS(TESSERA_CLASS, TESSERA_CLASS, TESSERA_CLASS) Dropout>;
#undef TESSERA_CLASS

// Tiles of scores that the options read ahead.
template <class... Option>
constexpr int64_t loaded_tiles(OptionList<Option...>) {
  const auto of = []<class One>() -> int64_t {
    if constexpr (requires { One::kLoadedTiles; }) return One::kLoadedTiles;
    return 0;
  };
  return (of.template operator()<Option>() + ...);
}
constexpr int64_t kScoreTiles = loaded_tiles(ScoreOptions{});
static_assert(kScoreTiles >= 1, "dropout's factors take their place when the scores are there");

// ---- what an option is ----

// True if the option can be applied with lanes of this kind.
template <class Option, class At>
concept HasLanes = requires {
  typename Option::template In<At>;
};
// True if it hides keys from some queries.
template <class Option>
concept Hides = requires(const Params& p, const ScoreEntry& at) {
  Option::sees(p, at);
};
// True if it hides nothing up to some key: tiles before that key do not need it.
template <class Option>
concept HidesAfter = requires(const Sequence& sequence) {
  Option::last_full_key(sequence);
};
// True if tiles have runs of keys that do not need it.
template <class Option>
concept HasRanges = requires(const Params& p, const QueryLanes& at) {
  Option::range(p, at, int64_t{}, int64_t{});
};
// True if its gradient depends on the product.
template <class Option>
concept NeedsProduct = requires(VecF x) {
  Option::slope(x);
};
// True if it rewrites whole rows. Whether a key is hidden may then depend on its score, so kernels mark hidden entries
// in their weights.
template <class Option>
concept Rewrites = requires(const Params& p, const QueryLanes& at, float* rows) {
  Option::rewrite(p, at, rows, int64_t{}, int64_t{}, rows, rows);
};
// True if AMX's stages support it.
template <class Option>
concept InAmxStages = requires {
  Option::kInAmxStages;
};
// True if it collects a gradient of its own.
template <class Option>
concept Collects = requires(const Params& p) {
  Option::collects(p);
};

// ---- what a call uses ----

TESSERA_INLINE bool asks_for_options(const tessera_problem& problem) {
  return ScoreOptions::any(problem, []<class Option>() { return true; });
}
// Options that every tile needs, i.e. those that the tile's key ranges do not exclude.
TESSERA_INLINE bool has_options_everywhere(const Params& p) {
  return ScoreOptions::any(p, []<class Option>() { return !HidesAfter<Option> && !HasRanges<Option>; });
}
// Options that a tile before all keys that a positional mask cuts may need.
TESSERA_INLINE bool has_score_options(const Params& p) {
  return ScoreOptions::any(p, []<class Option>() { return !HidesAfter<Option>; });
}
TESSERA_INLINE bool hides_by_position(const Params& p) {
  return ScoreOptions::any(p, []<class Option>() { return HidesAfter<Option>; });
}
// True if a key that is visible by position may be hidden.
TESSERA_INLINE bool may_mask_entries(const Params& p) {
  return ScoreOptions::any(p,
                           []<class Option>() { return (Hides<Option> && !HidesAfter<Option>) || Rewrites<Option>; });
}
// True if some key may be hidden from some query of the call, by that or by position.
TESSERA_INLINE bool may_hide_keys(const Params& p) {
  return p.causal || p.window_left >= 0 || p.window_right >= 0 ||
         ScoreOptions::any(p, []<class Option>() { return Hides<Option> || Rewrites<Option>; });
}
// True if hidden entries are marked in the weights.
TESSERA_INLINE bool marks_hidden(const Params& p) {
  return ScoreOptions::any(p, []<class Option>() { return Rewrites<Option>; });
}
// True if no option but those that rewrite whole rows changes a score, and none but those and positions hides a key.
TESSERA_INLINE bool only_rewrites(const Params& p) {
  return marks_hidden(p) && !ScoreOptions::any(p, []<class Option>() { return !Rewrites<Option>; });
}
TESSERA_INLINE bool gradient_needs_product(const Params& p) {
  return ScoreOptions::any(p, []<class Option>() { return NeedsProduct<Option>; });
}
template <class Only>
TESSERA_INLINE bool asks_for_nothing_but(const Params& p) {
  return !ScoreOptions::any(p, []<class Option>() { return !__is_same(Option, Only); });
}
// Whether an option collects a gradient.
TESSERA_INLINE bool collects_gradients(const Params& p) {
  return ScoreOptions::any(p, [&]<class Option>() {
    if constexpr (Collects<Option>) {
      return Option::collects(p);
    } else {
      return false;
    }
  });
}

// Whether the options leave an entry visible that is visible by position.
template <class... Option>
TESSERA_INLINE bool sees_entry(OptionList<Option...>, const Params& p, const ScoreEntry& at) {
  const auto sees = [&]<class One>() TESSERA_LAMBDA_INLINE {
    if constexpr (Hides<One>) {
      return !One::asked(p) || One::sees(p, at);
    } else {
      return true;
    }
  };
  return (sees.template operator()<Option>() && ...);
}
TESSERA_INLINE bool sees_entry(const Params& p, const ScoreEntry& at) { return sees_entry(ScoreOptions{}, p, at); }

// The last key up to which no mask hides anything from a query that sees it by causal, window and length.
template <class... Option>
TESSERA_INLINE int64_t last_full_key(OptionList<Option...>, const Params& p, const Sequence& sequence, int64_t high) {
  const auto of = [&]<class One>() TESSERA_LAMBDA_INLINE {
    if constexpr (HidesAfter<One>) {
      if (One::asked(p)) high = min_of(high, One::last_full_key(sequence));
    }
  };
  (of.template operator()<Option>(), ...);
  return high;
}
TESSERA_INLINE int64_t last_full_key(const Params& p, const Sequence& sequence, int64_t high) {
  return last_full_key(ScoreOptions{}, p, sequence, high);
}

}  // namespace
}  // namespace tessera::cpu
