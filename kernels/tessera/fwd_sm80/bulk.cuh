// Forward as fwd_sm80/kernel.cuh, for problems without options on GPUs that have TMA: no warp waits for another, but
// for the one whose turn it is to ask for the next tile.
//
// Q and tiles of K and V come by bulk copies. A warp waits until a tile has landed, and says when it has read it; into
// its place goes the tile `stages` behind it, issued by one thread half a tile later, when mostly all warps have. So
// warps drift apart, and one's exponentials stand beside another's products.
//
// Grid, block: as fwd_sm80/kernel.cuh's. Shared memory: FwdBulkSharedMemory. Its page: docs/reference/kernels/fwd_sm80.md.
#pragma once

#include "tessera/fwd_sm80/bulk_copies.cuh"

namespace tessera {

template <FwdConfig kCfg>
struct FwdBulkSharedMemory : FwdSharedMemory<kCfg> {
  Ring<kCfg.stages> k, v;
};

// Zero for the rows of a tile from `first` on, by all threads.
template <FwdConfig kCfg, class Tile>
TESSERA_DEVICE void clear_rows(Tile& sTile, int first) {
  constexpr int kWords = Tile::kPitchBytes / kLoadBytes;
#pragma unroll 1
  for (int i = first * kWords + static_cast<int>(threadIdx.x); i < Tile::kRows * kWords; i += kCfg.warps * 32) {
    ptx::st_shared_zero_16(shared_address(sTile.data) + i * kLoadBytes);
  }
}

template <FwdConfig kCfg>
TESSERA_DEVICE void fwd_sm80_bulk(const FwdBulkParams& p) {
  constexpr int kM = kCfg.block_m / kCfg.warps / 16;  // tiles of 16 rows a warp
  constexpr int kN = kCfg.block_n / 8, kSteps = kN / 2, kD = kCfg.head_dim_v / 8;
  static_assert(kM * kCfg.warps * 16 == kCfg.block_m, "a warp has a multiple of 16 rows");
  static_assert(kCfg.bulk && dtype_bytes(kCfg.dtype) == 2 && kCfg.stages > 1 && !kCfg.paged && !kCfg.score.any());
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdBulkSharedMemory<kCfg>*>(shared_memory);

  // 1. Which tile is mine, and which keys it sees. Tiles of one head stand together, so that they share its keys and
  // values in the L2 cache; of a sequence the last tile comes first, since under a causal mask it sees the most.
  const int index = static_cast<int>(blockIdx.x);
  const FwdBlock<kCfg> b(p, {index / p.tiles, index % p.tiles});
  if (b.work.tile < 0) {
    clear_unowned_outputs_at<kCfg>(p, {index / p.tiles, index % p.tiles}, static_cast<int>(gridDim.x) / p.tiles);
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, warp_row = warp * (kM * 16);

  // 2. Q and the first tiles of K and V: global -> shared. Another sequence's rows behind a packed one's last would have a
  // say in whether the stale max may serve.
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
  __syncthreads();  // the barriers are there for everybody, and a Q that was not copied

  // 3. For every tile of keys that a row of the block sees.
  RingPosition<kCfg.stages> at, free;  // of this tile; of the one before, a round on
  for (int tile = b.first; tile < b.last; ++tile) {
    // Mine to ask for: into the place of the tile before, of K behind its scores, of V behind its O.
    const int next = tile - 1 + kCfg.stages;
    const bool asks = tile > b.first && next < b.last && tile % kCfg.warps == warp && lane_id() == 0;
    if (asks) {
      shared.k.wait_empty(free);
      copy_k(next, free.stage());
    }
    __syncwarp();

    //    S = Q K^T; where a row sees a part of the tile, -inf for what is not visible; online softmax, P in place of S and O
    //    rescaled. Against the stale max first, where that may serve: attention/softmax. A tile that my rows see nothing of,
    //    the end of a causal mask, is passed over.
    shared.k.wait_full(at);
    const int key0 = tile * kCfg.block_n;
    const bool sees = tile == b.first || key0 <= mine.some.high;
    const bool whole = mine.all.holds(key0, kCfg.block_n);
    uint32 rP[kM][kSteps][4];
    if (sees) {
      float rS[kM][kN][4];
      for (bool stale_max = whole && softmax.ready;; stale_max = false) {
        clear(rS);
        product_abt(rS, shared.sQ, warp_row, shared.sK[at.stage()], 0);
        if (stale_max) {
          if (softmax.template try_stale_max<kCfg.dtype>(rS, p.scale_log2)) break;
          continue;
        }
        if (!whole) apply_mask<kCfg>(rS, p, b, b.row0 + warp_row, key0);
        softmax.update(rS, p.scale_log2, rO);
        break;
      }
      pack_rows<kCfg.dtype>(rP, rS);
    }
    shared.k.release(at);

    //    O += P V
    if (asks) {
      shared.v.wait_empty(free);
      copy_v(next, free.stage());
    }
    __syncwarp();
    shared.v.wait_full(at);
    if (key0 + kCfg.block_n > b.s.sk) [[unlikely]] {  // behind a sequence's end there may be NaN, which P's zeros keep
      __syncthreads();  // the ring has put all that was read here before; racecheck sees this one alone
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
    __syncthreads();  // nobody reads Q, whose place O takes
  } else {
    __syncwarp();  // a row of O takes the place of that row of Q, which this warp alone has read
  }
  finish_rows(shared.sO, p, b, softmax, rO, warp_row);
}

}  // namespace tessera
