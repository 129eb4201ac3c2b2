// The operations of score programs, one row each: name, types, meaning in float64, bounds, CUDA text. The derivatives
// are in derivative.cpp.
#pragma once

#include "core/score/program.hpp"

namespace tessera::core::score {

// Every value that an operand may have: low <= x <= high, or NaN where `nan`. A truth value is 0 or 1.
struct Interval {
  double low, high;
  bool nan = false;

  static Interval exactly(double x);
  static Interval everything();
  bool is(double x) const { return low == x && high == x && !nan; }
};

struct Operation {
  Op op;
  const char* text;  // its operator or function in text; nullptr: it has none, as inputs and conversions by need
  Type result;
  int operands;
  Type operand[3];
  int precedence;  // of an operator; kFunction: it is none
  bool commutes;
  double (*evaluate)(const double* x);   // nullptr: inputs, constants, loads
  Interval (*bound)(const Interval* x);  // nullptr: anything of its type
  const char* cuda;                      // %0, %1, %2: its operands, names of variables
};

// Precedence, from loosest to tightest; & | ^ bind tighter than comparisons, as in Python, so that `a & 1 == 0` asks what it seems to.
enum Precedence { kFunction, kOrElse, kAndAlso, kComparison, kBitOr, kBitXor, kBitAnd, kShift, kSum, kProduct, kUnary };

const Operation& operation(Op op);  // one row for each

// The row of an operator or function for operands of these types, without conversions; nullptr: none.
const Operation* find_operation(const char* text, int text_length, const Type* types, int count);

// Whether any operation has this name.
bool is_function(const char* text, int text_length);

int32_t wrap(double integer);  // of an exact sum or product: its low 32 bits

}  // namespace tessera::core::score
