// The dQ warpgroup of bwd_sm90: in each step it computes dS K and adds it in float32 to dq_accum in global memory, to
// which other blocks add too. A tile of dQ is computed in parts of 64 x 64, because the score warpgroups have most of
// the registers; with head size 96, in one part of 64 x 96.
#pragma once

#include "tessera/attention/backward/tiles.cuh"
#include "tessera/bwd_sm90/shared.cuh"

namespace tessera {

template <BwdSm90Config kCfg>
struct DqWarpgroup {
  using Shared = BwdSm90Shared<kCfg>;
  using Keys = typename Shared::Keys;
  using Gradients = typename Shared::Gradients;
  static constexpr int kPartCols = bwd_dq_columns(kCfg.head_dim), kPartsARow = kCfg.head_dim / kPartCols;
  static constexpr int kParts = kCfg.block_m / 64 * kPartsARow;
  static constexpr int kPartBytes = 16 * kPartCols * 4;  // of a warp's 16 queries

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  float rdQ[1][kPartCols / 8][4];

  TESSERA_DEVICE static int warp() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)); }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  TESSERA_DEVICE void run() {
    const int steps = uniform(block.steps);
    if (steps > 0) {
      ptx::mbarrier_wait_parity(shared.k_full(), 0);
      ptx::griddepcontrol_wait();  // the previous kernel clears dq_accum
      RingPosition<kCfg.ds_stages> at;
      RingPosition<kBwdDqStages> staged_at;
      // The tile is counted here: the step beside a stage of Q is overwritten once the score warpgroups have released
      // the stage, which may be before this point.
      int tile = block.first_tile, slot = block.head_kv * p.group * p.q_slots + block.slot0 + tile;
      for (int left = steps; left > 0; --left) {
        shared.wait_full(Shared::kDS, at);
        if constexpr (kCfg.block_mask) slot = ptx::ld_shared_s32(shared.dq_slot(left));
        if constexpr (kCfg.deterministic) shared.wait_empty(Shared::kDQ, staged_at);
        float* gdQ = p.dq_accum + static_cast<int64>(slot) * (kCfg.block_m * kCfg.head_dim);
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
          issue(at, part);
          ptx::wgmma_wait_group<0>();
          ptx::wgmma_pin(flat(rdQ));
          if (part == kParts - 1) Shared::arrive_warp(shared.empty(Shared::kDS, at));
          if constexpr (kCfg.deterministic) {
            stage(part, staged_at);
          } else {
            add(gdQ, part);
          }
        }
        at.advance();
        if constexpr (kCfg.deterministic) {
          ptx::fence_proxy_async();
          Shared::arrive_warp(shared.full(Shared::kDQ, staged_at));
          staged_at.advance();
        }
        if constexpr (kCfg.block_mask || kCfg.deterministic) continue;
        ++slot;
        if (++tile == block.first_tile + block.tiles) tile = block.first_tile, slot += p.q_slots - block.tiles;
      }
    }
    ptx::barrier_arrive(kKeysDone, 384);
    if constexpr (kCfg.staged_dq && !kCfg.deterministic) ptx::cp_async_bulk_wait_group_read();
  }

  TESSERA_DEVICE void issue(const RingPosition<kCfg.ds_stages>& at, int part) {
    TileDescriptor d_s = shared.tile_descriptor(Shared::kAt.d_s, Gradients::kBytes, at), k = shared.keys(Shared::kAt.k);
    d_s.address += part / kPartsARow * (64 * kChunkRowBytes / 16);
    k.address += part % kPartsARow * (Keys::kChunkBytes / 16);
    issue_dq_part<kCfg.dtype, Gradients, Keys>(rdQ, d_s, k);
  }

  // The offset of a part of the warp's 16 queries in a tile of dQ.
  TESSERA_DEVICE static int part_offset(int part) {
    return dq_part_offset<kCfg.head_dim>(part / kPartsARow * 4 + warp(), part % kPartsARow * (kPartCols / 8));
  }

  // Deterministic: stages the part for the thread that adds dQ (DqThread), in the layout of global memory.
  TESSERA_DEVICE void stage(int part, const RingPosition<kBwdDqStages>& staged_at) {
    stage_dq_part(shared.tile(Shared::kAt.dq, Shared::kDqBytes, staged_at) + part_offset(part) * 4, rdQ, lane());
  }

  // A warp's 16 rows of a part are contiguous, in the order of the accumulators: attention/backward/rows.cuh.
  TESSERA_DEVICE void add(float* gdQ, int part) {
    float* to = gdQ + part_offset(part);
    if constexpr (kCfg.staged_dq) {
      const uint32 staged = shared.base + Shared::kAt.dq + (part * 4 + warp()) * kPartBytes;
      if (part == 0) {
        if (lane() == 0) ptx::cp_async_bulk_wait_group_read();
        __syncwarp();
      }
      add_staged_dq_part(to, staged, rdQ, lane());
    } else {
#pragma unroll
      for (int n = 0; n < kPartCols / 8; ++n) dq_add(to + n * 128, lane(), rdQ[0][n]);
    }
  }
};

