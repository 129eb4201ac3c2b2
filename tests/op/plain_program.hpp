// A case's score program evaluated plainly, one pair after another, with the rounding errors that a kernel's evaluation
// may have, and differentiated by hand in reverse. Integers and truth values are exact, by the table of operations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/score/definitions.hpp"
#include "core/score/operations.hpp"
#include "inputs.hpp"

namespace tessera::testing {

// A number, and by how much roundings may have moved it.
template <class Real>
struct Rounded {
  Real value;
  double noise;
};

template <class Real>
class PlainProgram {
 public:
  // `epsilon`: of one rounding of Real.
  PlainProgram(const Inputs& in, double epsilon)
      : in_(in), program_(*in.program), epsilon_(epsilon), slots_(program_.values.size()) {}

  // Evaluates the program for a pair whose score so far is s.
  void evaluate(const core::score::Inputs& pair, Rounded<Real> s) {
    for (size_t n = 0; n < slots_.size(); ++n) evaluate(program_.values[n], pair, s, slots_[n]);
    s_ = s;
  }
  // After evaluate:
  bool visible() const { return program_.mask < 0 || slots_[static_cast<size_t>(program_.mask)].integer != 0; }
  Rounded<Real> score() const {
    if (program_.score < 0) return s_;
    const Slot& slot = slots_[static_cast<size_t>(program_.score)];
    return {slot.value, slot.noise};
  }
  // Of the gradient g of the new score, that of s. visit(tensor, element, gradient): what a tensor's element receives.
  template <class Visit>
  Rounded<Real> gradient(Rounded<Real> g, const Visit& visit) {
    if (program_.score < 0) return g;
    for (Slot& slot : slots_) slot.adjoint = {0, 0};
    slots_[static_cast<size_t>(program_.score)].adjoint = g;
    Rounded<Real> d_s{0, 0};
    for (size_t n = slots_.size(); n-- > 0;) {
      const Rounded<Real> adjoint = slots_[n].adjoint;
      if (adjoint.value == 0 && adjoint.noise == 0) continue;
      const core::score::Value& value = program_.values[n];
      if (value.op == Op::kS) d_s = adjoint;
      if (value.op == Op::kLoad && slots_[n].integer >= 0)
        visit(static_cast<size_t>(value.name), slots_[n].integer, adjoint);
      derive(value, slots_[n]);
    }
    return d_s;
  }

 private:
  using Op = core::score::Op;
  using Type = core::score::Type;

  struct Slot {
    Real value = 0;  // of a float
    double noise = 0;
    int64_t integer = 0;  // of an integer or a truth value; of a load of a float, its element, -1: outside
    bool unsure = false;  // a comparison of floats, or what follows from it: rounding may decide
    Rounded<Real> adjoint{0, 0};
  };

  // Functions are exact to four units; noise is doubled where it is compared.
  static constexpr double kRoundingsOfFunction = 2;
  static constexpr double kInf = std::numeric_limits<double>::infinity();

  static double times(double noise, double slope) { return noise == 0 || slope == 0 ? 0 : noise * std::fabs(slope); }

  void evaluate(const core::score::Value& v, const core::score::Inputs& pair, Rounded<Real> s, Slot& to) {
    const int64_t inputs[] = {0, pair.b, pair.h, pair.h_kv, pair.i, pair.j, pair.q_pos, pair.len_q, pair.len_k};
    to.unsure = false, to.noise = 0;
    if (v.op == Op::kS) {
      to.value = s.value, to.noise = s.noise;
    } else if (v.op < Op::kG) {
      to.integer = inputs[static_cast<size_t>(v.op)];
    } else if (v.op == Op::kConstant || v.op == Op::kScalar) {
      const double number = v.op == Op::kConstant ? v.constant : in_.scalars[static_cast<size_t>(v.name)];
      if (v.type != Type::kFloat) return void(to.integer = static_cast<int64_t>(number));
      to.value = static_cast<Real>(number);
      to.noise = static_cast<double>(to.value) == number || std::isnan(number) ? 0 : epsilon_ * std::fabs(number);
    } else if (v.op == Op::kLoad) {
      load(v, to);
    } else {
      operate(v, to);
    }
  }

  Slot& operand(const core::score::Value& v, int n) { return slots_[static_cast<size_t>(v.operands[n])]; }

