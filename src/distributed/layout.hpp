// Which rows each rank has.
#pragma once

#include <vector>

#include "tessera/distributed.h"

namespace tessera::distributed {

// Chunks in the order of (sequence, begin), T / N rows of each rank. The problem was checked.
std::vector<tessera_chunk> make_chunks(const tessera_ranks_problem& problem);

}  // namespace tessera::distributed
