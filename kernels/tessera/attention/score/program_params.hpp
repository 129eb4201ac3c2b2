// What a score program names, as a kernel gets it: tensors and scalars of a call, by their places in the program.
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
  kBool = 5,   // a byte, 0 or not
  kInt64 = 6,  // whose values fit 32 bits: the high ones are not read
  kInt8 = 7,
  kInt16 = 8,
  kUInt8 = 9
};

// How the pairs of one (b, h) share the elements that a load of a program reads (core/score/facts.hpp).
enum class GradientPattern : int {
  kHead = 0,      // all pairs read one element
  kRow = 1,       // all pairs of a query do
  kColumn = 2,    // all pairs of a key
  kDiagonal = 3,  // all pairs of the same i - j
  kElement = 4,   // no two pairs do
  kGather = 5     // anything else
};

// A tensor of any strides, of `rank` axes as its program has it.
struct ProgramTensor {
  const void* data;
  int64 stride_bytes[kProgramRank];
  uint32 extent[kProgramRank];  // at most 2^31: an index, which is an int32, is below that
};

// A float or an int, as the program has it; a truth value is an int, 0 or 1.
union ProgramScalar {
  float real;
  int integer;
};

struct ScoreProgramParams {
  ProgramTensor tensors[kProgramTensors];
  int* read_outside;  // check() writes 1 where a load that is taken is outside its tensor. NULL: not reported
  ProgramScalar scalars[kProgramScalars];
};

}  // namespace tessera
