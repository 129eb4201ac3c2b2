// The order in which a persistent grid (fwd_sm90, fwd_sm80's persistent kernels) processes its work tiles, whose cost
// differs under a causal mask: a tile of late queries sees the most keys. Plain integers, for the device and for the
// host's tests; src/cuda/work_order.cpp chooses the numbers in WorkOrder.
//
// All work tiles have an index; block b takes a fixed sequence of indices (BlockTiles). Two ways to lay them out follow
// each other:
//
// 1. Paired heads. The tiles of a head come as largest, smallest, second largest, second smallest ... A block takes
//    two neighbours at a time, and every such pair costs the same. Few heads are in use at once.
// 2. L2 swizzle. `swizzle_heads` heads, as many as have their K and V in the L2 cache, form a section. Within it
//    the tiles come longest first (LPT): the largest of every head, then the second largest of every head ... They
//    go to the blocks forwards in one round and backwards in the next. Neighbouring sections run in opposite
//    directions: blocks reach the border at different times, and this way no tile there is much larger than the one
//    before it. The last section ends with its smallest tiles.
//
// Where the last round of pairs is not complete, the first section fills it up, so that blocks with a pair less begin
// the section with its largest tiles.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

struct WorkOrder {
  Divisor tiles;          // work tiles of a head (packed: slots of the batch); heads * tiles in all
  int heads;              // (batch, head) pairs, packed: heads; (batch, head, split) where keys are split
  int paired_heads;       // the first heads, laid out in pairs; paired_heads * tiles is even, or covers all heads
  Divisor swizzle_heads;  // of the other heads, those of an L2 section
  Divisor swizzle_tiles;  // swizzle_heads * tiles
  int ascending;          // 1: the first section begins with its smallest tiles; 0: with its largest
};

TESSERA_HOST_DEVICE constexpr int work_tiles(const WorkOrder& order) { return order.heads * order.tiles; }
TESSERA_HOST_DEVICE constexpr int paired_tiles(const WorkOrder& order) { return order.paired_heads * order.tiles; }

struct TileCoord {
  int head;  // batch * heads_q + head, packed: head
  int slot;  // tile, or slot of a packed batch; 0 is a sequence's last queries
};

TESSERA_HOST_DEVICE constexpr TileCoord tile_coord(const WorkOrder& order, int index) {
  const int tiles = order.tiles;
  if (index < order.paired_heads * tiles) {
    const int head = index / order.tiles;
    int slot = index - head * tiles;
    if (tiles % 2 && head % 2) slot = tiles - 1 - slot;  // so that two heads' middle tiles are neighbours
    return {head, slot % 2 ? tiles - 1 - slot / 2 : slot / 2};
  }
  index -= order.paired_heads * tiles;
  const int section = index / order.swizzle_tiles, head = order.paired_heads + section * order.swizzle_heads;
  const int rest = order.heads - head;
  index -= section * order.swizzle_tiles;
  const int width = rest < order.swizzle_heads ? rest : order.swizzle_heads;
  const int slot = rest < order.swizzle_heads ? index / rest : index / order.swizzle_heads;
  return {head + index - slot * width, (section + order.ascending) % 2 ? tiles - 1 - slot : slot};
}

// The indices of one block's work tiles, in ascending order; the first that is no tile's ends them.
struct BlockTiles {
  int index;
  int step;  // to the next; the step after that is 2 * blocks - step

  TESSERA_HOST_DEVICE constexpr BlockTiles(const WorkOrder& order, int block, int blocks) : index(2 * block), step(1) {
    if (index >= paired_tiles(order)) begin_sections(order, block, blocks);
  }
  TESSERA_HOST_DEVICE constexpr void advance(const WorkOrder& order, int block, int blocks) {
    const int paired = paired_tiles(order);
    const bool in_pairs = index < paired;
    index += step;
    step = 2 * blocks - step;
    if (in_pairs && index >= paired) begin_sections(order, block, blocks);
  }

 private:
  // The incomplete round of pairs is the sections' first round, and runs forwards; the next runs backwards.
  TESSERA_HOST_DEVICE constexpr void begin_sections(const WorkOrder& order, int block, int blocks) {
    const int paired = paired_tiles(order);
    // Number of pairs from the last one to the pair that would be this block's next.
    const int past = (index - paired) / 2;
    const bool in_round = past <= block;  // false: the block has a pair of the incomplete round
    index = paired + past + (in_round ? 0 : blocks - 2 * block - 1);
    step = in_round ? 2 * (blocks - block) - 1 : 2 * block + 1;
  }
};

}  // namespace tessera
