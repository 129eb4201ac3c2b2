// Forward pass by the first FlashAttention's schedule (arXiv 2205.14135, algorithm 1), with mma.sync and cp.async, for
// comparison with fwd_sm80 and fwd_sm90. Tiles of K and V are the outer loop, tiles of Q the inner loop, and O, m and l
// are written to device memory and read back at every visit. FlashAttention-2 swapped the loops, so that a block keeps
// them in registers.
//
//   for every tile j of keys:      K_j, V_j: global -> shared
//     for every tile i of queries:   Q_i: global -> shared;   O_i, m_i, l_i: global -> registers
//       S = scale Q_i K_j^T    m' = max(m, rowmax S)    P = exp(S - m')    l' = exp(m - m') l + rowsum P
//       O_i = (l exp(m - m') O_i + P V_j) / l'
//       O_i, m', l': registers -> global
//
// Grid: one block for each head of a sequence, as in the paper's code. Block: `warps` warps of block_m / warps rows
// each. Shared memory: FwdFa1SharedMemory. Page: docs/reference/kernels/comparison.md.
#pragma once

#include "tessera/comparison/fwd_fa1/config.hpp"
#include "tessera/fwd_sm80/epilogue.cuh"
#include "tessera/fwd_sm80/loads.cuh"
#include "tessera/fwd_sm80/scores.cuh"

namespace tessera {

template <FwdSm80Config kCfg>
struct FwdFa1SharedMemory {
  SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ[2];
  static constexpr bool kLaneOrder = kCfg.score.lane_order(kCfg.block_n);
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim, kLaneOrder> sK, sV;
};

// A warp's rows of a query tile in device memory.
template <FwdSm80Config kCfg>
struct FwdFa1Rows {
  static constexpr int kM = kCfg.block_m / kCfg.warps / 16, kD = kCfg.head_dim / 8;
  float4* o;
  float *row_max, *row_sum;  // of the lane's first row

  TESSERA_DEVICE FwdFa1Rows(const FwdFa1Params& p, int64 tile, int warp) {
    const int64 row = tile * kCfg.block_m + warp * (kM * 16);
    o = reinterpret_cast<float4*>(p.o_accum + row * kCfg.head_dim) + lane_id();
    row_max = p.row_max + row + lane_row(), row_sum = p.row_sum + row + lane_row();
  }
  TESSERA_DEVICE float4& part(int m, int d) const { return o[(m * kD + d) * 32]; }
};

template <FwdSm80Config kCfg>
TESSERA_DEVICE void fwd_fa1(const FwdFa1Params& p) {
  using Rows = FwdFa1Rows<kCfg>;
  constexpr int kM = Rows::kM, kN = kCfg.block_n / 8, kD = Rows::kD, kThreads = kCfg.warps * 32;
  static_assert(kM * kCfg.warps * 16 == kCfg.block_m, "a warp has a multiple of 16 rows");
  static_assert(kCfg.head_dim == kCfg.head_dim_v && !kCfg.paged && !kCfg.split && !kCfg.pack_gqa);
  static_assert(sizeof(FwdFa1SharedMemory<kCfg>) == fwd_fa1_layout(kCfg).bytes, "as the host has it");
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdFa1SharedMemory<kCfg>*>(shared_memory);

  // 1. Decode the head; m = -inf and l = 0. A query tile that sees no key is never visited: O = 0, LSE = -inf.
  FwdBlock<kCfg> b(p, TileCoord{static_cast<int>(blockIdx.x), 0});
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32), warp_row = warp * (kM * 16);
  const int64 first_row = static_cast<int64>(blockIdx.x) * p.tiles * kCfg.block_m;
  const auto take_tile = [&](int tile) {  // of queries
    b.row0 = tile * kCfg.block_m, b.count = min(b.s.sq - b.row0, kCfg.block_m);
    b.visible = visible_keys(p, b.s, b.row0, b.row0 + b.count - 1);
  };
  for (int row = static_cast<int>(threadIdx.x); row < p.tiles * kCfg.block_m; row += kThreads) {
    p.row_max[first_row + row] = -infinity(), p.row_sum[first_row + row] = 0.0f;
  }
  for (int tile = 0; tile < p.tiles; ++tile) {
    take_tile(tile);
    if (b.visible.some.low <= b.visible.some.high) continue;
    for (int row = warp; row < b.count; row += kCfg.warps) {
      clear_row<kCfg.dtype>(p.o, b.work.batch, b.row0 + row, b.work.head, p.head_dim_v);
      if (lane_id() == 0) store_lse(p, b.work.batch, b.work.head, b.row0 + row, unseen_lse());
    }
  }

