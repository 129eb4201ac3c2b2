// A score program: a function of one (query, key) pair that its user writes, as a list of typed operations in static
// single assignment form. `score` makes a new score from the score so far, `mask` says whether the key is visible. What
// a program means is defined by the table of operations (operations.hpp); text becomes a program in parse.hpp, and a
// program text again in print.hpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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
