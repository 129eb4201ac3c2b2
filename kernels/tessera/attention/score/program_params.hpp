// The tensors and scalars that a score program names, as a kernel receives them, in the program's order.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

inline constexpr int kProgramTensors = 8, kProgramScalars = 16, kProgramRank = 4;

// The type of a captured tensor's elements, by tessera_dtype's numbers.
enum class ElementType : int {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kInt32 = 4,
  kBool = 5,   // a byte: 0 is false
  kInt64 = 6,  // the values fit 32 bits: the high ones are not read
  kInt8 = 7,
  kInt16 = 8,
  kUInt8 = 9
};

// How the pairs (i, j) of one (b, h) read the elements of a tensor that a program loads (core/score/facts.hpp).
enum class GradientPattern : int {
  kHead = 0,      // all pairs read one element
  kRow = 1,       // all pairs of a query read one element
  kColumn = 2,    // all pairs of a key read one element
  kDiagonal = 3,  // all pairs of the same i - j read one element
  kElement = 4,   // no two pairs read the same element
  kGather = 5     // anything else
};

// Of an axis, in bytes. In two halves, so that a stride of 32 bits is multiplied as one: by a single instruction.
struct ProgramStride {
  int low, high;

  TESSERA_HOST_DEVICE constexpr int64 bytes() const {
    return static_cast<int64>(high) * (int64{1} << 32) + static_cast<uint32>(low);
  }
};

// A tensor of any strides, with the `rank` axes of its program.
struct ProgramTensor {
  const void* data;
  ProgramStride stride[kProgramRank];
  uint32 extent[kProgramRank];  // at most 2^31: an index, which is an int32, is below that
};

// A float or an int, by its type in the program; a bool is an int, 0 or 1.
union ProgramScalar {
  float real;
  int integer;
};

struct ScoreProgramParams {
  ProgramTensor tensors[kProgramTensors];
  // Backward: the sums of the tensors' gradients, float or ExactSum for each element; NULL: not requested.
  void* sums[kProgramTensors];
  int* read_outside;  // check() writes 1 if a load that is executed is outside its tensor. NULL: not reported
  ProgramScalar scalars[kProgramScalars];
};

// A kernel's params with those of its program.
template <class Params>
struct ProgrammedParams : Params {
  ScoreProgramParams program;
};

// A sum of floats whose result does not depend on the order of additions: word w counts multiples of 2^(32 w - 149), so
// every finite float is two words' digits of 32 bits, and 2^31 floats can be added before a word overflows. What is not
// finite is remembered apart.
inline constexpr int kExactWords = 9;
inline constexpr uint32 kPlusInfinityAdded = 1, kMinusInfinityAdded = 2, kNanAdded = 4;
struct ExactSum {
  unsigned long long words[kExactWords];
  uint32 special, padding;
};

}  // namespace tessera
