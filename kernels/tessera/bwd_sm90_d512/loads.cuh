// The producer of bwd_sm90_d512: threads of different warps load K or V once, and in each step Q and dO; one thread
// sends dS.
#pragma once

#include "tessera/bwd_sm90_d512/shared.cuh"

namespace tessera {

template <class Shared, BwdSm90D512Config kCfg>
struct BwdD512Producer {
  static constexpr bool kValues = Shared::kRole == kD512Values;
  using Keys = typename Shared::Keys;
  using KeyPart = typename Shared::KeyPart;
  using Slot = typename Shared::Slot;

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;

  // Loads `chunks` chunks of columns of a side's keys, from column `col` on.
  TESSERA_DEVICE void load_keys(uint32 to, const TensorMap* map, uint32 full, int side, int col, int chunks) const {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      ptx::cp_async_bulk_tensor_4d(to + chunk * Keys::kChunkBytes, map, full, col + chunk * kChunkCols,
                                   block.s.k_begin + block.key0 + side * kCfg.score_keys, block.head_kv,
                                   p.keys.begins ? 0 : block.batch);
    }
  }

  // load_side() loads K or V of the side's keys; load_key_parts() loads the columns of K for dQ.
  TESSERA_DEVICE void load_side() const {
    const uint32 full = shared.barrier(Shared::kKeysFull);
    ptx::mbarrier_arrive_expect_tx(full, Keys::kBytes);
    load_keys(shared.base + Shared::kAt.keys, kValues ? &p.k_map : &p.v_map, full, D512Place::side(), 0, Keys::kChunks);
  }
  TESSERA_DEVICE void load_key_parts() const {
    const uint32 full = shared.barrier(Shared::kKPartsFull), to = shared.base + Shared::kAt.k_parts;
    const int col = static_cast<int>(D512Place::rank()) * kCfg.slot_dim;
    ptx::mbarrier_arrive_expect_tx(full, (kValues ? 1 : 2) * KeyPart::kBytes);
    load_keys(to, &p.k_map, full, kValues ? D512Place::side() ^ 1 : 0, col, KeyPart::kChunks);
    if constexpr (!kValues) load_keys(to + KeyPart::kBytes, &p.k_map, full, 1, col, KeyPart::kChunks);
  }

  // Loads in each step all columns of the operand by which the keys are multiplied: Q or dO. Both sides of the cluster
  // need the same tile, so each loads every second chunk to both (multicast).
  TESSERA_DEVICE void load_factors() const {
    const int side = D512Place::side();
    const auto pair = static_cast<unsigned short>(kValues ? 0x3 : 0xc);
    const TensorMap* map = kValues ? &p.q_map : &p.d_o_map;
    int head = block.head_kv * p.group, tile = block.first_tile;
#pragma unroll 1
    for (int step = 0; step < block.steps; ++step) {
#pragma unroll 1
      for (int slot = 0; slot < Shared::kFactorSlots; ++slot) {
        shared.wait_step(Shared::kFactorEmpty + slot, step, 1);
        const uint32 full = shared.barrier(Shared::kFactorFull + slot);
        const bool last = slot == Shared::kFactorSlots - 1;  // LSE or delta is loaded with it
        ptx::mbarrier_arrive_expect_tx(full, Slot::kBytes + (last ? Shared::kStatBytes : 0));
        ptx::cp_async_bulk_tensor_4d_multicast(
            shared.base + Shared::kAt.factors + slot * Slot::kBytes + side * Slot::kChunkBytes, map, full,
            slot * kCfg.slot_dim + side * kChunkCols, block.s.q_begin + tile * kCfg.block_m, head,
            p.cu_seqlens_q ? 0 : block.batch, pair);
        if (last) {
          // They come from the previous kernel: everything else is loaded before the wait for it.
          if (step == 0) ptx::griddepcontrol_wait();
          const int64 first = static_cast<int64>(head * p.q_slots + block.slot0 + tile) * kCfg.block_m;
          ptx::cp_async_bulk_load(shared.stats(step), (kValues ? p.row_lse_log2 : p.row_delta) + first,
                                  Shared::kStatBytes, full);
        }
      }
      if (++tile == block.first_tile + block.tiles) ++head, tile = block.first_tile;
    }
#pragma unroll 1
    for (int slot = 0; slot < Shared::kFactorSlots; ++slot)
      shared.wait_step(Shared::kFactorEmpty + slot, block.steps, 1);
  }

  // Loads in each step the block's columns of the operand from which dV or dK accumulates: dO or Q.
  TESSERA_DEVICE void load_accumulated() const {
    const int side = D512Place::side();
    const TensorMap* map = kValues ? &p.d_o_map : &p.q_map;
    int head = block.head_kv * p.group, tile = block.first_tile;
#pragma unroll 1
    for (int step = 0; step < block.steps; ++step) {
#pragma unroll 1
      for (int slot = 0; slot < Shared::kAccumulatedSlots; ++slot) {
        shared.wait_step(Shared::kAccumulatedEmpty + slot, step, 1);
        const uint32 full = shared.barrier(Shared::kAccumulatedFull + slot);
        const uint32 to = shared.base + Shared::kAt.accumulated + slot * Slot::kBytes;
        ptx::mbarrier_arrive_expect_tx(full, Slot::kBytes);
#pragma unroll
        for (int chunk = 0; chunk < Slot::kChunks; ++chunk) {
          ptx::cp_async_bulk_tensor_4d(to + chunk * Slot::kChunkBytes, map, full,
                                       side * kCfg.accumulated_dim + slot * kCfg.slot_dim + chunk * kChunkCols,
                                       block.s.q_begin + tile * kCfg.block_m, head, p.cu_seqlens_q ? 0 : block.batch);
        }
      }
      if (++tile == block.first_tile + block.tiles) ++head, tile = block.first_tile;
    }
  }

  // kD512Keys: sends this side's dS to the other blocks, once its 4 warps have written it. The stages there are free,
  // because P was sent only when they were.
  TESSERA_DEVICE void send_gradients() const {
#pragma unroll 1
    for (int step = 0; step < block.steps; ++step) {
      shared.wait_stage(Shared::kDSWritten, step);
      const uint32 from = shared.exchange(step) + D512Place::side() * Shared::kSideBytes;
#pragma unroll 1
      for (uint32 n = 1; n < kBwdD512ClusterBlocks; ++n) {
        const uint32 to = D512Place::rank() ^ n;
        ptx::cp_async_bulk_shared_cluster(ptx::mapa(from, to), from, Shared::kSideBytes,
                                          ptx::mapa(shared.at_stage(Shared::kDSFull, step), to));
      }
    }
  }
};

}  // namespace tessera
