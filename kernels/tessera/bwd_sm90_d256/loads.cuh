// The producer of bwd_sm90_d256: one thread that loads a block's keys once, and in each step the halves of Q and dO in
// the order in which the block uses them: Q, dO in block 0; dO, Q in block 1. In block 1 a thread of another warp sends
// dS to block 0.
#pragma once

#include "tessera/bwd_sm90_d256/shared.cuh"

namespace tessera {

template <class Shared, BwdSm90D256Config kCfg>
struct BwdSm90D256Producer {
  static constexpr int kRank = Shared::kRank;
  using Keys = typename Shared::Keys;
  using Half = typename Shared::Half;
  using ValueHalf = typename Shared::ValueHalf;
  using HalfAt = typename Shared::HalfAt;

  const BwdSm90Params& p;
  const Shared& shared;
  KeyBlock& block;

  // Loads `chunks` chunks of columns of the keys, from column `col` on.
  TESSERA_DEVICE void load_keys(int offset, const TensorMap* map, int barrier, int col, int chunks) const {
    const uint32 full = shared.barrier(barrier);
    ptx::mbarrier_arrive_expect_tx(full, chunks * Keys::kChunkBytes);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      ptx::cp_async_bulk_tensor_4d(shared.base + offset + chunk * Keys::kChunkBytes, map, full,
                                   col + chunk * kChunkCols, block.s.k_begin + block.key0, block.head_kv,
                                   p.keys.begins ? 0 : block.batch);
    }
  }
  TESSERA_DEVICE void load_stats(uint32 full, int slot, int stage) const {
    const int64 first = static_cast<int64>(slot) * kCfg.block_m;
    ptx::cp_async_bulk_load(shared.stats(stage), (kRank == 0 ? p.row_lse_log2 : p.row_delta) + first,
                            Shared::kStatBytes, full);
    if constexpr (kCfg.stat_rows(kRank) > 1) {
      ptx::cp_async_bulk_load(shared.stats(stage) + Shared::kStatBytes, p.row_lse_log2 + first, Shared::kStatBytes,
                              full);
    }
  }

  TESSERA_DEVICE void run() {
    if (block.steps == 0) return;
    HalfAt at;
    const int start = start_tile<kCfg>(p, block);
    int head = block.head_kv * p.group, tile = start, stage = 0, hidden = 0;
    load_keys(Shared::kAt.keys, kRank == 0 ? &p.k_map : &p.v_map, Shared::kKeysFull, 0, Keys::kChunks);
    uint32 first_full = 0;
#pragma unroll 1
    for (int left = block.steps; left > 0; --left) {
      if constexpr (kCfg.block_mask) {
        head = block.load_head, tile = list_block<kCfg.program_lists()>(block.load_entry);
        hidden = block.load_entry & (kCfg.program_lists() ? (1 << kProgramEntryBits) - 1 : kListHidden);
      }
      const int slot = head * p.q_slots + block.slot0 + tile;
#pragma unroll 1
      for (int n = 0; n < 4; ++n) {
        ptx::mbarrier_wait_parity(shared.barrier(Shared::kHalfEmpty) + at.offset, at.parity ^ 1);
        const uint32 full = shared.barrier(Shared::kHalfFull) + at.offset, to = shared.half(at);
        if (kCfg.has_steps() && n == 0) ptx::st_shared_s32x2(shared.step(left), slot, tile * kCfg.block_m | hidden);
        const bool of_q = (n < 2) == (kRank == 0);
        const int bytes = of_q ? Half::kBytes : ValueHalf::kBytes,
                  col = n % 2 * (of_q ? Half::kCols : ValueHalf::kCols);
        ptx::mbarrier_arrive_expect_tx(full, bytes + (n == 0 ? Shared::kStepStatBytes : 0));
        const TensorMap* map = of_q ? &p.q_map : &p.d_o_map;
#pragma unroll
        for (int chunk = 0; chunk < Half::kChunks; ++chunk) {
          if (chunk >= ValueHalf::kChunks && !of_q) break;
          ptx::cp_async_bulk_tensor_4d(to + chunk * Half::kChunkBytes, map, full, col + chunk * kChunkCols,
                                       block.s.q_begin + tile * kCfg.block_m, head, p.cu_seqlens_q ? 0 : block.batch);
        }
        if (n == 0) {
          if (left == block.steps) {
            // LSE and delta come from the previous kernel: everything else is loaded before the wait for it.
            first_full = full;
          } else {
            load_stats(full, slot, stage);
          }
        }
        at.advance();
      }
      if (left == block.steps) {
        if constexpr (kRank == 1) {
          load_keys(Shared::kAt.k_half, &p.k_map, Shared::kKHalfFull, Half::kCols, Half::kChunks);
        }
        ptx::griddepcontrol_wait();
        load_stats(first_full, slot, 0);
      }
      if (++stage == kBwdD256StatStages) stage = 0;
      if constexpr (kCfg.block_mask) {
        ++block.load_tile;
        if (left > 1) find_entry<kCfg.block_n, kCfg.program_lists()>(p, block);
        continue;
      }
      tile = next_tile(block, tile);
      if (tile == start) ++head;
    }
  }

  // Block 1: sends dS once its 8 warps have written it. The stage in block 0 is free, because block 0 sent P only when
  // it was.
  TESSERA_DEVICE void send_gradients() const {
    typename Shared::ExchangeAt at;
#pragma unroll 1
    for (int left = block.steps; left > 0; --left) {
      ptx::mbarrier_wait_parity(shared.at_stage(Shared::kDSFull, at), at.parity);
      const uint32 from = shared.exchange(at);
      ptx::cp_async_bulk_shared_cluster(ptx::mapa(from, 0), from, Shared::Exchange::kBytes,
                                        shared.other_barrier(Shared::kDSFull) + at.offset);
      at.advance();
    }
  }
};

}  // namespace tessera
