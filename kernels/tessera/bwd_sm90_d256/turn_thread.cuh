// bwd_sm90_d256's turn threads, deterministic: each of a warp of the producer's warpgroup, in each block of a cluster. Before a step's
// addition to dQ one waits for the clusters that add to the tile before this one, and after it lets the next one go on, so that the dQ
// warpgroup waits for no answer from memory but its turn. They take steps in turns: from a look at a tile's semaphore to its change some 3.4 us
// pass, more than a step takes. The first cluster in a tile's order stores: nothing is cleared beforehand.
#pragma once

#include "tessera/bwd_sm90_d256/shared.cuh"

namespace tessera {

template <class Shared, BwdSm90D256Config kCfg>
struct D256TurnThread {
  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  const int thread;  // of Shared::kTurnThreads

  TESSERA_DEVICE void run() const {
    if (block.steps == 0) return;
    ptx::griddepcontrol_wait();  // the kernel before this one cleared the semaphores
    const uint32 may_add = shared.barrier(Shared::kTurn + thread), added = shared.barrier(Shared::kAdded + thread);
    uint32 parity = 0;
    for_turns<kCfg, Shared::kTurnThreads>(p, block, thread, [&](int slot, int turn) {
      int* semaphore = p.dq_semaphore + slot;  // counts blocks: two of a cluster
      while (ptx::ld_acquire_s32(semaphore) < turn * kBwdD256ClusterBlocks) {
      }
      ptx::st_shared_s32(Shared::turn(block, thread), turn);
      ptx::mbarrier_arrive(may_add);
      ptx::mbarrier_wait_parity(added, parity);
      __threadfence();  // for what the dQ warpgroup added
      ptx::red_release_add_s32(semaphore, 1);
      parity ^= 1;
    });
  }
};

}  // namespace tessera
