#include "core/score/recognised.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "core/score/builder.hpp"
#include "core/score/operations.hpp"

namespace tessera::core::score {
namespace {

// An integer as a sum of positions and lengths, times small numbers, and a constant.
struct Affine {
  int64_t i = 0, j = 0, q_pos = 0, len_q = 0, len_k = 0, constant = 0;

  // The largest magnitude that a value with these terms can have, if positions and lengths are at most `longest`.
  int64_t most(int64_t longest) const {
    const int64_t terms = std::abs(i) + std::abs(j) + std::abs(q_pos) + std::abs(len_q) + std::abs(len_k);
    return terms * longest + std::abs(constant);
  }
};

Affine sum(const Affine& a, const Affine& b, int64_t sign) {
  return {a.i + sign * b.i,         a.j + sign * b.j,         a.q_pos + sign * b.q_pos,
          a.len_q + sign * b.len_q, a.len_k + sign * b.len_k, a.constant + sign * b.constant};
}

// q_pos = i + len_k - len_q.
Affine with_q_pos(Affine x) {
  if (x.i != 0 && x.len_k == x.i && x.len_q == -x.i) x.q_pos += x.i, x.i = x.len_k = x.len_q = 0;
  return x;
}

class Recogniser {
 public:
  Recogniser(const Program& program, const Surroundings& surroundings) : program_(program), around_(surroundings) {
    for (int place = 0; place < size(); ++place) affine_.push_back(make_affine(place));
  }

  Recognised run() {
    Recognised result;
    std::vector<int> others;  // terms of the mask that stay
    const std::vector<int> terms = terms_of_mask();
    // The range is of one position: q_pos if any term has it, else i.
    const bool q_pos = std::ranges::any_of(terms, [this](int term) {
      const std::optional<PositionRange> range = range_of(term);
      return range && range->from_q_pos && can_say(*range);
    });
    for (const int term : terms) {
      const std::optional<PositionRange> range = range_of(term);
      if (range && range->from_q_pos == q_pos && can_say(*range)) {
        result.range = {q_pos, std::max(result.range.low, range->low), std::min(result.range.high, range->high)};
      } else {
        others.push_back(term);
      }
    }
    const bool causal = around_.causal || (result.range.from_q_pos && result.range.high <= 0);

    int inner = -1;  // the value that the options make; -1: s
    if (program_.score >= 0) {
      const bool may_cap = !around_.softcap && !around_.bias && !around_.alibi;
      if (const int capped = may_cap ? softcapped(result.softcap) : -1; capped >= 0) inner = capped;
      if (!around_.alibi) {
        if (const int sloped = alibi(inner, causal, result.slopes); sloped >= 0) inner = sloped;
      }
    }
    result.rest = rest(inner, others);
    return result;
  }

 private:
  const Value& at(int place) const { return program_.values[static_cast<size_t>(place)]; }
  int size() const { return static_cast<int>(program_.values.size()); }
  bool can_say(const PositionRange& range) const { return !around_.can_say || around_.can_say(range); }
  bool is_constant(int place, double x) const { return at(place).op == Op::kConstant && at(place).constant == x; }

  // ---- the mask ----

  // The terms of the conjunction, each once.
  std::vector<int> terms_of_mask() const {
    std::vector<int> terms;
    if (program_.mask < 0) return terms;
    std::vector<bool> seen(program_.values.size());
    std::vector<int> left{program_.mask};
    while (!left.empty()) {
      const int place = left.back();
      left.pop_back();
      if (seen[static_cast<size_t>(place)]) continue;
      seen[static_cast<size_t>(place)] = true;
      if (at(place).op == Op::kAnd) {
        left.push_back(at(place).operands[1]), left.push_back(at(place).operands[0]);
      } else {
        terms.push_back(place);
      }
    }
    return terms;
  }

  // Only what cannot wrap: each operation's result is within 32 bits for all positions and lengths.
  const std::optional<Affine>& affine(int place) const { return affine_[static_cast<size_t>(place)]; }
  std::optional<Affine> make_affine(int place) const {
    const Value& value = at(place);
    const int a = value.operands[0], b = value.operands[1];
    std::optional<Affine> result;
    const auto combined = [&](int64_t sign) {
      const std::optional<Affine> left = affine(a), right = affine(b);
      if (left && right) result = sum(*left, *right, sign);
    };
    switch (value.op) {
      case Op::kI:
        result = around_.equal_lengths ? Affine{.q_pos = 1} : Affine{.i = 1};
        break;
      case Op::kJ:
        result = Affine{.j = 1};
        break;
      case Op::kQPos:
        result = Affine{.q_pos = 1};
        break;
      case Op::kLenQ:
        result = around_.equal_lengths ? Affine{.len_k = 1} : Affine{.len_q = 1};
        break;
      case Op::kLenK:
        result = Affine{.len_k = 1};
        break;
      case Op::kConstant:
        if (value.type == Type::kInt) result = Affine{.constant = static_cast<int64_t>(value.constant)};
        break;
      case Op::kAddInt:
        combined(1);
        break;
      case Op::kSubInt:
        combined(-1);
        break;
      case Op::kNegInt:
        if (const std::optional<Affine> of = affine(a)) result = sum({}, *of, -1);
        break;
      default:
        break;
    }
    if (!result || result->most(around_.longest) > INT32_MAX) return std::nullopt;
    return with_q_pos(*result);
  }

