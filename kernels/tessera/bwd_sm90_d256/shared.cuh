// The offsets of tiles and barriers in bwd_sm90_d256's shared memory, in this block and in the other.
#pragma once

#include "tessera/attention/backward/key_block.cuh"
#include "tessera/bwd_sm90_d256/config.hpp"
#include "tessera/ptx/async_copy.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/ptx/wgmma.cuh"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

// Named barriers; __syncthreads uses 0.
enum BwdSm90D256NamedBarrier : int {
  kKeyWarpgroupsDone = 1,
  kFirstKeyWarpgroup,  // among the warps of the first key warpgroup
  kSecondKeyWarpgroup,
  kDqWarpgroup,
};

template <BwdSm90D256Config kCfg, int kBlockRank>
struct BwdSm90D256Shared {
  static constexpr int kRank = kBlockRank;
  static constexpr BwdSm90D256Layout kAt = bwd_sm90_d256_layout(kCfg, kRank);
  static constexpr int kHalfSlots = bwd_sm90_d256_half_slots(kCfg, kRank);
  using Keys = SwizzledTile<kCfg.block_n, kRank == 0 ? kCfg.head_dim : kCfg.head_dim_v>;
  using Half = SwizzledTile<kCfg.block_m, kCfg.half_dim()>;         // of Q
  using ValueHalf = SwizzledTile<kCfg.block_m, kCfg.half_dim_v()>;  // of dO, in the same buffers
  using Exchange = SwizzledTile<kCfg.block_m, kCfg.block_n>;
  using HalfAt = RingPosition<kHalfSlots>;
  using ExchangeAt = RingPosition<kCfg.exchange_stages>;
  static constexpr int kStatBytes = kCfg.block_m * 4, kStepStatBytes = kCfg.stat_rows(kRank) * kStatBytes,
                       kWarpgroupBytes = Exchange::kBytes / 2;

  uint32 base;
  uint32 descriptor;  // `base` in matrix descriptor format: a tile's descriptor needs one addition

  TESSERA_DEVICE explicit BwdSm90D256Shared(const void* memory)
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
  TESSERA_DEVICE uint32 stats(int stage) const { return base + kAt.stats + stage * kStepStatBytes; }
  // With has_steps: the QueryTileStep of the step at which `left` steps remain, written by the producer before the
  // step's first half.
  TESSERA_DEVICE uint32 step(int left) const {
    static_assert(sizeof(QueryTileStep) == 8);
    return base + kAt.steps + left % bwd_sm90_d256_steps(kCfg) * 8;
  }

  // Block 0: the dropout bits of a step.
  static constexpr int kDropoutStages = 1, kDropoutBytes = kCfg.block_m * kCfg.block_n / 8,
                       kDropoutUnits = kDropoutBytes / 128;
  static constexpr int kDropoutWarps = kCfg.deterministic ? 2 : 3;  // the last warps of the producer's warpgroup
  using DropoutAt = RingPosition<kDropoutStages>;
  TESSERA_DEVICE uint32 dropout_bits(const DropoutAt&) const { return base + kAt.dropout_bits; }
  TESSERA_DEVICE uint32 dropout_full(const DropoutAt&) const { return barrier(kDropout); }
  TESSERA_DEVICE uint32 dropout_empty(const DropoutAt&) const { return barrier(kDropout + 1); }

  // Deterministic: a word in the key block for each semaphore thread, in which it tells the dQ warpgroup how many
  // clusters add before this one. Before that, block 0 passes the cluster's ticket to block 1 in the first of these
  // words.
  static constexpr int kDqThreads = bwd_dq_threads(kCfg.score);
  using DqThreadAt = RingPosition<kDqThreads>;
  TESSERA_DEVICE static uint32 order_word(const KeyBlock& block, int thread = 0) {
    return shared_address(thread == 0 ? &block.load_entry : &block.load_parity);
  }
  TESSERA_DEVICE static uint32 other_order_word(const KeyBlock& block) {
    constexpr int kOther = bwd_sm90_d256_layout(kCfg, 1 - kRank).block;
    return ptx::mapa(order_word(block) + kOther - kAt.block, 1 - kRank);
  }

