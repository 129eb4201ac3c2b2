#include "core/score/indices.hpp"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <optional>
#include <string>
#include <vector>

#include "core/geometry.hpp"
#include "core/score/bound.hpp"
#include "core/score/print.hpp"
#include "core/status.hpp"

namespace tessera::core::score {
namespace {

bool chooses(Op op) { return op == Op::kWhere || op == Op::kWhereInt || op == Op::kWhereBool; }

// For each value, whether it depends on s, on b, or on h.
struct Depends {
  std::vector<bool> s, b, h;

  explicit Depends(const Program& program) {
    const size_t count = program.values.size();
    s.resize(count), b.resize(count), h.resize(count);
    for (size_t n = 0; n < count; ++n) {
      const Value& value = program.values[n];
      s[n] = value.op == Op::kS, b[n] = value.op == Op::kB, h[n] = value.op == Op::kH || value.op == Op::kHkv;
      for (int operand = 0; operand < operand_count(value); ++operand) {
        const size_t of = static_cast<size_t>(value.operands[operand]);
        s[n] = s[n] || s[of], b[n] = b[n] || b[of], h[n] = h[n] || h[of];
      }
    }
  }
};

// Visits the loads below `root` that are evaluated. `truth(place)` says whether a condition holds (1), does not (0), or
// may be either (-1); `both`: whether both sides of a condition that may be either are visited, or neither.
template <class Truth, class Visit>
void visit_loads(const Program& program, const Depends& depends, int root, bool both, const Truth& truth,
                 const Visit& visit) {
  std::vector<bool> seen(program.values.size());
  std::vector<int> stack{root};
  while (!stack.empty()) {
    const int at = stack.back();
    stack.pop_back();
    if (at < 0 || seen[static_cast<size_t>(at)]) continue;
    seen[static_cast<size_t>(at)] = true;
    const Value& value = program.values[static_cast<size_t>(at)];
    const bool lazy = chooses(value.op) || value.op == Op::kAnd || value.op == Op::kOr;
    if (!lazy) {
      bool depends_on_s = false;
      for (int n = 0; n < operand_count(value); ++n) {
        stack.push_back(value.operands[n]);
        depends_on_s = depends_on_s || depends.s[static_cast<size_t>(value.operands[n])];
      }
      if (value.op == Op::kLoad && !depends_on_s) visit(at);
      continue;
    }
    stack.push_back(value.operands[0]);
    if (depends.s[static_cast<size_t>(value.operands[0])]) continue;
    const int holds = truth(value.operands[0]);
    if (holds < 0 && !both) continue;
    if (chooses(value.op)) {
      if (holds != 0) stack.push_back(value.operands[1]);
      if (holds != 1) stack.push_back(value.operands[2]);
    } else if (value.op == Op::kAnd ? holds != 0 : holds != 1) {
      stack.push_back(value.operands[1]);
    }
  }
}

int truth_of(const Interval& x) { return x.is(1) ? 1 : x.is(0) ? 0 : -1; }

Interval range(int64_t low, int64_t high) { return {static_cast<double>(low), static_cast<double>(high)}; }

// A load in the notation of its author: "bias[h, i - j + 8]".
std::string text_of(const Program& program, int load) { return to_text(program, load); }

// ---- without data ---------------------------------------------------------------------------------------------------

Interval anything_of(Type type) {
  return type == Type::kFloat  ? Interval::everything()
         : type == Type::kBool ? Interval{0, 1}
                               : range(INT32_MIN, INT32_MAX);
}

}  // namespace

tessera_status check_planned_indices(const tessera_plan& plan) {
  if (!has_program(plan) || plan.batch == 0 || plan.max_seqlen_q == 0 || plan.max_seqlen_k == 0) return ok();
  const Bound bound = bind(plan);
  const Program& program = bound.program();
  const tessera_problem& p = plan.problem;
  const bool dense_q = !packed_q(p), dense_k = !packed_k(p) && !paged(p) && !present(p.seqused_k);
  const int64_t sq = plan.max_seqlen_q, sk = plan.max_seqlen_k;
  Bounds bounds;
  bounds.b = range(0, plan.batch - 1), bounds.h = range(0, plan.heads_q - 1), bounds.h_kv = range(0, plan.heads_kv - 1);
  bounds.i = range(0, sq - 1), bounds.j = range(0, sk - 1);
  bounds.len_q = range(dense_q ? sq : 0, sq), bounds.len_k = range(dense_k ? sk : 0, sk);
  bounds.q_pos = {bounds.len_k.low - bounds.len_q.high, bounds.i.high + bounds.len_k.high - bounds.len_q.low};
  bounds.element = [&](int tensor, const Interval*) {
    return anything_of(program.tensors[static_cast<size_t>(tensor)].type);
  };
  bounds.scalar = [&](int scalar) { return anything_of(program.scalars[static_cast<size_t>(scalar)].type); };
  const std::vector<Interval> all = bounds_of_values(program, bounds);
  const Depends depends(program);
  tessera_status status = ok();
  for (const int root : {program.mask, program.score}) {
    visit_loads(
        program, depends, root, false, [&](int place) { return truth_of(all[static_cast<size_t>(place)]); },
        [&](int load) {
          const Value& value = program.values[static_cast<size_t>(load)];
          for (int axis = 0; axis < operand_count(value); ++axis) {
            const Interval& index = all[static_cast<size_t>(value.operands[axis])];
            const int64_t extent = bound.tensors[static_cast<size_t>(value.name)].shape[static_cast<size_t>(axis)];
            if (index.high >= 0 && index.low <= static_cast<double>(extent - 1)) continue;
            status = invalid("%s: index %d of %s is %.0f .. %.0f, accepted 0 .. %" PRId64,
                             program.tensors[static_cast<size_t>(value.name)].text.c_str(), axis,
                             text_of(program, load).c_str(), index.low, index.high, extent - 1);
          }
        });
  }
  return status;
}

namespace {

// ---- with data ------------------------------------------------------------------------------------------------------

// Bounds of the elements of integer and boolean tensors; floats may be anything.
class Elements {
 public:
  explicit Elements(const Bound& bound) : bound_(bound) {}

