// Checks every rule of shapes, strides, dtypes and options, in this one place; all later code relies on it.
#pragma once

#include "tessera/tessera.h"

namespace tessera::core {

// Returns INVALID_ARGUMENT, or UNSUPPORTED for a well-formed problem without a meaning (gradients of a paged cache).
tessera_status validate(const tessera_problem& problem);

// The layouts of tessera_combine.
tessera_status validate(const tessera_combine_call& call);

tessera_status validate(const tessera_device& device);

// The number of elements of a validated layout.
constexpr int64_t elements(const tessera_layout& layout) {
  int64_t count = layout.rank > 0 ? 1 : 0;
  for (int axis = 0; axis < layout.rank; ++axis) count *= layout.shape[axis];
  return count;
}

// "[2, 128, 8, 64]"
struct ShapeText {
  char text[TESSERA_MAX_RANK * 22 + 3];
};
ShapeText shape_text(const tessera_layout& layout);

}  // namespace tessera::core
