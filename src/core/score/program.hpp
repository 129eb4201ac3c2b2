// A score program: a function of one (query, key) pair that a user writes, as a list of typed operations in static
// single assignment form. `score` computes a new score from the current one, `mask` says whether the key is visible.
// The table of operations defines the meaning (operations.hpp); parse.hpp converts text to a program, and print.hpp a
// program to text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/score/op.hpp"

namespace tessera::core::score {

// One operation; its operands are indices of earlier ones.
struct Value {
  Op op = Op::kConstant;
  Type type = Type::kFloat;
  int16_t name = -1;  // kScalar, kLoad: index in scalars or tensors
  int16_t operands[kMaxOperands] = {-1, -1, -1, -1};
  double constant = 0;  // kConstant: also for an integer (exact) and a boolean (0 or 1)
};

// The declaration of a name that a program uses. Elements of any integer type are int, of any floating-point type
// float.
struct Name {
  std::string text;
  Type type = Type::kFloat;
  int rank = 0;  // number of indices of a tensor
  bool is_tensor = false;
};

struct Program {
  std::vector<Value> values;
  std::vector<Name> tensors, scalars;  // used ones, in the order of their first use
  int score = -1;                      // index of a float; -1: the score is unchanged
  int mask = -1;                       // index of a boolean; -1: every key is visible

  int operations() const;  // number of computed operations, without inputs, constants and scalars
};

// The number of operands of an operation; kLoad has one for each axis of its tensor.
int operand_count(const Value& value);

}  // namespace tessera::core::score