  Interval within(int tensor, const Interval* index) {
    const BoundTensor& of = bound_.tensors[static_cast<size_t>(tensor)];
    const Type type = bound_.program().tensors[static_cast<size_t>(tensor)].type;
    if (type == Type::kFloat) return Interval::everything();
    std::array<int64_t, kMaxRank> low{}, count{};
    int64_t elements = 1;
    bool inside = true;  // an element outside counts as 0
    for (int axis = 0; axis < of.rank; ++axis) {
      const size_t n = static_cast<size_t>(axis);
      const double last = static_cast<double>(of.shape[n] - 1);
      inside = inside && index[axis].low >= 0 && index[axis].high <= last;
      low[n] = static_cast<int64_t>(std::clamp(index[axis].low, 0.0, std::max(last, 0.0)));
      const int64_t high = static_cast<int64_t>(std::clamp(index[axis].high, -1.0, last));
      count[n] = std::max<int64_t>(0, high - low[n] + 1);
      elements *= count[n];
    }
    Interval found = elements <= kFew ? over(of, low, count) : whole(tensor);
    if (!inside || elements == 0) found = {std::min(found.low, 0.0), std::max(found.high, 0.0)};
    return found;
  }

 private:
  static constexpr int64_t kFew = 1024;

  static Interval over(const BoundTensor& tensor, const std::array<int64_t, kMaxRank>& low,
                       const std::array<int64_t, kMaxRank>& count) {
    BoundTensor part = tensor;
    part.shape = count;
    std::optional<Interval> found;
    for_each_element(part, [&](const int64_t* index, int64_t) {
      std::array<int64_t, kMaxRank> at{};
      for (size_t axis = 0; axis < kMaxRank; ++axis) at[axis] = index[axis] + low[axis];
      const double x = load_element(tensor, at.data());
      found = found ? Interval{std::min(found->low, x), std::max(found->high, x)} : Interval{x, x};
    });
    return found.value_or(Interval{0, 0});
  }

