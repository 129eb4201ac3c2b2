// The rules of one tensor's layout, apart from every other tensor: ranks, sizes that can be addressed, overlap.
#pragma once

#include "core/fields.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

enum class Access { kRead, kWritten };

// rank >= 1. Refuses negative extents, sizes beyond what 63 bits can address, a last axis that must be contiguous and
// is not, and written tensors whose strides could make two elements share memory.
tessera_status check_layout(const char* name, const tessera_layout& layout, Access access, LastAxis last_axis);

}  // namespace tessera::core
