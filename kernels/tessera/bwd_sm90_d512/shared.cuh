// The offsets of tiles and barriers in bwd_sm90_d512's shared memory, the same in all blocks of a cluster.
#pragma once

#include "tessera/attention/backward/key_block.cuh"
#include "tessera/bwd_sm90_d512/config.hpp"
#include "tessera/ptx/async_copy.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/ptx/wgmma.cuh"
#include "tessera/tile/pipeline.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

// The role of a pair of blocks: those of ranks 0 and 1 accumulate dV, those of ranks 2 and 3 dK.
enum D512Role : int { kD512Values = 0, kD512Keys = 1 };

// The position of a block in its cluster. The lower bit of its rank is its side: the half of the keys whose scores it
// computes, and the half of the columns that it accumulates.
struct D512Place {
  TESSERA_DEVICE static uint32 rank() { return not_hoisted(ptx::cluster_ctarank()); }
  TESSERA_DEVICE static int side() { return static_cast<int>(rank() % 2); }
  TESSERA_DEVICE static uint32 other_side() { return rank() ^ 1; }
  TESSERA_DEVICE static uint32 other_role() { return rank() ^ 2; }
};

template <BwdSm90D512Config kCfg, D512Role kBlockRole>
struct BwdD512Shared {
  static constexpr D512Role kRole = kBlockRole;
  static constexpr BwdSm90D512Layout kAt = bwd_sm90_d512_layout();
  static constexpr int kFactorSlots = kCfg.head_dim / kCfg.slot_dim,
                       kAccumulatedSlots = kCfg.accumulated_dim / kCfg.slot_dim;
  using Keys = SwizzledTile<kCfg.score_keys, kCfg.head_dim>;        // of K or V
  using KeyPart = SwizzledTile<kCfg.score_keys, kCfg.slot_dim>;     // of K
  using Slot = SwizzledTile<kCfg.block_m, kCfg.slot_dim>;           // of Q or dO
  using Exchange = SwizzledTile<kCfg.block_m, kCfg.block_n>;        // a chunk holds the keys of one side
  using Result = SwizzledTile<kCfg.block_n, kCfg.accumulated_dim>;  // dV or dK
  static_assert(Exchange::kChunks == 2 && Result::kBytes <= kFactorSlots * Slot::kBytes);
  static constexpr int kStatBytes = kCfg.block_m * 4, kSideBytes = Exchange::kChunkBytes;

  uint32 base;
  uint32 descriptor;  // `base` in matrix descriptor format: a tile's descriptor needs one addition

  TESSERA_DEVICE explicit BwdD512Shared(const void* memory)
      : base(shared_address(memory)), descriptor(descriptor_address(base)) {}

  // ---- tiles, some of them by a step's number ----
  //
  // Computed again at each use: kept in registers over the loop of steps, the descriptors would need more registers
  // than there are.
  TESSERA_DEVICE TileDescriptor tile_descriptor(int first) const {
    return {not_hoisted(descriptor) + first / 16, kDescriptorHigh};
  }
  TESSERA_DEVICE TileDescriptor exchange_descriptor(uint32 step) const {
    return {descriptor + kAt.exchange / 16 + step % kCfg.stages * (Exchange::kBytes / 16), kDescriptorHigh};
  }
  TESSERA_DEVICE uint32 exchange(uint32 step) const {
    return base + kAt.exchange + step % kCfg.stages * Exchange::kBytes;
  }
  TESSERA_DEVICE uint32 stats(uint32 step) const { return base + kAt.stats + step % kCfg.stages * kStatBytes; }
  // A thread's fragment of queries 0 ... 15, within its warpgroup; the fragment of the next sixteen is 128 * 16 bytes
  // further.
  TESSERA_DEVICE uint32 peer_word(uint32 step, uint32 thread) const {
    return base + kAt.peer + step % kCfg.stages * kSideBytes + thread * 16;
  }

