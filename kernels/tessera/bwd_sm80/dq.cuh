// Adds dS K of a step to dQ, in float32 in global memory (attention/backward/rows.cuh), to which the blocks of all keys
// add.
#pragma once

#include "tessera/bwd_sm80/key_block.cuh"
#include "tessera/ptx/async_copy.cuh"
#include "tessera/tile/product.cuh"

namespace tessera {

// Adds a warp's part of the sum: kQM x kQN fragments of 16 x 8 of the tile.
template <BwdConfig kCfg, bool kBulk = kCfg.bulk_dq>
struct DqAccumulator;

// By atomic additions from registers.
template <BwdConfig kCfg>
struct DqAccumulator<kCfg, false> {
  using Warps = BwdWarps<kCfg>;
  template <int kM, int kN>
  TESSERA_DEVICE static void add(const KeyBlock<kCfg>&, float* gdQ, const float (&rdQ)[kM][kN][4], int, int, int group,
                                 int columns) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (beyond<kCfg.head_dim, Warps::kQParts, kN>(columns * (kN * 8), n)) break;
        float* part_dq = dq_part<kCfg.head_dim>(gdQ, group * kM + m, columns * kN + n);
        dq_add(part_dq, lane_id(), rdQ[m][n]);
      }
  }
};

// By bulk copies (TMA) from shared memory: the source is the warp's part of the tile of Q or dO that its role has
// finished reading. If no other block adds to the tile of dQ, it is stored instead and need not be cleared before.
template <BwdConfig kCfg>
struct DqAccumulator<kCfg, true> {
  using Warps = BwdWarps<kCfg>;
  template <int kM, int kN>
  TESSERA_DEVICE static void add(const KeyBlock<kCfg>& b, float* gdQ, const float (&rdQ)[kM][kN][4], int stage,
                                 int row0, int group, int columns) {
    const bool alone = one_block_adds<kCfg.block_m, kCfg.block_n>(b.p, b.s, row0);
    constexpr int kPartElems = 16 * 8, kRunElems = kN * kPartElems;
    const bool is_dp = b.warp >= Warps::kRoleWarps;
    float* staged = reinterpret_cast<float*>(is_dp ? b.shared.sQ[stage].data : b.shared.sdO[stage].data) +
                    b.warp % Warps::kRoleWarps * (kM * kRunElems);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        *reinterpret_cast<float4*>(staged + m * kRunElems + n * kPartElems + lane_id() * 4) =
            make_float4(rdQ[m][n][0], rdQ[m][n][1], rdQ[m][n][2], rdQ[m][n][3]);
      }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_id() == 0) {
      float* to = dq_part<kCfg.head_dim>(gdQ, group * kM, columns * kN);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float* run = dq_part<kCfg.head_dim>(to, m, 0);
        const uint32 from = shared_address(staged + m * kRunElems);
        if (alone) {
          ptx::cp_async_bulk_store(run, from, kRunElems * 4);
        } else {
          ptx::cp_reduce_async_bulk_add_f32(run, from, kRunElems * 4);
        }
      }
      ptx::cp_async_bulk_commit_group();
    }
  }
};

// The order of the additions: any order or, deterministic, one block after another in the order of their keys, kept by
// a semaphore of the tile that counts the blocks that have added.
template <bool kDeterministic>
struct DqSemaphore {
  TESSERA_DEVICE static void wait(int*, int) {}
  TESSERA_DEVICE static void release(int*) {}
};
template <>
struct DqSemaphore<true> {
  // Waits until `before` blocks have added.
  TESSERA_DEVICE static void wait(int* semaphore, int before) {
    if (threadIdx.x == 0) {
      while (ptx::ld_acquire_s32(semaphore) < before) {
      }
    }
    __syncthreads();
  }
  TESSERA_DEVICE static void release(int* semaphore) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::red_release_add_s32(semaphore, 1);
  }
};

// A warp's part of the product dS K: kQM x kQN fragments of 16 rows and 8 columns.
template <BwdConfig kCfg>
struct DqPart {
  using Warps = BwdWarps<kCfg>;
  static constexpr int kM = Warps::kQM, kN = Warps::kQN;
  int group, columns;  // which group of rows, and which group of columns
  TESSERA_DEVICE explicit DqPart(int warp) : group(warp % Warps::kQueryGroups), columns(warp / Warps::kQueryGroups) {}
  TESSERA_DEVICE void multiply(float (&rdQ)[kM][kN][4], BwdSharedMemory<kCfg>& shared) const {
    clear(rdQ);
    product_atb<Warps::kQParts>(rdQ, shared.sScores[0], group * (kM * 16), shared.sK, columns * (kN * 8));
  }
};

// Adds rdQ, a warp's part of a step's product, to dQ of the query tile that begins at row row0 of the sequence.
template <BwdConfig kCfg>
TESSERA_DEVICE void add_dq(const BwdParams& p, const KeyBlock<kCfg>& b, const typename QuerySteps<kCfg>::Step& step,
                           int stage, int row0, const DqPart<kCfg>& part_of_warp,
                           const float (&rdQ)[DqPart<kCfg>::kM][DqPart<kCfg>::kN][4]) {
  using Semaphore = DqSemaphore<kCfg.deterministic>;
  const int slot = step.head * p.q_slots + b.slot0 + step.tile;
  if constexpr (kCfg.deterministic) {
    Semaphore::wait(p.dq_semaphore + slot, QuerySteps<kCfg>::adders_before(b, step));
  }
  float* gdQ = p.dq_accum + static_cast<int64>(slot) * (kCfg.block_m * kCfg.head_dim);
  DqAccumulator<kCfg>::add(b, gdQ, rdQ, stage, row0, part_of_warp.group, part_of_warp.columns);
  if constexpr (kCfg.deterministic) Semaphore::release(p.dq_semaphore + slot);
}

}  // namespace tessera