  // ---- barriers: those that the other block uses come first ----
  static constexpr int kStages = kCfg.exchange_stages;
  static constexpr int kPFull = 0;                   // block 1: [warpgroup][stage], bytes of P
  static constexpr int kDSFull = 2 * kStages;        // block 0: bytes of dS; block 1: its 8 warps that write dS
  static constexpr int kFree = kDSFull + kStages;    // block 0: the dQ warps of both blocks have finished with a stage
  static constexpr int kKeysFull = kFree + kStages;  // K (block 0) or V
  static constexpr int kKHalfFull = kKeysFull + 1;   // block 1: K's second half
  static constexpr int kHalfFull = kKHalfFull + 1, kHalfEmpty = kHalfFull + kHalfSlots;
  static constexpr int kMayAdd = kHalfEmpty + kHalfSlots, kAdded = kMayAdd + kDqThreads;  // deterministic
  static constexpr int kDropout = kCfg.deterministic ? kAdded + kDqThreads : kMayAdd;     // with dropout: full, empty
  static_assert(kDropout + (kCfg.score.dropout ? 2 : 0) <= bwd_sm90_d256_barriers(kCfg));

  TESSERA_DEVICE uint32 barrier(int index) const { return base + kAt.barriers + index * 8; }
  // The other block's barrier of the same index. kAt.barriers differs between the blocks; both offsets are known at
  // compile time.
  TESSERA_DEVICE uint32 other_barrier(int index) const {
    constexpr int kOther = bwd_sm90_d256_layout(kCfg, 1 - kRank).barriers;
    return ptx::mapa(base + kOther + index * 8, 1 - kRank);
  }
  TESSERA_DEVICE uint32 at_stage(int first, const ExchangeAt& at) const { return barrier(first) + at.offset; }
  TESSERA_DEVICE void wait_half(const HalfAt& at) const {
    ptx::mbarrier_wait_parity(barrier(kHalfFull) + at.offset, at.parity);
  }
  TESSERA_DEVICE void release_half(const HalfAt& at) const { arrive_warp(barrier(kHalfEmpty) + at.offset); }

  // A warp arrives at a barrier: it has finished reading or writing what the barrier guards.
  TESSERA_DEVICE static void arrive_warp(uint32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }

  // By one thread, before the barriers are used. The bytes that the other block sends are announced here for the first
  // use of a stage, and from then on by the waiter of each use for the next. Bytes may arrive before they are
  // announced, because the phase cannot end without the announcing arrival.
  TESSERA_DEVICE void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(barrier(kPFull + stage), 1);
      ptx::mbarrier_init(barrier(kPFull + kStages + stage), 1);
      ptx::mbarrier_init(barrier(kDSFull + stage), kRank == 0 ? 1 : 8);
      ptx::mbarrier_init(barrier(kFree + stage), 8);
    }
    ptx::mbarrier_init(barrier(kKeysFull), 1);
    ptx::mbarrier_init(barrier(kKHalfFull), 1);
    for (int slot = 0; slot < kHalfSlots; ++slot) {
      ptx::mbarrier_init(barrier(kHalfFull + slot), 1);
      ptx::mbarrier_init(barrier(kHalfEmpty + slot), 8);
    }
    if constexpr (kCfg.deterministic) {
      for (int thread = 0; thread < kDqThreads; ++thread) {
        ptx::mbarrier_init(barrier(kMayAdd + thread), 1);
        ptx::mbarrier_init(barrier(kAdded + thread), 4);
      }
    }
    if constexpr (kRank == 0 && kCfg.score.dropout) {
      ptx::mbarrier_init(barrier(kDropout), kDropoutUnits);
      ptx::mbarrier_init(barrier(kDropout + 1), 8);
    }
    ptx::fence_mbarrier_init();
    for (int stage = 0; stage < kStages; ++stage) {
      if constexpr (kRank == 0) {
        ptx::mbarrier_arrive_expect_tx(barrier(kDSFull + stage), Exchange::kBytes);
      } else {
        ptx::mbarrier_arrive_expect_tx(barrier(kPFull + stage), kWarpgroupBytes);
        ptx::mbarrier_arrive_expect_tx(barrier(kPFull + kStages + stage), kWarpgroupBytes);
      }
    }
  }
};

}  // namespace tessera
