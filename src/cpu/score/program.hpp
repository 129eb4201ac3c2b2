// Score programs: the user's score function, executed by the interpreter. It is applied after ALiBi and before the
// masks, to rows of scores in memory; its mask is one more mask. Its gradient converts dScore to the gradient of the
// score before it. The gradients of its tensors are summed in float64 for each chain of work items, and chains are
// merged in order, so that bits do not depend on threads.
#pragma once

#include "cpu/score/entry.hpp"
#include "cpu/score/interpreter.hpp"

namespace tessera::cpu {
namespace {

struct ProgramOption {
  static constexpr const char* kName = "score programs";
  static bool asked(const tessera_problem& problem) { return problem.program != nullptr; }
  TESSERA_INLINE static bool asked(const Params& p) { return p.program != nullptr; }

  // Whether a row sees a key may depend on its score, which an entry does not have: kernels mark the weights instead.
  template <class At>
  class In {
   public:
    TESSERA_INLINE In(const Params&, const At&) {}
  };

  // The first run of rows begin ... end - 1. Where intervals prove it, keys that the mask hides from all rows are
  // skipped, and keys that all rows see are not masked. Runs end at multiples of kChunk.
  template <class At>
  static KeyRun range(const Params& p, const At& at, int64_t begin, int64_t end) {
    const bool rewrites = p.program->score.index >= 0;
    if (!p.program_shows) return {end, true, rewrites};
    ScoreBlock block{};
    const Sequence& s = at.sequence();
    block.batch = at.batch() + p.first_sequence, block.len_q = s.total_q, block.len_k = s.total_k;
    block.head_low = block.head_high = at.head(0), block.query_low = block.query_high = at.query(0);
    const int64_t step = at.consecutive() ? max_of<int64_t>(1, at.count() - 1) : 1;
    for (int64_t lane = 0; lane < at.count(); lane += step) {
      block.head_low = min_of(block.head_low, at.head(lane)), block.head_high = max_of(block.head_high, at.head(lane));
      block.query_low = min_of(block.query_low, at.query(lane));
      block.query_high = max_of(block.query_high, at.query(lane));
    }
    block.head_low += p.first_head, block.head_high += p.first_head;
    block.query_low += s.first_q, block.query_high += s.first_q;
    const auto shows = [&](int64_t from, int64_t to) TESSERA_LAMBDA_INLINE {
      block.key_low = at.key(from) + s.first_k, block.key_high = at.key(to) - 1 + s.first_k;
      return p.program_shows(p.program_call, block);
    };
    int32_t seen = shows(begin, end);
    if (seen == 1) {
      constexpr int64_t kChunk = 64;
      const auto chunk_end = [&](int64_t from)
                                 TESSERA_LAMBDA_INLINE { return min_of(end, padded_to(from + 1, kChunk)); };
      int64_t to = chunk_end(begin);
      seen = to < end ? shows(begin, to) : 1;
      while (to < end && shows(to, chunk_end(to)) == seen) to = chunk_end(to);
      end = to;
    }
    return {end, seen != 0, rewrites || seen == 1};
  }

  // One code over rows of the scores.
  template <class At>
  class Run {
   public:
    TESSERA_OWN_FUNCTION Run(const Params& p, const At& at, const ScoreCode& code, float* registers)
        : at_(at), run_(code, registers) {
      const Sequence& s = at.sequence();
      const VecI first_head = splat(static_cast<int32_t>(p.first_head));
      const int32_t first_q = static_cast<int32_t>(s.first_q);
      run_.begin(at.vecs(), [&](core::score::Op op, int c) -> VecI {
        using core::score::Op;
        switch (op) {
          case Op::kB:
            return splat(static_cast<int32_t>(at.batch() + p.first_sequence));
          case Op::kH:
            return at.heads(c) + first_head;
          case Op::kHkv: {
            VecI heads = at.heads(c) + first_head;
            for (int lane = 0; lane < kLanes; ++lane) heads[lane] /= static_cast<int32_t>(p.group);
            return heads;
          }
          case Op::kI:
            return at.queries(c) + first_q;
          case Op::kQPos:
            return at.queries(c) + static_cast<int32_t>(s.first_q + s.total_k - s.total_q);
          case Op::kLenQ:
            return splat(static_cast<int32_t>(s.total_q));
          default:
            return splat(static_cast<int32_t>(s.total_k));
        }
      });
    }

