// A block mask as lists of visible blocks, which kernels walk instead of testing every block. The config is fixed when
// the kernel is compiled, the params are read at run time.
#pragma once

#include "tessera/attention/problem.hpp"

namespace tessera {

// An entry of a list: a block of columns that a tile of rows sees, and for each half of the tile's rows (those of one
// warpgroup) whether the block is hidden from that half. Rows are queries and columns are keys; transposed, for the
// backward pass, rows are keys and columns are queries.
inline constexpr int kListHalves = 2;
inline constexpr int kListHidden = (1 << kListHalves) - 1;  // the entry's lowest bits: bit h is set if half h does not
                                                            // see the block
TESSERA_HOST_DEVICE constexpr int list_block(int entry) { return entry >> kListHalves; }
TESSERA_HOST_DEVICE constexpr bool list_hides(int entry, int half) { return (entry >> half & 1) != 0; }

// One list for each mask [batch|1, heads|1] and each tile of rows: the number of entries, then at most `most` entries.
// The count and the first entries share 32 bytes, so one load fetches both. Entries are in ascending order, transposed
// in descending order: under a causal mask the long transposed lists of queries have a common end and different starts,
// so blocks that start together read the same queries, which are then in L2.
struct BlockLists {
  int* words;
  int tiles, most;
  int batch, head;  // distance between batch entries and between heads, in tiles of rows; 0 for broadcast
  TESSERA_HOST_DEVICE int at(int b, int h, int tile) const { return b * batch + h * head + tile; }
  TESSERA_HOST_DEVICE int stride() const { return (1 + most + 7) / 8 * 8; }
  TESSERA_HOST_DEVICE int* count(int list) const { return words + static_cast<int64>(list) * stride(); }
  TESSERA_HOST_DEVICE int* entries(int list) const { return count(list) + 1; }
};

// A list is long if it holds at least an eighth of the possible entries. Tiles with long lists are processed first if
// at most one list in kListsALongOne is long.
TESSERA_HOST_DEVICE constexpr bool is_long_list(int count, int most) { return int64{count} * 8 >= most; }
inline constexpr int kListsALongOne = 16;

struct BlockListsConfig {
  int rows;  // of a tile
  int cols;  // of a block
  bool transposed;
};
TESSERA_CONFIG_FIELDS(BlockListsConfig, rows, cols, transposed)

inline constexpr int kBlockListsWarps = 4;  // of a thread block; each warp makes one list

struct BlockListsParams : ProblemParams {
  BlockLists lists;
  int batches, heads;  // of the mask; 1 if it is broadcast
  int* long_lists;     // or NULL; zero at launch, and the kernel adds the number of long lists
  int* tile_counter;   // or NULL; set to 0 for the kernel that walks the lists
};

// ---- the lists of blocks that a score program's mask shows, made for every call: captured tensors may change ----

// An entry of such a list: as in BlockLists, and for each half of the tile's rows whether the program's mask shows all
// of the block, so that it need not be evaluated.
inline constexpr int kProgramEntryBits = 2 * kListHalves;
template <bool kProgram>
TESSERA_HOST_DEVICE constexpr int list_block(int entry) {
  return entry >> (kProgram ? kProgramEntryBits : kListHalves);
}
TESSERA_HOST_DEVICE constexpr bool list_is_full(int entry, int half) {
  return (entry >> (kListHalves + half) & 1) != 0;
}

// The lists have any lengths and share a pool. BlockLists::words is the number of words that are taken of the pool and,
// at kProgramLacksRoom, whether some list found no room; then from kProgramHeadsAt on kProgramHeadWords for each list:
// the number of entries, the word at which they begin, and a tile of the order of tiles; then the pool. Where some list
// found no room, all of them have kListNotMade entries: the kernel then visits every block that is visible by position,
// and evaluates the mask in each. Which lists find room depends on the order in which they are made; whether all do,
// does not, nor do the bits of the results.
inline constexpr int kProgramLacksRoom = 1, kProgramHeadsAt = 8, kProgramHeadWords = 3, kListNotMade = -1;
TESSERA_HOST_DEVICE constexpr int64 program_head_at(int64 list) { return kProgramHeadsAt + kProgramHeadWords * list; }
// The pool of so many lists.
TESSERA_HOST_DEVICE constexpr int64 program_pool_at(int64 lists) { return program_head_at(lists); }
struct ListHead {
  int count;
  const int* entries;
};
// The list of a kernel that is compiled with a program, or of one without.
template <bool kProgram>
TESSERA_HOST_DEVICE ListHead list_head(const BlockLists& lists, int list) {
  if constexpr (kProgram) {
    const int* head = lists.words + program_head_at(list);
    return {lists.words[kProgramLacksRoom] != 0 ? kListNotMade : head[0], lists.words + head[1]};
  } else {
    return {*lists.count(list), lists.entries(list)};
  }
}
// The order of a mask's tiles, the longest list first: the n-th tile is stored with the n-th of the mask's lists. Above
// kMostOrderedTiles tiles are not ordered by length, but taken by position.
inline constexpr int kMostOrderedTiles = 512;
TESSERA_HOST_DEVICE constexpr bool orders_tiles(const BlockLists& lists) { return lists.tiles <= kMostOrderedTiles; }
TESSERA_HOST_DEVICE inline int* ordered_tile(const BlockLists& lists, int first_list, int n) {
  return lists.words + program_head_at(first_list + n) + 2;
}
// The entry of the n-th block from `first` on of a list that was not made.
TESSERA_HOST_DEVICE constexpr int unlisted_entry(int first, int n) { return (first + n) << kProgramEntryBits; }

struct ProgramListsConfig {
  int rows;  // of a tile
  int cols;  // of a block
  bool transposed;
  bool varlen;   // sequences are packed, or use only some of their keys
  bool paged;    // keys are in pages
  bool ordered;  // tiles are ordered by the lengths of their lists, too
  ScoreConfig score;
  // Of the program the kernels read the mask alone, and are compiled with no more.
  static constexpr bool kMaskAlone = true;
};
TESSERA_CONFIG_FIELDS(ProgramListsConfig, rows, cols, transposed, varlen, paged, ordered, score)

// Bounds of blocks of columns are kept for each block and for each group of so many.
inline constexpr int kBoundsGroup = 32;
inline constexpr int kProgramListsThreads = 256, kProgramBoundsThreads = 32 * kBoundsGroup;

// Masks: pairs of a batch entry and a head that differ, or 1. If rows, or columns, are packed, the tiles of all
// sequences are one range of padded tile indices (attention/sequence.cuh), so their masks are heads.
struct ProgramListsParams : ProblemParams {
  BlockLists lists;   // tiles: of a sequence; packed: padded tile indices of the batch
  int heads;          // that have lists of their own; 1 if all share them
  int end_word;       // of the pool
  int* long_lists;    // or NULL; zero at launch, and the kernel adds the number of long lists
  int* tile_counter;  // or NULL; set to 0 for the kernel that walks the lists
  // What the mask reads of a column, bounded: [column_masks, column_blocks], then [column_masks, column_groups].
  void* bounds;
  int column_masks, column_blocks, column_groups;  // blocks and groups: as lists.tiles
};

// ---- the order of deterministic additions to dQ, of transposed lists of both kinds ----

// Blocks of keys add to a tile of queries in the order in which they start. Beside each entry of a list is its place:
// the number of blocks that add to that tile before the list's block.
struct DqOrder {
  int64 beside;  // words from an entry to its place
  int* adders;   // [masks, blocks]: how many blocks add to each tile of queries; only of a block mask, else NULL
};

struct DqOrderConfig {
  int rows, cols;  // keys of a tile, queries of a block
  bool varlen;     // as in ProgramListsConfig
  bool program;    // the lists are a program's
};
TESSERA_CONFIG_FIELDS(DqOrderConfig, rows, cols, varlen, program)

struct DqOrderParams : ProblemParams {
  BlockLists lists;
  DqOrder order;
  int heads;            // that have lists of their own; 1 if all share them
  int masks, blocks;    // ProgramListsParams::column_masks, column_blocks
  int last_keys_first;  // blocks start with the last tile of keys
};

}  // namespace tessera
