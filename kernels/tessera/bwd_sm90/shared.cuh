// The offsets of tiles and barriers in bwd_sm90's shared memory.
#pragma once

#include "tessera/attention/backward/key_block.cuh"
#include "tessera/bwd_sm90/config.hpp"
#include "tessera/ptx/async_copy.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/ptx/wgmma.cuh"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

// Named barriers; __syncthreads uses 0.
enum BwdSm90NamedBarrier : int {
  kFirstScores = 1,  // among the warps of the first score warpgroup
  kSecondScores,
  kKeysDone,       // the dQ warpgroup has read K for the last time
  kFirstMayBegin,  // the first score warpgroup may begin a step
  kSecondMayBegin,
};

template <BwdSm90Config kCfg>
struct BwdSm90Shared {
  static constexpr BwdSm90Layout kAt = bwd_sm90_layout(kCfg);
  using Keys = SwizzledTile<kCfg.block_n, kCfg.head_dim>;                 // K
  using Values = SwizzledTile<kCfg.block_n, kCfg.head_dim_v()>;           // V
  using Queries = SwizzledTile<kCfg.block_m, kCfg.head_dim>;              // Q
  using OutputGradients = SwizzledTile<kCfg.block_m, kCfg.head_dim_v()>;  // dO
  using Gradients = SwizzledTile<kCfg.block_m, kCfg.block_n>;             // dS
  static constexpr int kStatBytes = kCfg.block_m * 4, kDqBytes = kCfg.block_m * kCfg.head_dim * 4;
  static constexpr int kDropoutStages = bwd_sm90_dropout_stages(kCfg), kDropoutBytes = kCfg.block_m * kCfg.block_n / 8;
  static constexpr int kDropoutUnits = kDropoutBytes / 128;  // units of a step; a dropout warp generates one at a time
  // Warps of the producer's warpgroup that only generate dropout bits; deterministic, one warp adds dQ instead.
  static constexpr int kDropoutWarps = kCfg.deterministic ? 2 : 3;

  uint32 base;
  uint32 descriptor;  // `base` in matrix descriptor format: a tile's descriptor needs one addition

  TESSERA_DEVICE explicit BwdSm90Shared(const void* memory)
      : base(shared_address(memory)), descriptor(descriptor_address(base)) {}

  // ---- tiles ----
  template <int kStages>
  TESSERA_DEVICE uint32 tile(int first, int bytes, const RingPosition<kStages>& at) const {
    return base + first + at.offset * (bytes / RingPosition<kStages>::kStep);
  }
  TESSERA_DEVICE TileDescriptor keys(int first) const { return {descriptor + first / 16, kDescriptorHigh}; }
  template <int kStages>
  TESSERA_DEVICE TileDescriptor tile_descriptor(int first, int bytes, const RingPosition<kStages>& at) const {
    return {descriptor + first / 16 + at.offset * (bytes / 16 / RingPosition<kStages>::kStep), kDescriptorHigh};
  }

  template <int kStages>
  TESSERA_DEVICE uint32 step(const RingPosition<kStages>& at) const {
    static_assert(sizeof(QueryTileStep) == RingPosition<kStages>::kStep);
    return base + kAt.steps + at.offset;
  }

  // With a block mask: the DqAddition of the step at which `left` steps remain. The producer writes it before Q, and
  // it is read by the warpgroup or thread that adds dQ. When a stage of Q is free again, all dS but the last ds_stages
  // has been released, and all dQ but the kBwdDqStages tiles before those has been added.
  TESSERA_DEVICE uint32 dq_slot(int left) const {
    static_assert(sizeof(DqAddition) == 8);
    return base + kAt.slots + left % bwd_sm90_step_slots(kCfg) * 8;
  }

  // The dropout bits of a step.
  using DropoutAt = RingPosition<kDropoutStages>;
  TESSERA_DEVICE uint32 dropout_bits(const DropoutAt& at) const { return tile(kAt.dropout_bits, kDropoutBytes, at); }
  TESSERA_DEVICE uint32 dropout_full(const DropoutAt& at) const { return full(kDropout, at); }
  TESSERA_DEVICE uint32 dropout_empty(const DropoutAt& at) const { return empty(kDropout, at); }