    // Row n and those after it, `rows` at most kCodeRows. s, g: the scores before the program and dScore, in the
    // scores' layout.
    TESSERA_INLINE void rows(int64_t n, int rows, float* s, float* g) {
      run_.run_rows(rows, view_of(s, n), view_of(g, n), [&](int64_t r) TESSERA_LAMBDA_INLINE {
        return at_.keys(n + r * At::kStep) + static_cast<int32_t>(at_.sequence().first_k);
      });
    }
    TESSERA_INLINE CodeView view(CodePlace place) const { return run_.view(place); }

   private:
    TESSERA_INLINE CodeView view_of(float* rows, int64_t n) const {
      const int64_t first = at_.offset(n, 0);
      return {rows ? rows + first : nullptr, at_.offset(n + At::kStep, 0) - first, at_.offset(n, 1) - first};
    }

    const At& at_;
    Interpreter<At::kVecs, kLanesAreKeys<At>> run_;
  };

  // Writes the words of the mask of rows begin ... end - 1 to `shown`, in the scores' layout. Calls visit(shows) for
  // every kCodeRows rows: whether it shows any of their entries.
  template <class At, class Visit>
  TESSERA_INLINE static void write_mask(const Params& p, const At& at, float* shown, int64_t begin, int64_t end,
                                        float* registers, const Visit& visit) {
    Run<At> run(p, at, *p.program_mask, registers);
    for (int64_t n = begin; n < end; n += kCodeRows * At::kStep) {
      const int rows = rows_of<At>(n, end);
      run.rows(n, rows, shown, nullptr);
      const CodeView to = run.view(kPlaceOfS), mask = run.view(p.program_mask->mask);
      VecI all{};
      each_vector(at, rows, [&](int r, int c) TESSERA_LAMBDA_INLINE {
        const VecI words = load_as<VecI>(mask.at(r, c));
        store(to.at(r, c), words);
        all |= words;
      });
      visit(any(all));
    }
  }

  // Rows begin ... end - 1 in place; -inf if the mask hides a key. `shown`: what write_mask wrote; NULL: the mask is
  // computed here.
  template <class At>
  TESSERA_OWN_FUNCTION static void rewrite(const Params& p, const At& at, float* scores, int64_t begin, int64_t end,
                                           float* registers, const float* shown) {
    static constexpr ScoreCode kNoCode{};
    const ScoreCode& code = !shown ? *p.program : p.program_score ? *p.program_score : kNoCode;
    const bool in_place = !code.steps || code.score.index < 0 || is_place_of_s(code.score);
    Run<At> run(p, at, code, registers);
    for (int64_t n = begin; n < end; n += kCodeRows * At::kStep) {
      const int rows = rows_of<At>(n, end);
      run.rows(n, rows, scores, nullptr);
      const CodeView to = run.view(kPlaceOfS), score = in_place ? to : run.view(code.score);
      const auto select_shown = [&](const auto& words) TESSERA_LAMBDA_INLINE {
        each_vector(at, rows, [&](int r, int c) TESSERA_LAMBDA_INLINE {
          store(to.at(r, c), select(words(r, c), load(score.at(r, c)), splat(-infinity())));
        });
      };
      if (shown) {
        select_shown([&](int r, int c)
                         TESSERA_LAMBDA_INLINE { return load_as<VecI>(shown + at.offset(n + r * At::kStep, c)); });
      } else if (code.mask.index >= 0) {
        const CodeView mask = run.view(code.mask);
        select_shown([&](int r, int c) TESSERA_LAMBDA_INLINE { return load_as<VecI>(mask.at(r, c)); });
      } else if (!in_place) {
        each_vector(at, rows, [&](int r, int c) TESSERA_LAMBDA_INLINE { store(to.at(r, c), load(score.at(r, c))); });
      }
    }
  }

