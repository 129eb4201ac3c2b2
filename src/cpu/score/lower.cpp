#include "cpu/score/lower.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <optional>

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

// A program with other operations that compute the same and are cheaper here:
//   - an index that keys count up or down becomes the index for j = 0 and a factor of j (CodeStep::of_key);
//   - quotients and remainders by a power of two become shifts and masks.
class Cheaper {
 public:
  explicit Cheaper(const Program& from) : from_(from), for_key_zero_(from.values.size(), -1) {
    for (size_t at = 0; at < from.values.size(); ++at) {
      const Value& value = from.values[at];
      factors_of_old_.push_back(factor_of_key(value));
      Value copy = value;
      for (int n = 0; n < core::score::operand_count(value); ++n) copy.operands[n] = to_[operand(value, n)];
      const auto place = value.op == Op::kLoad ? load(value, copy) : divided(value, copy);
      to_.push_back(place ? *place : push(copy));
    }
  }

  Program program;                                                 // its values; names are those of the original
  std::vector<std::array<int32_t, core::score::kMaxRank>> of_key;  // of its loads

  int at(int old) const { return old < 0 ? old : to_[static_cast<size_t>(old)]; }

 private:
  static size_t operand(const Value& value, int n) { return static_cast<size_t>(value.operands[n]); }

  int16_t push(const Value& value) {
    program.values.push_back(value);
    of_key.push_back({});
    return static_cast<int16_t>(program.values.size() - 1);
  }
  int16_t push_constant(double x) { return push({.op = Op::kConstant, .type = Type::kInt, .constant = x}); }

  // The factor c if the value is an integer c j + d, where d does not depend on the key.
  std::optional<int64_t> factor_of_key(const Value& value) const {
    constexpr int64_t kMost = 1 << 20;
    if (value.op == Op::kJ) return 1;
    if (value.op == Op::kS || value.op == Op::kG) return std::nullopt;
    const int count = core::score::operand_count(value);
    std::array<std::optional<int64_t>, core::score::kMaxOperands> factors;
    bool affine = true, depends = false;
    for (int n = 0; n < count; ++n) {
      const auto& factor = factors[static_cast<size_t>(n)] = factors_of_old_[operand(value, n)];
      affine = affine && factor;
      depends = depends || factor != 0;
    }
    if (!depends) return 0;
    if (!affine) return std::nullopt;
    std::optional<int64_t> sum;
    if (value.op == Op::kAddInt) sum = *factors[0] + *factors[1];
    if (value.op == Op::kSubInt) sum = *factors[0] - *factors[1];
    if (value.op == Op::kNegInt) sum = -*factors[0];
    if (sum && std::abs(*sum) <= kMost) return sum;
    return std::nullopt;
  }

  // The value for j = 0, where it is c j + d.
  int16_t for_key_zero(int old) {
    if (factors_of_old_[static_cast<size_t>(old)] == 0) return to_[static_cast<size_t>(old)];
    if (const int16_t known = for_key_zero_[static_cast<size_t>(old)]; known >= 0) return known;
    const Value& value = from_.values[static_cast<size_t>(old)];
    Value copy = value;
    for (int n = 0; n < core::score::operand_count(value); ++n) copy.operands[n] = for_key_zero(value.operands[n]);
    return for_key_zero_[static_cast<size_t>(old)] = value.op == Op::kJ ? push_constant(0) : push(copy);
  }

  std::optional<int16_t> load(const Value& value, Value copy) {
    std::array<int32_t, core::score::kMaxRank> factors{};
    for (int n = 0; n < core::score::operand_count(value); ++n) {
      const auto& factor = factors_of_old_[operand(value, n)];
      if (!factor) return std::nullopt;
      factors[static_cast<size_t>(n)] = static_cast<int32_t>(*factor);
    }
    for (int n = 0; n < core::score::operand_count(value); ++n) copy.operands[n] = for_key_zero(value.operands[n]);
    const int16_t place = push(copy);
    of_key.back() = factors;
    return place;
  }

  std::optional<int16_t> divided(const Value& value, Value copy) {
    if (value.op != Op::kFloorDiv && value.op != Op::kMod) return std::nullopt;
    const Value& divisor = from_.values[operand(value, 1)];
    if (divisor.op != Op::kConstant || divisor.constant < 1) return std::nullopt;
    const auto whole = static_cast<uint32_t>(divisor.constant);
    if (!std::has_single_bit(whole)) return std::nullopt;
    const bool quotient = value.op == Op::kFloorDiv;
    copy.op = quotient ? Op::kShiftRight : Op::kAndInt;
    copy.operands[1] = push_constant(quotient ? std::countr_zero(whole) : whole - 1);
    return push(copy);
  }

  const Program& from_;
  std::vector<std::optional<int64_t>> factors_of_old_;
  std::vector<int16_t> to_, for_key_zero_;  // -1: not made
};

}  // namespace

