// Converts a block mask (block-sparse attention of arXiv 2205.14135, section 3.3) to the list of blocks that each tile
// of rows sees, by mask and by position. One warp makes a list, 32 blocks at a time. Sequences are dense and of one
// length.
//
// Grid: one warp for each of batches x heads x tiles. Block: kBlockListsWarps warps.
#pragma once

#include "tessera/block_lists/entry.cuh"

namespace tessera {

template <BlockListsConfig kCfg>
TESSERA_DEVICE void block_lists(const BlockListsParams& p) {
  static_assert(kCfg.rows % kListHalves == 0, "BlockListsConfig");
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int list = static_cast<int>(blockIdx.x) * kBlockListsWarps + static_cast<int>(threadIdx.x / 32);
  if (list >= p.batches * p.heads * p.lists.tiles) return;
  const int tile = list % p.lists.tiles, head = list / p.lists.tiles % p.heads, batch = list / p.lists.tiles / p.heads;
  const Sequence s = load_sequence<false>(p, batch);
  const char* mask =
      static_cast<const char*>(p.block_mask.data) + p.block_mask.batch * batch + p.block_mask.head * head;
  int* entries = p.lists.entries(list);
  int count = 0;
  for (int first = 0; first < p.lists.most; first += 32) {
    const int block = kCfg.transposed ? p.lists.most - 1 - (first + lane) : first + lane;
    int entry = 0;
    const bool seen = first + lane < p.lists.most && list_entry<kCfg>(p, s, mask, tile, block, entry);
    const uint32 seen_by = __ballot_sync(0xffffffff, seen);
    if (seen) entries[count + __popc(seen_by & ((1u << lane) - 1))] = entry;
    count += __popc(seen_by);
  }
  if (lane != 0) return;
  *p.lists.count(list) = count;
  if (p.long_lists && is_long_list(count, p.lists.most)) atomicAdd(p.long_lists, 1);
  if (p.tile_counter && list == 0) *p.tile_counter = 0;
}

}  // namespace tessera
