// The forward pass of fwd_sm80/kernel.cuh for problems without options, in which a warp has two tiles of 16 rows, half
// a block apart. When under a causal mask the upper half of the block sees no more keys, every warp still computes half
// of its products. It has a loop of its own because it runs in two parts: over both of the warp's tiles, then over the
// lower one alone.
//
// Grid: persistent blocks (fwd_sm80/scheduler), under a causal mask as many as the GPU holds, otherwise one for each
// work tile. The first loads of a work tile are issued during the last product of the previous one: K and V into the
// other stage, and Q over the previous Q as soon as the last scores are computed. Block: as in fwd_sm80/kernel.cuh.
// Shared memory: FwdPersistentSharedMemory. Details: docs/reference/kernels/fwd_sm80.md.
#pragma once

#include "tessera/fwd_sm80/epilogue.cuh"
#include "tessera/fwd_sm80/loads.cuh"
#include "tessera/fwd_sm80/scheduler.cuh"
#include "tessera/fwd_sm80/scores.cuh"

namespace tessera {

template <FwdSm80Config kCfg>
struct FwdPersistentSharedMemory {
  struct Stage {
    SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim> sK;
    SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v> sV;
  };
  using Output = SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v>;
  static_assert(sizeof(Output) <= sizeof(Stage), "O goes out through the place of the last tile of K and V");
  static_assert(sizeof(FwdBlock<kCfg>) == kFwdBlockBytes);

  SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ;
  Stage stage[2];
  FwdBlock<kCfg> work[2];  // this work tile and the next
};

// ---- the second of a warp's two tiles of 16 rows, alone ----

template <int kM, int kN>
TESSERA_DEVICE auto last_rows(float (&acc)[kM][kN][4]) -> float (&)[1][kN][4] {
  return *reinterpret_cast<float(*)[1][kN][4]>(&acc[kM - 1]);
}

template <int kM>
TESSERA_DEVICE OnlineSoftmax<1> last_rows(const OnlineSoftmax<kM>& all) {
  OnlineSoftmax<1> last;
  last.ready = all.ready, last.huge_rows = all.huge_rows >> (2 * (kM - 1));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    last.max[0][half] = all.max[kM - 1][half], last.sum[0][half] = all.sum[kM - 1][half];
  }
  return last;
}

template <int kM>
TESSERA_DEVICE void set_last_rows(OnlineSoftmax<kM>& all, const OnlineSoftmax<1>& last) {
  all.huge_rows = (all.huge_rows & ~(3u << (2 * (kM - 1)))) | last.huge_rows << (2 * (kM - 1));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    all.max[kM - 1][half] = last.max[0][half], all.sum[kM - 1][half] = last.sum[0][half];
  }
}

