// The dQ threads of bwd_sm90, when deterministic. Each is in a warp of its own of the producer's warpgroup. They add
// the tiles of dQ that the dQ warpgroup stages, one after another, each after waiting for the tile's semaphore, so the
// warpgroup itself waits for neither semaphores nor additions. From a thread's read of a tile's semaphore to its
// increment some 2.8 us pass, more than a step takes. The first block in a tile's order stores its dQ instead of adding
// it: nothing is cleared beforehand.
#pragma once

#include "tessera/bwd_sm90/shared.cuh"

namespace tessera {

template <BwdSm90Config kCfg>
struct DqThread {
  using Shared = BwdSm90Shared<kCfg>;
  static constexpr int kThreads = bwd_turn_threads(kCfg.score);
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
    for_turns<kCfg, kThreads>(p, block, thread, [&](int slot, int turn) {
      wait_for_turn(slot, turn);
      shared.wait_full(Shared::kDQ, at);
      add_staged(slot, turn, at);
    });
  }

  // The producer writes each step's tile of dQ to shared memory; it is visible once the step's dQ is staged.
  TESSERA_DEVICE void run_lists(RingPosition<kBwdDqStages>& at) const {
#pragma unroll 1
    for (int left = block.steps - thread; left > 0; left -= kThreads) {
      shared.wait_full(Shared::kDQ, at);
      const int slot = ptx::ld_shared_s32(shared.dq_slot(left)), turn = ptx::ld_shared_s32(shared.dq_slot(left) + 4);
      wait_for_turn(slot, turn);
      add_staged(slot, turn, at);
    }
  }

  TESSERA_DEVICE void add_staged(int slot, int turn, RingPosition<kBwdDqStages>& at) const {
    add(slot, turn == 0, shared.tile(Shared::kAt.dq, Shared::kDqBytes, at));
    ptx::cp_async_bulk_wait_group_read();
    ptx::mbarrier_arrive(shared.empty(Shared::kDQ, at));
    pass_turn(slot);
    at.advance(kThreads);
  }

  // The dQ semaphore counts the blocks that have added to a tile. fence_proxy_async_global orders the other blocks'
  // bulk copies, observed through the semaphore, before those of this thread.
  TESSERA_DEVICE void wait_for_turn(int slot, int turn) const {
    while (ptx::ld_acquire_s32(p.dq_semaphore + slot) < turn) {
    }
    ptx::fence_proxy_async_global();
  }
  TESSERA_DEVICE void pass_turn(int slot) const {
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