  Interval whole(int tensor) {
    std::optional<Interval>& known = whole_[static_cast<size_t>(tensor)];
    const BoundTensor& of = bound_.tensors[static_cast<size_t>(tensor)];
    if (!known) known = over(of, {}, of.shape);
    return *known;
  }

  const Bound& bound_;
  std::array<std::optional<Interval>, kMaxTensors> whole_;
};

struct Block {
  int64_t i0, i1, j0, j1;  // the ends are exclusive
};

class Checker {
 public:
  Checker(const tessera_plan& plan, const tessera_buffers& buffers, const Bound& bound)
      : plan_(plan),
        buffers_(buffers),
        bound_(bound),
        program_(bound_.program()),
        bindings_(bindings_of(bound_)),
        evaluator_(program_, bindings_),
        depends_(program_),
        elements_(bound_) {}

  tessera_status run() {
    const bool by_head = any(depends_.h), alike = !any(depends_.b) && !packed_q(plan_.problem) &&
                                                  !packed_k(plan_.problem) && !present(plan_.problem.seqused_k) &&
                                                  !present(plan_.problem.places);
    for (int64_t b = 0; b < (alike ? std::min<int64_t>(1, plan_.batch) : plan_.batch); ++b) {
      view_ = sequence(plan_.problem, buffers_, b);
      const Block all{0, view_.sq, 0, view_.sk};
      if (view_.sq == 0 || view_.sk == 0 || is_inside(b, 0, plan_.heads_q - 1, all)) continue;
      for (int64_t h = 0; h < (by_head ? plan_.heads_q : 1); ++h) TESSERA_RETURN_IF_ERROR(check(b, h, all));
    }
    return ok();
  }

 private:
  static constexpr int64_t kPairs = 16;  // side of a block whose pairs are checked one by one

  static bool any(const std::vector<bool>& of) { return std::ranges::find(of, true) != of.end(); }

  tessera_status check(int64_t b, int64_t h, const Block& block) {
    const auto [i0, i1, j0, j1] = block;
    if (i0 >= i1 || j0 >= j1 || is_hidden(block) || is_inside(b, h, h, block)) return ok();
    if (i1 - i0 <= kPairs && j1 - j0 <= kPairs) return check_pairs(b, h, block);
    const int64_t i = i1 - i0 > kPairs ? i0 + (i1 - i0) / 2 : i1, j = j1 - j0 > kPairs ? j0 + (j1 - j0) / 2 : j1;
    for (const Block& part : {Block{i0, i, j0, j}, Block{i0, i, j, j1}, Block{i, i1, j0, j}, Block{i, i1, j, j1}}) {
      TESSERA_RETURN_IF_ERROR(check(b, h, part));
    }
    return ok();
  }

  score::Inputs inputs(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return inputs_of(whole_heads(plan_.problem), view_.place, b, h, i, j);
  }

  // Whether position hides all pairs of the block; least and most are of j - (i + diagonal).
  bool is_hidden(const Block& block) const {
    const int64_t d = diagonal(plan_.problem, view_.place);
    const int64_t least = block.j0 - (block.i1 - 1 + d), most = block.j1 - 1 - (block.i0 + d);
    const tessera_problem& p = plan_.problem;
    return (view_.causal && least > 0) || (p.window_left >= 0 && -most > p.window_left) ||
           (p.window_right >= 0 && least > p.window_right);
  }

