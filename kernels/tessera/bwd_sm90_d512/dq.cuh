// bwd_sm90_d512's warpgroup of dQ: of each step dQ += dS K, the block's columns, added in float32 to global memory, where other
// clusters add theirs. In parts of 64 x 64: the registers are the key warpgroups'.
#pragma once

#include "tessera/bwd_sm90/dq.cuh"
#include "tessera/bwd_sm90_d512/shared.cuh"

namespace tessera {

template <BwdSm90D512Config kCfg>
struct BwdD512DqWarpgroup {
  using Shared = BwdD512Shared<kCfg>;
  using Keys = typename Shared::Keys;
  using Exchange = typename Shared::Exchange;
  static constexpr int kPartCols = kChunkCols, kParts = kCfg.block_dim / kPartCols;

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  float rdQ[1][kPartCols / 8][4];

  TESSERA_DEVICE static int warp() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)); }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  TESSERA_DEVICE void run() {
    const int steps = uniform(block.steps);
    if (steps == 0) return;
    const int part0 = static_cast<int>(ptx::cluster_ctarank()) * kParts;
    ptx::mbarrier_wait_parity(shared.barrier(Shared::kKFull), 0);
    ptx::griddepcontrol_wait();  // what dQ is added to was cleared by the kernel before this one
    typename Shared::ExchangeAt at;
    int slot = block.head_kv * p.group * p.q_slots + block.slot0 + block.first_tile, tile = 0;
#pragma unroll 1
    for (int left = steps; left > 0; --left) {
      ptx::mbarrier_wait_parity(shared.at_stage(Shared::kDSFull, at), at.parity);
      float* gdQ = p.dq_accum + static_cast<int64>(slot) * (kCfg.block_m * kCfg.head_dim);
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        TileDescriptor k = shared.tile_descriptor(Shared::kAt.k);
        k.address += part * (Keys::kChunkBytes / 16);
        issue_dq_part<kCfg.dtype, Exchange, Keys>(rdQ, shared.exchange_descriptor(at), k);
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_pin(flat(rdQ));
        if (part == kParts - 1) Shared::arrive_warp(shared.at_stage(Shared::kFree, at));
        float* to = dq_part<kCfg.head_dim>(gdQ, warp(), (part0 + part) * (kPartCols / 8));
#pragma unroll
        for (int n = 0; n < kPartCols / 8; ++n) dq_add(to + n * 128, lane(), rdQ[0][n]);
      }
      at.advance();
      ++slot;
      if (++tile == block.tiles) tile = 0, slot += p.q_slots - block.tiles;
    }
  }
};

}  // namespace tessera
