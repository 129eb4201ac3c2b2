// What a persistent block of fwd_sm90 works on.
#pragma once

#include "tessera/attention/mask.cuh"
#include "tessera/attention/scheduler.cuh"
#include "tessera/attention/work_order.hpp"
#include "tessera/fwd_sm90/config.hpp"

namespace tessera {

// One tile of queries of one head, and the blocks of keys [first, last) that it sees.
template <FwdSm90Config kCfg>
struct WorkTile {
  static constexpr int kBlockM = 64 * kCfg.consumers, kEnd = -1;
  int batch, head, row0, count;  // count 0: nothing to do; kEnd: nor anything afterwards
  Sequence s;
  TileRange visible;
  int first, last;
  // For the consumers: the first and the last block that a consumer's rows see, and that each of them sees whole.
  int first_of[4], last_of[4], whole_first_of[4], whole_last_of[4];

  // Tiles of a head stand together; under a causal mask they differ in size, and attention/work_order says how they stand.
  TESSERA_DEVICE void open(const FwdSm90Params& p, int index) {
    WorkPlace place{index / p.order.tiles, index % p.order.tiles};
    if constexpr (kCfg.causal) place = work_place(p.order, index);
    const int slot = place.slot;
    const SequenceHead of = sequence_head<kCfg.score>(p, place.head, p.heads_q);
    head = of.head, batch = of.batch;
    int tile = slot;
    if (kCfg.uneven && p.cu_seqlens_q) {
      batch = find_sequence<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, slot);
      tile -= slot_begin<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, batch);
    }
    if constexpr (kCfg.uneven) reload_memory();  // registers are few here, and what was found stands in memory
    s = load_sequence<kCfg.uneven>(p, batch);
    row0 = ((s.sq + kBlockM - 1) / kBlockM - 1 - tile) * kBlockM;
    count = row0 < 0 ? 0 : min(s.sq - row0, kBlockM);
    if constexpr (kCfg.uneven) count = max(count, 0);  // a slot before the first sequence's
    visible = visible_keys(p, s, row0, row0 + max(count, 1) - 1);
    first = max(visible.some.low, 0) / kCfg.block_n;
    last = count > 0 ? (visible.some.high + kCfg.block_n) / kCfg.block_n : first;
  }

  // Where tensor maps have the sequence: packed ones are rows of one.
  TESSERA_DEVICE int q_batch(const FwdSm90Params& p) const { return kCfg.uneven && p.cu_seqlens_q ? 0 : batch; }
  TESSERA_DEVICE int k_batch(const FwdSm90Params& p) const { return kCfg.uneven && p.cu_seqlens_k ? 0 : batch; }

  // What consumers want to know beside.
  TESSERA_DEVICE void set_consumer_bounds(const FwdSm90Params& p) {
    for (int consumer = 0; consumer < kCfg.consumers; ++consumer) {
      const TileRange seen = visible_keys(p, s, row0 + consumer * 64, row0 + consumer * 64 + 63);
      first_of[consumer] = clamp(seen.some.low / kCfg.block_n, first, last - 1);
      last_of[consumer] = clamp(seen.some.high / kCfg.block_n, first_of[consumer], last - 1);
      whole_first_of[consumer] = (max(seen.all.low, 0) + kCfg.block_n - 1) / kCfg.block_n;
      whole_last_of[consumer] = (seen.all.high + 1) / kCfg.block_n - 1;
    }
  }
};

}  // namespace tessera
