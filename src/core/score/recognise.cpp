#include "core/score/recognise.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/geometry.hpp"
#include "core/score/builder.hpp"

namespace tessera::core::score {
namespace {

const Value& at(const Program& program, int place) { return program.values[static_cast<size_t>(place)]; }

// Within them no sum of a query's place, a key's and a constant wraps.
constexpr int64_t kMostLength = 1 << 28, kMostConstant = 1 << 28;

// j times `of_j`, plus i or q_pos times `of_query`, plus a constant.
struct Linear {
  int64_t of_j = 0, of_i = 0, of_q_pos = 0, constant = 0;
};

std::optional<Linear> linear(const Program& program, int place) {
  const Value& value = at(program, place);
  switch (value.op) {
    case Op::kJ:
      return Linear{.of_j = 1};
    case Op::kI:
      return Linear{.of_i = 1};
    case Op::kQPos:
      return Linear{.of_q_pos = 1};
    case Op::kConstant:
      if (value.type != Type::kInt) return std::nullopt;
      return Linear{.constant = static_cast<int64_t>(value.constant)};
    case Op::kAddInt:
    case Op::kSubInt: {
      const std::optional<Linear> a = linear(program, value.operands[0]), b = linear(program, value.operands[1]);
      if (!a || !b || std::abs(a->constant) > kMostConstant || std::abs(b->constant) > kMostConstant) {
        return std::nullopt;
      }
      const int64_t sign = value.op == Op::kAddInt ? 1 : -1;
      return Linear{a->of_j + sign * b->of_j, a->of_i + sign * b->of_i, a->of_q_pos + sign * b->of_q_pos,
                    a->constant + sign * b->constant};
    }
    default:
      return std::nullopt;
  }
}

// Keys right of the query's place that are visible: -left .. right, of which either may be absent.
struct Range {
  std::optional<int64_t> left, right;
  bool of_i = false;  // measured from key i, else from key q_pos
};

// difference <= most, of a difference of a key and a query.
std::optional<Range> range_of(const Linear& difference, int64_t most) {
  const int64_t of_query = difference.of_i + difference.of_q_pos;
  const bool one_query = (difference.of_i == 0) != (difference.of_q_pos == 0);
  const int64_t bound = most - difference.constant;
  if (!one_query || std::abs(bound) > kMostConstant) return std::nullopt;
  Range range{.of_i = difference.of_i != 0};
  if (difference.of_j == 1 && of_query == -1) {
    range.right = bound;  // j - place <= bound
  } else if (difference.of_j == -1 && of_query == 1) {
    range.left = bound;  // place - j <= bound
  } else {
    return std::nullopt;
  }
  return range;
}

// The range that a comparison is; none: it is another one.
std::optional<Range> range_of(const Program& program, int place) {
  const Value& value = at(program, place);
  if (value.op != Op::kLessInt && value.op != Op::kLessEqualInt) return std::nullopt;
  const int64_t strict = value.op == Op::kLessInt ? 1 : 0;
  const int left = value.operands[0], right = value.operands[1];
  if (at(program, left).op == Op::kAbsInt) {  // abs(place - j) <= most
    const std::optional<Linear> inner = linear(program, at(program, left).operands[0]), most = linear(program, right);
    if (!inner || !most || most->of_j != 0 || most->of_i != 0 || most->of_q_pos != 0) return std::nullopt;
    const Linear turned{-inner->of_j, -inner->of_i, -inner->of_q_pos, -inner->constant};
    const std::optional<Range> one = range_of(*inner, most->constant - strict);
    const std::optional<Range> other = range_of(turned, most->constant - strict);
    if (!one || !other) return std::nullopt;
    return Range{one->left ? one->left : other->left, one->right ? one->right : other->right, one->of_i};
  }
  const std::optional<Linear> a = linear(program, left), b = linear(program, right);
  if (!a || !b) return std::nullopt;
  return range_of({a->of_j - b->of_j, a->of_i - b->of_i, a->of_q_pos - b->of_q_pos, a->constant - b->constant},
                  -strict);
}

// Whether i and q_pos are one number in every sequence.
bool is_square(const tessera_problem& p) {
  return !packed_q(p) && !packed_k(p) && !paged(p) && !present(p.seqused_k) && p.q.shape[1] == p.k.shape[1];
}

bool has_range(const tessera_problem& p) {
  return p.causal || present(p.causal_seqs) || p.window_left >= 0 || p.window_right >= 0;
}

// Narrows the problem's window; false: its options cannot say this range.
bool narrow(const Range& range, tessera_problem& p) {
  if (range.left.value_or(0) < 0 || range.right.value_or(0) < 0) return false;
  const bool top_left = p.alignment == TESSERA_TOP_LEFT;
  if (!is_square(p) && range.of_i != top_left) {
    if (has_range(p) || !range.of_i) return false;
    p.alignment = TESSERA_TOP_LEFT;
  }
  const auto least = [](int64_t window, const std::optional<int64_t>& bound) {
    return !bound ? window : window < 0 ? *bound : std::min(window, *bound);
  };
  p.window_left = least(p.window_left, range.left);
  p.window_right = least(p.window_right, range.right);
  if (p.window_right == 0 && !present(p.causal_seqs)) p.causal = 1;
  return true;
}

// Terms that are joined by &&, from left to right.
void terms_of(const Program& program, int place, std::vector<int>& terms) {
  const Value& value = at(program, place);
  if (value.op != Op::kAnd) return terms.push_back(place);
  terms_of(program, value.operands[0], terms);
  terms_of(program, value.operands[1], terms);
}

// C of C * tanh(s / C).
std::optional<double> softcap_of(const Program& program) {
  const Value& product = at(program, program.score);
  if (product.op != Op::kMul) return std::nullopt;
  for (const int side : {0, 1}) {
    const Value &factor = at(program, product.operands[side]), &tanh = at(program, product.operands[1 - side]);
    if (factor.op != Op::kConstant || tanh.op != Op::kTanh) continue;
    const Value& quotient = at(program, tanh.operands[0]);
    if (quotient.op != Op::kDiv || at(program, quotient.operands[0]).op != Op::kS) continue;
    const Value& divisor = at(program, quotient.operands[1]);
    if (divisor.op == Op::kConstant && divisor.constant == factor.constant) return factor.constant;
  }
  return std::nullopt;
}

}  // namespace

bool recognise(Program& program, tessera_problem& problem) {
  const Sizes size = sizes(problem);
  if (std::max(size.max_seqlen_q, size.max_seqlen_k) > kMostLength) return false;
  Program left = program;
  tessera_problem changed = problem;
  if (program.mask >= 0) {
    std::vector<int> terms, others;
    terms_of(program, program.mask, terms);
    for (const int term : terms) {
      const std::optional<Range> range = range_of(program, term);
      if (!range || !narrow(*range, changed)) others.push_back(term);
    }
    if (others.size() < terms.size()) {
      Builder builder(program);
      left.mask = others.empty() ? -1 : others[0];
      for (size_t n = 1; n < others.size(); ++n) left.mask = builder.add(Op::kAnd, left.mask, others[n]);
      left.values = builder.program().values;
    }
  }
  if (program.score >= 0 && left.mask < 0) {
    const std::optional<double> softcap = softcap_of(program);
    constexpr double kLeast = 1e-18, kMost = 1e18;  // of the option
    const bool first = problem.softcap == 0 && !present(problem.bias) && !present(problem.alibi_slopes);
    if (softcap && first && *softcap >= kLeast && *softcap <= kMost) changed.softcap = *softcap, left.score = -1;
  }
  if (left.mask == program.mask && left.score == program.score) return false;
  int score = left.score, mask = left.mask;
  left = reachable(left, {&score, &mask});
  left.score = score, left.mask = mask;
  program = left;
  problem = changed;
  return true;
}

}  // namespace tessera::core::score
