// The rules for a single tensor's layout: rank, addressable size, overlap of its own elements.
#pragma once

#include "core/fields.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

enum class Access { kRead, kWritten };

// Needs rank >= 1. Refuses negative extents, sizes that 63 bits cannot address, a last axis that must be contiguous but
// is not, and output tensors whose strides could make two elements share memory.
tessera_status check_layout(const char* name, const tessera_layout& layout, Access access, LastAxis last_axis);

}  // namespace tessera::core
