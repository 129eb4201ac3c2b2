// The lists of blocks that a score program's mask shows, made on the device for every call: captured tensors may change
// between calls. The config is fixed when the kernels are compiled, the params are read at run time.
#pragma once

#include "tessera/block_lists/config.hpp"

namespace tessera {

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

// The lists have any lengths and share a pool. BlockLists::words is the number of words that are taken of the pool,
// then from kProgramHeadsAt on two words for each list: the number of entries and the word at which they begin; then
// the pool. A list that found no room has kListNotMade entries: the kernel then visits every block that is visible by
// position, and evaluates the mask in each.
inline constexpr int kProgramHeadsAt = 8, kListNotMade = -1;
struct ListHead {
  int count;
  const int* entries;
};
// The list of a kernel that is compiled with a program, or of one without.
template <bool kProgram>
TESSERA_HOST_DEVICE ListHead list_head(const BlockLists& lists, int list) {
  if constexpr (kProgram) {
    const int* head = lists.words + kProgramHeadsAt + 2 * static_cast<int64>(list);
    return {head[0], lists.words + head[1]};
  } else {
    return {*lists.count(list), lists.entries(list)};
  }
}
// The entry of the n-th block from `first` on of a list that was not made.
TESSERA_HOST_DEVICE constexpr int unlisted_entry(int first, int n) { return (first + n) << kProgramEntryBits; }

struct ProgramListsConfig {
  int rows;  // of a tile
  int cols;  // of a block
  bool transposed;
  ScoreConfig score;
};
TESSERA_CONFIG_FIELDS(ProgramListsConfig, rows, cols, transposed, score)

// Bounds of blocks of columns are kept for each block and for each group of so many.
inline constexpr int kBoundsGroup = 32;
inline constexpr int kProgramListsThreads = 256;

struct ProgramListsParams : ProblemParams {
  BlockLists lists;
  int batches, heads;  // that have lists of their own; 1 if all share them
  int end_word;        // of the pool
  int* long_lists;     // or NULL; zero at launch, and the kernel adds the number of long lists
  int* tile_counter;   // or NULL; set to 0 for the kernel that walks the lists
  // What the mask reads of a column, bounded: [batches, heads, lists.most] for blocks, then likewise for groups.
  void* bounds;
};

}  // namespace tessera
