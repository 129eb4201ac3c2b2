// Persistent blocks: how many there are, and the order in which they take work tiles: the numbers that
// attention/work_order.hpp reads.
#pragma once

#include <cstdint>

#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// The work tiles of a grid.
struct TileGrid {
  int64_t tiles, heads;  // as WorkOrder has them
  bool equal;            // in size
  bool packed;           // tiles are slots, and which are large is not known
  int64_t group;         // heads that share keys and values
  int64_t head_bytes;    // of these
  int64_t tile_keys;     // that a tile sees and the next smaller one does not
  int64_t fixed_keys;    // what every tile costs beside
  int64_t blocks;        // of the grid

  bool operator==(const TileGrid&) const = default;
};

WorkOrder order_of(const TileGrid& grid);

// Whether later queries see more keys, under a causal mask or a window without a left edge: work tiles differ in cost.
bool is_causal(const tessera_problem& problem);

// How many blocks a grid of `work_tiles` has on a GPU that holds `resident` at a time; each takes work tiles until there are
// no more. Which tiles of a packed batch are long only the GPU knows: there a multiprocessor gets several blocks of a few
// tiles each, the next when one ends.
int64_t persistent_blocks(const tessera_plan& plan, int64_t work_tiles, int64_t resident);

// The order of a plan's work tiles: `tiles` a head as above, each of `rows` query rows. `fixed_keys`: what it costs to decode
// a tile's index and to store its rows, in keys.
WorkOrder order_of(const tessera_plan& plan, int64_t tiles, int64_t heads, int64_t rows, int64_t fixed_keys,
                   int64_t blocks);

}  // namespace tessera::cuda