  // The sums of a step's diagonals.
  TESSERA_DEVICE uint32 diagonals_full() const { return barrier(kDiagonals); }
  TESSERA_DEVICE uint32 diagonals_empty() const { return barrier(kDiagonals + 1); }
  TESSERA_DEVICE uint32 diagonal_step() const { return base + kAt.diagonal_step; }

  // ---- barriers ----
  static constexpr int kDOStages = bwd_sm90_d_o_stages(kCfg);
  static constexpr int kQ = 2, kDO = kQ + 2 * kCfg.stages, kDS = kDO + 2 * kDOStages,
                       kDQ = kDS + 2 * kCfg.ds_stages,               // deterministic
      kDropout = kDQ + (kCfg.deterministic ? 2 * kBwdDqStages : 0);  // with dropout
  static constexpr int kDiagonals = kDropout + 2 * kDropoutStages;   // with d_diagonal
  TESSERA_DEVICE uint32 barrier(int index) const { return base + kAt.barriers + index * 8; }
  TESSERA_DEVICE uint32 k_full() const { return barrier(0); }
  TESSERA_DEVICE uint32 v_full() const { return barrier(1); }
  TESSERA_DEVICE uint32 k_empty() const { return barrier(1); }  // with whole_head, instead of v_full()
  template <int kStages>
  TESSERA_DEVICE uint32 full(int ring, const RingPosition<kStages>& at) const {
    return barrier(ring) + at.offset;
  }
  template <int kStages>
  TESSERA_DEVICE uint32 empty(int ring, const RingPosition<kStages>& at) const {
    return barrier(ring + kStages) + at.offset;
  }
  template <int kStages>
  TESSERA_DEVICE void wait_full(int ring, const RingPosition<kStages>& at) const {
    ptx::mbarrier_wait_parity(full(ring, at), at.parity);
  }
  template <int kStages>
  TESSERA_DEVICE void wait_empty(int ring, const RingPosition<kStages>& at) const {
    ptx::mbarrier_wait_parity(empty(ring, at), at.parity ^ 1);
  }
  // A warp arrives at a barrier: it has finished reading or writing what the barrier guards.
  TESSERA_DEVICE static void arrive_warp(uint32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  // By one thread, before the barriers are used.
  TESSERA_DEVICE void init() const {
    ptx::mbarrier_init(k_full(), 1);
    ptx::mbarrier_init(v_full(), kCfg.whole_head ? 8 : 1);
    for (int stage = 0; stage < kCfg.stages; ++stage) {
      ptx::mbarrier_init(barrier(kQ + stage), 1);
      ptx::mbarrier_init(barrier(kQ + kCfg.stages + stage), 8);
    }
    for (int stage = 0; stage < kDOStages; ++stage) {
      ptx::mbarrier_init(barrier(kDO + stage), 1);
      ptx::mbarrier_init(barrier(kDO + kDOStages + stage), 8);
    }
    for (int stage = 0; stage < kCfg.ds_stages; ++stage) {
      ptx::mbarrier_init(barrier(kDS + stage), 8);
      ptx::mbarrier_init(barrier(kDS + kCfg.ds_stages + stage), kCfg.whole_head ? 8 : 4);
    }
    for (int stage = 0; kCfg.deterministic && stage < kBwdDqStages; ++stage) {
      ptx::mbarrier_init(barrier(kDQ + stage), 4);
      ptx::mbarrier_init(barrier(kDQ + kBwdDqStages + stage), 1);
    }
    for (int stage = 0; stage < kDropoutStages; ++stage) {
      ptx::mbarrier_init(barrier(kDropout + stage), kDropoutUnits);
      ptx::mbarrier_init(barrier(kDropout + kDropoutStages + stage), 8);
    }
    if constexpr (kCfg.d_diagonal) {
      ptx::mbarrier_init(diagonals_full(), 8);
      ptx::mbarrier_init(diagonals_empty(), kBwdDiagonalWarps);
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace tessera