  void load(const core::score::Value& v, Slot& to) {
    const CapturedTensor& tensor = in_.captured[static_cast<size_t>(v.name)];
    int64_t element = 0;
    for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
      const Slot& index = operand(v, static_cast<int>(axis));
      const bool inside = element >= 0 && index.integer >= 0 && index.integer < tensor.shape[axis];
      element = inside ? element * tensor.shape[axis] + index.integer : -1;
      if (index.unsure) to.unsure = true, to.noise = kInf;
    }
    const double value = element < 0 ? 0 : tensor.values[static_cast<size_t>(element)];
    if (v.type == Type::kFloat) {
      to.value = static_cast<Real>(value), to.integer = element;
    } else {
      to.integer = static_cast<int64_t>(value);
    }
  }

  void operate(const core::score::Value& v, Slot& to) {
    const core::score::Operation& operation = core::score::operation(v.op);
    const Slot* x[3] = {};
    for (int n = 0; n < operation.operands; ++n) x[n] = &operand(v, n);
    if (operation.result == Type::kFloat) return compute(v.op, x, to);
    double exact[3] = {};
    for (int n = 0; n < operation.operands; ++n) {
      const bool is_float = operation.operand[n] == Type::kFloat;
      exact[n] = is_float ? static_cast<double>(x[n]->value) : static_cast<double>(x[n]->integer);
      to.unsure = to.unsure || x[n]->unsure;
    }
    to.integer = static_cast<int64_t>(operation.evaluate(exact));
    if (v.op == Op::kFloatToInt) to.unsure = is_near_integer(*x[0]);
    if (operation.operands == 2 && operation.operand[0] == Type::kFloat) to.unsure = are_near(*x[0], *x[1]);
  }

  static bool is_near_integer(const Slot& x) {
    const auto value = static_cast<double>(x.value);
    return x.noise > 0 && std::fabs(value - std::nearbyint(value)) <= x.noise;
  }
  static bool are_near(const Slot& a, const Slot& b) {
    const double noise = a.noise + b.noise;
    return noise > 0 && std::fabs(static_cast<double>(a.value) - static_cast<double>(b.value)) <= noise;
  }

  void compute(Op op, const Slot* const* x, Slot& to) {
    const Real a = x[0] ? x[0]->value : 0, b = x[1] ? x[1]->value : 0;
    const double noise_a = x[0] ? x[0]->noise : 0, noise_b = x[1] ? x[1]->noise : 0;
    Real& y = to.value;
    const auto rounded = [&](Real value, double noise, double roundings) {
      y = value;
      to.noise = noise + (value == 0 ? 0 : roundings * epsilon_ * std::fabs(static_cast<double>(value)));
    };
    const auto function = [&](Real value, double slope) {
      rounded(value, times(noise_a, slope), kRoundingsOfFunction);
    };
    switch (op) {
      case Op::kAdd:
        return rounded(a + b, noise_a + noise_b, 1);
      case Op::kSub:
        return rounded(a - b, noise_a + noise_b, 1);
      case Op::kMul:
        return rounded(a * b, times(noise_a, b) + times(noise_b, a), 1);
      case Op::kDiv:
        return rounded(a / b, times(noise_a, 1 / b) + times(noise_b, a / b / b), 1);
      case Op::kNeg:
        return rounded(-a, noise_a, 0);
      case Op::kAbs:
        return rounded(std::fabs(a), noise_a, 0);
      case Op::kMin:
      case Op::kMax: {
        const bool first = op == Op::kMin ? a < b : b < a;
        const Real chosen = std::isnan(a) || std::isnan(b) ? a + b : first ? a : b;
        return rounded(chosen, are_near(*x[0], *x[1]) ? std::max(noise_a, noise_b) : first ? noise_a : noise_b, 0);
      }
      case Op::kFloor:
        return rounded(std::floor(a), is_near_integer(*x[0]) ? 1 : 0, 0);
      case Op::kSign:
        return rounded(std::isnan(a) ? a : static_cast<Real>((a > 0) - (a < 0)), are_near(*x[0], Slot{}) ? 1 : 0, 0);
      case Op::kExp:
        return function(std::exp(a), std::exp(a));
      case Op::kExp2:
        return function(std::exp2(a), M_LN2 * std::exp2(a));
      case Op::kLog:
        return function(std::log(a), 1 / a);
      case Op::kSqrt:
        return function(std::sqrt(a), 1 / (2 * std::sqrt(a)));
      case Op::kRsqrt:
        return function(1 / std::sqrt(a), 1 / (2 * a * std::sqrt(a)));
      case Op::kTanh:
        return function(std::tanh(a), 1 - std::tanh(a) * std::tanh(a));
      case Op::kSigmoid: {
        const Real sigmoid = 1 / (1 + std::exp(-a));
        return function(sigmoid, sigmoid * (1 - sigmoid));
      }
      case Op::kSin:
        to.value = std::sin(a), to.noise = times(noise_a, std::cos(a)) + kRoundingsOfFunction * epsilon_;
        return;
      case Op::kCos:
        to.value = std::cos(a), to.noise = times(noise_a, std::sin(a)) + kRoundingsOfFunction * epsilon_;
        return;
      case Op::kWhere: {
        const Slot &taken = x[0]->integer ? *x[1] : *x[2], &other = x[0]->integer ? *x[2] : *x[1];
        const double jump = std::fabs(static_cast<double>(taken.value) - static_cast<double>(other.value));
        return rounded(taken.value, x[0]->unsure ? std::max(taken.noise, other.noise) + jump : taken.noise, 0);
      }
      default:  // of an integer or a truth value
        return rounded(static_cast<Real>(x[0]->integer), x[0]->unsure ? 1 : 0,
                       std::abs(x[0]->integer) < int64_t{1} << 24 ? 0 : 1);
    }
  }

