// The interface of fwd_sm80 that fwd_sm90 uses for data that is not aligned.
#pragma once

#include <cstdint>

#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// The decisions of fwd_sm80 for a problem.
struct FwdSm80Plan {
  FwdConfig config;     // if every row of q, k and v starts at a multiple of 16 bytes
  FwdConfig unaligned;  // otherwise
  WorkOrder order;      // of persistent blocks
  Divisor tiles;        // tiles of a head (packed: of all sequences)
  Grid grid;
  int num_splits, split_keys;
};

// `plan` describes a problem that fwd_sm80 supports, and has its sizes filled in. kNone: its workspace has no room for
// split keys.
enum class Splits { kByLoad, kNone };
FwdSm80Plan plan_fwd_sm80(const tessera_plan& plan, Splits splits);

tessera_status list_fwd_sm80(const tessera_plan& plan, const FwdSm80Plan& own, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches);

}  // namespace tessera::cuda
