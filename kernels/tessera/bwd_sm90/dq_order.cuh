// Deterministic, with a block mask: for each key tile and query tile, counts the blocks that add to that tile of dQ
// before the key tile's block, in the order in which blocks start, and all blocks that add to it. One warp processes a
// query tile, 32 key tiles at a time.
//
// Grid: a warp for each of batches x heads x query tiles. Block: kBlockListsWarps warps.
#pragma once

#include "tessera/attention/backward/key_block.cuh"
#include "tessera/block_lists/entry.cuh"

namespace tessera {

template <BlockListsConfig kCfg>
TESSERA_DEVICE void bwd_sm90_dq_order(const BlockListsParams& p) {
  static_assert(kCfg.transposed, "tiles of keys by lists of tiles of queries");
  const int lane = static_cast<int>(threadIdx.x % 32), queries = p.lists.most, keys = p.lists.tiles;
  const int warp = static_cast<int>(blockIdx.x) * kBlockListsWarps + static_cast<int>(threadIdx.x / 32);
  if (warp >= p.batches * p.heads * queries) return;
  const int block = warp % queries, mask_number = warp / queries, head = mask_number % p.heads,
            batch = mask_number / p.heads;
  const Sequence s = load_sequence<false>(p, batch);
  const char* mask =
      static_cast<const char*>(p.block_mask.data) + p.block_mask.batch * batch + p.block_mask.head * head;
  int adders = 0;
  for (int first = 0; first < keys; first += 32) {
    const int tile = last_keys_first(p) ? keys - 1 - (first + lane) : first + lane;
    int entry = 0;
    const bool adds = first + lane < keys && list_entry<kCfg>(p, s, mask, tile, block, entry);
    const uint32 added_by = __ballot_sync(0xffffffff, adds);
    if (adds) *p.dq_order.before(mask_number * keys + tile, block) = adders + __popc(added_by & ((1u << lane) - 1));
    adders += __popc(added_by);
  }
  if (lane == 0) *p.dq_order.adders(mask_number, block) = adders;
}

}  // namespace tessera
