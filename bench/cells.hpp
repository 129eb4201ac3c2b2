// The table of cells: what is promised about speed and memory, and the least value that keeps each promise.
#pragma once

#include <vector>

#include "contest.hpp"

namespace bench {

std::vector<Cell> all_cells(const tessera_device& device);

}  // namespace bench
