// The producer of bwd_sm90: one thread that loads K and V once, and in each step Q, dO and their rows of LSE and delta.
#pragma once

#include "tessera/bwd_sm90/shared.cuh"

namespace tessera {

template <class Tile>
TESSERA_DEVICE void copy_tile(uint32 to, const TensorMap* map, uint32 barrier, int row, int head, int batch) {
#pragma unroll
  for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
    ptx::cp_async_bulk_tensor_4d(to + chunk * Tile::kChunkBytes, map, barrier, chunk * kChunkCols, row, head, batch);
  }
}

// The index of a block's KV head in K and V.
template <BwdSm90Config kCfg>
TESSERA_DEVICE int stored_kv_head(const BwdSm90Params& p, const KeyBlock& b) {
  return kCfg.split_group ? b.head_kv / p.group_splits : b.head_kv;
}

template <BwdSm90Config kCfg>
struct BwdSm90Producer {
  using Shared = BwdSm90Shared<kCfg>;

  const BwdSm90Params& p;
  const Shared& shared;
  KeyBlock& block;

  template <class Keys>
  TESSERA_DEVICE void load_keys(int offset, const TensorMap* map, uint32 full) const {
    ptx::mbarrier_arrive_expect_tx(full, Keys::kBytes);
    copy_tile<Keys>(shared.base + offset, map, full, block.s.k_begin + block.key0, stored_kv_head<kCfg>(p, block),
                    p.keys.begins ? 0 : block.batch);
  }
  template <class Queries>
  TESSERA_DEVICE void load_queries(const RingPosition<kCfg.stages>& at, int ring, int offset, const TensorMap* map,
                                   int extra_bytes) const {
    shared.wait_empty(ring, at);
    const uint32 full = shared.full(ring, at);
    ptx::mbarrier_arrive_expect_tx(full, Queries::kBytes + extra_bytes);
    copy_tile<Queries>(shared.tile(offset, Queries::kBytes, at), map, full, block.s.q_begin + load_row0(),
                       block.load_head, p.cu_seqlens_q ? 0 : block.batch);
  }
  TESSERA_DEVICE void load_stats(const RingPosition<kCfg.stages>& at, int slot) const {
    const int64 first = static_cast<int64>(slot) * kCfg.block_m;
    const uint32 to = shared.tile(Shared::kAt.stats, 2 * Shared::kStatBytes, at), full = shared.full(Shared::kQ, at);
    ptx::cp_async_bulk_load(to, p.row_lse_log2 + first, Shared::kStatBytes, full);
    ptx::cp_async_bulk_load(to + Shared::kStatBytes, p.row_delta + first, Shared::kStatBytes, full);
  }

  TESSERA_DEVICE int load_row0() const {
    return (kCfg.block_mask ? list_block<kCfg.program_lists()>(block.load_entry) : block.load_tile) * kCfg.block_m;
  }

  TESSERA_DEVICE int load_adders_before() const {
    if constexpr (!kCfg.deterministic) return 0;
    const int list = list_of<kCfg.block_n, kCfg.program_lists()>(p, block, block.load_head);
    return listed_adders_before<kCfg>(p, block, list, load_row0());
  }

  // Loads the tiles of the next step; `left` counts the remaining steps, with this one. The first step loads K and V
  // too, in the order in which they are used.
  template <bool kFirst = false>
  TESSERA_DEVICE void load_step(int left) {
    RingPosition<kCfg.stages> at;
    at.offset = block.load_offset, at.parity = block.load_parity;
    const int slot = block.load_head * p.q_slots + block.slot0 + load_row0() / kCfg.block_m;
    if constexpr (kFirst) load_keys<typename Shared::Keys>(Shared::kAt.k, &p.k_map, shared.k_full());
    shared.wait_empty(Shared::kQ, at);
    constexpr int kEntryBits = kCfg.program_lists() ? (1 << kProgramEntryBits) - 1 : kListHidden;
    const int hidden = kCfg.block_mask ? block.load_entry & kEntryBits : 0;
    ptx::st_shared_s32x2(shared.step(at), slot, load_row0() | hidden);
    if constexpr (kCfg.block_mask) ptx::st_shared_s32x2(shared.dq_slot(left), slot, load_adders_before());
    load_queries<typename Shared::Queries>(at, Shared::kQ, Shared::kAt.q, &p.q_map, 2 * Shared::kStatBytes);
    if constexpr (kFirst) load_keys<typename Shared::Values>(Shared::kAt.v, &p.v_map, shared.v_full());
    if constexpr (!kFirst) load_stats(at, slot);
    load_queries<typename Shared::OutputGradients>(at, Shared::kDO, Shared::kAt.d_o, &p.d_o_map, 0);
    if constexpr (kFirst) {
      ptx::griddepcontrol_wait();  // the previous kernel computes LSE and delta
      load_stats(at, slot);
    }
    at.advance();
    block.load_offset = at.offset, block.load_parity = at.parity;
    if constexpr (kCfg.block_mask) {
      ++block.load_tile;
      return;
    }
    if constexpr (kCfg.deterministic) {
      block.load_tile = next_tile(block, block.load_tile);
      if (block.load_tile == start_tile<kCfg>(p, block)) ++block.load_head;
      return;
    }
    if (++block.load_tile == block.first_tile + block.tiles) ++block.load_head, block.load_tile = block.first_tile;
  }

  TESSERA_DEVICE void run() {
    if (block.steps == 0) return;
    load_step<true>(block.steps);
    for (int left = block.steps - 1; left > 0; --left) {
      if constexpr (kCfg.block_mask) find_entry<kCfg.block_n, kCfg.program_lists()>(p, block);
      load_step(left);
    }
  }
};

}  // namespace tessera
