// The passes over rows before and after bwd_sm90. With a block mask the preprocess also computes the order of the key
// tiles.
#pragma once

#include "tessera/attention/backward/key_block.cuh"
#include "tessera/attention/backward/row_passes.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/bwd_sm90/config.hpp"
#include "tessera/ptx/synchronization.cuh"

namespace tessera {

// ---- the order of key tiles -----------------------------------------------------------------------------------------
//
// With a block mask: the order in which bwd_sm90's blocks process the key tiles. Keys that many queries see (a
// document's beginning, every 16th block) have much longer lists than others. If a head's long lists started only after
// all blocks of the heads before it, they would end long after everything else. The long lists of all heads therefore
// start first, and the rest fills the GPU after them.

// A list is long if it has this many times the mean number of entries. The lists of a random mask are all shorter and
// keep their order, in which a head's Q, dO and dQ stay in L2.
inline constexpr int kLongList = 2;

// Writes p.order, by a block of kThreads threads with some neighbouring key tiles each: a stable partition into long
// lists and others.
template <int kThreads>
TESSERA_DEVICE void order_key_tiles(const BwdSm90Params& p) {
  __shared__ int64 sSums[2][kThreads / 32];
  const int tiles = p.heads * static_cast<int>(p.key_tiles), each = (tiles + kThreads - 1) / kThreads;
  const int thread = static_cast<int>(threadIdx.x), begin = min(thread * each, tiles), end = min(begin + each, tiles);
  int64 mine = 0, all;
  for (int n = begin; n < end; ++n) mine += steps_of(p, key_tile_place(p, n));
  sum_before<kThreads / 32>(thread, mine, sSums[0], all);
  const auto is_long = [&](int n) { return int64{steps_of(p, key_tile_place(p, n))} * tiles > kLongList * all; };
  int64 mine_long = 0, all_long;
  for (int n = begin; n < end; ++n) mine_long += is_long(n);
  int64 next_long = sum_before<kThreads / 32>(thread, mine_long, sSums[1], all_long);
  int64 next_other = all_long + begin - next_long;
  for (int n = begin; n < end; ++n) p.order[is_long(n) ? next_long++ : next_other++] = n;
}

// ---- preprocess and postprocess -------------------------------------------------------------------------------------
//
// The preprocess and postprocess of bwd_sm90, one pass over the queries each and memory-bound. They differ from
// bwd_sm80/rows.cuh in that P is scaled (kBwdRaise_log2) and that they support programmatic dependent launch, which the
// library does not use, because it gains nothing (docs/lab/bwd_sm90.md).
//
// Grid: one block of 128 threads for each tile of block_m queries and query head. With a block mask, not deterministic,
// the first block of the preprocess computes the order of the key tiles. The postprocess has one more block for each
// head's dSink.

// Computes delta = rowsum(dO o O) - dLSE, scaled down, and the LSE in log2 units. Clears dQ's accumulator
// (deterministic: only where no block adds to it), the dQ semaphores and the ticket, and the gradients of rows that
// belong to no sequence.
template <BwdSm90RowsConfig kCfg>
TESSERA_DEVICE void bwd_sm90_before(const BwdSm90Params& p) {
  // Of 16 bytes; rows that are processed at once.
  constexpr int kLanes = lanes_of(kCfg.head_dim / 8), kRows = kBwdRowsThreads / kLanes;
  constexpr float kDelta = bwd_lowers_early(kCfg.dtype) ? kBwdLower : 1.0f;
  ptx::griddepcontrol_launch_dependents();
  clear_unowned_gradients<kCfg>(p);
  if constexpr (kCfg.d_bias) clear_bias_gradient(p);
  if constexpr (kCfg.block_mask && !kCfg.deterministic) {
    if (blockIdx.x == 0) {
      order_key_tiles<kBwdRowsThreads>(p);
      return;
    }
  }
  Sequence s;
  const QueryTile t = query_tile_of<kCfg.block_m, kCfg.positions()>(p, static_cast<int>(gridDim.x - 1 - blockIdx.x), s);
  if (threadIdx.x == 0 && p.dq_semaphore) {
    p.dq_semaphore[t.slot] = 0;
    if (blockIdx.x == 0) *p.ticket = 0;
  }
  bool clears = true;
  if constexpr (kCfg.deterministic) {
    if constexpr (kCfg.block_mask) {
      clears =
          p.dq_order.adders[p.lists.at(t.batch, t.head, 0) / p.lists.tiles * p.lists.most + t.row0 / kCfg.block_m] == 0;
    } else {
      const KeyRange keys = visible_keys<kCfg.positions()>(p, s, t.row0, min(t.row0 + kCfg.block_m, s.sq) - 1).some;
      clears = keys.low > keys.high;
    }
  }
  if constexpr (kCfg.whole_head) {  // dQ of queries that see no key, which the main kernel does not reach
    clears = false;
    const KeyRange keys = visible_keys<kCfg.positions()>(p, s, t.row0, min(t.row0 + kCfg.block_m, s.sq) - 1).some;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int row = warp; keys.low > keys.high && row < t.count; row += kBwdRowsThreads / 32) {
      clear_row<kCfg.dtype>(p.d_q, t.batch, static_cast<int64>(s.q_begin) + t.row0 + row, t.head, p.head_dim);
    }
  }
  const int lane = static_cast<int>(threadIdx.x) % kLanes, group = static_cast<int>(threadIdx.x) / kLanes;
  constexpr int kGroups = kCfg.block_m / kRows, kAhead = kGroups < 4 ? kGroups : 4;
  float4* acc = reinterpret_cast<float4*>(p.dq_accum + t.slot * (kCfg.block_m * kCfg.head_dim));
  bool far = false;
  const RowStats row_stats(p, lane, t.batch, t.head);
#pragma unroll 1
  for (int first = 0; first < kCfg.block_m; first += kAhead * kRows) {
    uint4 o[kAhead] = {}, d_o[kAhead] = {};
    float stats[kAhead] = {};
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int row = first + n * kRows + group;
      if (row >= t.count) continue;
      const int64 query = static_cast<int64>(s.q_begin) + t.row0 + row;
      o[n] = load_words<kCfg.dtype, true>(p.o.data, p.o.batch * t.batch + p.o.row * query + p.o.head * t.head, lane * 8,
                                          p.head_dim_v);
      d_o[n] = load_words<kCfg.dtype, true>(p.d_o.data, p.d_o.batch * t.batch + p.d_o.row * query + p.d_o.head * t.head,
                                            lane * 8, p.head_dim_v);
      row_stats.load(stats[n], query);
    }
    constexpr int kWords = kAhead * kRows * kCfg.head_dim / 4;  // 16-byte words of the accumulator
#pragma unroll
    for (int n = 0; clears && n < kWords / kBwdRowsThreads; ++n) {
      acc[first * (kCfg.head_dim / 4) + n * kBwdRowsThreads + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const uint32 a[4] = {o[n].x, o[n].y, o[n].z, o[n].w}, b[4] = {d_o[n].x, d_o[n].y, d_o[n].z, d_o[n].w};
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 x = unpack_pair<kCfg.dtype>(a[e]), y = unpack_pair<kCfg.dtype>(b[e]);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
      }
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
      const TwoFloats lse{stats[n], row_stat(stats[n], 1)};
      const float d_lse = row_stat(stats[n], 2);
      const int row = first + n * kRows + group;
      if (lane != 0) continue;
      const bool sees = row < t.count && lse.high != -infinity();
      p.row_lse_log2[t.slot * kCfg.block_m + row] = sees ? lse_log2(p, lse, kBwdRaise_log2) : infinity();
      p.row_delta[t.slot * kCfg.block_m + row] = sees ? (sum - d_lse) * kDelta : 0.0f;
      far |= sees && is_far(p, lse);
    }
  }
  mark_far_tile<kCfg.block_m, kBwdRowsThreads>(p.row_lse_log2 + t.slot * kCfg.block_m, far);
}

// Calls convert(sequence, tile) with the block's tile of queries, or makes dSink, one block for each head.
template <BwdSm90RowsConfig kCfg, class Convert>
TESSERA_DEVICE void after_tile(const BwdParams& p, Convert&& convert) {
  const int index = static_cast<int>(blockIdx.x), tiles = p.q_slots * p.heads_q;
  if constexpr (kCfg.d_sink) {
    if (index >= tiles) {
      reduce_sink<kCfg.block_m>(p, index - tiles, kBwdRaise_log2, bwd_lowers_early(kCfg.dtype) ? 1 / kBwdLower : 1.0f);
      return;
    }
  }
  Sequence s;
  const QueryTile t = query_tile_of<kCfg.block_m>(p, tiles - 1 - index, s);
  ptx::griddepcontrol_wait();
  convert(s, t);
}

// dQ = scale times its accumulator, and dSink; the scale of `p` includes bwd_lower_late.
template <BwdSm90RowsConfig kCfg>
TESSERA_DEVICE void bwd_sm90_after(const BwdParams& p) {
  after_tile<kCfg>(p, [&](const Sequence& s, const QueryTile& t) { store_dq<kCfg>(p, s, t, p.scale); });
}

}  // namespace tessera
