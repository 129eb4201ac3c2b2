// Which keys a block of bwd_sm90 owns, and which tiles of queries it passes over.
#pragma once

#include "tessera/attention/query_slots.cuh"
#include "tessera/bwd_sm90/config.hpp"

namespace tessera {

// Key tiles are ordered in sections of heads whose Q, dO and dQ fit into the L2 cache together (L2 swizzle). In a section the
// first key tile of every head comes first, which under a causal mask is visible to the most queries, so that the longest
// blocks start first (LPT order).
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
  int load_entry;  // with a block mask: of the list of load_head, whose load_tile-th it is
};
static_assert(sizeof(KeyBlock) <= kBwdSm90BlockBytes);

// Deterministic: blocks add to a tile of dQ in the order in which they start, so that a block waits only for blocks that have
// started. Under a causal mask they start with the last key tile, since each block begins with the query tile on its diagonal,
// to which it is then the first to add. Without a mask all would begin with the first query tile and follow one another: rotated,
// each begins with the query tile at its own keys, and if all go at one pace, nobody waits.
TESSERA_DEVICE bool last_keys_first(const ProblemParams& p) { return p.causal || p.window_right >= 0; }

// Deterministic: where a block's steps begin; after its last tile of queries comes its first.
template <auto kCfg>
TESSERA_DEVICE int start_tile(const BwdSm90Params& p, const KeyBlock& b) {
  return b.first_tile + b.key0 / kCfg.block_n * p.rotation;
}
TESSERA_DEVICE int next_tile(const KeyBlock& b, int tile) {
  return tile + 1 == b.first_tile + b.tiles ? b.first_tile : tile + 1;
}

// A (sequence, KV head) pair and one of its tiles of keys, packed a slot.
struct KeyTilePlace {
  int head, slot;
};
TESSERA_DEVICE KeyTilePlace key_tile_place(const BwdSm90Params& p, int index) {
  const int section_blocks = p.section_heads * p.key_tiles;
  const int section = index / section_blocks, first = section * p.section_heads;
  index -= section * section_blocks;
  const int width = min(p.heads - first, static_cast<int>(p.section_heads));
  const int slot = width == p.section_heads ? index / p.section_heads : index / width;
  return {first + index - slot * width, slot};
}

// Where K and V have a block's KV head.
template <BwdSm90Config kCfg>
TESSERA_DEVICE int stored_kv_head(const BwdSm90Params& p, const KeyBlock& b) {
  return kCfg.split_group ? b.head_kv / p.group_splits : b.head_kv;
}

// kCfg: of either kernel, with block_m, block_n, varlen and deterministic.
template <auto kCfg>
TESSERA_DEVICE KeyBlock key_block(const BwdSm90Params& p, int index) {
  KeyBlock b;
  auto [head, slot] = key_tile_place(p, index);
  if (kCfg.deterministic && last_keys_first(p)) slot = p.key_tiles - 1 - slot;
  b.batch = head / p.heads_kv, b.head_kv = head % p.heads_kv;
  int64 key0 = static_cast<int64>(slot) * kCfg.block_n;
  if (kCfg.varlen && p.cu_seqlens_k) {
    b.batch = find_sequence<kCfg.block_n>(p, p.cu_seqlens_k, p.cu_seqlens_k_stride, p.rows_k, 1, slot),
    b.head_kv = head;
    key0 = tile_at_slot<kCfg.block_n>(p, p.cu_seqlens_k, p.cu_seqlens_k_stride, p.rows_k, 1, slot, b.batch);
    key0 *= kCfg.block_n;
  }
  b.s = load_sequence<kCfg.varlen>(p, b.batch);
  b.key0 = static_cast<int>(min(key0, static_cast<int64>(b.s.k_rows)));  // a slot may belong to no sequence
  const KeyRange some = seeing_queries(p, b.s, b.key0, min(b.key0 + kCfg.block_n, b.s.sk) - 1);
  b.first_tile = some.low / kCfg.block_m;
  b.tiles = some.low <= some.high ? some.high / kCfg.block_m + 1 - b.first_tile : 0;
  // The last key is seen from the latest query on, the first key up to the earliest.
  b.full_low = seeing_queries(p, b.s, b.key0 + kCfg.block_n - 1, b.key0 + kCfg.block_n - 1).low;
  b.full_high = b.key0 + kCfg.block_n <= b.s.sk ? seeing_queries(p, b.s, b.key0, b.key0).high : -1;
  b.slot0 = query_slot<kCfg.block_m>(p, b.batch);
  b.steps = b.tiles * p.group;
  b.load_head = b.head_kv * p.group, b.load_tile = b.first_tile, b.load_offset = b.load_parity = 0;
  if constexpr (kCfg.deterministic) b.load_tile = start_tile<kCfg>(p, b);
  return b;
}

