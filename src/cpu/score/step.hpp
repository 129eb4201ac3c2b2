// From raw products to scores. Kernels call it, whatever the options are, for tiles that need more than a
// multiplication by the scale. Its parameter is the coordinates of the entries in the kernel's lanes (coordinates.hpp):
//
//   range      which keys of a tile are visible to none, all or some of its rows
//   load       reads ahead what the options need
//   apply      products -> scores in natural units, -inf if a key is hidden
//   collect    dScore -> gradients of the options' tensors
//   gradient   dScore -> dProduct
#pragma once

#include "cpu/score/coordinates.hpp"
#include "cpu/score/options.hpp"

namespace tessera::cpu {
namespace {

// Scratch of the options beside the scores. Tiles are as large as the scores.
struct ScoreScratch {
  float* loaded = nullptr;  // kLoadedTiles tiles, which `load` fills
  int64_t tile_floats = 0;
  float* slope = nullptr;      // for a gradient that needs the product; NULL: there is none
  float* before = nullptr;     // the scores before a program, for its gradient; NULL: there is none
  float* registers = nullptr;  // for a program: program_floats()
  float* shown = nullptr;      // the words of its mask, in the scores' layout; NULL: it is not computed yet
};

// What `apply` calls after every vector where there is nothing to do.
struct Nothing {
  TESSERA_INLINE void operator()(VecF, int64_t, int) const {}
};

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
  TESSERA_INLINE ScoreStepOf(const Params& p, const At& at, const ScoreScratch& scratch)
      : In<Option>(p, at)..., p_(p), at_(at), scratch_(scratch) {}

  // Whether the score of a visible key is more than scale * (q . k).
  TESSERA_INLINE static bool changes_scores(const Params& p) {
    return (((kScales<Option> || kAdds<Option> || kApplies<Option> || Rewrites<Option>)&&Option::asked(p)) || ...);
  }

  // The first run of rows begin ... end - 1 of the scores.
  TESSERA_INLINE static KeyRun range(const Params& p, const At& at, int64_t begin, int64_t end) {
    KeyRun run{end, true, has_options_everywhere(p)};
    (meet<Option>(run, p, at, begin), ...);
    return run;
  }

  // Before apply, for rows begin ... end - 1.
  TESSERA_INLINE void load(int64_t begin, int64_t end) {
    ScoreTiles tiles{scratch_.loaded, scratch_.tile_floats};
    (load_of<Option>(begin, end, tiles), ...);
  }

