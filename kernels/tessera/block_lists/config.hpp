// A block mask as lists, which kernels walk instead of all blocks. Config: fixed when the kernel is compiled; params: read at run time.
#pragma once

#include "tessera/attention/problem.hpp"

namespace tessera {

// An entry of a list: a block of columns of some rows' tile, and for each half of the tile's rows, a warpgroup's, whether the block is
// hidden from it. Rows are queries and columns keys; transposed, for the backward pass, rows are keys and columns queries.
inline constexpr int kListHalves = 2;
inline constexpr int kListHidden = (1 << kListHalves) - 1;  // the entry's lowest bits: bit h: from half h
TESSERA_HOST_DEVICE constexpr int list_block(int entry) { return entry >> kListHalves; }
TESSERA_HOST_DEVICE constexpr bool list_hides(int entry, int half) { return (entry >> half & 1) != 0; }

// The lists, of the mask's [batch|1, heads|1] and each tile of rows: how many entries there are, and the entries, at most `most`. Whoever
// reads the first of them has read the count's 32 bytes. In ascending order, transposed in descending order: under a causal mask the long
// lists of queries end alike and begin at their keys, so that blocks that start together meet the same queries, which L2 then has.
struct BlockLists {
  int* words;
  int tiles, most;
  int batch, head;  // from one batch entry's, one head's, to the next: in tiles of rows; 0: the same
  TESSERA_HOST_DEVICE int at(int b, int h, int tile) const { return b * batch + h * head + tile; }
  TESSERA_HOST_DEVICE int stride() const { return (1 + most + 7) / 8 * 8; }
  TESSERA_HOST_DEVICE int* count(int list) const { return words + static_cast<int64>(list) * stride(); }
  TESSERA_HOST_DEVICE int* entries(int list) const { return count(list) + 1; }
};

// Long lists among short ones: of a tile whose list is long work begins first, if few are.
TESSERA_HOST_DEVICE constexpr bool is_long_list(int count, int most) { return int64{count} * 8 >= most; }
inline constexpr int kListsALongOne = 16;

struct BlockListsConfig {
  int rows;  // of a tile
  int cols;  // of a block
  bool transposed;
};
TESSERA_CONFIG_FIELDS(BlockListsConfig, rows, cols, transposed)

// Deterministic backward pass, of transposed lists: the order in which the blocks of keys that see a tile of queries add to its dQ.
struct BlockTurns {
  int* words;
  int lists, most;  // of BlockLists: all of them, and tiles of queries
  TESSERA_HOST_DEVICE int* turn(int list, int block) const { return words + static_cast<int64>(list) * most + block; }
  TESSERA_HOST_DEVICE int* adders(int mask_number, int block) const { return turn(lists + mask_number, block); }
};

inline constexpr int kBlockListsWarps = 4;  // of a block, each with a list

struct BlockListsParams : ProblemParams {
  BlockLists lists;
  BlockTurns turns;
  int batches, heads;  // of the mask: 1 where it is the same for all
  int* long_lists;     // or NULL: 0, to which those that are long are added
  int* tile_counter;   // or NULL: becomes 0, for the kernel that walks the lists
};

}  // namespace tessera
