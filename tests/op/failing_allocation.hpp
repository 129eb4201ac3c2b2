// Allocations that fail on request, on one thread.
#pragma once

#include <cstdint>

namespace tessera::testing {

// The number of allocations by `new` of this thread that succeed before one fails, from now on; -1: all succeed. Once
// one has failed, all succeed.
void set_allocations_left(int64_t count);

}  // namespace tessera::testing
