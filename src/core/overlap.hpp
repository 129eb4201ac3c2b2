// Tests if two tensors with any strides share an element's memory.
#pragma once

#include "tessera/tessera.h"

namespace tessera::core {

// The address range of a tensor, whose layout is valid and has elements.
struct Extent {
  const char *begin, *end;
};
Extent extent_of(const tessera_layout& layout, const void* data);

// Exact for tensors whose strides nest (views of one packed tensor, slices, transposes). For others it may return a
// false "no" when the search takes too long, but never a false "yes".
bool overlap(const tessera_layout& a, const void* a_data, const tessera_layout& b, const void* b_data);

}  // namespace tessera::core
