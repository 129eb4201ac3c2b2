// Checks that a program's loads are inside its tensors. A load counts if it is evaluated: not on the side of where, &&
// and
// | that is not selected, and only for pairs that position (causal, window, lengths) and the program's mask show. Loads
// that depend on s are not checked: an element outside is never read, and counts as 0.
#pragma once

#include "core/score/bound.hpp"
#include "tessera/tessera.h"

namespace tessera::core::score {

// For a plan, without data: INVALID_ARGUMENT if a load of every pair is outside for any data.
tessera_status check_planned_indices(const tessera_plan& plan);

// For a call whose tensors the host can read: INVALID_ARGUMENT names the load, the pair and the index. Pairs are
// checked in blocks; only the few at the border of a tensor are checked one by one.
tessera_status check_indices(const tessera_plan& plan, const tessera_buffers& buffers, const Bound& bound);

}  // namespace tessera::core::score
