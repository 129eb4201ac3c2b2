// bwd_sm90_d512's shared memory: where a block's tiles and barriers are, at the same places in both blocks of a cluster.
#pragma once

#include "tessera/bwd_sm90/block.cuh"
#include "tessera/bwd_sm90_d512/config.hpp"
#include "tessera/ptx/barrier.cuh"
#include "tessera/ptx/cluster.cuh"
#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/ptx/griddepcontrol.cuh"
#include "tessera/ptx/st_async.cuh"
#include "tessera/ptx/warpgroup.cuh"
#include "tessera/tile/ring_position.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

// The warpgroups of keys: one has S, P and dV, the other dP, dS and dK.
enum D512Role : int { kD512Values = 0, kD512Keys = 1 };

template <BwdSm90D512Config kCfg>
struct BwdD512Shared {
  static constexpr BwdSm90D512Layout kAt = bwd_sm90_d512_layout(kCfg);
  using Keys = SwizzledTile<kCfg.block_n, kCfg.block_dim>;  // of K, V, dK, dV
  using Half = SwizzledTile<kCfg.block_m, kCfg.half_dim>;
  using Exchange = SwizzledTile<kCfg.block_m, kCfg.block_n>;
  using HalfAt = RingPosition<kCfg.half_slots>;
  using ExchangeAt = RingPosition<kCfg.stages>;
  static constexpr int kStatBytes = kCfg.block_m * 4, kPartialWarpBytes = 16 * kCfg.block_m * 4;

  uint32 base;
  uint32 descriptor;  // its address in a matrix descriptor: a tile's is one addition away

  TESSERA_DEVICE explicit BwdD512Shared(const void* memory)
      : base(shared_address(memory)), descriptor(descriptor_address(base)) {}

  // ---- tiles ----
  TESSERA_DEVICE TileDescriptor tile_descriptor(int first) const { return {descriptor + first / 16, kDescriptorHigh}; }
  TESSERA_DEVICE TileDescriptor half_descriptor(const HalfAt& at) const {
    return {descriptor + kAt.halves / 16 + at.offset * (Half::kBytes / 16 / HalfAt::kStep), kDescriptorHigh};
  }
  TESSERA_DEVICE TileDescriptor exchange_descriptor(const ExchangeAt& at) const {
    return {descriptor + kAt.exchange / 16 + at.offset * (Exchange::kBytes / 16 / ExchangeAt::kStep), kDescriptorHigh};
  }
  TESSERA_DEVICE uint32 half(const HalfAt& at) const {
    return base + kAt.halves + at.offset * (Half::kBytes / HalfAt::kStep);
  }
  TESSERA_DEVICE uint32 exchange(const ExchangeAt& at) const {
    return base + kAt.exchange + at.offset * (Exchange::kBytes / ExchangeAt::kStep);
  }
  TESSERA_DEVICE uint32 lse(int stage) const { return base + kAt.stats + stage * 2 * kStatBytes; }
  TESSERA_DEVICE uint32 delta(int stage) const { return lse(stage) + kStatBytes; }
  // Of a thread of either role, what it has of queries 0 ... 7; the next eight are 128 * 16 bytes further.
  TESSERA_DEVICE uint32 partial(int thread) const { return base + kAt.partial + thread * 16; }

  // ---- barriers ----
  static constexpr int kKFull = 0, kVFull = 1;
  static constexpr int kHalfFull = 2, kHalfEmpty = kHalfFull + kCfg.half_slots;  // empty: the 8 warps of both roles
  static constexpr int kPartialFull = kHalfEmpty + kCfg.half_slots;  // [role][warp]: the other block's share is here
  static constexpr int kPartialFree = kPartialFull + 8;     // [role][warp]: the other block has read this one's
  static constexpr int kPFull = kPartialFree + 8;           // [warp][stage]
  static constexpr int kDSFull = kPFull + 4 * kCfg.stages;  // the 4 warps that write dS
  static constexpr int kFree = kDSFull + kCfg.stages;       // the 4 dQ warps are done with a stage
  static_assert(kFree + kCfg.stages == bwd_sm90_d512_barriers(kCfg));

  TESSERA_DEVICE uint32 barrier(int index) const { return base + kAt.barriers + index * 8; }
  TESSERA_DEVICE uint32 at_stage(int first, const ExchangeAt& at) const { return barrier(first) + at.offset; }
  TESSERA_DEVICE void wait_half(const HalfAt& at) const {
    ptx::mbarrier_wait_parity(barrier(kHalfFull) + at.offset, at.parity);
  }
  TESSERA_DEVICE void release_half(const HalfAt& at) const { arrive_warp(barrier(kHalfEmpty) + at.offset); }

  // A warp is done with what a barrier guards.
  TESSERA_DEVICE static void arrive_warp(uint32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  // By one thread, before anything else. What the other block sends is announced here for the first step, and from then on
  // by the waiter of each for the next.
  TESSERA_DEVICE void init() const {
    ptx::mbarrier_init(barrier(kKFull), 1);
    ptx::mbarrier_init(barrier(kVFull), 1);
    for (int slot = 0; slot < kCfg.half_slots; ++slot) {
      ptx::mbarrier_init(barrier(kHalfFull + slot), 1);
      ptx::mbarrier_init(barrier(kHalfEmpty + slot), 8);
    }
    for (int i = 0; i < 8; ++i) {
      ptx::mbarrier_init(barrier(kPartialFull + i), 1);
      ptx::mbarrier_init(barrier(kPartialFree + i), 1);
    }
    for (int i = 0; i < 4 * kCfg.stages; ++i) ptx::mbarrier_init(barrier(kPFull + i), 1);
    for (int stage = 0; stage < kCfg.stages; ++stage) {
      ptx::mbarrier_init(barrier(kDSFull + stage), 4);
      ptx::mbarrier_init(barrier(kFree + stage), 4);
    }
    ptx::fence_mbarrier_init();
    for (int i = 0; i < 8; ++i) ptx::mbarrier_arrive_expect_tx(barrier(kPartialFull + i), kPartialWarpBytes);
  }
};

}  // namespace tessera
