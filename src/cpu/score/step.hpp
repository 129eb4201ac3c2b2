// From raw products to scores: what a kernel calls, whatever the options are. It comes where a tile needs more than a
// multiplication by the scale and is parameterised by which entries the kernel's lanes are (coordinates.hpp):
//
//   range      which keys of a tile are visible to none, all or some of its rows
//   load       what the options read, ahead
//   apply      products -> scores in natural units, -inf where a key is hidden
//   collect    dScore -> gradients of what the options read
//   gradient   dScore -> dProduct
#pragma once

#include "cpu/score/coordinates.hpp"
#include "cpu/score/options.hpp"

namespace tessera::cpu {
namespace {

template <class Option, class At>
struct NotApplied {
  TESSERA_INLINE NotApplied(const Params&, const At&) {}
};
template <class Option, class At>
struct InOf {
  typedef NotApplied<Option, At> Type;
};
template <class Option, class At>
requires HasLanes<Option, At>
struct InOf<Option, At> {
  typedef typename Option::template In<At> Type;
};

template <class At, class Options>
class ScoreStepOf;
template <class At, class... Option>
class ScoreStepOf<At, OptionList<Option...>> : private InOf<Option, At>::Type... {
  template <class One>
  using In = typename InOf<One, At>::Type;
  template <class One>
  static constexpr bool kScales = requires(const In<One>& in, VecF v) {
    in.scaled(v);
  };
  template <class One>
  static constexpr bool kAdds = requires(const In<One>& in, const Scaled& s) {
    in.add(s, int64_t{}, 0);
  };
  template <class One>
  static constexpr bool kApplies = requires(const In<One>& in, VecF v) {
    in.apply(v, int64_t{}, 0);
  };
  template <class One>
  static constexpr bool kHides = requires(const In<One>& in) {
    in.visible(int64_t{}, 0);
  };
  template <class One>
  static constexpr bool kLoads = requires(In<One>& in, ScoreTiles& tiles) {
    in.load(int64_t{}, int64_t{}, tiles);
  };
  template <class One>
  static constexpr bool kBeginsRows = requires(In<One>& in) {
    in.begin_row(int64_t{});
  };
  static_assert((kScales<Option> + ...) <= 1 && (kAdds<Option> + ...) <= 1, "one of them takes the scale's place");

 public:
  // `at` must outlive it.
  TESSERA_INLINE ScoreStepOf(const Params& p, const At& at) : In<Option>(p, at)..., p_(p), at_(at) {}

  // Whether the score of a visible key is more than scale * (q . k).
  TESSERA_INLINE static bool changes_scores(const Params& p) {
    return (((kScales<Option> || kAdds<Option> || kApplies<Option>)&&Option::asked(p)) || ...);
  }

  // The first run of rows begin ... end - 1 of the scores.
  TESSERA_INLINE static KeyRun range(const Params& p, const At& at, int64_t begin, int64_t end) {
    KeyRun run{end, true, has_options_everywhere(p)};
    (meet<Option>(run, p, at, begin), ...);
    return run;
  }

  // Ahead of apply, for rows begin ... end - 1. `scratch`: kLoadedTiles tiles as large as the scores'.
  TESSERA_INLINE void load(int64_t begin, int64_t end, float* scratch, int64_t tile_floats) {
    ScoreTiles tiles{scratch, tile_floats};
    (load_of<Option>(begin, end, tiles), ...);
  }

  // Rows begin ... end - 1 in place. `slope`: of the gradient through an option that needs the product, in the scores'
  // layout, or NULL. then(score, n, c) follows every vector.
  template <class Then>
  TESSERA_INLINE void apply(float* scores, int64_t begin, int64_t end, float* slope, Then&& then) {
    const bool all_seen = at_.all_seen(begin, end);
    const bool asked[] = {Option::asked(p_)...};
    const VecF scale = splat(p_.scale);
    for (int64_t n = begin; n < end; n += At::kStep) {
      each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
        if constexpr (kBeginsRows<One>) {
          if (!HidesAfter<One> || !all_seen) in<One>().begin_row(n);
        }
      });
      for (int c = 0; c < at_.vecs(); ++c) {
        float* to = scores + at_.offset(n, c);
        Scaled scaled{::tessera::cpu::load(to), scale};
        each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
          if constexpr (kScales<One>) {
            scaled = in<One>().scaled(scaled.value);
            if (slope) store(slope + at_.offset(n, c), One::slope(scaled.value));
          }
        });
        // As written, whatever the compiler would fuse: forward and backward must make the same bits of a score.
        VecF score = scaled.value * scaled.factor;
        each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
          if constexpr (kAdds<One>) score = in<One>().add(scaled, n, c);
        });
        each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
          if constexpr (kApplies<One>) score = in<One>().apply(score, n, c);
        });
        if (!all_seen) score = select(at_.seen(n, c), score, splat(-infinity()));
        each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
          if constexpr (kHides<One>) {
            if (!HidesAfter<One> || !all_seen) score = select(in<One>().visible(n, c), score, splat(-infinity()));
          }
        });
        store(to, score);
        then(score, n, c);
      }
    }
  }

  // Of a vector of dScore; `slope`: what apply left there.
  TESSERA_INLINE static VecF gradient(const Params& p, VecF d_score, const float* slope) {
    VecF d = d_score * splat(p.scale);
    const auto through = [&]<class One>() TESSERA_LAMBDA_INLINE {
      if constexpr (NeedsProduct<One>) {
        if (One::asked(p)) d = One::gradient(d, ::tessera::cpu::load(slope));
      }
    };
    (through.template operator()<Option>(), ...);
    return d;
  }

  // Of rows 0 ... count - 1 of dScore. `scratch`: [kBlockM][kKeyBlock].
  TESSERA_INLINE static void collect(const Params& p, const At& at, const float* d_score, float* scratch,
                                     int64_t count) {
    const auto of = [&]<class One>() TESSERA_LAMBDA_INLINE {
      if constexpr (Collects<One>) {
        if (One::collects(p)) One::collect(p, at, d_score, scratch, at.key(0), count);
      }
    };
    (of.template operator()<Option>(), ...);
  }

 private:
  template <class One>
  TESSERA_INLINE In<One>& in() {
    return *this;
  }
  template <class Body>
  TESSERA_INLINE static void each(const bool (&asked)[sizeof...(Option)], const Body& body) {
    int at = 0;
    ((asked[at++] ? body.template operator()<Option>() : void()), ...);
  }
  template <class One>
  TESSERA_INLINE void load_of(int64_t begin, int64_t end, ScoreTiles& tiles) {
    if constexpr (kLoads<One>) {
      if (One::asked(p_)) in<One>().load(begin, end, tiles);
    }
  }
  template <class One>
  TESSERA_INLINE static void meet(KeyRun& run, const Params& p, const At& at, int64_t begin) {
    if constexpr (HasRanges<One>) {
      if (!One::asked(p)) return;
      const KeyRun of_one = One::range(p, at, begin, run.end);
      run = {of_one.end, run.visible && of_one.visible, run.options || of_one.options};
    }
  }

  const Params& p_;
  const At& at_;
};
template <class At>
using ScoreStep = ScoreStepOf<At, ScoreOptions>;

}  // namespace
}  // namespace tessera::cpu