  // Rows begin ... end - 1 in place. Calls then(score, n, c) after every vector.
  template <class Then>
  TESSERA_INLINE void apply(float* scores, int64_t begin, int64_t end, const Then& then) {
    const bool all_seen = at_.all_seen(begin, end);
    const bool asked[] = {Option::asked(p_)...};
    const VecF scale = splat(p_.scale);
    const auto before_masks = [&](int64_t n, int c) TESSERA_LAMBDA_INLINE {
      Scaled scaled{::tessera::cpu::load(scores + at_.offset(n, c)), scale};
      each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
        if constexpr (kScales<One>) {
          scaled = in<One>().scaled(scaled.value);
          if (scratch_.slope) store(scratch_.slope + at_.offset(n, c), One::slope(scaled.value));
        }
      });
      // The operations are as written, not fused by the compiler: forward and backward must compute a score with the
      // same bits.
      VecF score = scaled.value * scaled.factor;
      each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
        if constexpr (kAdds<One>) score = in<One>().add(scaled, n, c);
      });
      each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
        if constexpr (kApplies<One>) score = in<One>().apply(score, n, c);
      });
      return score;
    };
    const auto begin_row = [&](int64_t n) TESSERA_LAMBDA_INLINE {
      each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
        if constexpr (kBeginsRows<One>) {
          if (!HidesAfter<One> || !all_seen) in<One>().begin_row(n);
        }
      });
    };
    const auto mask = [&](VecF score, int64_t n, int c) TESSERA_LAMBDA_INLINE {
      if (!all_seen) score = select(at_.seen(n, c), score, splat(-infinity()));
      each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
        if constexpr (kHides<One>) {
          if (!HidesAfter<One> || !all_seen) score = select(in<One>().visible(n, c), score, splat(-infinity()));
        }
      });
      store(scores + at_.offset(n, c), score);
      then(score, n, c);
    };
    if (!marks_hidden(p_)) {
      for (int64_t n = begin; n < end; n += At::kStep) {
        begin_row(n);
        for (int c = 0; c < at_.vecs(); ++c) mask(before_masks(n, c), n, c);
      }
      return;
    }
    // With nothing to do after a vector, there is a short way for the usual call, which has no other options.
    bool alone = false;
    if constexpr (__is_same(Then, Nothing)) alone = only_rewrites(p_);
    for (int64_t n = begin; n < end; n += At::kStep) {
      for (int c = 0; c < at_.vecs(); ++c) {
        const int64_t to = at_.offset(n, c);
        const VecF score = alone ? ::tessera::cpu::load(scores + to) * scale : before_masks(n, c);
        store(scores + to, score);
        if (scratch_.before) store(scratch_.before + to, score);
      }
    }
    each(asked, [&]<class One>() TESSERA_LAMBDA_INLINE {
      if constexpr (Rewrites<One>) One::rewrite(p_, at_, scores, begin, end, scratch_.registers, scratch_.shown);
    });
    if (alone && all_seen) return;
    for (int64_t n = begin; n < end; n += At::kStep) {
      begin_row(n);
      for (int c = 0; c < at_.vecs(); ++c) mask(::tessera::cpu::load(scores + at_.offset(n, c)), n, c);
    }
  }

  // For a vector of dScore; `slope`: as written by apply.
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

  // For rows 0 ... count - 1 of dScore, which are replaced by the gradient of the score before a program. `rows`:
  // scratch, [kBlockM][kKeyBlock].
  TESSERA_INLINE static void collect(const Params& p, const At& at, float* d_score, const ScoreScratch& scratch,
                                     float* rows, int64_t count) {
    const auto through = [&]<class One>() TESSERA_LAMBDA_INLINE {
      if constexpr (Rewrites<One>) {
        if (One::asked(p)) One::gradient(p, at, d_score, scratch.before, count, scratch.registers);
      }
    };
    (through.template operator()<Option>(), ...);
    const auto of = [&]<class One>() TESSERA_LAMBDA_INLINE {
      if constexpr (Collects<One>) {
        if (One::collects(p)) One::collect(p, at, d_score, rows, at.key(0), count);
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
  const ScoreScratch scratch_;
};
template <class At>
using ScoreStep = ScoreStepOf<At, ScoreOptions>;

// The scores of rows begin ... end - 1 of a tile, from its raw products, with every option.
TESSERA_OWN_FUNCTION inline void apply_scores(const Params& p, const QueryLanes& at, float* scores, int64_t begin,
                                              int64_t end, const ScoreScratch& scratch) {
  ScoreStep<QueryLanes> step(p, at, scratch);
  step.load(begin, end);
  step.apply(scores, begin, end, Nothing{});
}

// Floats of a call's program registers, for rows of `vecs` vectors.
TESSERA_INLINE int64_t program_floats(const Params& p, int64_t vecs) {
  int64_t floats = 0;
  for (const ScoreCode* code : {p.program, p.program_mask, p.program_score, p.program_gradient}) {
    if (code) floats = max_of(floats, code_floats(*code, vecs, kLanes));
  }
  return floats;
}

// If a program is used, hidden entries have a weight of -0, which adds nothing, and by which a product with NaN or
// infinities distinguishes them from visible ones.
TESSERA_INLINE VecF marked_weight(VecF weight, VecF score) {
  return select(score == -infinity(), splat(-0.0f), weight);
}
TESSERA_INLINE VecI not_marked(VecF weight) { return (VecI)weight != INT32_MIN; }

}  // namespace
}  // namespace tessera::cpu
