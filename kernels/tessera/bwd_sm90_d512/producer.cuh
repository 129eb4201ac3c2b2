// bwd_sm90_d512's producer: a thread that brings the block's columns of K and V once, and of Q and dO step by step, in halves.
#pragma once

#include "tessera/bwd_sm90_d512/shared.cuh"

namespace tessera {

template <BwdSm90D512Config kCfg>
struct BwdD512Producer {
  using Shared = BwdD512Shared<kCfg>;
  using Keys = typename Shared::Keys;
  using Half = typename Shared::Half;

  const BwdSm90Params& p;
  const Shared& shared;
  KeyBlock& block;

  // The block's first column; anew where it is used, since the producer has few registers.
  TESSERA_DEVICE static int first_col() {
    return static_cast<int>(not_hoisted(ptx::cluster_ctarank())) * kCfg.block_dim;
  }

  TESSERA_DEVICE void load_keys(int offset, const TensorMap* map, int barrier) const {
    const uint32 full = shared.barrier(barrier);
    ptx::mbarrier_arrive_expect_tx(full, Keys::kBytes);
#pragma unroll 1
    for (int chunk = 0; chunk < Keys::kChunks; ++chunk) {
      ptx::cp_async_bulk_tensor_4d(shared.base + offset + chunk * Keys::kChunkBytes, map, full,
                                   first_col() + chunk * kChunkCols, block.s.k_begin + block.key0, block.head_kv,
                                   p.cu_seqlens_k ? 0 : block.batch);
    }
  }
  TESSERA_DEVICE void load_stats(uint32 full, int slot, int stage) const {
    const int64 first = static_cast<int64>(slot) * kCfg.block_m;
    ptx::cp_async_bulk_load(shared.lse(stage), p.row_lse_log2 + first, Shared::kStatBytes, full);
    ptx::cp_async_bulk_load(shared.delta(stage), p.row_delta + first, Shared::kStatBytes, full);
  }

  TESSERA_DEVICE void run() {
    if (block.steps == 0) return;
    typename Shared::HalfAt at;
    int head = block.head_kv * p.group, tile = block.first_tile, stage = 0;
    load_keys(Shared::kAt.k, &p.k_map, Shared::kKFull);
    uint32 first_full = 0;
#pragma unroll 1
    for (int left = block.steps; left > 0; --left) {
      const int slot = head * p.q_slots + block.slot0 + tile;
#pragma unroll 1
      for (int n = 0; n < 4; ++n) {
        ptx::mbarrier_wait_parity(shared.barrier(Shared::kHalfEmpty) + at.offset, at.parity ^ 1);
        const uint32 full = shared.barrier(Shared::kHalfFull) + at.offset, to = shared.half(at);
        ptx::mbarrier_arrive_expect_tx(full, Half::kBytes + (n == 0 ? 2 * Shared::kStatBytes : 0));
        const TensorMap* map = n < 2 ? &p.q_map : &p.d_o_map;
#pragma unroll
        for (int chunk = 0; chunk < Half::kChunks; ++chunk) {
          ptx::cp_async_bulk_tensor_4d(to + chunk * Half::kChunkBytes, map, full,
                                       first_col() + n % 2 * kCfg.half_dim + chunk * kChunkCols,
                                       block.s.q_begin + tile * kCfg.block_m, head, p.cu_seqlens_q ? 0 : block.batch);
        }
        if (n == 0) {
          if (left == block.steps) {
            first_full = full;  // LSE and delta are of the kernel before this one: everything else goes ahead
            load_keys(Shared::kAt.v, &p.v_map, Shared::kVFull);
          } else {
            load_stats(full, slot, stage);
          }
        }
        at.advance();
      }
      if (left == block.steps) {
        ptx::griddepcontrol_wait();
        load_stats(first_full, slot, 0);
      }
      if (++stage == kBwdD512StatStages) stage = 0;
      if (++tile == block.first_tile + block.tiles) ++head, tile = block.first_tile;
    }
  }
};

}  // namespace tessera