template <FwdSm80Config kCfg>
TESSERA_DEVICE void fwd_sm80_persistent(const FwdSm80Params& p) {
  constexpr int kM = 2;                        // tiles of 16 rows of a warp
  constexpr int kRowStep = kCfg.block_m / kM;  // rows from one tile to the next
  constexpr int kN = kCfg.block_n / 8, kSteps = kN / 2, kD = kCfg.head_dim_v / 8;
  static_assert(kCfg.row_map == RowMap::kSpread && kM * kCfg.warps * 16 == kCfg.block_m);
  static_assert(dtype_bytes(kCfg.dtype) == 2 && kCfg.stages == 2 && !kCfg.score.any());
  using Shared = FwdPersistentSharedMemory<kCfg>;
  static_assert(has_fwd_layout<kCfg, Shared>(), "shared memory lies where the host has it");
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<Shared*>(shared_memory);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;

  const auto load_k = [&](const FwdBlock<kCfg>& b, int tile, int stage) {
    if (tile < b.last) load_keys(shared.stage[stage].sK, p, p.k, b, tile * kCfg.block_n, 0, p.head_dim);
  };
  const auto load_v = [&](const FwdBlock<kCfg>& b, int tile, int stage) {
    if (tile < b.last) load_keys(shared.stage[stage].sV, p, p.v, b, tile * kCfg.block_n, b.dv_begin, b.dv_count);
  };

  // 1. This block's work tiles, and the keys that the first one sees.
  PersistentScheduler<kCfg> scheduler(p);
  scheduler.clear_unowned(p);
  if (!scheduler.more) return;
  int place = 0, stage = 0;
  // 2. Q: global -> shared, with the first tile of K and V.
  {
    const FwdBlock<kCfg> b(p, scheduler.place);
    if (threadIdx.x == 0) shared.work[place] = b;
    load_queries(shared.sQ, p, b);
    load_k(b, b.first, stage);
    ptx::cp_async_commit_group();
    load_v(b, b.first, stage);
    ptx::cp_async_commit_group();
  }
  __syncthreads();

  while (scheduler.more) {
    const FwdBlock<kCfg>& b = shared.work[place];
    place ^= 1;
    const int end = max(b.last, b.first + 1);  // if no row sees any key, one tile is processed, all of it masked

    // 3. For every tile of keys that a row of the block sees.
    float rO[kM][kD][4];
    clear(rO);
    OnlineSoftmax<kM> softmax;
    // Processes one tile of keys for rows from `row` on, with their outputs and softmax: all of the warp's rows, or its
    // last 16.
    const auto take_keys = [&]<int kTiles>(int tile, float(&rO)[kTiles][kD][4], OnlineSoftmax<kTiles>& softmax,
                                           int row) {
      // In a block's only work tile, the wait for V of the first tile comes after the scores.
      const bool v_later = tile == b.first && PersistentScheduler<kCfg>::one_each(p);
      if (v_later) {
        ptx::cp_async_wait_group<1>();
      } else {
        ptx::cp_async_wait_group<0>();
      }
      // The tile is visible to all warps, and all have finished reading the previous tile, or the previous O.
      __syncthreads();
      const bool ends = tile + 1 == end;
      if (!ends) {
        load_k(b, tile + 1, stage ^ 1), load_v(b, tile + 1, stage ^ 1);
      } else {
        scheduler.advance(p);
        if (scheduler.more) {
          const FwdBlock<kCfg> next(p, scheduler.place);
          if (threadIdx.x == 0) shared.work[place] = next;
          load_k(next, next.first, stage ^ 1), load_v(next, next.first, stage ^ 1);
        }
      }
      ptx::cp_async_commit_group();

      //    S = Q K^T; in a partial tile, -inf for keys that a row does not see; online softmax: P replaces S, and O is
      //    rescaled. In a full tile the stale max is tried first: attention/softmax.
      const int key0 = tile * kCfg.block_n;
      // If only the last 16 rows are processed, at the end of a causal mask, the tile is partial.
      const bool full = kTiles == kM && b.visible.all.holds(key0, kCfg.block_n);
      float rS[kTiles][kN][4];
      score_tile<kCfg, kRowStep>(rS, softmax, rO, shared.sQ, shared.stage[stage].sK, p, b, row, key0, full);
      uint32 rP[kTiles][kSteps][4];
      pack_rows<kCfg.dtype>(rP, rS);
      if (v_later) ptx::cp_async_wait_group<1>();
      if (ends || v_later) __syncthreads();  // no warp reads Q any more; V is visible to all
      if (ends) {
        if (scheduler.more) load_queries(shared.sQ, p, shared.work[place]);
        ptx::cp_async_commit_group();
      }

      //    O += P V
      product_pb(rO, rP, shared.stage[stage].sV);
      stage ^= 1;
    };
    // The upper half of the block's rows does not see the tiles from upper_end on: there every warp omits half of its
    // rows.
    const int upper_high = visible_keys<kCfg.score>(p, b.s, b.map.query(b.row0 + min(kRowStep, b.count) - 1)).high;
    const int upper_end = min(max(upper_high / kCfg.block_n + 1, b.first), end);
    int tile = b.first;
    for (; tile < upper_end; ++tile) take_keys(tile, rO, softmax, warp_row);
    OnlineSoftmax<1> lower = last_rows(softmax);
    for (; tile < end; ++tile) take_keys(tile, last_rows(rO), lower, warp_row + kRowStep);
    set_last_rows(softmax, lower);

    // 4. O / l and LSE: registers -> (shared ->) global. A row that sees nothing: 0 and -inf.
    __syncthreads();  // no warp reads the last tile any more, which O overlays
    auto& sO = *reinterpret_cast<typename Shared::Output*>(&shared.stage[stage ^ 1]);
    finish_rows<kRowStep>(sO, p, b, softmax, rO, warp_row);
  }
}

}  // namespace tessera
