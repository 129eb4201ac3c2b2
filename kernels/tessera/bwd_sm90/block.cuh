// Which keys a block of bwd_sm90 owns, and which tiles of queries it passes over.
#pragma once

#include "tessera/bwd_sm80/query_slots.cuh"
#include "tessera/bwd_sm90/config.hpp"

namespace tessera {

// Tiles of keys stand in sections of heads whose Q, dO and dQ fit into L2 together; in a section the first keys of all
// heads come first, which under a causal mask are seen by the most queries: so the last blocks of a launch are short.
struct KeyBlock {
  int batch, head_kv;
  int key0;
  int steps;                // tiles of queries of all heads of the group
  int first_tile, tiles;    // of queries that see some of the keys
  int full_low, full_high;  // rows of queries that see all of them
  int slot0;                // of the sequence's first tile of queries
  Sequence s;

  // The producer's: the step that it loads next. In memory, where they take no registers of dQ's warpgroup.
  int load_head, load_tile, load_offset, load_parity;
};
static_assert(sizeof(KeyBlock) <= kBwdSm90BlockBytes);

// kCfg: of either kernel, with block_m and block_n.
template <auto kCfg>
TESSERA_DEVICE KeyBlock key_block(const BwdSm90Params& p, int index) {
  KeyBlock b;
  const int section_blocks = p.section_heads * p.key_tiles;
  const int section = index / section_blocks, first = section * p.section_heads;
  index -= section * section_blocks;
  const int width = min(p.heads - first, static_cast<int>(p.section_heads));
  const int slot = width == p.section_heads ? index / p.section_heads : index / width;
  const int head = first + index - slot * width;
  b.batch = head / p.heads_kv, b.head_kv = head % p.heads_kv;
  b.key0 = slot * kCfg.block_n;
  b.s = load_sequence<false>(p, b.batch);
  const KeyRange some = seeing_queries(p, b.s, b.key0, min(b.key0 + kCfg.block_n, b.s.sk) - 1);
  b.first_tile = some.low / kCfg.block_m;
  b.tiles = some.low <= some.high ? some.high / kCfg.block_m + 1 - b.first_tile : 0;
  // The last key is seen from the latest query on, the first key up to the earliest.
  b.full_low = seeing_queries(p, b.s, b.key0 + kCfg.block_n - 1, b.key0 + kCfg.block_n - 1).low;
  b.full_high = b.key0 + kCfg.block_n <= b.s.sk ? seeing_queries(p, b.s, b.key0, b.key0).high : -1;
  b.slot0 = query_slot<kCfg.block_m>(p, b.batch);
  b.steps = b.tiles * p.group;
  b.load_head = b.head_kv * p.group, b.load_tile = b.first_tile, b.load_offset = b.load_parity = 0;
  return b;
}

// A step: one tile of queries of one of the group's query heads, head after head. The producer leaves it beside the tile.
struct QueryTileStep {
  int slot;  // of the tile in what [heads_q, q_slots] describes
  int row0;  // of the sequence
};

}  // namespace tessera
