// bwd_sm90_d256's turn thread, deterministic: of a warp of the producer's warpgroup, in each block of a cluster. Before each step's
// addition to dQ it waits for the clusters that add to the tile before this one, and after it lets the next one go on, so that the dQ
// warpgroup waits for no answer from memory but its turn. The first cluster in a tile's order stores: nothing is cleared beforehand.
#pragma once

#include "tessera/bwd_sm90_d256/shared.cuh"

namespace tessera {

template <class Shared, BwdSm90D256Config kCfg>
struct D256TurnThread {
  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;

  TESSERA_DEVICE void run() const {
    if (block.steps == 0) return;
    ptx::griddepcontrol_wait();  // the kernel before this one cleared the semaphores
    uint32 parity = 0;
    for_turns<kCfg>(p, block, [&](int slot, int turn) {
      int* semaphore = p.dq_semaphore + slot;  // counts blocks: two of a cluster
      while (ptx::ld_acquire_s32(semaphore) < turn * kBwdD256ClusterBlocks) {
      }
      ptx::st_shared_s32(Shared::turn(block), turn);
      ptx::mbarrier_arrive(shared.barrier(Shared::kTurn));
      ptx::mbarrier_wait_parity(shared.barrier(Shared::kAdded), parity);
      __threadfence();  // for what the dQ warpgroup added
      ptx::red_release_add_s32(semaphore, 1);
      parity ^= 1;
    });
  }
};

}  // namespace tessera
