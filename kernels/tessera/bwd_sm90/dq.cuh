// bwd_sm90's warpgroup of dQ: of each step dQ += dS K, added in float32 to global memory, where other blocks add theirs. A tile
// of dQ is made in parts of 64 x 64, for the registers are the score warpgroups'.
#pragma once

#include "tessera/bwd_sm90/shared.cuh"

namespace tessera {

// A part of 64 x 64 of dQ: dS, 64 queries, times 64 columns of K. From 0 unless it `adds`.
template <Dtype kDtype, class Gradients, class Keys, int kN>
TESSERA_DEVICE void issue_dq_part(float (&rdQ)[1][kN][4], const TileDescriptor& d_s, const TileDescriptor& k,
                                  bool adds) {
  if (!adds) ptx::wgmma_forget(flat(rdQ));
  ptx::wgmma_fence();
#pragma unroll
  for (int key = 0; key < Gradients::kCols; key += 16) {
    ptx::Wgmma<kDtype, kN * 8, true>::ss(flat(rdQ), inner_major<Gradients>(d_s, 0, key), outer_major<Keys>(k, key),
                                         adds || key > 0);
  }
  ptx::wgmma_commit_group();
}

template <BwdSm90Config kCfg>
struct DqWarpgroup {
  using Shared = BwdSm90Shared<kCfg>;
  using Keys = typename Shared::Keys;
  using Gradients = typename Shared::Gradients;
  static constexpr int kPartCols = 64, kPartsARow = kCfg.head_dim / kPartCols, kParts = kCfg.block_m / 64 * kPartsARow;
  static constexpr int kPartBytes = 16 * kPartCols * 4;  // of a warp's 16 queries

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  float rdQ[1][kPartCols / 8][4];

  TESSERA_DEVICE static int warp() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)); }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  TESSERA_DEVICE void run() {
    const int steps = uniform(block.steps);
    [[maybe_unused]] int added_slot = -1;  // fused_dq: of the step before, if others wait for its addition
    if (steps > 0) {
      ptx::mbarrier_wait_parity(shared.k_full(), 0);
      ptx::griddepcontrol_wait();  // what dQ is added to was cleared by the kernel before this one
      RingPosition<kCfg.ds_stages> at;
      // Counted here: what stands beside a tile of Q is gone when the score warpgroups have used it, which may be before this.
      const bool down = kCfg.fused_dq && uniform(static_cast<int>(block.last_tile_first)) != 0;
      int tile = down ? block.first_tile + block.tiles - 1 : block.first_tile;
      int slot = block.head_kv * p.group * p.q_slots + block.slot0 + tile;
      for (int left = steps; left > 0; --left) {
        float* gdQ = p.dq_accum + static_cast<int64>(slot) * (kCfg.block_m * kCfg.head_dim);
        bool first = false, last = false;
        if constexpr (kCfg.fused_dq) {  // under the products of dS
          const DqTurn turn = fused_turn<kCfg>(p, block, tile);
          first = turn.turn == 0, last = turn.turn == turn.count - 1;
          wait_for(slot, 4 * (last ? turn.turn : min(turn.turn, 1)));
          begin(gdQ, 0, last && !first);
          if (added_slot >= 0) signal(added_slot);
          added_slot = last ? -1 : slot;
        }
        shared.wait_full(Shared::kDS, at);
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
          if (kCfg.fused_dq && part > 0) begin(gdQ, part, last && !first);
          issue(at, part);
          ptx::wgmma_wait_group<0>();
          ptx::wgmma_pin(flat(rdQ));
          if (part == kParts - 1) Shared::arrive_warp(shared.empty(Shared::kDS, at));
          if (kCfg.deterministic && part == 0) wait_for_turn(slot, tile * kCfg.block_m);
          if (kCfg.fused_dq && last) {
            finish(part, slot, tile);
          } else {
            add(gdQ, part, first);
          }
        }
        if constexpr (kCfg.deterministic) pass_turn(slot);
        at.advance();
        if (down) {
          --slot;
          if (--tile < block.first_tile) tile += block.tiles, slot += p.q_slots + block.tiles;
        } else {
          ++slot;
          if (++tile == block.first_tile + block.tiles) tile = block.first_tile, slot += p.q_slots - block.tiles;
        }
      }
    }
    ptx::barrier_arrive(kKeysDone, 384);
    if (kCfg.fused_dq && added_slot >= 0) signal(added_slot);
    if constexpr (kCfg.staged_dq) ptx::cp_async_bulk_wait_group_read();
  }

  // Blocks add to the tile of queries from row0 on in the order in which they started.
  TESSERA_DEVICE void wait_for_turn(int slot, int row0) const {
    if (lane() == 0) {
      const int turn = turn_of<kCfg>(p, block, row0);
      while (ptx::ld_acquire_s32(p.dq_semaphore + slot) < turn) {
      }
    }
    __syncwarp();
  }
  TESSERA_DEVICE void pass_turn(int slot) const {
    if (kCfg.staged_dq && lane() == 0) ptx::cp_async_bulk_wait_group();
    __threadfence();
    ptx::barrier_sync(kDqAdded, 128);
    if (threadIdx.x % 128 == 0) ptx::red_release_add_s32(p.dq_semaphore + slot, 1);
  }

  // Each warp adds to the same part of a tile in every block, and counts for itself.
  TESSERA_DEVICE void wait_for(int slot, int count) const {
    if (lane() == 0 && count > 0) {
      while (ptx::ld_acquire_s32(p.dq_semaphore + slot) < count) {
      }
      ptx::fence_proxy_async_global();
    }
    __syncwarp();
  }
  TESSERA_DEVICE void signal(int slot) const {
    if (lane() != 0) return;
    ptx::cp_async_bulk_wait_group();
    ptx::red_release_add_s32(p.dq_semaphore + slot, 1);
  }

  // What the others have added to a part of a tile, for the last block's product to be added to; else 0.
  TESSERA_DEVICE void begin(const float* gdQ, int part, bool sums) {
    if (sums) {
      const float* from = dq_part<kCfg.head_dim>(const_cast<float*>(gdQ), part / kPartsARow * 4 + warp(),
                                                 part % kPartsARow * (kPartCols / 8));
#pragma unroll
      for (int n = 0; n < kPartCols / 8; ++n) {
        const float4 sum = __ldcg(reinterpret_cast<const float4*>(from + n * 128) + lane());
        float(&x)[4] = rdQ[0][n];
        x[0] = sum.x, x[1] = sum.y, x[2] = sum.z, x[3] = sum.w;
      }
    } else {
      clear(rdQ);
    }
  }

  // The last block to add to a tile: dQ in its type.
  TESSERA_DEVICE void finish(int part, int slot, int tile) {
    using Rows = SwizzledTile<16, kPartCols>;
    const int row = part / kPartsARow * 64 + warp() * 16;
    const uint32 staged = shared.base + Shared::kAt.dq + (part * 4 + warp()) * kPartBytes;
    if (part == 0) {
      if (lane() == 0) ptx::cp_async_bulk_wait_group_read();
      __syncwarp();
    }
    const float* lse = p.row_lse_log2 + static_cast<int64>(slot) * kCfg.block_m + row + lane() / 4;
    const float scale = p.scale * bwd_lower_late(kCfg.dtype);
    const bool seen[2] = {lse[0] != infinity(), lse[8] != infinity()};
#pragma unroll
    for (int n = 0; n < kPartCols / 8; n += 2) {
      uint32 words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float(&x)[4] = rdQ[0][n + t / 2];
        const uint32 pair = pack_pair<kCfg.dtype>(x[t % 2 * 2] * scale, x[t % 2 * 2 + 1] * scale);
        words[t] = seen[t % 2] ? pair : 0;
      }
      ptx::stmatrix_x4(Rows::at(staged, lane() % 16, n * 8 + lane() / 16 * 8), words);
    }
    __syncwarp();
    const int rows = block.s.sq - tile * kCfg.block_m - row, col = part % kPartsARow * kPartCols + lane() % 8 * 8;
    if (col >= p.head_dim) return;
    unsigned short* to =
        static_cast<unsigned short*>(p.d_q.data) + p.d_q.batch * block.batch + p.d_q.head * (slot / p.q_slots) +
        p.d_q.row * (static_cast<int64>(block.s.q_begin) + tile * kCfg.block_m + row + lane() / 8) + col;
