#include "core/score/facts.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "core/score/affine.hpp"
#include "core/score/evaluate.hpp"
#include "core/score/print.hpp"

namespace tessera::core::score {
namespace {

// Whether the new score may be -inf or NaN for a finite score. Bounds of floats are at most as wide as float32: a score
// near its limit overflows in sums, which is no reason to expect hidden keys.
bool may_hide(const Program& program) {
  if (program.score < 0) return false;
  constexpr double kLargest = 1e30;
  const Interval counts{0, INT32_MAX};
  Bounds bounds;
  bounds.s = {-kLargest, kLargest};
  bounds.b = bounds.h = bounds.h_kv = bounds.i = bounds.j = bounds.len_q = bounds.len_k = counts;
  bounds.q_pos = {INT32_MIN, INT32_MAX};
  bounds.element = [&program](int tensor, const Interval*) {
    switch (program.tensors[static_cast<size_t>(tensor)].type) {
      case Type::kFloat:
        return Interval::everything();
      case Type::kInt:
        return Interval{INT32_MIN, INT32_MAX};
      default:
        return Interval{0, 1};
    }
  };
  bounds.scalar = [&program](int scalar) {
    return program.scalars[static_cast<size_t>(scalar)].type == Type::kFloat ? Interval::everything()
                                                                             : Interval{INT32_MIN, INT32_MAX};
  };
  const Interval score = bound(program, program.score, bounds);
  return score.nan || std::isinf(score.low) || std::isinf(score.high);
}

bool reads_tensor(const Program& program) {
  for (const Value& value : program.values) {
    if (value.op == Op::kLoad) return true;
  }
  return false;
}

// The form of an integer over the pairs of one (b, h) of a sequence.
struct Form {
  enum Kind { kUniform, kAffine, kDiagonal, kOther } kind = kOther;
  int64_t i = 0, j = 0;  // kAffine: its coefficients of i and j, besides a uniform part

