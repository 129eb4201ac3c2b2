// The rows of each rank.
#pragma once

#include <vector>

#include "tessera/distributed.h"

namespace tessera::distributed {

// Chunks in the order of (sequence, begin), T / N rows for each rank. The problem is already checked.
std::vector<tessera_chunk> make_chunks(const tessera_ranks_problem& problem);

}  // namespace tessera::distributed
