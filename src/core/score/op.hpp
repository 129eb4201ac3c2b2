// The types and operations of score programs, by number, and the limits of a program, for back ends that do not know
// the text form.
#pragma once

#include <cstdint>

namespace tessera::core::score {

// float: float32 in a kernel, float64 in the oracle; int: int32, whose overflow wraps; bool.
enum class Type : uint8_t { kFloat, kInt, kBool };
inline constexpr const char* kTypeNames[] = {"float", "int", "bool"};

enum class Op : uint8_t {
  // Inputs of a pair.
  kS,     // float: the score so far, scaled and after the built-in options
  kB,     // int: the sequence
  kH,     // int: the query head
  kHkv,   // int: its KV head
  kI,     // int: index of the query in its sequence, from 0
  kJ,     // int: index of the key in its sequence, from 0
  kQPos,  // int: i + len_k - len_q, the position that causal and windows use
  kLenQ,  // int: queries of the sequence
  kLenK,  // int: keys
  kG,     // float: the gradient of the new score; only in derivatives
  // The operands that a program names.
  kConstant,
  kScalar,  // a named number
  kLoad,    // an element of a named tensor; one operand for each of its axes
  // Floating-point arithmetic.
  kAdd,
  kSub,
  kMul,
  kDiv,
  kNeg,
  kAbs,
  kMin,
  kMax,
  kFloor,
  kSign,
  kIsNaN,
  kExp,
  kExp2,
  kLog,
  kSqrt,
  kRsqrt,
  kTanh,
  kSigmoid,
  kSin,
  kCos,
  // Integer arithmetic with 32 bits; quotients and remainders round down, and a divisor of 0 gives 0.
  kAddInt,
  kSubInt,
  kMulInt,
  kFloorDiv,
  kMod,
  kNegInt,
  kAbsInt,
  kMinInt,
  kMaxInt,
  kAndInt,
  kOrInt,
  kXorInt,
  kNotInt,
  kShiftLeft,
  kShiftRight,
  // Comparisons; the others are these with exchanged sides.
  kLess,
  kLessEqual,
  kEqual,
  kNotEqual,
  kLessInt,
  kLessEqualInt,
  kEqualInt,
  kNotEqualInt,
  // Logic.
  kAnd,
  kOr,
  kXor,
  kNot,
  // condition ? a : b
  kWhere,
  kWhereInt,
  kWhereBool,
  // Conversions.
  kIntToFloat,
  kBoolToFloat,
  kFloatToInt,
  kBoolToInt,
  kCount
};

inline constexpr int kMaxOperands = 4;
inline constexpr int kMaxOperations = 128, kMaxTensors = 8, kMaxScalars = 16, kMaxRank = 4, kMaxNameLength = 31;
inline constexpr int kMaxTextBytes = 16384, kMaxNesting = 64;

}  // namespace tessera::core::score