  bool is_inside(int64_t b, int64_t h0, int64_t h1, const Block& block) {
    const score::Inputs low = inputs(b, h0, block.i0, block.j0), high = inputs(b, h1, block.i1 - 1, block.j1 - 1);
    Bounds bounds;
    bounds.b = range(low.b, high.b), bounds.h = range(low.h, high.h), bounds.h_kv = range(low.h_kv, high.h_kv);
    bounds.i = range(low.i, high.i), bounds.j = range(low.j, high.j), bounds.q_pos = range(low.q_pos, high.q_pos);
    bounds.len_q = range(low.len_q, high.len_q), bounds.len_k = range(low.len_k, high.len_k);
    bounds.element = [this](int tensor, const Interval* index) { return elements_.within(tensor, index); };
    bounds.scalar = [this](int scalar) {
      const Interval exact = Interval::exactly(bound_.scalars[static_cast<size_t>(scalar)]);
      const bool is_float = program_.scalars[static_cast<size_t>(scalar)].type == Type::kFloat;
      return is_float ? Interval::everything() : exact;  // kernels round it
    };
    const std::vector<Interval> all = bounds_of_values(program_, bounds);
    bool inside = true;
    for (const int root : {program_.mask, program_.score}) {
      if (root == program_.score && program_.mask >= 0 && all[static_cast<size_t>(program_.mask)].is(0)) continue;
      visit_loads(
          program_, depends_, root, true, [&](int place) { return truth_of(all[static_cast<size_t>(place)]); },
          [&](int load) {
            const Value& value = program_.values[static_cast<size_t>(load)];
            const BoundTensor& tensor = bound_.tensors[static_cast<size_t>(value.name)];
            for (int axis = 0; axis < tensor.rank; ++axis) {
              const Interval& index = all[static_cast<size_t>(value.operands[axis])];
              const double last = static_cast<double>(tensor.shape[static_cast<size_t>(axis)] - 1);
              inside = inside && index.low >= 0 && index.high <= last;
            }
          });
    }
    return inside;
  }

  tessera_status check_pairs(int64_t b, int64_t h, const Block& block) {
    tessera_status status = ok();
    for (int64_t i = block.i0; i < block.i1; ++i) {
      for (int64_t j = block.j0; j < block.j1; ++j) {
        if (is_hidden({i, i + 1, j, j + 1})) continue;
        const score::Inputs pair = inputs(b, h, i, j);
        evaluator_.begin(pair);
        const auto truth = [this](int place) { return evaluator_.value(place) != 0 ? 1 : 0; };
        const auto visit = [&](int load) {
          const Value& value = program_.values[static_cast<size_t>(load)];
          const BoundTensor& tensor = bound_.tensors[static_cast<size_t>(value.name)];
          for (int axis = 0; axis < tensor.rank; ++axis) {
            const double index = evaluator_.value(value.operands[axis]);
            const int64_t extent = tensor.shape[static_cast<size_t>(axis)];
            if (index >= 0 && index < static_cast<double>(extent)) continue;
            status = invalid("%s: index %d of %s is %.0f for b %" PRId64 ", h %" PRId64 ", i %" PRId64 ", j %" PRId64
                             ", accepted 0 .. %" PRId64,
                             program_.tensors[static_cast<size_t>(value.name)].text.c_str(), axis,
                             text_of(program_, load).c_str(), index, pair.b, pair.h, pair.i, pair.j, extent - 1);
          }
        };
        visit_loads(program_, depends_, program_.mask, true, truth, visit);
        const bool known = program_.mask < 0 || !depends_.s[static_cast<size_t>(program_.mask)];
        const bool shown = program_.mask < 0 || (known && evaluator_.value(program_.mask) != 0);
        if (shown && status.code == TESSERA_OK) visit_loads(program_, depends_, program_.score, true, truth, visit);
        if (status.code != TESSERA_OK) return status;
      }
    }
    return status;
  }

  const tessera_plan& plan_;
  const tessera_buffers& buffers_;
  const Bound& bound_;
  const Program& program_;
  const Bindings bindings_;
  Evaluator evaluator_;
  const Depends depends_;
  Elements elements_;
  SequenceView view_{};
};

}  // namespace

tessera_status check_indices(const tessera_plan& plan, const tessera_buffers& buffers, const Bound& bound) {
  return plan.program.num_tensors > 0 ? Checker(plan, buffers, bound).run() : ok();
}

}  // namespace tessera::core::score
