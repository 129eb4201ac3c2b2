// The dQ warpgroup of bwd_sm90: in each step it computes dS K and adds it in float32 to dq_accum in global memory, to
// which other blocks add too. A tile of dQ is computed in parts of 64 x 64, because the score warpgroups have most of
// the registers; with head size 96, in one part of 64 x 96.
#pragma once

#include "tessera/bwd_sm90/shared.cuh"

namespace tessera {

// Issues the product of a part of 64 queries of dQ: dS times kN * 8 columns of K.
template <Dtype kDtype, class Gradients, class Keys, int kN>
TESSERA_DEVICE void issue_dq_part(float (&rdQ)[1][kN][4], const TileDescriptor& d_s, const TileDescriptor& k) {
  ptx::wgmma_forget(flat(rdQ));
  ptx::wgmma_fence();
#pragma unroll
  for (int key = 0; key < Gradients::kCols; key += 16) {
    ptx::Wgmma<kDtype, kN * 8, true>::ss(flat(rdQ), inner_major<Gradients>(d_s, 0, key), outer_major<Keys>(k, key),
                                         key > 0);
  }
  ptx::wgmma_commit_group();
}

// Writes a warp's 16 rows of a part of dQ to shared memory, contiguous in the order of the accumulators.
template <int kN>
TESSERA_DEVICE void stage_dq_part(uint32 staged, const float (&rdQ)[1][kN][4], int lane) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float(&x)[4] = rdQ[0][n];
    ptx::st_shared_f32x4(staged + n * 512 + lane * 16, x[0], x[1], x[2], x[3]);
  }
}
// Does the same, then adds them to global memory by a bulk copy of the warp's first lane.
template <int kN>
TESSERA_DEVICE void add_staged_dq_part(float* to, uint32 staged, const float (&rdQ)[1][kN][4], int lane) {
  stage_dq_part(staged, rdQ, lane);
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
    ptx::cp_reduce_async_bulk_add_f32(to, staged, kN * 512);
    ptx::cp_async_bulk_commit_group();
  }
}

template <BwdSm90Config kCfg>
struct DqWarpgroup {
  using Shared = BwdSm90Shared<kCfg>;
  using Keys = typename Shared::Keys;
  using Gradients = typename Shared::Gradients;
  static constexpr int kPartCols = bwd_dq_columns(kCfg.head_dim), kPartsARow = kCfg.head_dim / kPartCols;
  static constexpr int kParts = kCfg.block_m / 64 * kPartsARow;
  static constexpr int kPartBytes = 16 * kPartCols * 4;  // of a warp's 16 queries

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  float rdQ[1][kPartCols / 8][4];

  TESSERA_DEVICE static int warp() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)); }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  TESSERA_DEVICE void run() {
    const int steps = uniform(block.steps);
    if (steps > 0) {
      ptx::mbarrier_wait_parity(shared.k_full(), 0);
      ptx::griddepcontrol_wait();  // the previous kernel clears dq_accum
      RingPosition<kCfg.ds_stages> at;
      RingPosition<kBwdDqStages> staged_at;
      // The tile is counted here: the step beside a stage of Q is overwritten once the score warpgroups have released
      // the stage, which may be before this point.
      int tile = block.first_tile, slot = block.head_kv * p.group * p.q_slots + block.slot0 + tile;
      for (int left = steps; left > 0; --left) {
        shared.wait_full(Shared::kDS, at);
        if constexpr (kCfg.block_mask) slot = ptx::ld_shared_s32(shared.dq_slot(left));
        if constexpr (kCfg.deterministic) shared.wait_empty(Shared::kDQ, staged_at);
        float* gdQ = p.dq_accum + static_cast<int64>(slot) * (kCfg.block_m * kCfg.head_dim);
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
          issue(at, part);
          ptx::wgmma_wait_group<0>();
          ptx::wgmma_pin(flat(rdQ));
          if (part == kParts - 1) Shared::arrive_warp(shared.empty(Shared::kDS, at));
          if constexpr (kCfg.deterministic) {
            stage(part, staged_at);
          } else {
            add(gdQ, part);
          }
        }
        at.advance();
        if constexpr (kCfg.deterministic) {
          ptx::fence_proxy_async();
          Shared::arrive_warp(shared.full(Shared::kDQ, staged_at));
          staged_at.advance();
        }
        if constexpr (kCfg.block_mask || kCfg.deterministic) continue;
        ++slot;
        if (++tile == block.first_tile + block.tiles) tile = block.first_tile, slot += p.q_slots - block.tiles;
      }
    }
    ptx::barrier_arrive(kKeysDone, 384);
    if constexpr (kCfg.staged_dq && !kCfg.deterministic) ptx::cp_async_bulk_wait_group_read();
  }

  TESSERA_DEVICE void issue(const RingPosition<kCfg.ds_stages>& at, int part) {
    TileDescriptor d_s = shared.tile_descriptor(Shared::kAt.d_s, Gradients::kBytes, at), k = shared.keys(Shared::kAt.k);
    d_s.address += part / kPartsARow * (64 * kChunkRowBytes / 16);
    k.address += part % kPartsARow * (Keys::kChunkBytes / 16);
    issue_dq_part<kCfg.dtype, Gradients, Keys>(rdQ, d_s, k);
  }

  // The offset of a part of the warp's 16 queries in a tile of dQ.
  TESSERA_DEVICE static int part_offset(int part) {
    return dq_part_offset<kCfg.head_dim>(part / kPartsARow * 4 + warp(), part % kPartsARow * (kPartCols / 8));
  }

  // Deterministic: stages the part for the thread that adds dQ (dq_thread.cuh), in the layout of global memory.
  TESSERA_DEVICE void stage(int part, const RingPosition<kBwdDqStages>& staged_at) {
    stage_dq_part(shared.tile(Shared::kAt.dq, Shared::kDqBytes, staged_at) + part_offset(part) * 4, rdQ, lane());
  }

  // A warp's 16 rows of a part are contiguous, in the order of the accumulators: attention/query_slots.cuh.
  TESSERA_DEVICE void add(float* gdQ, int part) {
    float* to = gdQ + part_offset(part);
    if constexpr (kCfg.staged_dq) {
      const uint32 staged = shared.base + Shared::kAt.dq + (part * 4 + warp()) * kPartBytes;
      if (part == 0) {
        if (lane() == 0) ptx::cp_async_bulk_wait_group_read();
        __syncwarp();
      }
      add_staged_dq_part(to, staged, rdQ, lane());
    } else {
#pragma unroll
      for (int n = 0; n < kPartCols / 8; ++n) dq_add(to + n * 128, lane(), rdQ[0][n]);
    }
  }
};

}  // namespace tessera