  // Gives operand n the adjoint times a slope that may be off by `noise`.
  void give(const core::score::Value& v, int n, const Slot& y, Real slope, double noise) {
    Rounded<Real>& to = operand(v, n).adjoint;
    const Rounded<Real>& g = y.adjoint;
    const Real term = g.value * slope;
    to.value += term;
    to.noise += times(g.noise, slope) + times(noise, g.value) + times(epsilon_, term);
  }

  void derive(const core::score::Value& v, const Slot& y) {
    if (v.op < Op::kAdd || v.type != Type::kFloat) return;
    const int operands = core::score::operation(v.op).operands;
    const Slot &a = operand(v, 0), &b = operands > 1 ? operand(v, 1) : a;
    const double noise = y.noise, unit = epsilon_;
    const Real value = y.value;
    switch (v.op) {
      case Op::kAdd:
        return give(v, 0, y, 1, 0), give(v, 1, y, 1, 0);
      case Op::kSub:
        return give(v, 0, y, 1, 0), give(v, 1, y, -1, 0);
      case Op::kMul:
        return give(v, 0, y, b.value, b.noise), give(v, 1, y, a.value, a.noise);
      case Op::kDiv:
        give(v, 0, y, 1 / b.value, times(b.noise, 1 / b.value / b.value));
        return give(v, 1, y, -value / b.value, times(noise, 1 / b.value) + times(b.noise, value / b.value / b.value));
      case Op::kNeg:
        return give(v, 0, y, -1, 0);
      case Op::kAbs:
        return give(v, 0, y, static_cast<Real>((a.value > 0) - (a.value < 0)), are_near(a, Slot{}) ? 2 : 0);
      case Op::kMin:
      case Op::kMax: {
        const bool first = v.op == Op::kMin ? a.value < b.value : b.value < a.value, tie = a.value == b.value;
        const double jump = are_near(a, b) ? 1 : 0;
        give(v, 0, y, static_cast<Real>(tie ? 0.5 : first), jump);
        return give(v, 1, y, static_cast<Real>(tie ? 0.5 : !first), jump);
      }
      case Op::kExp:
        return give(v, 0, y, value, noise);
      case Op::kExp2:
        return give(v, 0, y, static_cast<Real>(M_LN2) * value, noise);
      case Op::kLog:
        return give(v, 0, y, 1 / a.value, times(a.noise, 1 / a.value / a.value));
      case Op::kSqrt:
        return give(v, 0, y, 1 / (2 * value), times(noise, 1 / (2 * value * value)));
      case Op::kRsqrt:
        return give(v, 0, y, value * value * value / -2, times(noise, value * value * 3 / 2));
      case Op::kTanh:
        return give(v, 0, y, 1 - value * value, times(noise, 2 * value) + unit);
      case Op::kSigmoid:
        return give(v, 0, y, value * (1 - value), noise + unit);
      case Op::kSin:
        return give(v, 0, y, std::cos(a.value), a.noise + kRoundingsOfFunction * unit);
      case Op::kCos:
        return give(v, 0, y, -std::sin(a.value), a.noise + kRoundingsOfFunction * unit);
      case Op::kWhere: {
        const int taken = a.integer ? 1 : 2, jump = a.unsure ? 1 : 0;
        give(v, taken, y, 1, jump);
        return give(v, 3 - taken, y, 0, jump);
      }
      default:  // floor and sign, whose derivative is 0, and conversions
        return;
    }
  }

  const Inputs& in_;
  const core::score::Program& program_;
  const double epsilon_;
  std::vector<Slot> slots_;
  Rounded<Real> s_{0, 0};
};

}  // namespace tessera::testing