  // What a truth value says of j - position, if it says nothing else.
  std::optional<PositionRange> range_of(int place, bool when = true) const {
    const Value& value = at(place);
    const int a = value.operands[0], b = value.operands[1];
    if (value.op == Op::kNot) return range_of(a, !when);
    const bool is_less = value.op == Op::kLessInt;
    if (!is_less && value.op != Op::kLessEqualInt && !(value.op == Op::kEqualInt && when)) return std::nullopt;
    if (value.op == Op::kEqualInt) {
      const std::optional<Affine> left = affine(a), right = affine(b);
      if (!left || !right) return std::nullopt;
      const Affine difference = sum(*left, *right, -1);
      return both(at_most_zero(difference), at_most_zero(sum({}, difference, -1)));
    }
    // abs(x) < c, abs(x) <= c: -c < x < c.
    if (at(a).op == Op::kAbsInt && when) {
      const std::optional<Affine> of = affine(at(a).operands[0]), limit = affine(b);
      if (!of || !limit) return std::nullopt;
      Affine above = sum(*of, *limit, -1), below = sum(sum({}, *of, -1), *limit, -1);
      above.constant += is_less, below.constant += is_less;
      return both(at_most_zero(above), at_most_zero(below));
    }
    // a <= b: a - b <= 0; not (a <= b): b - a < 0, of integers b - a + 1 <= 0.
    const std::optional<Affine> left = affine(a), right = affine(b);
    if (!left || !right) return std::nullopt;
    Affine difference = when ? sum(*left, *right, -1) : sum(*right, *left, -1);
    difference.constant += when == is_less;
    return at_most_zero(difference);
  }

  // x <= 0, where x is a multiple of nothing but (j - position) and a constant.
  static std::optional<PositionRange> at_most_zero(Affine x) {
    x = with_q_pos(x);
    // i = q_pos + len_q - len_k.
    if (x.q_pos != 0 && x.len_q == x.q_pos && x.len_k == -x.q_pos) x.i += x.q_pos, x.q_pos = x.len_q = x.len_k = 0;
    if (x.len_q != 0 || x.len_k != 0 || std::abs(x.j) != 1) return std::nullopt;
    const bool from_q_pos = x.q_pos == -x.j && x.i == 0;
    if (!from_q_pos && !(x.i == -x.j && x.q_pos == 0)) return std::nullopt;
    PositionRange range{.from_q_pos = from_q_pos};
    if (x.j > 0) {
      range.high = -x.constant;  // j - position + constant <= 0
    } else {
      range.low = x.constant;
    }
    return range;
  }
  static std::optional<PositionRange> both(const std::optional<PositionRange>& a,
                                           const std::optional<PositionRange>& b) {
    if (!a || !b || a->from_q_pos != b->from_q_pos) return std::nullopt;
    return PositionRange{a->from_q_pos, std::max(a->low, b->low), std::min(a->high, b->high)};
  }

  // ---- the score ----

  // The pair of operands of a commuting operation for which `is` holds in this order or the other.
  template <class Is>
  static bool either_order(int a, int b, const Is& is) {
    return is(a, b) || is(b, a);
  }

  bool is_score(int place, int inner) const { return inner < 0 ? at(place).op == Op::kS : place == inner; }

  // Whether score and mask depend on `inner` (-1: s) through `outer` alone.
  bool only_through(int outer, int inner) const {
    std::vector<bool> needed(program_.values.size());
    if (program_.score >= 0) needed[static_cast<size_t>(program_.score)] = true;
    if (program_.mask >= 0) needed[static_cast<size_t>(program_.mask)] = true;
    for (int place = size() - 1; place >= 0; --place) {
      if (!needed[static_cast<size_t>(place)] || place == outer) continue;
      if (is_score(place, inner)) return false;
      for (int n = 0; n < operand_count(at(place)); ++n) {
        needed[static_cast<size_t>(at(place).operands[n])] = true;
      }
    }
    return needed[static_cast<size_t>(outer)];
  }

  int softcapped(double& cap) const {
    for (int place = 0; place < size(); ++place) {
      if (at(place).op != Op::kMul) continue;
      double c = 0;
      const auto is = [&](int factor, int tanh) {
        if (at(factor).op != Op::kConstant || at(tanh).op != Op::kTanh) return false;
        const Value& quotient = at(at(tanh).operands[0]);
        c = at(factor).constant;
        // The option's bounds; kernels hold it as float32.
        return c >= 1e-18 && c <= 1e18 && static_cast<float>(c) == c && quotient.op == Op::kDiv &&
               at(quotient.operands[0]).op == Op::kS && is_constant(quotient.operands[1], c);
      };
      if (either_order(at(place).operands[0], at(place).operands[1], is) && only_through(place, -1)) {
        cap = c;
        return place;
      }
    }
    return -1;
  }

