// The preprocess and the postprocess of bwd_sm80/kernel.cuh, one pass over the queries each and memory-bound. They are
// one kernel, whose parameter `after` selects which of them runs, so that a first call compiles only one.
//
// Preprocess: computes delta = rowsum(dO o O) - dLSE and the LSE in log2 units, and clears whatever the main kernel
// adds to: dQ's accumulator, unless a block stores it, its semaphores and the ticket, dBias, and the gradients of rows
// that belong to no sequence. Postprocess: dQ = scale times its accumulator, in its type; 0 for dK and dV of the keys
// from seqused_k on that are in the same tile as a sequence's last key, but for sums, which the main kernel does not
// write there; and dSink = -sum exp(sink - LSE) delta, in a fixed order.
//
// Grid: one block for each tile of block_m queries and query head; the postprocess has one more for each head's dSink.
// At least one. Neighbouring blocks have all heads of the same queries, whose rows are mostly contiguous in memory, and
// the last queries come first: the queries with which the main kernel begins are then the last ones in the L2 cache,
// and the postprocess begins with the queries that the main kernel read last.
#pragma once

#include "tessera/attention/backward/row_passes.cuh"
#include "tessera/bwd_sm80/config.hpp"

namespace tessera {

// Computes delta and LSE of a tile's queries, one group of lanes for each query. The loads of several queries are
// issued before the first of them is used.
template <BwdRowsConfig kCfg>
TESSERA_DEVICE void reduce_rows(const BwdParams& p, const Sequence& s, const QueryTile& t) {
  constexpr int kElems = 16 / dtype_bytes(kCfg.dtype), kLoads = kCfg.head_dim_v / kElems;  // 16-byte loads of a row
  constexpr int kLanes = kLoads > 16 ? 32 : kLoads > 8 ? 16 : kLoads > 4 ? 8 : 4;
  constexpr int kLaneLoads = (kLoads + kLanes - 1) / kLanes;
  constexpr int kRows = kBwdRowsThreads / kLanes;  // rows that are processed at once
  constexpr int kGroups = kCfg.block_m / kRows, kMost = kLaneLoads > 1 ? 1 : 2;
  // Sets of rows whose loads are in flight together.
  constexpr int kAhead = kGroups >= kMost ? kMost : kGroups > 1 ? kGroups : 1;
  static_assert(kCfg.block_m % 16 == 0 && (kGroups <= 1 || kGroups % kAhead == 0));
  const int lane = static_cast<int>(threadIdx.x) % kLanes, group = static_cast<int>(threadIdx.x) / kLanes;
  bool far = false;
  const RowStats row_stats(p, lane, t.batch, t.head);
#pragma unroll 1
  for (int first = 0; first < kCfg.block_m; first += kAhead * kRows) {
    uint4 o[kAhead][kLaneLoads] = {}, d_o[kAhead][kLaneLoads] = {};
    float stats[kAhead] = {};
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int row = first + n * kRows + group;
      if (row >= t.count) break;
      const int64 query = static_cast<int64>(s.q_begin) + t.row0 + row;
      const int64 gO = p.o.batch * t.batch + p.o.row * query + p.o.head * t.head;
      const int64 gdO = p.d_o.batch * t.batch + p.d_o.row * query + p.d_o.head * t.head;
#pragma unroll
      for (int load = 0; load < kLaneLoads; ++load) {
        const int col = (load * kLanes + lane) * kElems;
        if (col >= p.head_dim_v) break;
        o[n][load] = load_words<kCfg.dtype, kCfg.aligned>(p.o.data, gO, col, p.head_dim_v);
        d_o[n][load] = load_words<kCfg.dtype, kCfg.aligned>(p.d_o.data, gdO, col, p.head_dim_v);
      }
      row_stats.load(stats[n], query);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      float sum = 0.0f;
#pragma unroll
      for (int load = 0; load < kLaneLoads; ++load)
#pragma unroll
        for (int e = 0; e < kElems; ++e) {
          sum = fmaf(load_element<kCfg.dtype>(&o[n][load], e), load_element<kCfg.dtype>(&d_o[n][load], e), sum);
        }
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
      const TwoFloats lse{stats[n], row_stat(stats[n], 1)};
      const float d_lse = row_stat(stats[n], 2);
      const int row = first + n * kRows + group;
      if (lane != 0 || row >= kCfg.block_m) continue;
      const bool sees = row < t.count && lse.high != -infinity();
      p.row_lse_log2[t.slot * kCfg.block_m + row] = sees ? lse_log2(p, lse) : infinity();
      p.row_delta[t.slot * kCfg.block_m + row] = sees ? sum - d_lse : 0.0f;
      far |= sees && is_far(p, lse);
    }
  }
  mark_far_tile<kCfg.block_m, kBwdRowsThreads>(p.row_lse_log2 + t.slot * kCfg.block_m, far);
}

