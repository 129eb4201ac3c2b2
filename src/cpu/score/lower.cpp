#include "cpu/score/lower.hpp"

#include <algorithm>
#include <bit>

namespace tessera::cpu {
namespace {

using core::score::Op;
using core::score::Program;
using core::score::Type;
using core::score::Value;

uint8_t level_of_input(Op op) {
  switch (op) {
    case Op::kS:
    case Op::kG:
      return kOfPair;
    case Op::kJ:
      return kOfKey;
    case Op::kH:
    case Op::kHkv:
    case Op::kI:
    case Op::kQPos:
      return kOfQuery;
    default:
      return kOfCall;  // b and the lengths are constant in a tile
  }
}

uint32_t word_of(double x, Type type) {
  switch (type) {
    case Type::kFloat:
      return std::bit_cast<uint32_t>(static_cast<float>(x));
    case Type::kInt:
      return static_cast<uint32_t>(static_cast<int64_t>(x));
    default:
      return x != 0 ? ~uint32_t{0} : 0;  // the representation of a comparison's result
  }
}

}  // namespace

LoweredScore::LoweredScore(const Program& program, std::span<const CodeTensor> tensors, std::span<const double> scalars)
    : tensors_(tensors.begin(), tensors.end()) {
  lower(program, scalars, {program.score, program.mask});
  const auto place = [&](int at) { return at < 0 ? CodePlace{} : places_[static_cast<size_t>(at)]; };
  score_ = place(program.score), mask_ = place(program.mask);
}

LoweredScore::LoweredScore(const core::score::Gradient& gradient, std::span<const CodeTensor> tensors,
                           std::span<const double> scalars, std::span<const bool> loads)
    : tensors_(tensors.begin(), tensors.end()) {
  std::vector<int> roots{gradient.d_s};
  const auto needed = [&](const core::score::LoadGradient& load) {
    return static_cast<size_t>(load.tensor) < loads.size() && loads[static_cast<size_t>(load.tensor)];
  };
  for (const core::score::LoadGradient& load : gradient.loads) {
    if (!needed(load)) continue;
    roots.push_back(load.adjoint);
    roots.insert(roots.end(), load.indices.begin(), load.indices.end());
  }
  lower(gradient.program, scalars, roots);
  const auto place = [&](int at) { return at < 0 ? CodePlace{} : places_[static_cast<size_t>(at)]; };
  d_s_ = place(gradient.d_s);
  for (const core::score::LoadGradient& load : gradient.loads) {
    if (!needed(load)) continue;
    CodeGradient out{};
    out.tensor = static_cast<int16_t>(load.tensor);
    out.adjoint = place(load.adjoint);
    for (size_t n = 0; n < load.indices.size(); ++n) {
      out.indices[n] = place(load.indices[n]);
      out.level |= out.indices[n].level;
    }
    gradients_.push_back(out);
  }
}

void LoweredScore::lower(const Program& program, std::span<const double> scalars, const std::vector<int>& roots) {
  const int count = static_cast<int>(program.values.size());
  const auto value = [&](int at) -> const Value& { return program.values[static_cast<size_t>(at)]; };
  std::vector<bool> needed(static_cast<size_t>(count));
  for (const int root : roots) {
    if (root >= 0) needed[static_cast<size_t>(root)] = true;
  }
  for (int at = count - 1; at >= 0; --at) {
    if (!needed[static_cast<size_t>(at)]) continue;
    for (int n = 0; n < core::score::operand_count(value(at)); ++n) {
      needed[static_cast<size_t>(value(at).operands[n])] = true;
    }
  }

  // First the levels, then the order by level: a value's operands have its level or a lower one, and so come before it.
  places_.assign(static_cast<size_t>(count), {});
  std::vector<int> order;
  for (int at = 0; at < count; ++at) {
    const Value& v = value(at);
    uint8_t level = v.op <= Op::kG ? level_of_input(v.op) : uint8_t{kOfCall};
    for (int n = 0; n < core::score::operand_count(v); ++n) {
      level = static_cast<uint8_t>(level | places_[static_cast<size_t>(v.operands[n])].level);
    }
    places_[static_cast<size_t>(at)].level = level;
    if (needed[static_cast<size_t>(at)]) order.push_back(at);
  }
  const auto level_of = [&](int at) { return places_[static_cast<size_t>(at)].level; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return level_of(a) < level_of(b); });

  // The register of a pair's value is reused after its last use; the others are kept for many pairs.
  std::vector<int> last_use(static_cast<size_t>(count), -1);
  for (const int at : order) {
    for (int n = 0; n < core::score::operand_count(value(at)); ++n) {
      last_use[static_cast<size_t>(value(at).operands[n])] = at;
    }
  }
  for (const int root : roots) {
    if (root >= 0) last_use[static_cast<size_t>(root)] = count;
  }
  std::vector<int16_t> unused;
  for (const int at : order) {
    const Value& v = value(at);
    CodePlace& place = places_[static_cast<size_t>(at)];
    CodeStep step{};
    step.op = v.op, step.type = v.type;
    if (v.op == Op::kLoad) step.tensor = v.name;
    if (v.op == Op::kConstant) step.bits = word_of(v.constant, v.type);
    if (v.op == Op::kScalar) step.bits = word_of(scalars[static_cast<size_t>(v.name)], v.type);
    for (int n = 0; n < core::score::operand_count(v); ++n) {
      const int operand = v.operands[n];
      step.operands[n] = places_[static_cast<size_t>(operand)];
      int& last = last_use[static_cast<size_t>(operand)];
      if (level_of(operand) == kOfPair && last == at) {
        unused.push_back(step.operands[n].index);
        last = -1;  // only once if it is both operands
      }
    }
    if (place.level == kOfPair && !unused.empty()) {
      place.index = unused.back();
      unused.pop_back();
    } else {
      place.index = static_cast<int16_t>(registers_[place.level]++);
    }
    step.result = place;
    steps_.push_back(step);
    ends_[place.level] = static_cast<int32_t>(steps_.size());
  }
  for (int level = 1; level < kCodeLevels; ++level) ends_[level] = std::max(ends_[level], ends_[level - 1]);
}

ScoreCode LoweredScore::code() const {
  ScoreCode code{};
  code.steps = steps_.data();
  std::copy(std::begin(ends_), std::end(ends_), code.ends);
  std::copy(std::begin(registers_), std::end(registers_), code.registers);
  code.tensors = tensors_.data();
  code.score = score_, code.mask = mask_, code.d_s = d_s_;
  code.gradients = gradients_.data();
  code.num_gradients = static_cast<int32_t>(gradients_.size());
  return code;
}

}  // namespace tessera::cpu