// ---- deterministic: threads that add dQ -----------------------------------------------------------------------------
//
// Each such thread is in a warp of its own of the producer's warpgroup. They add
// the tiles of dQ that the dQ warpgroup stages, one after another, each after waiting for the tile's semaphore, so the
// warpgroup itself waits for neither semaphores nor additions. From a thread's read of a tile's semaphore to its
// increment some 2.8 us pass, more than a step takes. The first block in a tile's order stores its dQ instead of adding
// it: nothing is cleared beforehand.

template <BwdSm90Config kCfg>
struct DqThread {
  using Shared = BwdSm90Shared<kCfg>;
  static constexpr int kThreads = bwd_dq_threads(kCfg.score);
  static_assert(kThreads <= kBwdDqStages);

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  const int thread;  // index of kThreads; each processes every kThreads-th step

  TESSERA_DEVICE void run() const {
    if (block.steps == 0) return;
    ptx::griddepcontrol_wait();  // the previous kernel cleared the semaphores
    RingPosition<kBwdDqStages> at;
    at.advance(thread);
    if constexpr (kCfg.block_mask) {
      run_lists(at);
      return;
    }
    for_additions<kCfg, kThreads>(p, block, thread, [&](int slot, int before) {
      wait_for_semaphore(slot, before);
      shared.wait_full(Shared::kDQ, at);
      add_staged(slot, before, at);
    });
  }

  // The producer writes each step's tile of dQ to shared memory; it is visible once the step's dQ is staged.
  TESSERA_DEVICE void run_lists(RingPosition<kBwdDqStages>& at) const {
#pragma unroll 1
    for (int left = block.steps - thread; left > 0; left -= kThreads) {
      shared.wait_full(Shared::kDQ, at);
      const int slot = ptx::ld_shared_s32(shared.dq_slot(left)), before = ptx::ld_shared_s32(shared.dq_slot(left) + 4);
      wait_for_semaphore(slot, before);
      add_staged(slot, before, at);
    }
  }

  TESSERA_DEVICE void add_staged(int slot, int before, RingPosition<kBwdDqStages>& at) const {
    add(slot, before == 0, shared.tile(Shared::kAt.dq, Shared::kDqBytes, at));
    ptx::cp_async_bulk_wait_group_read();
    ptx::mbarrier_arrive(shared.empty(Shared::kDQ, at));
    increment_semaphore(slot);
    at.advance(kThreads);
  }

  // The dQ semaphore counts the blocks that have added to a tile. fence_proxy_async_global orders the other blocks'
  // bulk copies, observed through the semaphore, before those of this thread.
  TESSERA_DEVICE void wait_for_semaphore(int slot, int before) const {
    while (ptx::ld_acquire_s32(p.dq_semaphore + slot) < before) {
    }
    ptx::fence_proxy_async_global();
  }
  TESSERA_DEVICE void increment_semaphore(int slot) const {
    ptx::cp_async_bulk_wait_group();
    ptx::fence_proxy_async_global();
    ptx::red_release_add_s32(p.dq_semaphore + slot, 1);
  }

  TESSERA_DEVICE void add(int slot, bool first, uint32 staged) const {
    float* gdQ = p.dq_accum + static_cast<int64>(slot) * (kCfg.block_m * kCfg.head_dim);
    if (first) {
      ptx::cp_async_bulk_store(gdQ, staged, Shared::kDqBytes);
    } else {
      ptx::cp_reduce_async_bulk_add_f32(gdQ, staged, Shared::kDqBytes);
    }
    ptx::cp_async_bulk_commit_group();
  }
};

}  // namespace tessera
