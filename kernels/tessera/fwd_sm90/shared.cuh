// A work tile of fwd_sm90: some query rows of one head, and the K/V blocks that they see; and a block's shared memory.
#pragma once

#include "tessera/attention/score/options.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/attention/work_order.hpp"
#include "tessera/fwd_sm90/config.hpp"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

// The sequence that owns a padded tile index, if work tiles are listed (live_tiles/kernel).
TESSERA_DEVICE int find_live_sequence(const LiveTiles& tiles, int batch, int slot) {
  const int* first = tiles.first();
  return last_sequence_from(batch, slot, [first](int b) { return first[b]; });
}

// The first of this warp's rows among the warpgroup's 64, and the lane. Both are recomputed where they are used: kept
// in registers over the loops, they would cost registers that the accumulators need.
TESSERA_DEVICE int warp_row() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)) * 16; }
TESSERA_DEVICE int warp_lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

// Rows of a work tile for each query: with pack_gqa the heads of a KV head.
template <FwdSm90Config kCfg>
TESSERA_DEVICE int rows_a_query(const FwdSm90Params& p) {
  return kCfg.pack_gqa ? p.group.value : 1;
}
template <FwdSm90Config kCfg>
TESSERA_DEVICE int query_of_row(const FwdSm90Params& p, int row) {
  return kCfg.pack_gqa ? row / p.group : row;
}

template <FwdSm90Config kCfg>
struct WorkTile {
  static constexpr int kBlockM = kConsumerRows * kCfg.consumers, kEnd = -1;
  // head: with pack_gqa a KV head. Rows row0 ... of the sequence's; count 0: none; kEnd: there is no further tile
  int batch, head, row0, count;
  // With split keys, row_begin counts the rows of all heads of the parts (or clusters' sums) before this one, too.
  Sequence s;
  TileRange visible;
  int first, last;  // K/V blocks first ... last - 1 that any of the rows sees; with a block mask indices in its list
  // Of each consumer's rows: the first and the last block that some row sees, and those that every row sees in full.
  int first_of[4], last_of[4], full_first_of[4], full_last_of[4];

  TESSERA_DEVICE static const WorkOrder& order_of(const FwdSm90Params& p) {
    if constexpr (kCfg.live_tiles) return p.live->order;
    return p.order;
  }

  TESSERA_DEVICE static TileCoord place_of(const WorkOrder& order, int index) {
    if constexpr (kCfg.varying_tile_cost || kCfg.orders_lists()) return tile_coord(order, index);
    return {index / order.tiles, index % order.tiles};
  }

