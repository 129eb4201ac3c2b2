// Whether two tensors of any strides share an element's memory.
#pragma once

#include "tessera/tessera.h"

namespace tessera::core {

// The bytes from a tensor's first to its last; its layout is valid and has elements.
struct Extent {
  const char *begin, *end;
};
Extent extent_of(const tessera_layout& layout, const void* data);

// Exact for tensors whose strides nest (views of one packed tensor, slices, transposes). Of others it may say "no" when the
// search takes too long, never "yes" when they do not.
bool overlap(const tessera_layout& a, const void* a_data, const tessera_layout& b, const void* b_data);

}  // namespace tessera::core
