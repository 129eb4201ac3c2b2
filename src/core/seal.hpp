// A plan is the caller's memory, and everything after it relies on what it says: tile sizes, offsets, bytes of workspace.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::core {

// A hash of every member but the first two.
uint64_t seal_of(const tessera_plan& plan);

// Whether `plan` is what tessera_make_plan of this very version filled in, unchanged; INVALID_ARGUMENT says what it is
// instead. This finds accidents (stale files, other versions, edited members); who forges a seal too could as well
// write the memory.
tessera_status check_plan(const tessera_plan* plan);

}  // namespace tessera::core
