// Forward: O = softmax(scale Q K^T + ...) V and LSE, FlashAttention-2's algorithm 1, by mma.sync and cp.async: on every
// GPU from Ampere on, and with every option.
//
// Grid: one block for each tile of block_m query rows, head and split of the keys. Block: `warps` warps, each with
// block_m / warps rows, all of whose scores and outputs are in its registers: warps exchange nothing. Details and
// measurements: docs/reference/kernels/fwd_sm80.md.
//
// The family's five kernels differ in the keys' type and in three policies, and share the code of each. The loader
// loads tiles by cp.async or by TMA (loads.cuh). The row map says which of a tile's rows a warp has (RowMap). The tile
// scheduler gives a thread block one work tile or one after another (scheduler.cuh).
//
//                        loader            row map      tile scheduler   options
//   kernel.cuh           cp.async, pages   contiguous   single           all
//   bulk.cuh             TMA               contiguous   single           none
//   persistent.cuh       cp.async, pages   spread       persistent       none
//   pairs.cuh            either, pages     pairs        persistent       none
//   codes.cuh            cp.async, pages   contiguous   single           all; K and V of 8 bits
//
// What they have in common:
//
//   config.hpp      FwdSm80Config, the launch parameters, the layout of shared memory
//   shared.cuh      a work tile, and a block's shared memory
//   scheduler.cuh   the work tiles of a block
//   loads.cuh       Q, K and V: global -> shared
//   scores.cuh      S -> P: options, mask, online softmax, dropout
//   epilogue.cuh    sums and accumulators -> LSE and O, or the partial results of split keys
//
// Each kernel has a loop of its own, because its policies allow different schedules: with cp.async all warps meet at a
// barrier for each tile, and the loads of one iteration are for a later one; with TMA no warp waits for another; with
// spread rows a warp omits half of its rows in the last tiles; pairs compute P one tile ahead. Even calling score_tile,
// which bulk.cuh and persistent.cuh use, in this loop compiles to different machine code: one register less, and
// another schedule of the whole loop.
#pragma once

#include "tessera/fwd_sm80/epilogue.cuh"
#include "tessera/fwd_sm80/loads.cuh"
#include "tessera/fwd_sm80/scheduler.cuh"
#include "tessera/fwd_sm80/scores.cuh"

