// What fwd_sm90 asks of fwd_sm80, which stands in for it where data is not aligned.
#pragma once

#include <cstdint>

#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// All that fwd_sm80 has decided for a problem.
struct FwdSm80Plan {
  FwdConfig config;     // where every row of q, k and v starts at a multiple of 16 bytes
  FwdConfig unaligned;  // elsewhere
  WorkOrder order;      // of persistent blocks
  Divisor tiles;        // of a head (packed: of all sequences)
  Grid grid;
  int num_splits, split_keys;
};

// Of a problem that it takes; `plan` has its sizes filled in. Unsplit: for a plan without workspace for parts of the keys.
enum class Splits { kByLoad, kNone };
FwdSm80Plan plan_fwd_sm80(const tessera_plan& plan, Splits splits);

tessera_status list_fwd_sm80(const tessera_plan& plan, const FwdSm80Plan& own, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches);

}  // namespace tessera::cuda
