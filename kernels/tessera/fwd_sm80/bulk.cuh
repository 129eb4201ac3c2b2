// The forward pass of fwd_sm80/kernel.cuh for problems without options on GPUs that have TMA. It has a loop of its own
// because it has no barrier of the whole block: a warp waits for tiles, not for other warps.
//
// Q and tiles of K and V are loaded by bulk copies, through rings with a full and an empty barrier for each stage. A
// warp waits until a tile has arrived, and releases it when it has read it. The next load into that stage, of the tile
// `stages` later, is issued by one thread, of another warp for each tile, half a tile later: by then most warps have
// released the stage. The warps therefore drift apart, and the exponentials of one run during the products of another.
//
// Grid and block: as in fwd_sm80/kernel.cuh. Shared memory: FwdBulkSharedMemory. Details:
// docs/reference/kernels/fwd_sm80.md.
#pragma once

#include "tessera/fwd_sm80/epilogue.cuh"
#include "tessera/fwd_sm80/loads.cuh"
#include "tessera/fwd_sm80/scheduler.cuh"
#include "tessera/fwd_sm80/scores.cuh"

namespace tessera {

template <FwdSm80Config kCfg>
struct FwdBulkSharedMemory : FwdSharedMemory<kCfg> {
  Ring<kCfg.stages> k, v;
};

// Clears the rows of a tile from `first` on, by all threads.
template <FwdSm80Config kCfg, class Tile>
TESSERA_DEVICE void clear_rows(Tile& sTile, int first) {
  constexpr int kWords = Tile::kPitchBytes / kLoadBytes;
#pragma unroll 1
  for (int i = first * kWords + static_cast<int>(threadIdx.x); i < Tile::kRows * kWords; i += kCfg.warps * 32) {
    ptx::st_shared_zero_16(shared_address(sTile.data) + i * kLoadBytes);
  }
}

template <FwdSm80Config kCfg>
TESSERA_DEVICE void fwd_sm80_bulk(const FwdSm80BulkParams& p) {
  constexpr int kM = kCfg.block_m / kCfg.warps / 16;  // tiles of 16 rows of a warp
  constexpr int kN = kCfg.block_n / 8, kSteps = kN / 2, kD = kCfg.head_dim_v / 8;
  static_assert(kM * kCfg.warps * 16 == kCfg.block_m, "a warp has a multiple of 16 rows");
  static_assert(has_fwd_layout<kCfg, FwdBulkSharedMemory<kCfg>>(), "shared memory lies where the host has it");
  static_assert(kCfg.bulk && dtype_bytes(kCfg.dtype) == 2 && kCfg.stages > 1 && !kCfg.paged && !kCfg.score.any());
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdBulkSharedMemory<kCfg>*>(shared_memory);

  // 1. This block's work tile, and the keys that it sees.
  const FwdBlock<kCfg> b(p, single_tile(p));
  if (b.work.tile < 0) {
    clear_unowned_outputs_at<kCfg>(p, single_tile(p), static_cast<int>(gridDim.x) / p.tiles);
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, warp_row = warp * (kM * 16);

  // 2. Q and the first tiles of K and V: global -> shared. For a packed sequence's last tile, Q is loaded by cp.async:
  // a bulk copy would load the next sequence's rows, and they would influence the decision whether the stale max is
  // accepted.
  const bool copies_q = !kCfg.pack_gqa && (!p.cu_seqlens_q || b.count == kCfg.block_m);
  const auto copy_k = [&](int tile, int stage) {
    copy_keys(shared.sK[stage], shared.k.full[stage], p, p.k_map, b, tile * kCfg.block_n, 0);
  };
  const auto copy_v = [&](int tile, int stage) {
    copy_keys(shared.sV[stage], shared.v.full[stage], p, p.v_map, b, tile * kCfg.block_n, b.dv_begin);
  };
  if (threadIdx.x == 0) {
    shared.k.init(kCfg.warps), shared.v.init(kCfg.warps);
    ptx::fence_mbarrier_init();
    if (copies_q && b.first < b.last) copy_queries(shared.sQ, shared.k.full[0], p, b);
    for (int stage = 0; stage < min(kCfg.stages, b.last - b.first); ++stage) {
      copy_k(b.first + stage, stage), copy_v(b.first + stage, stage);
    }
  }
  if (!copies_q) {
    load_queries(shared.sQ, p, b);
    ptx::cp_async_wait_all();
  }

  float rO[kM][kD][4];
  clear(rO);
  OnlineSoftmax<kM> softmax;
  const TileRange mine = b.seen_by(p, warp_row, kM * 16);
  __syncthreads();  // all warps see the barriers, and also Q if it was not loaded by a bulk copy

  // 3. For every tile of keys that a row of the block sees.
  RingPosition<kCfg.stages> at, free;  // stage of this tile; stage of the previous tile, in the ring's next round
  for (int tile = b.first; tile < b.last; ++tile) {
    // The next load, if this thread issues it: into the stage of the previous tile, K after that tile's scores, V after
    // its O.
    const int next = tile - 1 + kCfg.stages;
    const bool loads = tile > b.first && next < b.last && tile % kCfg.warps == warp && lane_id() == 0;
    if (loads) {
      shared.k.wait_empty(free);
      copy_k(next, free.stage());
    }
    __syncwarp();

    //    S = Q K^T; in a partial tile, -inf for keys that a row does not see; online softmax: P replaces S, and O is
    //    rescaled. The stale max is tried first in full tiles: attention/softmax. A tile of which the warp's rows see
    //    nothing, past the end of a causal mask, is skipped.
    shared.k.wait_full(at);
    const int key0 = tile * kCfg.block_n;
    const bool sees = tile == b.first || key0 <= mine.some.high;
    const bool full = mine.all.holds(key0, kCfg.block_n);
    uint32 rP[kM][kSteps][4];
    if (sees) {
      float rS[kM][kN][4];
      score_tile<kCfg>(rS, softmax, rO, shared.sQ, shared.sK[at.stage()], p, b, warp_row, key0, full);
      pack_rows<kCfg.dtype>(rP, rS);
    }
    shared.k.release(at);

    //    O += P V
    if (loads) {
      shared.v.wait_empty(free);
      copy_v(next, free.stage());
    }
    __syncwarp();
    shared.v.wait_full(at);
    // Past a sequence's end there may be NaN, and NaN times P = 0 is NaN.
    if (key0 + kCfg.block_n > b.s.sk) [[unlikely]] {
      // The ring orders this after all reads of the previous tile, but racecheck recognises only a barrier.
      __syncthreads();
      clear_rows<kCfg>(shared.sV[at.stage()], b.s.sk - key0);
      __syncthreads();
    }
    if (sees) product_pb(rO, rP, shared.sV[at.stage()]);
    shared.v.release(at);

    free = at, free.parity ^= 1;
    at.advance();
  }

  // 4. O / l and LSE: registers -> (shared ->) global. A row that sees nothing: 0 and -inf.
  if constexpr (kCfg.head_dim != kCfg.head_dim_v) {
    __syncthreads();  // no warp reads Q any more, which O overlays
  } else {
    __syncwarp();  // a row of O overlays the same row of Q, which only this warp has read
  }
  finish_rows(shared.sO, p, b, softmax, rO, warp_row);
}

}  // namespace tessera
