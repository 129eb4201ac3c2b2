#include "core/score/affine.hpp"

#include <algorithm>
#include <vector>

#include "core/score/builder.hpp"

namespace tessera::core::score {
namespace {

constexpr int kNone = -1;

// factor s + term; kNone: 0.
struct Form {
  int factor = kNone, term = kNone;
};

class Reader {
 public:
  explicit Reader(const Program& program) : build_(program) {
    for (int place = 0; place < static_cast<int>(program.values.size()); ++place) {
      forms_.push_back(form_of(program.values[static_cast<size_t>(place)], place));
    }
  }

  const std::optional<Form>& form(int place) const { return forms_[static_cast<size_t>(place)]; }
  const Program& program() const { return build_.program(); }

 private:
  std::optional<Form> form_of(const Value& value, int place) {
    if (value.op == Op::kS) return Form{build_.number(1), kNone};
    bool known = true, needs_s = false;
    for (int n = 0; n < operand_count(value); ++n) {
      const std::optional<Form>& operand = form(value.operands[n]);
      known = known && operand;
      needs_s = needs_s || !operand || operand->factor != kNone;
    }
    if (!needs_s) return Form{kNone, place};
    if (!known) return std::nullopt;
    switch (value.op) {
      case Op::kAdd:
      case Op::kSub:
        return sum(value.op, *form(value.operands[0]), *form(value.operands[1]));
      case Op::kNeg:
        return negated(*form(value.operands[0]));
      case Op::kMul:
      case Op::kDiv:
        return product(value);
      default:
        return std::nullopt;
    }
  }
  std::optional<Form> product(const Value& value) {
    const Form a = *form(value.operands[0]), b = *form(value.operands[1]);
    if (b.factor == kNone) return times(value.op, a, b.term);
    if (a.factor == kNone && value.op == Op::kMul) return times(value.op, b, a.term);
    return std::nullopt;
  }
  Form times(Op op, const Form& a, int b) {
    const auto both = [&](int x) { return x == kNone ? kNone : build_.add(op, x, b); };
    return {both(a.factor), both(a.term)};
  }
  Form negated(const Form& a) {
    const auto minus = [&](int x) { return x == kNone ? kNone : build_.add(Op::kNeg, x); };
    return {minus(a.factor), minus(a.term)};
  }
  Form sum(Op op, const Form& a, const Form& b) {
    const Form second = op == Op::kSub ? negated(b) : b;
    const auto both = [&](int x, int y, int y_second) {
      return y == kNone ? x : x == kNone ? y_second : build_.add(op, x, y);
    };
    return {both(a.factor, b.factor, second.factor), both(a.term, b.term, second.term)};
  }

  Builder build_;
  std::vector<std::optional<Form>> forms_;  // of each value of the program
};

}  // namespace

std::optional<Affine> affine_of(const Program& program) {
  if (program.score < 0 || program.values[static_cast<size_t>(program.score)].op == Op::kS) return std::nullopt;
  const Reader reader(program);
  const std::optional<Form>& form = reader.form(program.score);
  if (!form || form->factor == kNone) return std::nullopt;
  return Affine{reader.program(), form->factor, form->term};
}

bool is_linear_in_key(const Program& program, int place) {
  enum Kind { kSame, kLinear, kOther };  // of a value, for the keys of one query
  std::vector<Kind> kinds;
  for (const Value& value : program.values) {
    const auto operand = [&](int n) { return kinds[static_cast<size_t>(value.operands[n])]; };
    Kind most = value.op == Op::kJ ? kLinear : value.op == Op::kS || value.op == Op::kG ? kOther : kSame;
    for (int n = 0; n < operand_count(value); ++n) most = std::max(most, operand(n));
    if (most == kLinear) {
      switch (value.op) {
        case Op::kJ:
        case Op::kAdd:
        case Op::kSub:
        case Op::kNeg:
        case Op::kAddInt:
        case Op::kSubInt:
        case Op::kNegInt:
        case Op::kIntToFloat:
          break;
        case Op::kMul:
        case Op::kMulInt:
          if (operand(0) == kLinear && operand(1) == kLinear) most = kOther;
          break;
        case Op::kDiv:
          if (operand(1) == kLinear) most = kOther;
          break;
        default:
          most = kOther;
      }
    }
    kinds.push_back(most);
  }
  return kinds[static_cast<size_t>(place)] == kLinear;
}

}  // namespace tessera::core::score
