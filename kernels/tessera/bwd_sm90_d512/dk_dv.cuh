// The accumulation of dV or dK in bwd_sm90_d512. Each of a block's two warpgroups accumulates them for 64 keys in
// registers, the block's columns in two halves.
#pragma once

#include "tessera/attention/backward/tiles.cuh"
#include "tessera/bwd_sm90_d512/shared.cuh"

namespace tessera {

inline constexpr int kD512ScoresDone = 1;  // a named barrier; __syncthreads uses 0

template <class Shared, BwdSm90D512Config kCfg>
struct BwdD512Accumulator {
  static constexpr bool kValues = Shared::kRole == kD512Values;
  static constexpr int kSteps = kCfg.block_m / 16, kN = kCfg.slot_dim / 8;
  using Slot = typename Shared::Slot;
  using Result = typename Shared::Result;
  using Product = ptx::Wgmma<kCfg.dtype, kCfg.slot_dim, true>;  // N = 256 with A from registers does not assemble

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  float rdX[Shared::kAccumulatedSlots][1][kN][4];  // dV or dK
  uint32 rA[kSteps][4];                            // A fragments of P^T or dS^T

  TESSERA_DEVICE BwdD512Accumulator(const BwdSm90Params& p, const Shared& shared, const KeyBlock& block)
      : p(p), shared(shared), block(block) {
#pragma unroll
    for (auto& half : rdX) clear(half);
  }

  TESSERA_DEVICE static int warp() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)); }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  // accumulate() issues dV += P^T dO or dK += dS^T Q of a step; accumulated() completes it and releases the buffers.
  TESSERA_DEVICE void accumulate(uint32 step) {
#pragma unroll
    for (int slot = 0; slot < Shared::kAccumulatedSlots; ++slot) {
      shared.wait_step(Shared::kAccumulatedFull + slot, step);
      ptx::wgmma_fence();
      const TileDescriptor tile = shared.tile_descriptor(Shared::kAt.accumulated + slot * Slot::kBytes);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        Product::rs(flat(rdX[slot]), rA[k], outer_major<Slot>(tile, k * 16), 1);
      }
    }
    ptx::wgmma_commit_group();
  }
  TESSERA_DEVICE void accumulated() {
#pragma unroll
    for (auto& half : rdX) ptx::wgmma_pin(flat(half));
#pragma unroll
    for (int slot = 0; slot < Shared::kAccumulatedSlots; ++slot) {
      Shared::arrive_warp(shared.barrier(Shared::kAccumulatedEmpty + slot));
    }
  }

  // Stores through the buffers of the factors, once the block's last scores are done. Each warp stores its 16 rows of
  // the keys of `side`; TMA does not write rows after the last key.
  TESSERA_DEVICE void store(int side) {
    const uint32 to = shared.base + Shared::kAt.factors;
    const float factor = kValues ? kBwdLower : p.scale * bwd_lower_late(kCfg.dtype);
    const int row = side * kCfg.score_keys + warp() * 16, col0 = D512Place::side() * kCfg.accumulated_dim;
    if constexpr (kCfg.sums) {
#pragma unroll
      for (int slot = 0; slot < Shared::kAccumulatedSlots; ++slot) {
        write_key_sums<kCfg, kValues>(p, block, row, col0 + slot * kCfg.slot_dim, rdX[slot], factor);
      }
      return;
    }
#pragma unroll
    for (int slot = 0; slot < Shared::kAccumulatedSlots; ++slot) {
      stage_accumulators<kCfg.dtype, Result>(to, row, slot * kCfg.slot_dim, rdX[slot], factor);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane() == 0) {
      const TensorMap* map = kValues ? &p.d_v_map : &p.d_k_map;
#pragma unroll
      for (int col = 0; col < kCfg.accumulated_dim; col += kChunkCols) {
        ptx::cp_async_bulk_tensor_store_4d(map, Result::at(to, row, col), col0 + col,
                                           block.s.k_begin + block.key0 + row, block.head_kv,
                                           p.keys.begins ? 0 : block.batch);
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read();  // before another block uses this shared memory
    }
  }
};

}  // namespace tessera
