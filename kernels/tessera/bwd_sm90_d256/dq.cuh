// The dQ warpgroup of bwd_sm90_d256. In each step it computes dS K, block 0 the first half of the columns and block 1
// the second, and adds it in float32 to global memory, to which other clusters add too (deterministic: in a fixed
// order). It computes parts of bwd_dq_columns, because the key warpgroups have most of the registers.
#pragma once

#include "tessera/attention/backward/tiles.cuh"
#include "tessera/bwd_sm90_d256/shared.cuh"

namespace tessera {

template <class Shared, BwdSm90D256Config kCfg>
struct D256DqWarpgroup {
  static constexpr int kRank = Shared::kRank;
  static constexpr int kPartCols = bwd_dq_columns(kCfg.half_dim()), kParts = kCfg.half_dim() / kPartCols;
  using Keys = typename Shared::Keys;
  using Exchange = typename Shared::Exchange;

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  float rdQ[1][kPartCols / 8][4];

  TESSERA_DEVICE static int warp() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)); }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  TESSERA_DEVICE void run() {
    const int steps = uniform(block.steps);
    if (steps == 0) return;
    ptx::mbarrier_wait_parity(shared.barrier(kRank == 0 ? Shared::kKeysFull : Shared::kKHalfFull), 0);
    if constexpr (kCfg.varlen) clear_keys();
    ptx::griddepcontrol_wait();  // the previous kernel clears dq_accum
    typename Shared::ExchangeAt at;
    const int start = start_tile<kCfg>(p, block);
    int head_slot = block.head_kv * p.group * p.q_slots + block.slot0, tile = start;  // of the head's first query tile
    [[maybe_unused]] typename Shared::DqThreadAt thread_at;
#pragma unroll 1
    for (int left = steps; left > 0; --left) {
      const uint32 full = shared.at_stage(Shared::kDSFull, at);
      ptx::mbarrier_wait_parity(full, at.parity);
      if constexpr (kRank == 0) {
        if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive_expect_tx(full, Exchange::kBytes);
      }
      int slot = head_slot + tile;
      if constexpr (kCfg.block_mask) slot = ptx::ld_shared_s32(shared.step(left));
      float* gdQ = p.dq_accum + static_cast<int64>(slot) * (kCfg.block_m * kCfg.head_dim);
      [[maybe_unused]] bool first = false;
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        issue(at, part);
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_pin(flat(rdQ));
        if (part == kParts - 1) release(at);
        if constexpr (kCfg.deterministic) {
          if (part == 0) {
            ptx::mbarrier_wait_parity(shared.barrier(Shared::kMayAdd) + thread_at.offset, thread_at.parity);
            first = ptx::ld_shared_s32(Shared::order_word(block, thread_at.stage())) == 0;
          }
        }
        float* to = dq_part<kCfg.head_dim>(gdQ, warp(), (kRank * kParts + part) * (kPartCols / 8));
        if constexpr (kCfg.staged_dq) {
          add_staged(to);
          continue;
        }
#pragma unroll
        for (int n = 0; n < kPartCols / 8; ++n) {
          if (kCfg.deterministic && first) {
            dq_store(to + n * 128, lane(), rdQ[0][n]);
          } else {
            dq_add(to + n * 128, lane(), rdQ[0][n]);
          }
        }
      }
      if constexpr (kCfg.deterministic) {
        Shared::arrive_warp(shared.barrier(Shared::kAdded) + thread_at.offset);
        thread_at.advance();
      }
      at.advance();
      if constexpr (kCfg.block_mask) continue;
      tile = next_tile(block, tile);
      if (tile == start) head_slot += p.q_slots;
    }
    if constexpr (kCfg.staged_dq) ptx::cp_async_bulk_wait_group_read();
  }

  // A warp's 16 rows of a part are contiguous, in the order of the accumulators.
  TESSERA_DEVICE void add_staged(float* to) const {
    const uint32 staged = shared.base + Shared::kAt.dq + warp() * (16 * kPartCols * 4);
    if (lane() == 0) ptx::cp_async_bulk_wait_group_read();
    __syncwarp();
    add_staged_dq_part(to, staged, rdQ, lane());
  }

  // Clears rows of K after the sequence's last key, because NaN times a dS of 0 is NaN. In block 0 the key warpgroups
  // may be reading them, for scores that they set to -inf by position.
  TESSERA_DEVICE void clear_keys() const {
    const int keys = max(0, block.s.sk - block.key0);
    if (keys >= kCfg.block_n) return;
    constexpr int kOffset = kRank == 0 ? Shared::kAt.keys : Shared::kAt.k_half;
    clear_rows<SwizzledTile<kCfg.block_n, kCfg.half_dim()>>(shared.base + kOffset, keys, kCfg.block_n);
    ptx::fence_proxy_async();
    ptx::barrier_sync(kDqWarpgroup, 128);
  }

  TESSERA_DEVICE void issue(const typename Shared::ExchangeAt& at, int part) {
    const TileDescriptor d_s = shared.exchange_descriptor(at);
    TileDescriptor k = shared.tile_descriptor(kRank == 0 ? Shared::kAt.keys : Shared::kAt.k_half);
    k.address += part * (Keys::kChunkBytes / 16);
    issue_dq_part<kCfg.dtype, Exchange, Keys>(rdQ, d_s, k);
  }

  // Block 0 may send P to a stage again once this block's dS in it has been read: by wgmma, and in block 1 also by the
  // copy for whose bytes block 0's dQ warpgroup has waited.
  TESSERA_DEVICE void release(const typename Shared::ExchangeAt& at) const {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    if constexpr (kRank == 0) {
      ptx::mbarrier_arrive(shared.at_stage(Shared::kFree, at));
    } else {
      ptx::mbarrier_arrive_shared_cluster(shared.other_barrier(Shared::kFree) + at.offset);
    }
  }
};

// ---- deterministic: threads that wait for the semaphores ------------------------------------------------------------
//
// In each block of a cluster such threads are in warps of their own of the producer's warpgroup. Before a step's
// addition to dQ such a thread waits for the clusters that add to the tile before this one; after it, it increments the
// tile's semaphore. The dQ warpgroup therefore never waits for an answer from memory, only for permission to add. The
// threads alternate between steps: from a read of a tile's semaphore to its increment some 3.4 us pass, more than a
// step takes. The first cluster in a tile's order stores its dQ instead of adding it: nothing is cleared beforehand.

template <class Shared, BwdSm90D256Config kCfg>
struct D256SemaphoreThread {
  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  const int thread;  // index of Shared::kDqThreads

  TESSERA_DEVICE void run() const {
    if (block.steps == 0) return;
    ptx::griddepcontrol_wait();  // the previous kernel cleared the semaphores
    const uint32 may_add = shared.barrier(Shared::kMayAdd + thread), added = shared.barrier(Shared::kAdded + thread);
    uint32 parity = 0;
    for_additions<kCfg, Shared::kDqThreads>(p, block, thread, [&](int slot, int before) {
      int* semaphore = p.dq_semaphore + slot;  // counts blocks: two for each cluster
      while (ptx::ld_acquire_s32(semaphore) < before * kBwdD256ClusterBlocks) {
      }
      ptx::st_shared_s32(Shared::order_word(block, thread), before);
      ptx::mbarrier_arrive(may_add);
      ptx::mbarrier_wait_parity(added, parity);
      __threadfence();  // for the additions of the dQ warpgroup
      ptx::red_release_add_s32(semaphore, 1);
      parity ^= 1;
    });
  }
};

}  // namespace tessera
