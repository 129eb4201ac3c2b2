// Persistent blocks: their number, and the order in which they process work tiles (the numbers of
// attention/work_order.hpp).
#pragma once

#include <cstdint>

#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// The work tiles of a grid.
struct TileGrid {
  int64_t tiles, heads;  // as in WorkOrder
  bool equal;            // all tiles cost the same
  bool packed;           // tiles are padded tile indices, and the large ones are unknown
  int64_t group;         // query heads that share keys and values
  int64_t head_bytes;    // bytes of keys and values per KV head
  int64_t tile_keys;     // keys that a tile sees beyond those of the next smaller one
  int64_t fixed_keys;    // additional cost of every tile, in keys
  int64_t blocks;        // of the grid

  bool operator==(const TileGrid&) const = default;
};

WorkOrder order_of(const TileGrid& grid);

// True if later queries see more keys, by a causal mask or a window without a left edge: work tiles then differ in
// cost.
bool is_causal(const tessera_problem& problem);

// The number of blocks for `work_tiles` tiles on a GPU that holds `resident` blocks at a time; each block processes
// tiles until none is left. Only the GPU knows which tiles of a packed batch are long, so there each multiprocessor
// gets several blocks of a few tiles each, one after another.
int64_t persistent_blocks(const tessera_plan& plan, int64_t work_tiles, int64_t resident);

// The order of a plan's work tiles: `tiles` per head as above, each of `rows` query rows. `fixed_keys`: the cost, in
// keys, of decoding a tile's index and storing its rows.
WorkOrder order_of(const tessera_plan& plan, int64_t tiles, int64_t heads, int64_t rows, int64_t fixed_keys,
                   int64_t blocks);

// An order for tiles that slots have by length, the longest first, and which blocks claim: sections of heads whose keys
// and values stay in the L2 cache.
WorkOrder sections_of(const tessera_plan& plan, int64_t tiles, int64_t heads);

}  // namespace tessera::cuda
