// What fwd_sm90 asks of fwd_sm80, which stands in for it.
#pragma once

#include "cuda/runtime/launch_list.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// fwd_sm80 for another kernel's plan, which has no workspace for parts of the keys: it takes them in one.
tessera_status forward_sm80_unsplit(const tessera_plan& plan, const tessera_buffers& buffers, LaunchList& launches);

// Parts into which fwd_sm80 would split the keys of a problem that it takes. `plan` has its sizes filled in.
int32_t splits_of_fwd_sm80(const tessera_plan& plan);

}  // namespace tessera::cuda
