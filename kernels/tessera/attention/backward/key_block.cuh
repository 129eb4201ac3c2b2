// The keys of a block of the backward kernels for Hopper, and the query tiles over which it loops.
#pragma once

#include "tessera/attention/backward/params.hpp"
#include "tessera/attention/backward/rows.cuh"
#include "tessera/attention/sequence.cuh"

namespace tessera {

// Key tiles are ordered in sections of heads whose Q, dO and dQ fit into the L2 cache together (L2 swizzle). Within a
// section the first key tile of every head comes first: under a causal mask it is visible to the most queries, so the
// longest blocks start first (LPT order).
struct KeyBlock {
  int batch, head_kv;
  int key0;
  int steps;                // query tiles of all query heads of the group
  int first_tile, tiles;    // query tiles that see some of the keys
  int full_low, full_high;  // query rows that see all of the keys
  int slot0;                // padded index of the sequence's first query tile
  Sequence s;

  // State of the producer: the step that it loads next. It is in memory so that it needs no registers of dQ's
  // warpgroup.
  int load_head, load_tile, load_offset, load_parity;
  int load_entry;  // with a block mask: entry load_tile of the list of load_head
};
static_assert(sizeof(KeyBlock) <= kBwdSm90BlockBytes);

// Deterministic: the query tile of a block's first step. The first query tile follows the last one.
template <auto kCfg>
TESSERA_DEVICE int start_tile(const BwdSm90Params& p, const KeyBlock& b) {
  return b.first_tile + b.key0 / kCfg.block_n * p.rotation;
}
TESSERA_DEVICE int next_tile(const KeyBlock& b, int tile) {
  return tile + 1 == b.first_tile + b.tiles ? b.first_tile : tile + 1;
}

// A (sequence, KV head) pair and one of its key tiles; packed: a padded key tile index.
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

// Whether the slots of key tiles are places in the order of tiles of a program's lists.
template <auto kCfg>
TESSERA_HOST_DEVICE constexpr bool orders_key_tiles() {
  if constexpr (requires { kCfg.program_lists(); }) return kCfg.program_lists() && !kCfg.varlen && !kCfg.deterministic;
  return false;
}

// kCfg: the config of bwd_sm90 or bwd_sm90_d256, with block_m, block_n, varlen and deterministic.
template <auto kCfg>
TESSERA_DEVICE KeyBlock key_block(const BwdSm90Params& p, int index) {
  KeyBlock b;
  auto [head, slot] = key_tile_place(p, index);
  if (kCfg.deterministic && last_keys_first(p)) slot = p.key_tiles - 1 - slot;
  b.batch = head / p.heads_kv, b.head_kv = head % p.heads_kv;
  if constexpr (orders_key_tiles<kCfg>()) {
    if (orders_tiles(p.lists)) slot = *ordered_tile(p.lists, p.lists.at(b.batch, b.head_kv * p.group, 0), slot);
  }
  int64 key0 = static_cast<int64>(slot) * kCfg.block_n;
  if (kCfg.varlen && p.keys.begins) {
    b.batch = find_sequence<kCfg.block_n>(p, p.keys.begins, p.keys.begins_stride, p.keys_limit, 1, slot),
    b.head_kv = head;
    key0 = tile_at_slot<kCfg.block_n>(p, p.keys.begins, p.keys.begins_stride, p.keys_limit, 1, slot, b.batch);
    key0 *= kCfg.block_n;
  }
  b.s = load_sequence<kCfg.varlen, false, kCfg.score>(p, b.batch);
  // A padded tile index may belong to no sequence.
  b.key0 = static_cast<int>(min(key0, static_cast<int64>(b.s.k_rows)));
  const KeyRange some = seeing_queries<kCfg.score>(p, b.s, b.key0, min(b.key0 + kCfg.block_n, b.s.sk) - 1);
  b.first_tile = some.low / kCfg.block_m;
  b.tiles = some.low <= some.high ? some.high / kCfg.block_m + 1 - b.first_tile : 0;
  // The queries that see the last key begin latest, and those that see the first key end earliest.
  b.full_low = seeing_queries<kCfg.score>(p, b.s, b.key0 + kCfg.block_n - 1, b.key0 + kCfg.block_n - 1).low;
  b.full_high = b.key0 + kCfg.block_n <= b.s.sk ? seeing_queries<kCfg.score>(p, b.s, b.key0, b.key0).high : -1;
  b.slot0 = query_slot<kCfg.block_m>(p, b.batch);
  b.steps = b.tiles * p.group;
  b.load_head = b.head_kv * p.group, b.load_tile = b.first_tile, b.load_offset = b.load_parity = 0;
  if constexpr (kCfg.deterministic) b.load_tile = start_tile<kCfg>(p, b);
  return b;
}

// With a block mask: the list of a key tile for one query head, and the number of entries of the lists of all query
// heads of the group. kProgram: the lists are a program's, and packed sequences have them by padded tile index.
template <int kBlockN, bool kProgram = false>
TESSERA_DEVICE int list_of(const BwdSm90Params& p, const KeyBlock& b, int head) {
  const int tile = kProgram ? listed_key_tile<kBlockN>(p, b.batch, b.key0) : b.key0 / kBlockN;
  return p.lists.at(b.batch, head, tile);
}
TESSERA_DEVICE int steps_of(const BwdSm90Params& p, int batch, int first_head, int tile) {
  int steps = 0;
  for (int n = 0; n < p.group; ++n) steps += *p.lists.count(p.lists.at(batch, first_head + n, tile));
  return steps;
}
TESSERA_DEVICE int steps_of(const BwdSm90Params& p, KeyTilePlace at) {
  return steps_of(p, at.head / p.heads_kv, at.head % p.heads_kv * p.group, at.slot);
}
// The entries of a list; of one that was not made, the tiles that are visible by position.
template <bool kProgram>
TESSERA_DEVICE int listed_tiles(const BwdSm90Params& p, const KeyBlock& b, int list) {
  const int count = list_head<kProgram>(p.lists, list).count;
  return kProgram && count == kListNotMade ? b.tiles : count;
}
template <bool kProgram>
TESSERA_DEVICE int listed_entry(const BwdSm90Params& p, const KeyBlock& b, int list, int n) {
  const ListHead head = list_head<kProgram>(p.lists, list);
  if (kProgram && head.count == kListNotMade) return unlisted_entry(b.first_tile, n);
  return head.entries[n];
}
// Advances to the next list entry, from b.load_tile of b.load_head on. Precondition: there is one.
template <int kBlockN, bool kProgram = false>
TESSERA_DEVICE void find_entry(const BwdSm90Params& p, KeyBlock& b) {
  while (b.load_tile == listed_tiles<kProgram>(p, b, list_of<kBlockN, kProgram>(p, b, b.load_head))) {
    ++b.load_head, b.load_tile = 0;
  }
  b.load_entry = listed_entry<kProgram>(p, b, list_of<kBlockN, kProgram>(p, b, b.load_head), b.load_tile);
}
// Replaces the block's steps by the entries of its lists.
template <int kBlockN, bool kProgram = false>
TESSERA_DEVICE void use_lists(const BwdSm90Params& p, KeyBlock& b) {
  if constexpr (kProgram) {
    b.steps = 0;
    for (int n = 0; n < p.group && b.tiles > 0; ++n) {
      b.steps += listed_tiles<true>(p, b, list_of<kBlockN, true>(p, b, b.load_head + n));
    }
  } else {
    b.steps = steps_of(p, b.batch, b.load_head, b.key0 / kBlockN);
  }
  b.load_tile = 0;
  if (b.steps > 0) find_entry<kBlockN, kProgram>(p, b);
}

// Deterministic: the number of blocks that add to the query tile of row0 before this one.
template <auto kCfg>
TESSERA_DEVICE int adders_before(const BwdSm90Params& p, const KeyBlock& b, int row0) {
  const int mine = b.key0 / kCfg.block_n;
  if (p.rotation) {  // the block that begins with this tile, or less than `rotation` tiles before it, is the first
    const int ahead = row0 / kCfg.block_m / p.rotation - mine;
    return ahead < 0 ? ahead + p.key_tiles : ahead;
  }
  const KeyRange keys = visible_keys<kCfg.score>(p, b.s, row0, min(row0 + kCfg.block_m, b.s.sq) - 1).some;
  return last_keys_first(p) ? keys.high / kCfg.block_n - mine : mine - keys.low / kCfg.block_n;
}

// Deterministic, with lists: the same for entry b.load_tile of a list.
template <auto kCfg>
TESSERA_DEVICE int listed_adders_before(const BwdSm90Params& p, const KeyBlock& b, int list, int row0) {
  const ListHead head = list_head<kCfg.program_lists()>(p.lists, list);
  if (kCfg.program_lists() && head.count == kListNotMade) return adders_before<kCfg>(p, b, row0);
  return head.entries[b.load_tile + p.dq_order.beside];
}

// Deterministic: calls body(slot, before) for every kThreads-th step of a block, from step `thread` on, in order. slot:
// the padded index of the tile of dQ; before: the number of blocks that add to it before this one.
template <auto kCfg, int kThreads, class Body>
TESSERA_DEVICE void for_additions(const BwdSm90Params& p, const KeyBlock& b, int thread, Body&& body) {
  const int start = start_tile<kCfg>(p, b);
  int tile = start, head_slot = b.head_kv * p.group * p.q_slots + b.slot0;  // of the head's first query tile
#pragma unroll 1
  for (int step = 0; step < b.steps; ++step) {
    if (step % kThreads == thread) body(head_slot + tile, adders_before<kCfg>(p, b, tile * kCfg.block_m));
    tile = next_tile(b, tile);
    if (tile == start) head_slot += p.q_slots;
  }
}

// A step: one query tile of one query head of the group; the heads are processed one after another. The producer writes
// it to shared memory with the tile.
struct QueryTileStep {
  int slot;  // the tile's padded index in [heads_q, q_slots]
  int row0;  // row of the sequence; with a block mask its lowest bits are those of the list entry
};

// With a block mask: the padded index of the tile to which a step's dQ is added and, deterministic, the number of
// blocks that add to it before this one.
struct DqAddition {
  int slot, before;
};

}  // namespace tessera