LoweredScore::LoweredScore(const Program& program, std::span<const CodeTensor> tensors, std::span<const double> scalars)
    : tensors_(tensors.begin(), tensors.end()) {
  lower(program, scalars, {program.score, program.mask}, program.score);
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
  lower(gradient.program, scalars, roots, -1);
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

void LoweredScore::lower(const Program& original, std::span<const double> scalars, const std::vector<int>& old_roots,
                         int old_in_place) {
  const Cheaper cheaper(original);
  const Program& program = cheaper.program;
  std::vector<int> roots;
  for (const int root : old_roots) roots.push_back(cheaper.at(root));
  const int in_place = cheaper.at(old_in_place);
  const int count = static_cast<int>(program.values.size());
  const auto value = [&](int at) -> const Value& { return program.values[static_cast<size_t>(at)]; };
  const auto of_key = [&](int at) -> const auto& { return cheaper.of_key[static_cast<size_t>(at)]; };
  const auto counted_by_key = [&](int at) { return std::ranges::any_of(of_key(at), [](int32_t f) { return f != 0; }); };
  const auto first_key = std::ranges::find(program.values, Op::kJ, &Value::op);  // before all values that need it
  const auto key = static_cast<size_t>(first_key - program.values.begin());
  std::vector<bool> needed(static_cast<size_t>(count));
  for (const int root : roots) {
    if (root >= 0) needed[static_cast<size_t>(root)] = true;
  }
  for (int at = count - 1; at >= 0; --at) {
    if (!needed[static_cast<size_t>(at)]) continue;
    if (counted_by_key(at)) needed[key] = true;
    for (int n = 0; n < core::score::operand_count(value(at)); ++n) {
      needed[static_cast<size_t>(value(at).operands[n])] = true;
    }
  }

  // First the levels, then the order by level: a value's operands have its level or a lower one, and so come before it.
  std::vector<CodePlace> places(static_cast<size_t>(count));
  std::vector<int> order;
  for (int at = 0; at < count; ++at) {
    const Value& v = value(at);
    CodePlace& place = places[static_cast<size_t>(at)];
    place.level = v.op <= Op::kG ? level_of_input(v.op) : uint8_t{kOfCall};
    if (counted_by_key(at)) place.level = static_cast<uint8_t>(place.level | kOfKey);
    for (int n = 0; n < core::score::operand_count(v); ++n) {
      place.level = static_cast<uint8_t>(place.level | places[static_cast<size_t>(v.operands[n])].level);
    }
    if (v.op == Op::kS || v.op == Op::kG) {
      place.index = v.op == Op::kS ? kRowsOfS : kRowsOfG;
    } else if (needed[static_cast<size_t>(at)]) {
      order.push_back(at);
    }
  }
  const auto level_of = [&](int at) { return places[static_cast<size_t>(at)].level; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return level_of(a) < level_of(b); });

  // The register of a pair's value is reused after its last use; the others are kept for many pairs.
  std::vector<int> last_use(static_cast<size_t>(count), -1);
  bool s_is_read_later = false;  // than by the result that may take its place
  for (const int at : order) {
    for (int n = 0; n < core::score::operand_count(value(at)); ++n) {
      const int operand = value(at).operands[n];
      last_use[static_cast<size_t>(operand)] = at;
      s_is_read_later = s_is_read_later || (value(operand).op == Op::kS && at > in_place);
    }
  }
  for (const int root : roots) {
    if (root < 0) continue;
    last_use[static_cast<size_t>(root)] = count;
    s_is_read_later = s_is_read_later || (value(root).op == Op::kS && root != in_place);
  }
  std::vector<int16_t> unused;
  for (const int at : order) {
    const Value& v = value(at);
    CodePlace& place = places[static_cast<size_t>(at)];
    CodeStep step{};
    step.op = v.op, step.type = v.type;
    if (v.op == Op::kLoad) step.tensor = v.name;
    if (v.op == Op::kConstant) step.bits = word_of(v.constant, v.type);
    if (v.op == Op::kScalar) step.bits = word_of(scalars[static_cast<size_t>(v.name)], v.type);
    if (counted_by_key(at)) {
      std::ranges::copy(of_key(at), step.of_key);
      step.key = places[key];
    }
    for (int n = 0; n < core::score::operand_count(v); ++n) {
      const int operand = v.operands[n];
      step.operands[n] = places[static_cast<size_t>(operand)];
      int& last = last_use[static_cast<size_t>(operand)];
      if (level_of(operand) == kOfPair && step.operands[n].index >= kPairInputs && last == at) {
        unused.push_back(step.operands[n].index);
        last = -1;  // only once if it is both operands
      }
    }
    if (at == in_place && place.level == kOfPair && !s_is_read_later) {
      place.index = kRowsOfS;
    } else if (place.level == kOfPair && !unused.empty()) {
      place.index = unused.back();
      unused.pop_back();
    } else {
      const int32_t inputs = place.level == kOfPair ? kPairInputs : 0;
      place.index = static_cast<int16_t>(inputs + registers_[place.level]++);
    }
    step.result = place;
    steps_.push_back(step);
    ends_[place.level] = static_cast<int32_t>(steps_.size());
  }
  for (int level = 1; level < kCodeLevels; ++level) ends_[level] = std::max(ends_[level], ends_[level - 1]);

  places_.clear();
  for (size_t at = 0; at < original.values.size(); ++at) {
    places_.push_back(places[static_cast<size_t>(cheaper.at(static_cast<int>(at)))]);
  }
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
