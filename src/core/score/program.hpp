// A score program: a function of one (query, key) pair that its user writes, as a list of typed operations in static
// single assignment form. `score` makes a new score from the score so far, `mask` says whether the key is visible. What
// a program means is defined by the table of operations (operations.hpp); text becomes a program in parse.hpp, and a
// program text again in print.hpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/score/op.hpp"

namespace tessera::core::score {

// One operation; its operands are places of earlier ones.
struct Value {
  Op op = Op::kConstant;
  Type type = Type::kFloat;
  int16_t name = -1;  // kScalar, kLoad: place in scalars, tensors
  int16_t operands[kMaxOperands] = {-1, -1, -1, -1};
  double constant = 0;  // kConstant: also of an integer (exact) and of a truth value (0 or 1)
};

// What stands behind a name that a program uses. Elements of any integer type are int, of any floating-point type
// float.
struct Name {
  std::string text;
  Type type = Type::kFloat;
  int rank = 0;  // of a tensor: indices that it takes
  bool is_tensor = false;
};

struct Program {
  std::vector<Value> values;
  std::vector<Name> tensors, scalars;  // those that it uses, in the order of their first use
  int score = -1;                      // the place of a float; -1: the score stays as it is
  int mask = -1;                       // the place of a truth value; -1: every key is visible

  int operations() const;  // those that are computed: neither inputs nor constants nor scalars
};

// How many operands an operation has: kLoad as many as its tensor has axes.
int operand_count(const Value& value);

}  // namespace tessera::core::score