// Clears dK and dV of keys from seqused_k on, in the tile with a sequence's last key: their weights of 0 may have been
// multiplied by a NaN of Q or dO. One warp for each row. (No query sees the tiles after it; the main kernel stores 0
// there.)
template <Dtype kDtype>
TESSERA_DEVICE void clear_unused_keys(const BwdParams& p) {
  constexpr int kWarps = kBwdRowsThreads / 32;
  const int64 rows = static_cast<int64>(p.batch) * p.block_n;
#pragma unroll 1
  for (int64 n = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32; n < rows * p.heads_kv;
       n += static_cast<int64>(gridDim.x) * kWarps) {
    const int head = static_cast<int>(n / rows), batch = static_cast<int>(n % rows / p.block_n);
    const Sequence s = load_sequence(p, batch);
    const int key = s.sk / p.block_n * p.block_n + static_cast<int>(n % p.block_n);
    if (key < s.sk || key >= s.k_rows) continue;
    clear_row<kDtype>(p.d_k, batch, s.k_begin + key, head, p.head_dim);
    clear_row<kDtype>(p.d_v, batch, s.k_begin + key, head, p.head_dim_v);
  }
}

// The preprocess of one query tile.
template <BwdRowsConfig kCfg>
TESSERA_DEVICE void prepare_rows(const BwdParams& p, const Sequence& s, const QueryTile& t) {
  reduce_rows<kCfg>(p, s, t);
  bool adds = true;
  if constexpr (kCfg.store_keys > 0) adds = !one_block_adds<kCfg.block_m, kCfg.store_keys>(p, s, t.row0);
  if (adds) {
    float4* acc = reinterpret_cast<float4*>(p.dq_accum + t.slot * (kCfg.block_m * kCfg.head_dim));
    for (int n = static_cast<int>(threadIdx.x); n < kCfg.block_m * kCfg.head_dim / 4; n += kBwdRowsThreads) {
      acc[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  if (threadIdx.x == 0 && p.dq_semaphore) p.dq_semaphore[t.slot] = 0;
}

template <BwdRowsConfig kCfg>
TESSERA_DEVICE void bwd_rows(const BwdParams& p) {
  const int index = static_cast<int>(blockIdx.x), tiles = p.q_slots * p.heads_q;
  if (index < tiles) {
    Sequence s;
    const QueryTile t = query_tile_of<kCfg.block_m>(p, tiles - 1 - index, s);
    if (p.after) {
      store_dq<kCfg>(p, s, t, p.scale);
    } else {
      prepare_rows<kCfg>(p, s, t);
    }
  }
  if (p.after) {
    if (!kCfg.sums && p.seqused_k) clear_unused_keys<kCfg.dtype>(p);
    if constexpr (kCfg.d_sink) {
      if (index >= tiles) reduce_sink<kCfg.block_m>(p, index - tiles);
    }
  } else {
    if (index == 0 && threadIdx.x == 0 && p.ticket) *p.ticket = 0;
    if constexpr (kCfg.d_bias) clear_bias_gradient(p);
    clear_unowned_gradients<kCfg>(p);
  }
}

}  // namespace tessera
