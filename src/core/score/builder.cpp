#include "core/score/builder.hpp"

#include <bit>
#include <cmath>
#include <utility>

#include "core/score/operations.hpp"

namespace tessera::core::score {
namespace {

int16_t place_of(std::vector<Name>& names, const Name& name) {
  for (size_t n = 0; n < names.size(); ++n) {
    if (names[n].text == name.text) return static_cast<int16_t>(n);
  }
  names.push_back(name);
  return static_cast<int16_t>(names.size() - 1);
}

}  // namespace

int Program::operations() const {
  int count = 0;
  for (const Value& value : values) count += value.op > Op::kScalar;
  return count;
}

int operand_count(const Value& value) {
  if (value.op != Op::kLoad) return operation(value.op).operands;
  int count = 0;
  while (count < kMaxOperands && value.operands[count] >= 0) ++count;
  return count;
}

Builder::Builder(const Program& program) : program_(program) {
  for (int place = 0; place < size(); ++place) places_.try_emplace(key_of(at(place)), place);
}

Builder::Key Builder::key_of(const Value& value) {
  int16_t first = value.operands[0], second = value.operands[1];
  if (operation(value.op).commutes && second < first) std::swap(first, second);
  return {value.op, value.type,        value.name,        first,
          second,   value.operands[2], value.operands[3], std::bit_cast<uint64_t>(value.constant)};
}

int Builder::append(const Value& value) {
  const auto [found, is_new] = places_.try_emplace(key_of(value), size());
  if (is_new) program_.values.push_back(value);
  return found->second;
}

int Builder::constant(Type type, double x) {
  Value value;
  value.type = type, value.constant = x;
  return append(value);
}

int Builder::scalar(const Name& name) {
  Value value;
  value.op = Op::kScalar, value.type = name.type, value.name = place_of(program_.scalars, name);
  return append(value);
}

int Builder::load(const Name& tensor, const std::vector<int>& indices) {
  Value value;
  value.op = Op::kLoad, value.type = tensor.type, value.name = place_of(program_.tensors, tensor);
  for (size_t n = 0; n < indices.size(); ++n) value.operands[n] = static_cast<int16_t>(indices[n]);
  return append(value);
}

int Builder::add(Op op, int a, int b, int c) {
  const Operation& row = operation(op);
  const int operands[] = {a, b, c};
  const auto is = [&](int place, double x) { return at(place).op == Op::kConstant && at(place).constant == x; };

  bool all_constant = row.operands > 0;
  double x[3] = {};
  for (int n = 0; n < row.operands; ++n) {
    all_constant = all_constant && at(operands[n]).op == Op::kConstant;
    x[n] = at(operands[n]).constant;
  }
  if (all_constant) return constant(row.result, row.evaluate(x));

  // Only simplifications that are exact for every operand, including NaN and -0.
  switch (op) {
    case Op::kMul:
    case Op::kMulInt:
      if (is(a, 1)) return b;
      if (is(b, 1)) return a;
      break;
    case Op::kDiv:
    case Op::kFloorDiv:
      if (is(b, 1)) return a;
      break;
    case Op::kAddInt:
      if (is(a, 0)) return b;
      if (is(b, 0)) return a;
      break;
    case Op::kSubInt:
      if (is(b, 0)) return a;
      break;
    case Op::kSub:
      if (is(b, 0) && !std::signbit(at(b).constant)) return a;
      break;
    case Op::kAnd:
      if (is(a, 1) || is(b, 0)) return b;
      if (is(b, 1) || is(a, 0)) return a;
      break;
    case Op::kOr:
      if (is(a, 0) || is(b, 1)) return b;
      if (is(b, 0) || is(a, 1)) return a;
      break;
    case Op::kNot:
    case Op::kNeg:
    case Op::kNegInt:
    case Op::kNotInt:
      if (at(a).op == op) return at(a).operands[0];
      break;
    case Op::kWhere:
    case Op::kWhereInt:
    case Op::kWhereBool:
      if (is(a, 1) || b == c) return b;
      if (is(a, 0)) return c;
      break;
    default:
      break;
  }
  Value value;
  value.op = op, value.type = row.result;
  for (int n = 0; n < row.operands; ++n) value.operands[n] = static_cast<int16_t>(operands[n]);
  return append(value);
}

Program reachable(const Program& program, const std::vector<int*>& roots) {
  Program result;
  std::vector<int> place(program.values.size(), -1);
  // Operands precede their users, so a walk with an explicit stack visits each once, at any nesting depth.
  std::vector<std::pair<int, int>> stack;  // a value, and the number of its operands that were visited
  for (int* const root : roots) {
    if (*root < 0) continue;
    stack.emplace_back(*root, 0);
    while (!stack.empty()) {
      auto& [at, visited] = stack.back();
      const Value& value = program.values[static_cast<size_t>(at)];
      if (place[static_cast<size_t>(at)] >= 0) {
        stack.pop_back();
      } else if (visited < operand_count(value)) {
        const int operand = value.operands[visited++];
        stack.emplace_back(operand, 0);
      } else {
        Value copy = value;
        for (int n = 0; n < operand_count(value); ++n) {
          copy.operands[n] = static_cast<int16_t>(place[static_cast<size_t>(value.operands[n])]);
        }
        if (value.op == Op::kScalar)
          copy.name = place_of(result.scalars, program.scalars[static_cast<size_t>(value.name)]);
        if (value.op == Op::kLoad)
          copy.name = place_of(result.tensors, program.tensors[static_cast<size_t>(value.name)]);
        place[static_cast<size_t>(at)] = static_cast<int>(result.values.size());
        result.values.push_back(copy);
        stack.pop_back();
      }
    }
    *root = place[static_cast<size_t>(*root)];
  }
  return result;
}

}  // namespace tessera::core::score