  // Decodes the tile from its index in the grid's order. Without a causal mask all tiles cost the same, and those of a
  // head, which read the same keys, are neighbours; attention/work_order has the order under a causal mask.
  TESSERA_DEVICE void decode(const FwdSm90Params& p, int index) {
    const WorkOrder& order = order_of(p);
    TileCoord place;
    int split = 0;
    if constexpr (kCfg.merges()) {  // the parts of a work tile are neighbours; padded tile indices come last
      const int work_tile = index / p.num_splits;
      split = index % p.num_splits, place = {work_tile % p.merged_heads, work_tile / p.merged_heads};
    } else {
      place = place_of(order, index);
      if constexpr (kCfg.split) split = place.head % p.num_splits, place.head = place.head / p.num_splits;
    }
    const int slot = place.slot;
    const SequenceHead of = sequence_head<kCfg.score>(p, place.head, kCfg.pack_gqa ? p.heads_kv : p.heads_q);
    head = of.head, batch = of.batch;
    int tile = slot;
    if constexpr (kCfg.live_tiles) {
      batch = find_live_sequence(*p.live, p.batch, slot);
      tile -= p.live->first()[batch];
    } else if (kCfg.varlen && p.cu_seqlens_q) {
      const int rows = rows_a_query<kCfg>(p);
      batch = find_sequence<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, rows, slot);
      tile -= slot_begin<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, rows, batch);
    }
    // The producer has few registers; the results so far are in shared memory.
    if constexpr (kCfg.varlen) reload_memory();
    s = load_sequence<kCfg.varlen, (kCfg.page_rows > 0), kCfg.score>(p, batch);
    const int rows = s.sq * rows_a_query<kCfg>(p);
    row0 = ((rows + kBlockM - 1) / kBlockM - 1 - tile) * kBlockM;
    if constexpr (kCfg.orders_lists()) {
      if (orders_tiles(p.lists)) row0 = *ordered_tile(p.lists, p.lists.at(batch, head, 0), slot) * kBlockM;
    }
    count = row0 < 0 ? 0 : min(rows - row0, kBlockM);
    if constexpr (kCfg.varlen) count = max(count, 0);  // a padded tile index before the first sequence's
    visible = queries_see(p, row0, row0 + max(count, 1) - 1);
    first = max(visible.some.low, 0) / kCfg.block_n;
    last = count > 0 ? (visible.some.high + kCfg.block_n) / kCfg.block_n : first;
    if constexpr (kCfg.block_mask) {
      first = last = 0;
      if (count > 0) last = listed_blocks(p);
    }
    if constexpr (kCfg.split) {
      const int blocks = max(last - first, 0), each = (blocks + p.num_splits.value - 1) / p.num_splits;
      first += min(split * each, blocks), last = min(first + each, last);
      s.row_begin += static_cast<int64>(split / kCfg.merge_blocks) * p.heads_q.value * p.rows_total;
    }
  }

  TESSERA_DEVICE void set_consumer_bounds(const FwdSm90Params& p) {
    for (int consumer = 0; consumer < kCfg.consumers; ++consumer) {
      const int first_row = row0 + consumer * kConsumerRows;
      const TileRange seen = queries_see(p, first_row, first_row + kConsumerRows - 1);
      first_of[consumer] = clamp(seen.some.low / kCfg.block_n, first, last - 1);
      last_of[consumer] = clamp(seen.some.high / kCfg.block_n, first_of[consumer], last - 1);
      if constexpr (kCfg.block_mask) first_of[consumer] = 0, last_of[consumer] = last - 1;
      full_first_of[consumer] = (max(seen.all.low, 0) + kCfg.block_n - 1) / kCfg.block_n;
      full_last_of[consumer] = (seen.all.high + 1) / kCfg.block_n - 1;
    }
  }

  // What the queries of some rows of the sequence see.
  TESSERA_DEVICE TileRange queries_see(const FwdSm90Params& p, int first_row, int last_row) const {
    return ScoreOptions<kCfg.score>::range(p, s, query_of_row<kCfg>(p, first_row), query_of_row<kCfg>(p, last_row));
  }

  // With a block mask and dense sequences: whether the list of the tile at an index in the grid's order is long.
  TESSERA_DEVICE static bool is_long(const FwdSm90Params& p, int index) {
    const TileCoord place = place_of(p.order, index);
    const SequenceHead of = sequence_head<kCfg.score>(p, place.head, p.heads_q);
    const int list = p.lists.at(of.batch, of.head, p.lists.tiles - 1 - place.slot);
    return is_long_list(list_head<kCfg.program_lists()>(p.lists, list).count, p.lists.most);
  }
  // The index of the tile's list. Packed: by padded tile index.
  TESSERA_DEVICE int list(const FwdSm90Params& p) const {
    int tile = row0 / kBlockM;
    if constexpr (kCfg.varlen) {
      if (p.cu_seqlens_q) tile += slot_begin<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, batch);
    }
    return p.lists.at(batch, head, tile);
  }

  // The blocks of the tile's list or, if that was not made, those that are visible by position.
  TESSERA_DEVICE int listed_blocks(const FwdSm90Params& p) const {
    const int count = list_head<kCfg.program_lists()>(p.lists, list(p)).count;
    if (!kCfg.program_lists() || count != kListNotMade) return count;
    return max((visible.some.high + kCfg.block_n) / kCfg.block_n - first_visible_block(), 0);
  }
  TESSERA_DEVICE int first_visible_block() const { return max(visible.some.low, 0) / kCfg.block_n; }

  // The batch index in the tensor maps: a packed tensor is one sequence to them.
  TESSERA_DEVICE int q_batch(const FwdSm90Params& p) const { return kCfg.varlen && p.cu_seqlens_q ? 0 : batch; }
  TESSERA_DEVICE int k_batch(const FwdSm90Params& p) const { return kCfg.varlen && p.keys.begins ? 0 : batch; }
};