  // ---- barriers ----
  static constexpr int kKeysFull = 0, kKPartsFull = 1;
  static constexpr int kFactorFull = 2;
  // Released by the score warpgroups' warps of both sides.
  static constexpr int kFactorEmpty = kFactorFull + kFactorSlots;
  static constexpr int kAccumulatedFull = kFactorEmpty + kFactorSlots;
  static constexpr int kAccumulatedEmpty =
      kAccumulatedFull + kAccumulatedSlots;  // released by the 8 warps of both warpgroups
  // Barriers with a phase for each use of a stage. kD512Keys: P of this side; kD512Values: P of the other side.
  static constexpr int kPFull = kAccumulatedEmpty + kAccumulatedSlots;
  static constexpr int kDSFull = kPFull + kCfg.stages;      // dS of both sides
  static constexpr int kDSWritten = kDSFull + kCfg.stages;  // kD512Keys: dS of this side, written by 4 warps
  // kD512Values: the cluster's dQ warps have finished reading dS.
  static constexpr int kFree = kDSWritten + kCfg.stages;
  static_assert(kFree + kCfg.stages == bwd_sm90_d512_barriers());

  TESSERA_DEVICE uint32 barrier(int index) const { return base + kAt.barriers + index * 8; }
  TESSERA_DEVICE uint32 at_stage(int first, uint32 step) const { return barrier(first) + step % kCfg.stages * 8; }
  TESSERA_DEVICE static int stage_parity(uint32 step) { return static_cast<int>(step / kCfg.stages % 2); }
  TESSERA_DEVICE void wait_stage(int first, uint32 step, int ahead = 0) const {
    ptx::mbarrier_wait_parity(at_stage(first, step), stage_parity(step) ^ ahead);
  }
  // Waits for a barrier with a phase for each step.
  TESSERA_DEVICE void wait_step(int index, uint32 step, int ahead = 0) const {
    ptx::mbarrier_wait_parity(barrier(index), static_cast<int>(step % 2) ^ ahead);
  }

  // A warp arrives at a barrier, of this block or of blocks first ... first + count - 1 of the cluster: it has finished
  // reading or writing what the barrier guards.
  TESSERA_DEVICE static void arrive_warp(uint32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
  }
  TESSERA_DEVICE static void arrive_warp(uint32 barrier, uint32 first, uint32 count) {
    __syncwarp();
    const uint32 lane = not_hoisted(threadIdx.x % 32);
    if (lane < count) ptx::mbarrier_arrive_shared_cluster(ptx::mapa(barrier, first + lane));
  }

  // Bytes that other blocks send to a stage. init() announces them for the first use, and then a waiter for each next
  // use.
  static constexpr int kDSBytes = (kRole == kD512Values ? 2 : 1) * kSideBytes;

  // By one thread, before the barriers are used.
  TESSERA_DEVICE void init() const {
    ptx::mbarrier_init(barrier(kKeysFull), 1);
    ptx::mbarrier_init(barrier(kKPartsFull), 1);
    for (int slot = 0; slot < kFactorSlots; ++slot) {
      ptx::mbarrier_init(barrier(kFactorFull + slot), 1);
      ptx::mbarrier_init(barrier(kFactorEmpty + slot), 8);
    }
    for (int slot = 0; slot < kAccumulatedSlots; ++slot) {
      ptx::mbarrier_init(barrier(kAccumulatedFull + slot), 1);
      ptx::mbarrier_init(barrier(kAccumulatedEmpty + slot), 8);
    }
    for (int stage = 0; stage < kCfg.stages; ++stage) {
      ptx::mbarrier_init(barrier(kPFull + stage), 1);
      ptx::mbarrier_init(barrier(kDSFull + stage), kRole == kD512Values ? 1 : 1 + 4);
      ptx::mbarrier_init(barrier(kDSWritten + stage), 4);
      ptx::mbarrier_init(barrier(kFree + stage), 4 * kBwdD512ClusterBlocks);
    }
    ptx::fence_mbarrier_init();
    for (int stage = 0; stage < kCfg.stages; ++stage) {
      ptx::mbarrier_arrive_expect_tx(barrier(kPFull + stage), kSideBytes);
      ptx::mbarrier_arrive_expect_tx(barrier(kDSFull + stage), kDSBytes);
    }
  }
};

}  // namespace tessera
