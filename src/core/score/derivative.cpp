#include "core/score/derivative.hpp"

#include <cmath>
#include <numbers>

#include "core/score/builder.hpp"
#include "core/score/operations.hpp"

namespace tessera::core::score {
namespace {

class Reverse {
 public:
  explicit Reverse(const Program& program)
      : build_(program), adjoints_(program.values.size(), kZero), selected_(program.values.size()) {}

  Gradient run(int root) {
    std::vector<LoadGradient> loads;
    const int d_s = differentiate(root, build_.add(Op::kG), loads);
    return finished(d_s, std::move(loads));
  }
  Slope run_slope(int root) {
    std::vector<LoadGradient> loads;
    const int d_s = differentiate(root, number(1), loads);
    return {build_.program(), d_s, std::move(loads)};
  }

 private:
  static constexpr int kZero = -1;

  // Returns the adjoint of s, given that of the root.
  int differentiate(int root, int of_root, std::vector<LoadGradient>& loads) {
    const int count = static_cast<int>(adjoints_.size());
    adjoints_[static_cast<size_t>(root)] = of_root;
    int d_s = kZero;
    for (int place = count - 1; place >= 0; --place) {
      const int g = adjoints_[static_cast<size_t>(place)];
      if (g == kZero) continue;
      const Value value = build_.at(place);
      if (value.op == Op::kS) d_s = g;
      if (value.op == Op::kLoad && value.type == Type::kFloat) {
        loads.insert(loads.begin(), {value.name, {value.operands, value.operands + operand_count(value)}, g});
      }
      g_ = g, now_selected_ = selected_[static_cast<size_t>(place)];
      derive(value, place, g);
    }
    return d_s;
  }

  int add(Op op, int a, int b = -1, int c = -1) { return build_.add(op, a, b, c); }
  int times(int a, int b) { return add(Op::kMul, a, b); }
  // On the side of a where that was not selected, the adjoint is 0, but the slope may be NaN or infinite; the product
  // must stay 0.
  int slope(int adjoint) {
    return now_selected_ ? add(Op::kWhere, add(Op::kEqual, g_, number(0)), number(0), adjoint) : adjoint;
  }
  int number(double x) { return build_.number(x); }

  void give(int place, int adjoint) {
    if (build_.type(place) != Type::kFloat) return;
    selected_[static_cast<size_t>(place)] = selected_[static_cast<size_t>(place)] || now_selected_;
    int& sum = adjoints_[static_cast<size_t>(place)];
    sum = sum == kZero ? adjoint : add(Op::kAdd, sum, adjoint);
  }
  // condition ? g : 0, as a selection, never a multiplication by 0.
  int only(int condition, int g) { return add(Op::kWhere, condition, g, number(0)); }

  // Adds to the adjoints of the operands of `y` = value, given the adjoint g of `y`.
  void derive(const Value& value, int y, int g) {
    const int a = value.operands[0], b = value.operands[1], c = value.operands[2];
    switch (value.op) {
      case Op::kAdd:
        give(a, g), give(b, g);
        break;
      case Op::kSub:
        give(a, g), give(b, add(Op::kNeg, g));
        break;
      case Op::kMul:
        give(a, slope(times(g, b))), give(b, slope(times(g, a)));
        break;
      case Op::kDiv:  // d(a / b) = da / b - y db / b
        give(a, slope(add(Op::kDiv, g, b))), give(b, slope(add(Op::kNeg, add(Op::kDiv, times(g, y), b))));
        break;
      case Op::kNeg:
        give(a, add(Op::kNeg, g));
        break;
      case Op::kAbs:
        give(a, slope(times(g, add(Op::kSign, a))));
        break;
      case Op::kMin:
      case Op::kMax: {
        now_selected_ = true;
        const int first = value.op == Op::kMin ? add(Op::kLess, a, b) : add(Op::kLess, b, a);
        const int tie = add(Op::kEqual, a, b), half = times(g, number(0.5));
        give(a, add(Op::kWhere, tie, half, only(first, g)));
        give(b, add(Op::kWhere, tie, half, add(Op::kWhere, first, number(0), g)));
        break;
      }
      case Op::kExp:
        give(a, slope(times(g, y)));
        break;
      case Op::kExp2:
        give(a, slope(times(g, times(y, number(std::numbers::ln2)))));
        break;
      case Op::kLog:
        give(a, slope(add(Op::kDiv, g, a)));
        break;
      case Op::kSqrt:  // 1 / (2 y)
        give(a, slope(add(Op::kDiv, g, times(number(2), y))));
        break;
      case Op::kRsqrt:  // -y^3 / 2
        give(a, slope(times(g, times(number(-0.5), times(y, times(y, y))))));
        break;
      case Op::kTanh:
        give(a, slope(times(g, add(Op::kSub, number(1), times(y, y)))));
        break;
      case Op::kSigmoid:
        give(a, slope(times(g, times(y, add(Op::kSub, number(1), y)))));
        break;
      case Op::kSin:
        give(a, slope(times(g, add(Op::kCos, a))));
        break;
      case Op::kCos:
        give(a, slope(add(Op::kNeg, times(g, add(Op::kSin, a)))));
        break;
      case Op::kWhere:
        now_selected_ = true;
        give(b, only(a, g)), give(c, add(Op::kWhere, a, number(0), g));
        break;
      default:  // non-floats, and floor and sign, whose derivative is 0
        break;
    }
  }

  Gradient finished(int d_s, std::vector<LoadGradient> loads) {
    Gradient result;
    std::vector<int*> roots{&d_s};
    for (LoadGradient& load : loads) {
      for (int& index : load.indices) roots.push_back(&index);
      roots.push_back(&load.adjoint);
    }
    std::vector<std::string> names;
    for (const LoadGradient& load : loads)
      names.push_back(build_.program().tensors[static_cast<size_t>(load.tensor)].text);
    result.program = reachable(build_.program(), roots);
    result.d_s = d_s;
    for (size_t n = 0; n < loads.size(); ++n)
      loads[n].tensor = tensor_named(result.program, build_.program(), names[n]);
    result.loads = std::move(loads);
    return result;
  }

  // The gradient of a tensor is written even if no gradient needs the tensor's value.
  static int tensor_named(Program& program, const Program& original, const std::string& text) {
    for (size_t n = 0; n < program.tensors.size(); ++n) {
      if (program.tensors[n].text == text) return static_cast<int>(n);
    }
    for (const Name& name : original.tensors) {
      if (name.text == text) program.tensors.push_back(name);
    }
    return static_cast<int>(program.tensors.size() - 1);
  }

  Builder build_;
  std::vector<int> adjoints_;   // of each value of the program; kZero: nothing was added
  std::vector<bool> selected_;  // whether a where may have made it 0
  int g_ = kZero;               // the adjoint of the current value
  bool now_selected_ = false;
};

}  // namespace

Gradient gradient(const Program& program) {
  if (program.score >= 0) return Reverse(program).run(program.score);
  Gradient same;  // the score is unchanged
  Builder build;
  same.d_s = build.add(Op::kG);
  same.program = build.program();
  return same;
}

Slope slope(const Program& program) { return Reverse(program).run_slope(program.score); }

}  // namespace tessera::core::score