  // slope[h] or slope[b, h].
  bool is_slope(int place, int& slopes) const {
    const Value& value = at(place);
    if (value.op != Op::kLoad || value.type != Type::kFloat) return false;
    const int count = operand_count(value);
    if (count != 1 && count != 2) return false;
    if (at(value.operands[count - 1]).op != Op::kH) return false;
    if (count == 2 && at(value.operands[0]).op != Op::kB) return false;
    if (around_.no_slopes >> value.name & 1) return false;
    slopes = value.name;
    return true;
  }

  // sign * (the distance of j from q_pos), of visible pairs; 0: the value is something else.
  int distance_sign(int place, bool causal) const {
    const Value& value = at(place);
    if (value.op == Op::kNeg || value.op == Op::kNegInt || value.op == Op::kIntToFloat) {
      return (value.op == Op::kIntToFloat ? 1 : -1) * distance_sign(value.operands[0], causal);
    }
    const bool absolute = value.op == Op::kAbsInt || value.op == Op::kAbs;
    int inner = absolute ? value.operands[0] : place;
    if (at(inner).op == Op::kIntToFloat) inner = at(inner).operands[0];
    const std::optional<Affine> of = at(inner).type == Type::kInt ? affine(inner) : std::nullopt;
    if (!of || std::abs(of->j) != 1 || of->q_pos != -of->j) return 0;
    if (of->i != 0 || of->len_q != 0 || of->len_k != 0 || of->constant != 0) return 0;
    if (absolute) return 1;
    return causal ? static_cast<int>(of->q_pos) : 0;
  }

  // slope * distance, with a sign.
  int term_sign(int place, bool causal, int& slopes) const {
    const Value& value = at(place);
    if (value.op == Op::kNeg) return -term_sign(value.operands[0], causal, slopes);
    if (value.op != Op::kMul) return 0;
    int sign = 0;
    either_order(value.operands[0], value.operands[1], [&](int slope, int distance) {
      int factor = 1;
      while (at(slope).op == Op::kNeg) slope = at(slope).operands[0], factor = -factor;
      if (!is_slope(slope, slopes)) return false;
      sign = factor * distance_sign(distance, causal);
      return sign != 0;
    });
    return sign;
  }

  int alibi(int inner, bool causal, int& slopes) const {
    for (int place = 0; place < size(); ++place) {
      const Value& value = at(place);
      if (value.op != Op::kAdd && value.op != Op::kSub) continue;
      const int a = value.operands[0], b = value.operands[1];
      int found = -1;
      const bool is = value.op == Op::kSub ? is_score(a, inner) && term_sign(b, causal, found) == 1
                                           : either_order(a, b, [&](int score, int term) {
                                               return is_score(score, inner) && term_sign(term, causal, found) == -1;
                                             });
      if (is && only_through(place, inner)) {
        slopes = found;
        return place;
      }
    }
    return -1;
  }

  // ---- what is left ----

  // The program with s in place of `inner`, and the other terms of the mask.
  Program rest(int inner, const std::vector<int>& others) const {
    Builder build;
    std::vector<int> places(program_.values.size());
    for (int place = 0; place < size(); ++place) {
      const Value& value = at(place);
      int& to = places[static_cast<size_t>(place)];
      const auto operand = [&](int n) {
        return value.operands[n] < 0 ? -1 : places[static_cast<size_t>(value.operands[n])];
      };
      if (place == inner) {
        to = build.add(Op::kS);
      } else if (value.op == Op::kConstant) {
        to = build.constant(value.type, value.constant);
      } else if (value.op == Op::kScalar) {
        to = build.scalar(program_.scalars[static_cast<size_t>(value.name)]);
      } else if (value.op == Op::kLoad) {
        std::vector<int> indices;
        for (int n = 0; n < operand_count(value); ++n) indices.push_back(operand(n));
        to = build.load(program_.tensors[static_cast<size_t>(value.name)], indices);
      } else {
        to = build.add(value.op, operand(0), operand(1), operand(2));
      }
    }
    int score = program_.score < 0 ? -1 : places[static_cast<size_t>(program_.score)];
    if (score >= 0 && build.at(score).op == Op::kS) score = -1;
    int mask = -1;
    for (const int term : others) {
      const int to = places[static_cast<size_t>(term)];
      mask = mask < 0 ? to : build.add(Op::kAnd, mask, to);
    }
    Program result = reachable(build.program(), {&score, &mask});
    result.score = score, result.mask = mask;
    return result;
  }

  const Program& program_;
  const Surroundings& around_;
  std::vector<std::optional<Affine>> affine_;  // of the integers that are such sums
};

}  // namespace

Recognised recognise(const Program& program, const Surroundings& surroundings) {
  return Recogniser(program, surroundings).run();
}

}  // namespace tessera::core::score
