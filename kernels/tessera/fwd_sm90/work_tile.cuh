// A work tile of fwd_sm90: some query rows of one head, and the K/V blocks that they see.
#pragma once

#include "tessera/attention/packed_slots.cuh"
#include "tessera/attention/score/options.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/attention/work_order.hpp"
#include "tessera/fwd_sm90/config.hpp"

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

template <FwdSm90Config kCfg>
struct WorkTile {
  static constexpr int kBlockM = kConsumerRows * kCfg.consumers, kEnd = -1;
  int batch, head, row0, count;  // query rows row0 ... of the sequence; count 0: none; kEnd: there is no further tile
  Sequence s;
  TileRange visible;
  int first, last;  // K/V blocks first ... last - 1 that any of the rows sees; with a block mask indices in its list
  // Of each consumer's rows: the first and the last block that some row sees, and those that every row sees in full.
  int first_of[4], last_of[4], full_first_of[4], full_last_of[4];

  TESSERA_DEVICE static const WorkOrder& order_of(const FwdSm90Params& p) {
    if constexpr (kCfg.live_tiles) return p.live->order;
    return p.order;
  }

  // Decodes the tile from its index in the grid's order. Without a causal mask all tiles cost the same, and those of a
  // head, which read the same keys, are neighbours; attention/work_order has the order under a causal mask.
  TESSERA_DEVICE void decode(const FwdSm90Params& p, int index) {
    const WorkOrder& order = order_of(p);
    TileCoord place{index / order.tiles, index % order.tiles};
    if constexpr (kCfg.varying_tile_cost) place = tile_coord(order, index);
    const int slot = place.slot;
    const SequenceHead of = sequence_head<kCfg.score>(p, place.head, p.heads_q);
    head = of.head, batch = of.batch;
    int tile = slot;
    if constexpr (kCfg.live_tiles) {
      batch = find_live_sequence(*p.live, p.batch, slot);
      tile -= p.live->first()[batch];
    } else if (kCfg.varlen && p.cu_seqlens_q) {
      batch = find_sequence<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, slot);
      tile -= slot_begin<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, batch);
    }
    // The producer has few registers; the results so far are in shared memory.
    if constexpr (kCfg.varlen) reload_memory();
    s = load_sequence<kCfg.varlen, (kCfg.page_rows > 0), kCfg.score>(p, batch);
    row0 = ((s.sq + kBlockM - 1) / kBlockM - 1 - tile) * kBlockM;
    count = row0 < 0 ? 0 : min(s.sq - row0, kBlockM);
    if constexpr (kCfg.varlen) count = max(count, 0);  // a padded tile index before the first sequence's
    visible = ScoreOptions<kCfg.score>::range(p, s, row0, row0 + max(count, 1) - 1);
    first = max(visible.some.low, 0) / kCfg.block_n;
    last = count > 0 ? (visible.some.high + kCfg.block_n) / kCfg.block_n : first;
    if constexpr (kCfg.block_mask) {
      first = last = 0;
      if (count > 0) last = *p.lists.count(list(p));
    }
  }

  TESSERA_DEVICE void set_consumer_bounds(const FwdSm90Params& p) {
    for (int consumer = 0; consumer < kCfg.consumers; ++consumer) {
      const TileRange seen = ScoreOptions<kCfg.score>::range(p, s, row0 + consumer * kConsumerRows,
                                                             row0 + consumer * kConsumerRows + kConsumerRows - 1);
      first_of[consumer] = clamp(seen.some.low / kCfg.block_n, first, last - 1);
      last_of[consumer] = clamp(seen.some.high / kCfg.block_n, first_of[consumer], last - 1);
      if constexpr (kCfg.block_mask) first_of[consumer] = 0, last_of[consumer] = last - 1;
      full_first_of[consumer] = (max(seen.all.low, 0) + kCfg.block_n - 1) / kCfg.block_n;
      full_last_of[consumer] = (seen.all.high + 1) / kCfg.block_n - 1;
    }
  }

  // With a block mask: whether the list of the tile at an index in the grid's order is long.
  TESSERA_DEVICE static bool is_long(const FwdSm90Params& p, int index) {
    TileCoord place{index / p.order.tiles, index % p.order.tiles};
    if constexpr (kCfg.varying_tile_cost) place = tile_coord(p.order, index);
    const SequenceHead of = sequence_head<kCfg.score>(p, place.head, p.heads_q);
    return is_long_list(*p.lists.count(p.lists.at(of.batch, of.head, p.lists.tiles - 1 - place.slot)), p.lists.most);
  }
  // The index of the tile's list.
  TESSERA_DEVICE int list(const FwdSm90Params& p) const { return p.lists.at(batch, head, row0 / kBlockM); }

  // The batch index in the tensor maps: a packed tensor is one sequence to them.
  TESSERA_DEVICE int q_batch(const FwdSm90Params& p) const { return kCfg.varlen && p.cu_seqlens_q ? 0 : batch; }
  TESSERA_DEVICE int k_batch(const FwdSm90Params& p) const { return kCfg.varlen && p.cu_seqlens_k ? 0 : batch; }
};

}  // namespace tessera