  // The same for all pairs with the same i - j.
  bool is_of_diagonal() const { return kind == kUniform || kind == kDiagonal || (kind == kAffine && i == -j); }
};

Form form_of(const Value& value, const Form* operands) {
  switch (value.op) {
    case Op::kI:
    case Op::kQPos:
      return {Form::kAffine, 1, 0};
    case Op::kJ:
      return {Form::kAffine, 0, 1};
    case Op::kS:
    case Op::kG:
      return {};
    default:
      break;
  }
  const int count = operand_count(value);
  bool uniform = true, diagonal = true, affine = count > 0;
  for (int n = 0; n < count; ++n) {
    uniform = uniform && operands[n].kind == Form::kUniform;
    diagonal = diagonal && operands[n].is_of_diagonal();
    affine = affine && (operands[n].kind == Form::kUniform || operands[n].kind == Form::kAffine);
  }
  if (uniform) return {Form::kUniform};
  // Coefficients are bounded, so that wrapping makes no two of them equal.
  constexpr int64_t kMostFactor = 1 << 20;
  if (affine && (value.op == Op::kAddInt || value.op == Op::kSubInt || value.op == Op::kNegInt)) {
    const int64_t sign = value.op == Op::kAddInt ? 1 : -1;
    const bool negates = value.op == Op::kNegInt;
    const Form sum =
        negates ? Form{Form::kAffine, -operands[0].i, -operands[0].j}
                : Form{Form::kAffine, operands[0].i + sign * operands[1].i, operands[0].j + sign * operands[1].j};
    if (sum.i == 0 && sum.j == 0) return {Form::kUniform};
    if (std::abs(sum.i) <= kMostFactor && std::abs(sum.j) <= kMostFactor) return sum;
  }
  return {diagonal ? Form::kDiagonal : Form::kOther};
}

// Whether the value at `place` is s times a value that all pairs of a head share.
bool is_of_products(Program program, int place) {
  if (program.values[static_cast<size_t>(place)].op == Op::kS) return true;
  program.score = place;
  const std::optional<Affine> affine = affine_of(program);
  return affine && affine->term < 0 && !(inputs_of(affine->program, affine->factor) & kPairInputs);
}

std::vector<Form> forms_of(const Program& program) {
  std::vector<Form> forms;
  for (const Value& value : program.values) {
    Form operands[kMaxOperands];
    for (int n = 0; n < operand_count(value); ++n) operands[n] = forms[static_cast<size_t>(value.operands[n])];
    forms.push_back(form_of(value, operands));
  }
  return forms;
}

}  // namespace

std::vector<bool> of_diagonal(const Program& program) {
  std::vector<bool> found;
  for (const Form& form : forms_of(program)) found.push_back(form.is_of_diagonal());
  return found;
}

std::vector<std::optional<int>> steps_along_diagonal(const Program& program) {
  std::vector<std::optional<int>> steps;
  for (const Form& form : forms_of(program)) {
    std::optional<int> step;
    if (form.kind == Form::kUniform) step = 0;
    if (form.kind == Form::kAffine && form.i == -form.j) step = static_cast<int>(form.i);
    steps.push_back(step);
  }
  return steps;
}

InputSet inputs_of(const Program& program, int place, int except) {
  if (place < 0) return 0;
  std::vector<bool> needed(static_cast<size_t>(place) + 1);
  needed[static_cast<size_t>(place)] = true;
  InputSet inputs = 0;
  for (int at = place; at >= 0; --at) {
    if (!needed[static_cast<size_t>(at)] || at == except) continue;
    const Value& value = program.values[static_cast<size_t>(at)];
    if (value.op <= Op::kG) inputs |= input_bit(value.op);
    for (int n = 0; n < operand_count(value); ++n) needed[static_cast<size_t>(value.operands[n])] = true;
  }
  return inputs;
}

namespace {

InputSet inputs_of_all(const Program& program, const std::vector<int>& places) {
  InputSet inputs = 0;
  for (const int place : places) inputs |= inputs_of(program, place);
  return inputs;
}

}  // namespace

GradientPattern pattern_of(const Program& gradient, const LoadGradient& load) {
  const InputSet inputs = inputs_of_all(gradient, load.indices);
  constexpr InputSet kOfRow = input_bit(Op::kI) | input_bit(Op::kQPos), kOfColumn = input_bit(Op::kJ);
  if (inputs & (input_bit(Op::kS) | input_bit(Op::kG))) return GradientPattern::kGather;
  if (!(inputs & (kOfRow | kOfColumn))) return GradientPattern::kHead;
  if (!(inputs & kOfColumn)) return GradientPattern::kRow;
  if (!(inputs & kOfRow)) return GradientPattern::kColumn;

  const std::vector<Form> forms = forms_of(gradient);
  bool diagonal = true, has_row = false, has_column = false;
  for (const int index : load.indices) {
    const Form& form = forms[static_cast<size_t>(index)];
    diagonal = diagonal && form.is_of_diagonal();
    has_row = has_row || (form.kind == Form::kAffine && std::abs(form.i) == 1 && form.j == 0);
    has_column = has_column || (form.kind == Form::kAffine && form.i == 0 && std::abs(form.j) == 1);
  }
  if (diagonal) return GradientPattern::kDiagonal;
  return has_row && has_column ? GradientPattern::kElement : GradientPattern::kGather;
}

std::vector<LoadSum> load_sums(const Checked& checked) {
  const Program& program = checked.program;
  std::vector<LoadSum> sums;
  if (checked.gradient.loads.empty()) return sums;
  const Slope made = slope(program);
  const std::vector<Form> forms = forms_of(made.program);
  const std::optional<Affine> affine = affine_of(program);
  const bool scales_by_head = affine && !(inputs_of(affine->program, affine->factor) & kPairInputs);
  for (const LoadGradient& load : made.loads) {
    const auto of_diagonal = [&forms](int place) { return forms[static_cast<size_t>(place)].is_of_diagonal(); };
    const bool one_element = !(inputs_of_all(made.program, load.indices) & kPairInputs);
    if (scales_by_head && one_element && is_of_products(made.program, load.adjoint)) {
      sums.push_back(LoadSum::kProducts);
    } else if (of_diagonal(load.adjoint) && std::ranges::all_of(load.indices, of_diagonal)) {
      sums.push_back(LoadSum::kDiagonals);
    } else {
      sums.push_back(LoadSum::kPairs);
    }
  }
  return sums;
}

Facts facts_of(const Checked& checked) {
  const Program& program = checked.program;
  const Gradient& gradient = checked.gradient;
  Facts facts{};
  facts.changes_score = key_changes_score(checked.text);
  facts.has_mask = program.mask >= 0;
  facts.score_inputs = facts.changes_score ? inputs_of(program, program.score) : input_bit(Op::kS);
  facts.mask_inputs = inputs_of(program, program.mask);
  facts.gradient_inputs = inputs_of(gradient.program, gradient.d_s);
  facts.slope_needs_s = (facts.gradient_inputs & input_bit(Op::kS)) != 0;
  for (const LoadGradient& load : gradient.loads) {
    facts.gradient_inputs |= inputs_of(gradient.program, load.adjoint);
    for (const int index : load.indices) facts.gradient_inputs |= inputs_of(gradient.program, index);
  }
  facts.gradient_inputs &= ~input_bit(Op::kG);
  facts.score_needs_s = (facts.score_inputs & input_bit(Op::kS)) != 0;
  facts.mask_needs_s = (facts.mask_inputs & input_bit(Op::kS)) != 0;
  facts.reads_tensors = reads_tensor(program);
  facts.may_hide = may_hide(program);
  facts.passes_gradient = gradient.d_s >= 0 && gradient.program.values[static_cast<size_t>(gradient.d_s)].op == Op::kG;
  const std::optional<Affine> affine = affine_of(program);
  facts.scales_by_head =
      affine && affine->term < 0 && !facts.mask_needs_s && !(inputs_of(affine->program, affine->factor) & kPairInputs);
  facts.affine = affine && !facts.has_mask;
  facts.grows_linearly = facts.affine && affine->term >= 0 && is_linear_in_key(affine->program, affine->term);
  facts.gradient_loads = static_cast<int>(gradient.loads.size());
  facts.sums_by_head = facts.gradient_loads == 1 && !facts.slope_needs_s &&
                       pattern_of(gradient.program, gradient.loads[0]) == GradientPattern::kHead &&
                       load_sums(checked)[0] == LoadSum::kPairs;
  return facts;
}

}  // namespace tessera::core::score
