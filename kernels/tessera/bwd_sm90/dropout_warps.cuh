// The dropout warps of the Hopper backward kernels (in bwd_sm90_d256, of block 0): otherwise idle warps of the
// producer's warpgroup generate the dropout bits of a step, each bit once, ahead of the score warpgroups. The score
// warpgroups spend nothing on it; they could not use a whole call of Philox, because some of its keys belong to other
// threads.
#pragma once

#include "tessera/bwd_sm90/block.cuh"
#include "tessera/bwd_sm90/drawn_bits.cuh"
#include "tessera/ptx/mbarrier.cuh"
#include "tessera/ptx/mma.cuh"
#include "tessera/tile/pipeline.cuh"

namespace tessera {

template <class Shared, auto kCfg>
struct DropoutWarps {
  static constexpr int kUnits = Shared::kDrawnUnits;  // of a step: 32 words each, one for each lane

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;

  // warp: index of kDropoutWarps, each of which processes every kDropoutWarps-th unit. What a unit needs is recomputed
  // from its number, because the warps have few registers.
  TESSERA_DEVICE void run(uint32 warp) const {
#pragma unroll 1
    for (uint32 unit = warp; unit < static_cast<uint32>(block.steps) * kUnits; unit += Shared::kDropoutWarps) {
      const uint32 drops = draw(unit);
      const RingPosition<Shared::kDrawnStages> at = place_of(not_hoisted(unit) / kUnits);
      ptx::mbarrier_wait_parity(shared.drawn_empty(at), at.parity ^ 1);
      ptx::st_shared_s32(shared.drawn(at) + word_of(not_hoisted(unit)) * 4, static_cast<int>(drops));
      Shared::arrive_warp(shared.drawn_full(at));
    }
  }
  TESSERA_DEVICE static RingPosition<Shared::kDrawnStages> place_of(uint32 step) {
    RingPosition<Shared::kDrawnStages> at;
    at.offset = static_cast<int>(step % Shared::kDrawnStages) * at.kStep;
    at.parity = static_cast<int>(step / Shared::kDrawnStages % 2);
    return at;
  }
  TESSERA_DEVICE static uint32 word_of(uint32 unit) { return unit % kUnits * 32 + not_hoisted(threadIdx.x % 32); }

  // The producer's query tile number `step`, and its head; tiles are counted from the group's first head on.
  TESSERA_DEVICE int find(int step, int& head) const {
    if constexpr (kCfg.block_mask) {
      while (true) {
        const int64 list = list_of(p, block, kCfg.block_n, head);
        const int count = *p.lists.count(list);
        if (step < count) return list_block(p.lists.entries(list)[step]);
        step -= count, ++head;
      }
    } else {
      for (; step >= block.tiles; ++head) step -= block.tiles;
      const int tile = start_tile<kCfg>(p, block) + step, end = block.first_tile + block.tiles;
      return tile < end ? tile : tile - block.tiles;
    }
  }

  TESSERA_DEVICE uint32 draw(uint32 unit) const {
    int head = block.head_kv * p.group;
    const int row0 = find(static_cast<int>(unit / kUnits), head) * kCfg.block_m;
    return DrawnBits::draw<kCfg.score.dropout_state>(p, dropout_head<kCfg.score>(p, block.batch, head),
                                                     dropout_query<kCfg.score>(p, row0),
                                                     dropout_key<kCfg.score>(p, block.key0), word_of(unit));
  }
};

}  // namespace tessera
