// Deterministic backward pass with lists: for each entry of a list of query tiles, counts the blocks of keys that add
// to that tile of dQ before the list's block, in the order in which blocks start. One warp processes a query tile: it
// looks for the tile in the lists of 32 key tiles at a time. The places take as many words as the entries.
//
// Which lists of a program find room in a full pool depends on the order in which they were made. The total of what
// they ask for does not, nor does whether it exceeds the pool; then no list counts, and blocks add by position.
//
// Grid: a warp for each of masks x query tiles. Block: kBlockListsWarps warps.
#pragma once

#include "tessera/attention/sequence.cuh"
#include "tessera/block_lists/config.hpp"

namespace tessera {

// The index of a block in a transposed list, whose entries are in descending order; -1: it is not listed.
template <bool kProgram>
TESSERA_DEVICE int find_block(const ListHead& list, int block) {
  int low = 0, high = list.count;
  while (low < high) {
    const int middle = (low + high) / 2, at = list_block<kProgram>(list.entries[middle]);
    if (at == block) return middle;
    if (at > block) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return -1;
}

template <DqOrderConfig kCfg>
TESSERA_DEVICE void dq_order(const DqOrderParams& p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(blockIdx.x) * kBlockListsWarps + static_cast<int>(threadIdx.x / 32);
  if constexpr (kCfg.program) {
    if (p.lists.words[kProgramLacksRoom] != 0) {
      const int threads = static_cast<int>(gridDim.x) * kBlockListsWarps * 32;
      for (int list = warp * 32 + lane; list < p.count; list += threads) {
        p.lists.words[program_head_at(list)] = kListNotMade;
      }
      return;
    }
  }
  if (warp >= p.masks * p.blocks) return;

  // 1. The warp's tile of queries, and the tiles of keys of its sequence.
  const int mask = warp / p.blocks;
  int block = warp % p.blocks, batch = mask / p.heads, head = mask % p.heads;
  if (kCfg.varlen && p.cu_seqlens_q) {
    const int slot = block;
    batch = find_sequence<kCfg.cols>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, slot), head = mask;
    block = tile_at_slot<kCfg.cols>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, slot, batch);
  }
  int first_tile = 0, tiles = p.lists.tiles;
  if (kCfg.varlen && p.keys.begins) {
    first_tile = slot_begin<kCfg.rows>(p, p.keys.begins, p.keys.begins_stride, p.keys_limit, 1, batch);
    tiles = (load_sequence<true>(p, batch).sk + kCfg.rows - 1) / kCfg.rows;
  }
  const int first_list = p.lists.at(batch, head, first_tile);

  // 2. The places of its entries.
  int adders = 0;
  for (int first = 0; first < tiles; first += 32) {
    const int n = first + lane, tile = p.last_keys_first ? tiles - 1 - n : n;
    ListHead list{0, nullptr};
    if (n < tiles) list = list_head<kCfg.program>(p.lists, first_list + tile);
    const int entry = find_block<kCfg.program>(list, block);
    const uint32 added_by = __ballot_sync(0xffffffff, entry >= 0);
    if (entry >= 0) {
      int* const places = p.lists.words + (list.entries - p.lists.words) + p.order.beside;
      places[entry] = adders + __popc(added_by & ((1u << lane) - 1));
    }
    adders += __popc(added_by);
  }
  if (lane == 0 && p.order.adders) p.order.adders[warp] = adders;
}

}  // namespace tessera