  const ScoreUnit unit = score_unit<kCfg.score>(p);
#pragma unroll 1
  for (int key0 = 0; key0 < b.s.sk; key0 += kCfg.block_n) {
    // 2. K and V: global -> shared, with the first tile of Q.
    const KeyRange queries = seeing_queries(p, b.s, key0, min(key0 + kCfg.block_n, b.s.sk) - 1);
    if (queries.low > queries.high) continue;
    const int first = queries.low / kCfg.block_m, last = queries.high / kCfg.block_m;
    const auto load_q = [&](int tile, int stage) {
      if (tile <= last) {
        take_tile(tile);
        load_queries(shared.sQ[stage], p, b);
      }
      ptx::cp_async_commit_group();
    };
    __syncthreads();  // all warps are done with the previous tiles, and m and l are visible
    load_keys(shared.sK, p, p.k, b, key0, 0, p.head_dim);
    load_keys(shared.sV, p, p.v, b, key0, 0, p.head_dim_v);
    load_q(first, 0);

    // 3. For every query tile that sees some of the keys.
    int stage = 0;
#pragma unroll 1
    for (int tile = first; tile <= last; ++tile, stage ^= 1) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // the tile is visible to all warps, and all are done with the previous one
      load_q(tile + 1, stage ^ 1);
      take_tile(tile);
      const TileRange mine = b.seen_by(p, warp_row, kM * 16);
      const bool finishes = b.visible.some.high < key0 + kCfg.block_n;  // the tile sees no later key
      const bool sees = mine.some.low < key0 + kCfg.block_n && mine.some.high >= key0;
      if (!sees && !finishes) continue;

      //    O_i, m_i and l_i: global -> registers. Before a row's first visible key, O is not in memory yet.
      const Rows rows(p, static_cast<int64>(blockIdx.x) * p.tiles + tile, warp);
      OnlineSoftmax<kM> softmax;  // each of the four lanes of a row sums its own columns
      bool moderate = true;
      uint32 huge = 0;
      float row_sum[kM][2], rO[kM][kD][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          row_sum[m][half] = rows.row_sum[m * 16 + half * 8];
          softmax.max[m][half] = rows.row_max[m * 16 + half * 8];
          softmax.sum[m][half] = lane_col() == 0 ? fabsf(row_sum[m][half]) : 0.0f;
          if (row_sum[m][half] < 0.0f) huge |= 1u << (2 * m + half);  // the same marking as in decode_sm90's DecodePart
          row_sum[m][half] = fabsf(row_sum[m][half]);
          moderate &= !is_huge(softmax.max[m][half]);
        }
        const bool upper = row_sum[m][0] != 0.0f, lower = row_sum[m][1] != 0.0f;
        const bool any = __any_sync(0xffffffff, upper || lower);
#pragma unroll
        for (int d = 0; d < kD; ++d) {
          const float4 o = any ? rows.part(m, d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          rO[m][d][0] = upper ? o.x * row_sum[m][0] : 0.0f, rO[m][d][1] = upper ? o.y * row_sum[m][0] : 0.0f;
          rO[m][d][2] = lower ? o.z * row_sum[m][1] : 0.0f, rO[m][d][3] = lower ? o.w * row_sum[m][1] : 0.0f;
        }
      }
      softmax.ready = __all_sync(0xffffffff, moderate && huge == 0), softmax.huge_rows = huge;

      //    S = Q K^T, options, mask
      float rS[kM][kN][4];
      clear(rS);
      product_abt(rS, shared.sQ[stage], warp_row, shared.sK, 0);
      FwdScoreStep<kCfg, kM, kN> scores;
      scores.apply(rS, {p, b, b.row0 + warp_row, key0}, false, mine.all.holds(key0, kCfg.block_n));

      //    m', P, l'; rescale O
      softmax.update(rS, unit, rO, 0.0f);

      //    O += P V; normalise; write to device memory or, at the tile's last visit, to o
      if constexpr (kCfg.score.dropout) drop<kCfg>(rS, p, b, b.row0 + warp_row, key0);
      product_pb(rO, rS, shared.sV, 0);
      if (finishes) {
        __syncwarp();  // a row of O overwrites the same row of Q, which this warp alone has read
        finish_rows(shared.sQ[stage], p, b, softmax, rO, warp_row);
        continue;
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float sum = tessera::row_sum(softmax.sum[m][half]);
          factor[half] = sum == 0.0f ? 0.0f : ptx::rcp_approx_ftz(sum);
          if (lane_col() == 0) {
            rows.row_max[m * 16 + half * 8] = softmax.max[m][half];
            rows.row_sum[m * 16 + half * 8] = softmax.huge(m, half) ? -sum : sum;
          }
        }
#pragma unroll
        for (int d = 0; d < kD; ++d) {
          rows.part(m, d) = make_float4(rO[m][d][0] * factor[0], rO[m][d][1] * factor[0], rO[m][d][2] * factor[1],
                                        rO[m][d][3] * factor[1]);
        }
      }
    }
  }
}

}  // namespace tessera
