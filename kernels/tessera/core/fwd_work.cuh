// What a persistent block of fwd_sm90 works on, and in which order.
#pragma once

#include "tessera/core/scheduler.cuh"

namespace tessera {

// One tile of queries of one head, and the blocks of keys [first, last) that it sees.
template <FwdSm90Config kCfg>
struct FwdWork {
  static constexpr int kBlockM = 64 * kCfg.consumers, kEnd = -1;
  int batch, head, row0, count;  // count 0: nothing to do; kEnd: nor anything afterwards
  Sequence s;
  TileRange visible;
  int first, last;
  // For the consumers: the end of the halves of blocks that a consumer's rows see, and the blocks that every row sees whole.
  int halves_of[4], whole_first, whole_last;

  // Tiles of a head stand together. Under a staircase they differ in size. Section 0: the largest, the smallest, the second
  // largest ..., and a block takes two neighbours, which are the same work for every block. Else the largest of a section of
  // heads come first, and every second round of the grid goes backwards.
  TESSERA_DEVICE void open(const FwdSm90Params& p, int index) {
    int slot = index % p.tiles, pair = index / p.tiles;  // pair: batch * heads_q + head, packed: head
    if constexpr (kCfg.causal) {
      if (p.section > 0) {
        const int pairs = p.works / p.tiles;
        const int section = index / (p.section * p.tiles), in_section = index % (p.section * p.tiles);
        const int width = min(p.section, pairs - section * p.section);
        slot = in_section / width;
        pair = section * p.section + in_section % width;
      } else {
        if (p.tiles % 2 && pair % 2) slot = p.tiles - 1 - slot;  // so that two heads' middle tiles are neighbours
        slot = slot % 2 ? p.tiles - 1 - slot / 2 : slot / 2;
      }
    }
    head = pair % p.heads_q, batch = pair / p.heads_q;
    int tile = slot;
    if (p.cu_seqlens_q) {
      batch = find_sequence<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, slot);
      tile -= slot_begin<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, batch);
    }
    s = load_sequence(p, batch);
    row0 = ((s.sq + kBlockM - 1) / kBlockM - 1 - tile) * kBlockM;
    count = row0 < 0 ? 0 : min(s.sq - row0, kBlockM);
    visible = visible_keys(p, s, row0, row0 + max(count, 1) - 1);
    first = max(visible.some.low, 0) / kCfg.block_n;
    last = count > 0 ? (visible.some.high + kCfg.block_n) / kCfg.block_n : first;
  }

  // What consumers want to know beside.
  TESSERA_DEVICE void share_out(const FwdSm90Params& p) {
    constexpr int kHalf = kCfg.block_n / 2;
    for (int consumer = 0; consumer < kCfg.consumers; ++consumer) {
      const int high = visible_keys(p, s, row0 + consumer * 64 + 63).high;
      halves_of[consumer] = min(2 * last, max((high + kHalf) / kHalf, 2 * first + 1));
    }
    whole_first = (max(visible.all.low, 0) + kCfg.block_n - 1) / kCfg.block_n;
    whole_last = (visible.all.high + 1) / kCfg.block_n - 1;
  }

  // The work that this block does in a round, if there are as many.
  TESSERA_DEVICE static int index_of(const FwdSm90Params& p, int round) {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    if (!kCfg.causal) return round * blocks + block;
    if (p.section == 0) return 2 * (round / 2 * blocks + block) + round % 2;
    return round * blocks + (round % 2 ? blocks - 1 - block : block);
  }
};

}  // namespace tessera
