// Persistent blocks: how many there are, and the order in which they take works, the numbers that attention/work_order.hpp
// reads.
#pragma once

#include <cstdint>

#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

struct Works {
  int64_t tiles, heads;  // as WorkOrder has them
  bool equal;            // in size
  bool packed;           // tiles are slots, and which are large is not known
  int64_t group;         // heads that share keys and values
  int64_t head_bytes;    // of these
  int64_t tile_keys;     // that a tile sees and the next smaller one does not
  int64_t fixed_keys;    // what every tile costs beside
  int64_t blocks;        // of the grid

  bool operator==(const Works&) const = default;
};

WorkOrder order_of(const Works& works);

// Whether queries see the more keys the later they stand: works differ in size.
bool staircase(const tessera_problem& problem);

// Of a grid whose GPU holds `resident` at a time. Each takes works until there are no more. Which works of a packed
// batch are long only the GPU knows: there a multiprocessor gets blocks of a few works one after another, as it becomes
// free.
int64_t persistent_blocks(const tessera_plan& plan, int64_t works, int64_t resident);

// Of a plan's works: tiles a head as above, each of `rows` query rows. `fixed_keys`: what opening a work and storing
// its rows cost.
WorkOrder order_of(const tessera_plan& plan, int64_t tiles, int64_t heads, int64_t rows, int64_t fixed_keys,
                   int64_t blocks);

}  // namespace tessera::cuda