namespace tessera {

template <FwdSm80Config kCfg>
TESSERA_DEVICE void fwd_sm80(const FwdSm80Params& p) {
  constexpr int kM = kCfg.block_m / kCfg.warps / 16;  // tiles of 16 rows of a warp
  constexpr int kN = kCfg.block_n / 8, kD = kCfg.head_dim_v / 8;
  static_assert(kM * kCfg.warps * 16 == kCfg.block_m, "a warp has a multiple of 16 rows");
  static_assert(has_fwd_layout<kCfg, FwdSharedMemory<kCfg>>(), "shared memory lies where the host has it");
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdSharedMemory<kCfg>*>(shared_memory);

  // 1. This block's work tile, and the keys that it sees.
  const FwdBlock<kCfg> b(p, single_tile(p));
  if (b.work.tile < 0) {
    clear_unowned_outputs_at<kCfg>(p, single_tile(p), static_cast<int>(gridDim.x) / p.tiles);
    return;
  }
  const int warp_row = uniform(static_cast<int>(threadIdx.x) / 32) * (kM * 16);
  const KeyTiles<kCfg> tiles(p, b);

  // 2. Q: global -> shared, with the first tiles of K and V.
  load_queries(shared.sQ, p, b);
  // Each load is a group of its own; past the last tile groups are empty, so that their count stays the same.
  const auto load_k = [&](int tile, int stage) {
    if (tile < tiles.last) load_keys(shared.sK[stage], p, p.k, b, tiles.tile(tile) * kCfg.block_n, 0, p.head_dim);
    ptx::cp_async_commit_group();
  };
  const auto load_v = [&](int tile, int stage) {
    if (tile < tiles.last) {
      load_keys(shared.sV[stage], p, p.v, b, tiles.tile(tile) * kCfg.block_n, b.dv_begin, b.dv_count);
    }
    ptx::cp_async_commit_group();
  };
  constexpr int kAhead = kCfg.stages - 1;  // tiles that are loaded before they are needed
  if constexpr (kAhead == 0) load_k(tiles.first, 0);

  // 3. For every tile of keys that a row of the warp sees. The kAhead iterations before the first tile only load.
  float rO[kM][kD][4];
  clear(rO);
  OnlineSoftmax<kM> softmax;
  const TileRange mine = b.seen_by(p, warp_row, kM * 16);
  int stage = kAhead == 0 ? 0 : 1;  // kAhead iterations before stage 0
#pragma unroll 1
  for (int tile = tiles.first - kAhead; tile < tiles.last; ++tile) {
    // The first tile waits only for K before its product; the others, loaded long before, wait for V too, which saves a
    // barrier.
    const bool v_later = kCfg.stages == 1 || tile == tiles.first;
    if (tile >= tiles.first) {
      if (v_later) {
        ptx::cp_async_wait_group<kAhead == 0 ? 0 : 2 * kAhead - 1>();
      } else {
        ptx::cp_async_wait_group<kAhead == 0 ? 0 : 2 * kAhead - 2>();
      }
      __syncthreads();  // the tile is visible to all warps, and all have finished reading the previous one
    }
    if constexpr (kAhead > 0) {
      const int free_stage = stage == 0 ? kAhead : stage - 1;
      load_k(tile + kAhead, free_stage), load_v(tile + kAhead, free_stage);
    } else {
      load_v(tile, 0);
    }
    const int stage_here = stage;
    stage = stage + 1 == kCfg.stages ? 0 : stage + 1;
    if (tile < tiles.first) continue;

    //    S = Q K^T; with options the score is changed; in a partial tile, -inf for keys that a row does not see; online
    //    softmax: P replaces S, and O is rescaled. The stale max is tried first if the config allows it:
    //    attention/softmax.
    const int key0 = tiles.tile(tile) * kCfg.block_n;
    if (!v_later && key0 > mine.some.high) continue;  // the warp's rows see none of it: the end of a causal mask
    const bool full = mine.all.holds(key0, kCfg.block_n);
    float rS[kM][kN][4];
    bool stale_max = keeps_stale_max<kCfg.score>() && softmax.ready;
    FwdScoreStep<kCfg, kM, kN> scores;
    const FwdCoordinates<kCfg, kM, kN> at{p, b, b.row0 + warp_row, key0};
    const bool loaded = scores.kLoads && full && p.bias_mask_keys > 1;
    if (loaded) scores.load(at);
    const ScoreUnit unit = score_unit<kCfg.score>(p);
    for (;; stale_max = false) {
      clear(rS);
      product_abt(rS, shared.sQ, warp_row, shared.sK[stage_here], 0);
      if constexpr (scores.kPlain) {
        if (stale_max && full) {
          if (softmax.try_stale_max(rS, unit)) break;
          continue;
        }
      }
      scores.apply(rS, at, loaded, full, scores.kByKeys && tiles.is_full(tile));
      if (stale_max) {
        if (softmax.try_stale_max(rS, unit)) break;
        continue;
      }
      softmax.update(rS, unit, rO, keeps_stale_max<kCfg.score>() ? 0.0f : kRescaleThreshold_log2);
      break;
    }

    //    Dropout comes after the sum: the LSE is that without dropout.
    if constexpr (kCfg.score.dropout) drop<kCfg>(rS, p, b, b.row0 + warp_row, key0);

    //    O += P V
    if (v_later) {
      ptx::cp_async_wait_group<2 * kAhead>();
      __syncthreads();
      if constexpr (kAhead == 0) load_k(tile + 1, 0);  // all warps have finished reading K
    }
    product_pb(rO, rS, shared.sV[stage_here], 0);
  }

  // 4. O / l and LSE: registers -> (shared ->) global. A row that sees nothing: 0 and -inf.
  if (kCfg.head_dim != kCfg.head_dim_v || tiles.last <= tiles.first) {
    ptx::cp_async_wait_all();  // without an iteration, Q's loads are in no group
    __syncthreads();           // no warp reads or loads Q any more, which O overlays
  } else {
    __syncwarp();  // a row of O overlays the same row of Q, which only this warp has read
  }
  finish_rows(shared.sO, p, b, softmax, rO, warp_row);
}

}  // namespace tessera
