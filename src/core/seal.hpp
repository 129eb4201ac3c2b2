// Detects changed plans. A plan is in the caller's memory, and execution relies on its tile sizes, offsets and
// workspace size.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::core {

// A hash of every member but the first two.
uint64_t seal_of(const tessera_plan& plan);

// OK if `plan` was filled in by tessera_make_plan of this version and is unchanged; otherwise INVALID_ARGUMENT says
// what is wrong. This detects accidents (stale files, other versions, edited members), not a deliberately forged seal.
tessera_status check_plan(const tessera_plan* plan);

}  // namespace tessera::core
