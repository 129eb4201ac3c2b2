// Whether what a program reads is inside its tensors. A load counts where it is evaluated: of where, && and || not on the side
// that is not taken, and of a pair only where position (causal, window, lengths) and the program's mask show it. What depends on
// s is not checked: an element outside is never read, and counts as 0.
#pragma once

#include "tessera/tessera.h"

namespace tessera::core::score {

// Of a plan, without data: INVALID_ARGUMENT where a load of every pair is outside whatever the data are.
tessera_status check_planned_indices(const tessera_plan& plan);

// Of a call whose tensors the host can read: INVALID_ARGUMENT names the load, the pair and the index. By blocks of pairs, of which
// few are looked at one by one: those at the border of a tensor.
tessera_status check_indices(const tessera_plan& plan, const tessera_buffers& buffers);

}  // namespace tessera::core::score