  // Replaces d_score of rows 0 ... end - 1 by the gradient of the score before the program, and adds up its tensors'
  // gradients. `before`: that score.
  template <class At>
  TESSERA_OWN_FUNCTION static void gradient(const Params& p, const At& at, float* d_score, float* before, int64_t end,
                                            float* registers) {
    const ScoreCode& code = *p.program_gradient;
    Run<At> run(p, at, code, registers);
    for (int64_t n = 0; n < end; n += kCodeRows * At::kStep) {
      const int rows = rows_of<At>(n, end);
      run.rows(n, rows, before, d_score);
      for (int32_t i = 0; i < code.num_gradients; ++i) {
        collect(p, at, run, code.gradients[i], d_score + at.offset(n, 0), rows);
      }
      const CodeView to = run.view(kPlaceOfG), d = run.view(code.d_s);
      // A hidden entry has no gradient, whatever the program's derivative is there.
      const bool none = code.d_s.index < 0;
      each_vector(at, rows, [&](int r, int c) TESSERA_LAMBDA_INLINE {
        store(to.at(r, c), select(load(to.at(r, c)) == 0.0f, VecF{}, none ? VecF{} : load(d.at(r, c))));
      });
    }
  }

 private:
  static constexpr CodePlace kPlaceOfS{kRowsOfS, kOfPair}, kPlaceOfG{kRowsOfG, kOfPair};
  TESSERA_INLINE static bool is_place_of_s(CodePlace place) {
    return place.level == kOfPair && place.index == kRowsOfS;
  }

  template <class At, class Body>
  TESSERA_INLINE static void each_vector(const At& at, int rows, const Body& body) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < at.vecs(); ++c) body(r, c);
    }
  }

  template <class At>
  TESSERA_INLINE static int rows_of(int64_t n, int64_t end) {
    return static_cast<int>(min_of<int64_t>(kCodeRows, (end - n + At::kStep - 1) / At::kStep));
  }

  // The gradient of one load: entries that read the same element are summed first, over keys, queries or both.
  template <class At>
  TESSERA_OWN_FUNCTION static void collect(const Params& p, const At& at, const Run<At>& run, const CodeGradient& to,
                                           const float* d_score, int rows) {
    const CodeTensor& tensor = p.program_gradient->tensors[to.tensor];
    double* sums = p.program_sums + p.program_sums_begin[to.tensor];
    const CodeView of_adjoint = run.view(to.adjoint);
    CodeView of_index[core::score::kMaxRank];
    for (int axis = 0; axis < tensor.rank; ++axis) of_index[axis] = run.view(to.indices[axis]);
    const auto adjoint = [&](int r, int c) TESSERA_LAMBDA_INLINE {
      const VecF g = load(d_score + at.offset(r * At::kStep, c) - at.offset(0, 0));
      return select(g == 0.0f, VecF{}, load(of_adjoint.at(r, c)));
    };
    const auto add = [&](int r, int c, int lane, float x) TESSERA_LAMBDA_INLINE {
      int64_t element = 0;
      for (int axis = 0; axis < tensor.rank; ++axis) {
        const int32_t index = load_as<VecI>(of_index[axis].at(r, c))[lane];
        if (index < 0 || index >= tensor.shape[axis]) return;
        element = element * tensor.shape[axis] + index;
      }
      sums[element] += double{x};
    };
    if (!(to.level & kOfKey)) {  // all keys read the same element
      VecF all{};
      for (int c = 0; c < at.vecs(); ++c) {
        VecF sum{};
        for (int r = 0; r < rows; ++r) sum += adjoint(r, c);
        all += sum;
        if (to.level & kOfQuery) add_lanes(of_index, tensor.rank, sum, 0, c, add);
      }
      if (!(to.level & kOfQuery)) add(0, 0, 0, sum_lanes(all));
      return;
    }
    for (int r = 0; r < rows; ++r) {
      VecF all{};
      for (int c = 0; c < at.vecs(); ++c) {
        const VecF sum = adjoint(r, c);
        all += sum;
        if (to.level & kOfQuery) add_lanes(of_index, tensor.rank, sum, r, c, add);
      }
      if (!(to.level & kOfQuery)) add(r, 0, 0, sum_lanes(all));
    }
  }
  // Lane by lane, or all together if they have the same index, such as a head.
  template <class Add>
  TESSERA_INLINE static void add_lanes(const CodeView (&of_index)[core::score::kMaxRank], int rank, VecF sum, int r,
                                       int c, const Add& add) {
    VecI differ{};
    for (int axis = 0; axis < rank; ++axis) {
      const VecI at = load_as<VecI>(of_index[axis].at(r, c));
      differ |= at != at[0];
    }
    if (!any(differ)) return add(r, c, 0, sum_lanes(sum));
    for (int lane = 0; lane < kLanes; ++lane) {
      if (sum[lane] != 0.0f) add(r, c, lane, sum[lane]);  // NaN is added, too
    }
  }
};

}  // namespace
}  // namespace tessera::cpu
