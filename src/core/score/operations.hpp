// The operations of score programs, one row each: name, types, meaning in float64, bounds, CUDA text. The derivatives
// are in derivative.cpp.
#pragma once

#include "core/score/program.hpp"

namespace tessera::core::score {

// The values that an operand may have: low <= x <= high, or NaN if `nan`. A boolean is 0 or 1.
struct Interval {
  double low, high;
  bool nan = false;

  static Interval exactly(double x);
  static Interval everything();
  bool is(double x) const { return low == x && high == x && !nan; }
};

struct Operation {
  Op op;
  const char* text;  // its operator or function in text; nullptr for inputs and implicit conversions
  Type result;
  int operands;
  Type operand[3];
  int precedence;  // of an operator; kFunction: not an operator
  bool commutes;
  double (*evaluate)(const double* x);   // nullptr: inputs, constants, loads
  Interval (*bound)(const Interval* x);  // nullptr: any value of its type
  const char* cuda;                      // %0, %1, %2: the variables of its operands
  // The function bounds_... of attention/score/program_bounds.cuh; nullptr: any value of its type.
  const char* cuda_bounds = nullptr;
};

// Precedence, from loosest to tightest. & | ^ bind tighter than comparisons, as in Python, so that `a & 1 == 0`
// compares the result of &.
enum Precedence { kFunction, kOrElse, kAndAlso, kComparison, kBitOr, kBitXor, kBitAnd, kShift, kSum, kProduct, kUnary };

const Operation& operation(Op op);  // one row for each operation

// The row of an operator or function for operands of these types, without conversions; nullptr: none.
const Operation* find_operation(const char* text, int text_length, const Type* types, int count);

// Whether any operation has this name.
bool is_function(const char* text, int text_length);

int32_t wrap(double integer);  // the low 32 bits of an exact sum or product

}  // namespace tessera::core::score
