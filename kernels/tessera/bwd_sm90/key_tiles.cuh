// bwd_sm90 with a block mask, in any order: a block of the grid for each multiprocessor takes one tile of keys after another (order.cuh),
// since of a mask that hides most a tile has few steps, and a block's start, its first loads and its stores take as long as three. The next
// tile is found while the last steps of the one before are under way, and its keys are loaded while dK and dV leave.
#pragma once

#include "tessera/bwd_sm90/dq.cuh"
#include "tessera/bwd_sm90/producer.cuh"
#include "tessera/bwd_sm90/scores.cuh"

namespace tessera {

template <BwdSm90Config kCfg>
struct KeyTiles {
  using Shared = BwdSm90Shared<kCfg>;

  const BwdSm90Params& p;
  const Shared& shared;
  KeyBlock* blocks;  // [kBwdKeyTiles] in shared memory
  RingPosition<kBwdKeyTiles> at{};

  // The producer's thread. A tile is drawn when all loads of the one before are issued: late enough that no multiprocessor holds tiles while
  // another has none, and a few steps before it is wanted.
  TESSERA_DEVICE void produce() {
    ptx::griddepcontrol_wait();  // the kernel before this one made the order
    const int tiles = p.heads * static_cast<int>(p.key_tiles);
    KeyBlock& none = blocks[kBwdKeyTiles - 1];  // before the first
    none.steps = none.load_offset = none.load_parity = none.first_slot = none.keys_parity = 0;
    for (int n = static_cast<int>(blockIdx.x);; n = static_cast<int>(gridDim.x) + atomicAdd(p.order + tiles, 1)) {
      shared.wait_empty(Shared::kKeyTiles, at);
      KeyBlock& block = blocks[at.stage()];
      if (n >= tiles) {
        block.steps = kNoFurtherTile;
        ptx::mbarrier_arrive(shared.full(Shared::kKeyTiles, at));
        return;
      }
      block = key_block<kCfg>(p, p.order[n]);
      use_lists(p, block, kCfg.block_n);
      go_on_after(blocks[at.stage() ^ 1], block);
      ptx::mbarrier_arrive(shared.full(Shared::kKeyTiles, at));
      if (block.steps > 0) {
        ptx::mbarrier_wait_parity(shared.keys_empty(), block.keys_parity ^ 1);
        BwdSm90Producer<kCfg>{p, shared, block}.run();
      }
      at.advance();
    }
  }

  TESSERA_DEVICE void make_scores(int warpgroup) {
    RingPosition<kCfg.stages> queries_at;
    while (next()) {
      Scores scores(p, shared, blocks[at.stage()], warpgroup);
      scores.at = queries_at;
      scores.run();
      queries_at = scores.at;
      store(scores);
      release();
    }
    ptx::cp_async_bulk_wait_group_read();  // before the next block gets the shared memory
  }

  TESSERA_DEVICE void make_dq() {
    RingPosition<kCfg.ds_stages> gradients_at;
    while (next()) {
      DqWarpgroup<kCfg>{p, shared, blocks[at.stage()]}.run(gradients_at);
      release();
    }
    if constexpr (kCfg.staged_dq) ptx::cp_async_bulk_wait_group_read();
  }

 private:
  using Scores = ScoreWarpgroup<kCfg>;
  static constexpr int kNoFurtherTile = -1;  // steps

  // The rings' state, in memory, since the producer has few registers.
  TESSERA_DEVICE static void go_on_after(const KeyBlock& before, KeyBlock& block) {
    constexpr int kSlots = bwd_sm90_step_slots(kCfg);
    block.load_offset = before.load_offset, block.load_parity = before.load_parity;
    block.first_slot = static_cast<short>((before.first_slot + kSlots - block.steps % kSlots) % kSlots);
    block.keys_parity = static_cast<short>(before.keys_parity ^ (before.steps > 0));
  }

  // dV, then dK, through the warp's rows of one place, while the next K and V are loaded.
  TESSERA_DEVICE void store(Scores& scores) const {
    const int row = scores.warpgroup * 64 + Scores::warp_key();
    const uint32 out = shared.base + Shared::kAt.out;
    wait_stored();
    store_gradient<kCfg, typename Scores::Values>(p, scores.block, out, row, scores.rdV, kBwdLower, &p.d_v_map, p.d_v,
                                                  p.head_dim_v);
    wait_stored();
    store_gradient<kCfg, typename Scores::Keys>(p, scores.block, out, row, scores.rdK,
                                                p.scale * bwd_lower_late(kCfg.dtype), &p.d_k_map, p.d_k, p.head_dim);
  }
  // TMA has read what this warp staged.
  TESSERA_DEVICE static void wait_stored() {
    ptx::cp_async_bulk_wait_group_read();
    __syncwarp();
  }

  TESSERA_DEVICE bool next() const {
    shared.wait_full(Shared::kKeyTiles, at);
    return uniform(blocks[at.stage()].steps) != kNoFurtherTile;
  }
  TESSERA_DEVICE void release() {
    Shared::arrive_warp(shared.empty(Shared::kKeyTiles, at));
    at.advance();
  }
};

}  // namespace tessera