// ---- shared memory --------------------------------------------------------------------------------------------------
//
// A block's shared memory as types; fwd_sm90_layout (config.hpp) gives the offset of each member.

// With a block mask: the list entry of the K block in each stage.
template <int kStages>
struct ListEntries {
  int of[kStages];
};
template <>
struct ListEntries<0> {};

template <FwdSm90Config kCfg>
struct FwdSm90SharedMemory {
  using OutputTile = SwizzledTile<16, kCfg.o_chunks * kChunkCols>;
  SwizzledTile<kConsumerRows, kCfg.head_dim> sQ[kCfg.q_stages];  // consumer after consumer, work tile after work tile
  SwizzledTile<kCfg.block_n, kCfg.head_dim> sK[kCfg.k_stages];
  SwizzledTile<kCfg.block_n, kCfg.head_dim_v> sV[kCfg.v_stages];
  OutputTile sO[kCfg.consumers * 4];  // a warp's rows of O, before they are stored to global memory
  WorkTile<kCfg> work_tiles[kWorkTilesAhead];
  Ring<kWorkTilesAhead> tile_ring;
  Ring<kCfg.q_stages> q_ring;
  Ring<kCfg.k_stages, kCfg.cluster> k_ring;
  Ring<kCfg.v_stages, kCfg.cluster> v_ring;
  [[no_unique_address]] ListEntries<kCfg.block_mask ? kCfg.k_stages : 0> k_entries;
};

// One of the consumer warpgroups.
template <FwdSm90Config kCfg>
struct ConsumerGroup {
  const FwdSm90Params& p;
  FwdSm90SharedMemory<kCfg>& shared;
  const int consumer;  // index; of a work tile it has rows consumer * kConsumerRows ...
  // Of the block's shared memory; a tile's descriptor is one addition and its index away.
  const uint32 shared_descriptor;

  TESSERA_DEVICE ConsumerGroup(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared, int consumer)
      : p(p), shared(shared), consumer(consumer), shared_descriptor(descriptor_address(shared_address(&shared))) {}
};

// Members follow one another without padding, so their sizes give their offsets.
template <FwdSm90Config kCfg>
TESSERA_DEVICE constexpr bool has_fwd_sm90_layout() {
  using Shared = FwdSm90SharedMemory<kCfg>;
  constexpr FwdSm90Layout kAt = fwd_sm90_layout(kCfg);
  return kAt.q == 0 && sizeof(Shared::sQ) == kAt.k - kAt.q && sizeof(Shared::sK) == kAt.v - kAt.k &&
         sizeof(Shared::sV) == kAt.o - kAt.v && sizeof(Shared::sO) == kAt.work_tiles - kAt.o &&
         sizeof(Shared::work_tiles) == kAt.tile_ring - kAt.work_tiles &&
         sizeof(Shared::tile_ring) == kAt.q_ring - kAt.tile_ring && sizeof(Shared::q_ring) == kAt.k_ring - kAt.q_ring &&
         sizeof(Shared::k_ring) == kAt.v_ring - kAt.k_ring &&
         sizeof(Shared::v_ring) == kCfg.v_stages * kRingStageBytes && sizeof(Shared) == kAt.bytes;
}

}  // namespace tessera
