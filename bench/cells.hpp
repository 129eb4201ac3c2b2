// The table of cells: the promises about speed and memory, and the least value that keeps each of them.
#pragma once

#include <vector>

#include "contest.hpp"

namespace bench {

std::vector<Cell> all_cells(const tessera_device& device);

}  // namespace bench
