#include "core/score/evaluate.hpp"

namespace tessera::core::score {

Evaluator::Evaluator(const Program& program, const Bindings& bindings)
    : program_(program), bindings_(bindings), values_(program.values.size()), made_in_(program.values.size()) {}

void Evaluator::begin(const Inputs& inputs) {
  inputs_ = inputs;
  read_outside_ = false;
  ++round_;
}

double Evaluator::input(Op op) const {
  switch (op) {
    case Op::kS:
      return inputs_.s;
    case Op::kB:
      return static_cast<double>(inputs_.b);
    case Op::kH:
      return static_cast<double>(inputs_.h);
    case Op::kHkv:
      return static_cast<double>(inputs_.h_kv);
    case Op::kI:
      return static_cast<double>(inputs_.i);
    case Op::kJ:
      return static_cast<double>(inputs_.j);
    case Op::kQPos:
      return static_cast<double>(inputs_.q_pos);
    case Op::kLenQ:
      return static_cast<double>(inputs_.len_q);
    case Op::kLenK:
      return static_cast<double>(inputs_.len_k);
    default:
      return inputs_.g;
  }
}

double Evaluator::value(int place) {
  const size_t at = static_cast<size_t>(place);
  if (made_in_[at] == round_) return values_[at];
  const Value& v = program_.values[at];
  double result = 0;
  if (v.op <= Op::kG) {
    result = input(v.op);
  } else if (v.op == Op::kConstant) {
    result = v.constant;
  } else if (v.op == Op::kScalar) {
    result = bindings_.scalar(v.name);
  } else if (v.op == Op::kLoad) {
    int64_t index[kMaxOperands] = {};
    for (int n = 0; n < operand_count(v); ++n) index[n] = static_cast<int64_t>(value(v.operands[n]));
    bool read = true;
    result = bindings_.element(v.name, index, read);
    if (!read) result = 0, read_outside_ = true;
  } else {
    double x[3] = {};
    const bool chooses = v.op == Op::kWhere || v.op == Op::kWhereInt || v.op == Op::kWhereBool;
    x[0] = value(v.operands[0]);
    if (chooses) {
      const int taken = x[0] != 0 ? 1 : 2;
      x[taken] = value(v.operands[taken]);
    } else if ((v.op == Op::kAnd && x[0] == 0) || (v.op == Op::kOr && x[0] != 0)) {
      x[1] = x[0];  // the other side has no effect
    } else {
      for (int n = 1; n < operation(v.op).operands; ++n) x[n] = value(v.operands[n]);
    }
    result = operation(v.op).evaluate(x);
  }
  values_[at] = result;
  made_in_[at] = round_;
  return result;
}

namespace {

// a - b if both are i, q_pos or j plus a constant. All combinations of a block's places occur in pairs, so the
// difference is bounded exactly. But q_pos - i is one number for a sequence, and x - x is 0.
bool difference_of_places(const Program& program, int a, int b, const Bounds& bounds, Interval& result) {
  const Op first = program.values[static_cast<size_t>(a)].op, second = program.values[static_cast<size_t>(b)].op;
  if (a == b) {
    result = Interval::exactly(0);
    return true;
  }
  const bool rows = (first == Op::kI && second == Op::kQPos) || (first == Op::kQPos && second == Op::kI);
  if (!rows) return false;
  const Interval diagonal = {bounds.len_k.low - bounds.len_q.high, bounds.len_k.high - bounds.len_q.low};
  result = first == Op::kQPos ? diagonal : Interval{-diagonal.high, -diagonal.low};
  return true;
}

}  // namespace

namespace {

// Bounds of the values up to `root`.
std::vector<Interval> bounds_up_to(const Program& program, int root, const Bounds& bounds) {
  const Interval inputs[] = {bounds.s, bounds.b,     bounds.h,     bounds.h_kv,  bounds.i,
                             bounds.j, bounds.q_pos, bounds.len_q, bounds.len_k, bounds.g};
  std::vector<Interval> of(static_cast<size_t>(root) + 1);
  for (int place = 0; place <= root; ++place) {
    const Value& v = program.values[static_cast<size_t>(place)];
    Interval& result = of[static_cast<size_t>(place)];
    if (v.op <= Op::kG) {
      result = inputs[static_cast<size_t>(v.op)];
      continue;
    }
    Interval x[kMaxOperands];
    for (int n = 0; n < operand_count(v); ++n) x[n] = of[static_cast<size_t>(v.operands[n])];
    if (v.op == Op::kConstant) {
      result = Interval::exactly(v.constant);
    } else if (v.op == Op::kScalar) {
      result = bounds.scalar(v.name);
    } else if (v.op == Op::kLoad) {
      result = bounds.element(v.name, x);
    } else if (v.op == Op::kSubInt && difference_of_places(program, v.operands[0], v.operands[1], bounds, result)) {
      continue;
    } else if (operation(v.op).bound) {
      result = operation(v.op).bound(x);
    } else {
      const Type type = operation(v.op).result;
      result = type == Type::kFloat  ? Interval::everything()
               : type == Type::kBool ? Interval{0, 1}
                                     : Interval{INT32_MIN, INT32_MAX};
    }
  }
  return of;
}

}  // namespace

Interval bound(const Program& program, int root, const Bounds& bounds) {
  return bounds_up_to(program, root, bounds)[static_cast<size_t>(root)];
}

std::vector<Interval> bounds_of_values(const Program& program, const Bounds& bounds) {
  return bounds_up_to(program, static_cast<int>(program.values.size()) - 1, bounds);
}

Visible visible(const Program& program, const Bounds& bounds) {
  if (program.mask < 0) return Visible::kAll;
  const Interval mask = bound(program, program.mask, bounds);
  return mask.is(1) ? Visible::kAll : mask.is(0) ? Visible::kNone : Visible::kSome;
}

}  // namespace tessera::core::score
