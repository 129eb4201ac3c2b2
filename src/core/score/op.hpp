// The types and operations of score programs, by number, and the limits of a program: what back ends need that know
// nothing of text.
#pragma once

#include <cstdint>

namespace tessera::core::score {

// float32 in a kernel and float64 in the oracle; int32, whose overflow wraps; a truth value.
enum class Type : uint8_t { kFloat, kInt, kBool };
inline constexpr const char* kTypeNames[] = {"float", "int", "bool"};

enum class Op : uint8_t {
  // What a pair brings.
  kS,     // float: the score so far: scaled, after the built-in options
  kB,     // int: the sequence
  kH,     // int: the query head
  kHkv,   // int: its KV head
  kI,     // int: the query's number in its sequence, from 0
  kJ,     // int: the key's
  kQPos,  // int: i + len_k - len_q, the position that causal and windows use
  kLenQ,  // int: queries of the sequence
  kLenK,  // int: keys
  kG,     // float: the gradient of the new score; in derivatives alone
  // What a program names.
  kConstant,
  kScalar,  // a named number
  kLoad,    // an element of a named tensor: as many operands as it has axes
  // Arithmetic of floats.
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
  // Of integers: 32 bits; quotients and remainders round down, and a divisor of 0 gives 0.
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
  // Comparisons; the others are these with their sides exchanged.
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