#pragma unroll 1
    for (int r = lane() / 8; r < min(rows, 16); r += 4, to += p.d_q.row * 4) {
      *reinterpret_cast<uint4*>(to) = ptx::ld_shared_16(Rows::at(staged, r, lane() % 8 * 8));
    }
  }

  TESSERA_DEVICE void issue(const RingPosition<kCfg.ds_stages>& at, int part) {
    TileDescriptor d_s = shared.tile_descriptor(Shared::kAt.d_s, Gradients::kBytes, at), k = shared.keys(Shared::kAt.k);
    d_s.address += part / kPartsARow * (64 * kChunkRowBytes / 16);
    k.address += part % kPartsARow * (Keys::kChunkBytes / 16);
    issue_dq_part<kCfg.dtype, Gradients, Keys>(rdQ, d_s, k, kCfg.fused_dq);
  }

  // A warp's 16 x 64 stand together, in the order of the accumulators: bwd_sm80/query_slots.cuh.
  TESSERA_DEVICE void add(float* gdQ, int part, bool stores = false) {
    float* to = dq_part<kCfg.head_dim>(gdQ, part / kPartsARow * 4 + warp(), part % kPartsARow * (kPartCols / 8));
    if constexpr (kCfg.staged_dq) {
      const uint32 staged = shared.base + Shared::kAt.dq + (part * 4 + warp()) * kPartBytes;
      if (part == 0) {
        if (lane() == 0) ptx::cp_async_bulk_wait_group_read();
        __syncwarp();
      }
#pragma unroll
      for (int n = 0; n < kPartCols / 8; ++n) {
        const float(&x)[4] = rdQ[0][n];
        ptx::st_shared_f32x4(staged + n * 512 + lane() * 16, x[0], x[1], x[2], x[3]);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane() == 0) {
        if (kCfg.fused_dq && stores) {
          ptx::cp_async_bulk_store(to, staged, kPartBytes);
        } else {
          ptx::cp_reduce_async_bulk_add_f32(to, staged, kPartBytes);
        }
        ptx::cp_async_bulk_commit_group();
      }
    } else {
#pragma unroll
      for (int n = 0; n < kPartCols / 8; ++n) dq_add(to + n * 128, lane(), rdQ[0][n]);
    }
  }
};

}  // namespace tessera
