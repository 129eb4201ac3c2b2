// The semaphore threads of bwd_sm90_d256, when deterministic: in each block of a cluster, each in a warp of its own of
// the producer's warpgroup. Before a step's addition to dQ such a thread waits for the clusters that add to the tile
// before this one; after it, it increments the tile's semaphore. The dQ warpgroup therefore never waits for an answer
// from memory, only for permission to add. The threads alternate between steps: from a read of a tile's semaphore to
// its increment some 3.4 us pass, more than a step takes. The first cluster in a tile's order stores its dQ instead of
// adding it: nothing is cleared beforehand.
#pragma once

#include "tessera/bwd_sm90_d256/shared.cuh"

namespace tessera {

template <class Shared, BwdSm90D256Config kCfg>
struct D256TurnThread {
  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  const int thread;  // index of Shared::kTurnThreads

  TESSERA_DEVICE void run() const {
    if (block.steps == 0) return;
    ptx::griddepcontrol_wait();  // the previous kernel cleared the semaphores
    const uint32 may_add = shared.barrier(Shared::kTurn + thread), added = shared.barrier(Shared::kAdded + thread);
    uint32 parity = 0;
    for_turns<kCfg, Shared::kTurnThreads>(p, block, thread, [&](int slot, int turn) {
      int* semaphore = p.dq_semaphore + slot;  // counts blocks: two for each cluster
      while (ptx::ld_acquire_s32(semaphore) < turn * kBwdD256ClusterBlocks) {
      }
      ptx::st_shared_s32(Shared::turn(block, thread), turn);
      ptx::mbarrier_arrive(may_add);
      ptx::mbarrier_wait_parity(added, parity);
      __threadfence();  // for the additions of the dQ warpgroup
      ptx::red_release_add_s32(semaphore, 1);
      parity ^= 1;
    });
  }
};

}  // namespace tessera
