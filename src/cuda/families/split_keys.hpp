// Keys split into parts that different blocks compute: the parts' place in the workspace, and their merge.
#pragma once

#include <cstdint>

#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// [part, query head, query of the batch], float32; NULL without a workspace.
struct SplitParts {
  float *o, *lse, *lse_low;  // o has head_dim_v columns
};

// Whether a forward kernel stores its tiles as parts in float32, which a merge turns into o: of split keys, and of a
// call that accumulates or whose o has another dtype than q.
bool merges_parts(const tessera_problem& problem, int num_splits);

int64_t split_parts_bytes(const tessera_plan& plan, int num_splits);
SplitParts split_parts_at(const tessera_plan& plan, int num_splits, void* workspace);

// Merges the parts of every row into o and lse, with the sink and the partial result that a call accumulates to.
// Without parts (num_splits 0) no row sees a key.
tessera_status merge_split_parts(const tessera_plan& plan, int num_splits, const SplitParts& parts,
                                 const tessera_buffers& buffers, LaunchList& launches);

}  // namespace tessera::cuda