// With a block mask: the lists of a tile of keys, one of each query head of the group, and how many entries they have.
TESSERA_DEVICE int list_of(const BwdSm90Params& p, const KeyBlock& b, int block_n, int head) {
  return p.lists.at(b.batch, head, b.key0 / block_n);
}
TESSERA_DEVICE int steps_of(const BwdSm90Params& p, int batch, int first_head, int tile) {
  int steps = 0;
  for (int n = 0; n < p.group; ++n) steps += *p.lists.count(p.lists.at(batch, first_head + n, tile));
  return steps;
}
TESSERA_DEVICE int steps_of(const BwdSm90Params& p, KeyTilePlace at) {
  return steps_of(p, at.head / p.heads_kv, at.head % p.heads_kv * p.group, at.slot);
}
// To the next list that has an entry, from b.load_tile of b.load_head on; there is one.
TESSERA_DEVICE void find_entry(const BwdSm90Params& p, KeyBlock& b, int block_n) {
  while (b.load_tile == *p.lists.count(list_of(p, b, block_n, b.load_head))) ++b.load_head, b.load_tile = 0;
  b.load_entry = p.lists.entries(list_of(p, b, block_n, b.load_head))[b.load_tile];
}
// The block's steps are those lists.
TESSERA_DEVICE void use_lists(const BwdSm90Params& p, KeyBlock& b, int block_n) {
  b.steps = steps_of(p, b.batch, b.load_head, b.key0 / block_n);
  b.load_tile = 0;
  if (b.steps > 0) find_entry(p, b, block_n);
}

// How many blocks add to the tile of queries from row0 on before this one.
template <auto kCfg>
TESSERA_DEVICE int turn_of(const BwdSm90Params& p, const KeyBlock& b, int row0) {
  const int mine = b.key0 / kCfg.block_n;
  if (p.rotation) {  // the block that begins with this tile, or shortly before it, is the first
    const int ahead = row0 / kCfg.block_m / p.rotation - mine;
    return ahead < 0 ? ahead + p.key_tiles : ahead;
  }
  const KeyRange keys = visible_keys(p, b.s, row0, min(row0 + kCfg.block_m, b.s.sq) - 1).some;
  return last_keys_first(p) ? keys.high / kCfg.block_n - mine : mine - keys.low / kCfg.block_n;
}

// Deterministic: body(slot, turn) of every kThreads-th of a block's steps from the thread-th on, in their order: where in dQ it adds, and how
// many blocks add there before.
template <auto kCfg, int kThreads, class Body>
TESSERA_DEVICE void for_turns(const BwdSm90Params& p, const KeyBlock& b, int thread, Body&& body) {
  const int start = start_tile<kCfg>(p, b);
  int tile = start, head_slot = b.head_kv * p.group * p.q_slots + b.slot0;  // of the head's first tile
#pragma unroll 1
  for (int step = 0; step < b.steps; ++step) {
    if (step % kThreads == thread) body(head_slot + tile, turn_of<kCfg>(p, b, tile * kCfg.block_m));
    tile = next_tile(b, tile);
    if (tile == start) head_slot += p.q_slots;
  }
}

// A step: one tile of queries of one of the group's query heads, head after head. The producer writes it to shared memory
// beside the tile.
struct QueryTileStep {
  int slot;  // of the tile in what [heads_q, q_slots] describes
  int row0;  // of the sequence; with a block mask its lowest bits are the list's entry's
};

// With a block mask: where a step's dQ is added, and, deterministic, how many blocks add there before.
struct QueryTileTurn {
  int slot, turn;
};

}  // namespace tessera
