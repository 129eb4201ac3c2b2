// The preprocess and the postprocess of bwd_sm80/kernel.cuh, one pass over the queries each and memory-bound. They are
// one kernel, whose parameter `after` selects which of them runs, so that a first call compiles only one.
//
// Preprocess: computes delta = rowsum(dO o O) - dLSE and the LSE in log2 units, and clears whatever the main kernel
// adds to: dQ's accumulator, unless a block stores it, its semaphores and the ticket, dBias, and the gradients of rows
// that belong to no sequence. Postprocess: dQ = scale times its accumulator, in its type; 0 for dK and dV of the keys
// from seqused_k on that are in the same tile as a sequence's last key; and dSink = -sum exp(sink - LSE) delta, in a
// fixed order.
//
// Grid: one block for each tile of block_m queries and query head; the postprocess has one more for each head's dSink.
// At least one. Neighbouring blocks have all heads of the same queries, whose rows are mostly contiguous in memory, and
// the last queries come first: the queries with which the main kernel begins are then the last ones in the L2 cache,
// and the postprocess begins with the queries that the main kernel read last.
#pragma once

#include "tessera/attention/far_rows.cuh"
#include "tessera/attention/query_slots.cuh"
#include "tessera/attention/unowned_rows.cuh"
#include "tessera/bwd_sm80/config.hpp"
#include "tessera/tile/copy_tile.cuh"

namespace tessera {

inline constexpr int kBwdRowsThreads = 128;

// One tile of queries of one head.
struct QueryTile {
  int batch, head;
  int row0, count;  // row0: within the sequence; count <= 0: the padded tile index belongs to no sequence
  int64 slot;       // the tile's padded index in [heads_q, q_slots]
};

template <int kBlockM>
TESSERA_DEVICE QueryTile query_tile_of(const BwdParams& p, int index, Sequence& s) {
  QueryTile t;
  const int slot = index / p.heads_q;
  t.head = index % p.heads_q;
  t.batch = slot_owner<kBlockM>(p, slot);
  s = load_sequence(p, t.batch);
  t.row0 = (slot - query_slot<kBlockM>(p, t.batch)) * kBlockM;
  t.count = t.row0 < 0 ? 0 : min(s.sq - t.row0, kBlockM);
  t.slot = static_cast<int64>(t.head) * p.q_slots + slot;
  return t;
}

// 16 bytes of a row of type kDtype, from column `col` on; columns from `columns` on are 0.
template <Dtype kDtype, bool kAligned>
TESSERA_DEVICE uint4 load_words(const void* data, int64 row, int col, int columns) {
  constexpr int kBytes = dtype_bytes(kDtype), kElems = 16 / kBytes;
  const char* from = static_cast<const char*>(data) + (row + col) * kBytes;
  if constexpr (kAligned) {
    if (col + kElems <= columns) return *reinterpret_cast<const uint4*>(from);
  }
  uint4 words = {};
#pragma unroll(kAligned ? 1 : kElems)  // only the end of an aligned row reaches this loop
  for (int n = kElems - 1; n >= 0; --n) {
    words.w = kBytes == 2 ? __funnelshift_l(words.z, words.w, 16) : words.z;
    words.z = kBytes == 2 ? __funnelshift_l(words.y, words.z, 16) : words.y;
    words.y = kBytes == 2 ? __funnelshift_l(words.x, words.y, 16) : words.x;
    words.x = kBytes == 2 ? words.x << 16 : 0;
    if (col + n >= columns) continue;
    if constexpr (kBytes == 2) {
      words.x |= reinterpret_cast<const unsigned short*>(from)[n];
    } else {
      words.x = reinterpret_cast<const uint32*>(from)[n];
    }
  }
  return words;
}

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

// Clears dBias, one warp for each of its rows.
TESSERA_DEVICE void clear_bias_gradient(const BwdParams& p) {
  constexpr int kWarps = kBwdRowsThreads / 32;
  const int64 rows = static_cast<int64>(p.d_bias_batches) * p.d_bias_heads * p.d_bias_rows;
  for (int64 r = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32; r < rows;
       r += static_cast<int64>(gridDim.x) * kWarps) {
    const int64 row = r % p.d_bias_rows, head = r / p.d_bias_rows % p.d_bias_heads;
    const int64 batch = r / p.d_bias_rows / p.d_bias_heads;
    float* to = static_cast<float*>(p.d_bias.data) + p.d_bias.batch * batch + p.d_bias.head * head + p.d_bias.row * row;
    for (int col = static_cast<int>(threadIdx.x) % 32; col < p.d_bias_cols; col += 32) to[col] = 0.0f;
  }
}

// Clears dQ, dK and dV of rows that belong to no sequence, one warp for each row.
template <Dtype kDtype>
TESSERA_DEVICE void clear_unowned_gradients(const BwdParams& p) {
  constexpr int kWarps = kBwdRowsThreads / 32;
  const int64 warp = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64 warps = static_cast<int64>(gridDim.x) * kWarps;
  if (p.cu_seqlens_q) {
    const UnownedRows rows(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q);
    rows.for_each(p.heads_q, warp, warps,
                  [&](int row, int head) { clear_row<kDtype>(p.d_q, 0, row, head, p.head_dim); });
  }
  if (p.cu_seqlens_k) {
    const UnownedRows rows(p, p.cu_seqlens_k, p.cu_seqlens_k_stride, p.rows_k);
    rows.for_each(p.heads_kv, warp, warps, [&](int row, int head) {
      clear_row<kDtype>(p.d_k, 0, row, head, p.head_dim);
      clear_row<kDtype>(p.d_v, 0, row, head, p.head_dim_v);
    });
  }
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

// Columns of dQ that a warp converts at once: the largest number up to 64 that divides all columns.
TESSERA_HOST_DEVICE constexpr int strip_columns(int columns) {
  return columns % 64 == 0 ? 64 : columns % 48 == 0 ? 48 : columns % 32 == 0 ? 32 : 16;
}

// Converts dQ of a tile's queries, one warp for each strip of 16 queries and strip_columns columns, through shared
// memory, so that whole cache lines are stored. dQ of a query that sees nothing is set to 0, because its products may
// be NaN.
template <BwdRowsConfig kCfg>
TESSERA_DEVICE void store_dq(const BwdParams& p, const Sequence& s, const QueryTile& t) {
  constexpr int kWarps = kBwdRowsThreads / 32, kCols = strip_columns(kCfg.head_dim),
                kStripsARow = kCfg.head_dim / kCols;
  __shared__ SharedTile<kCfg.dtype, 16, kCols> strips[kWarps];
  const int lane = lane_id(), warp = static_cast<int>(threadIdx.x) / 32;
  auto& sdQ = strips[warp];
  float* tile = p.dq_accum + t.slot * (kCfg.block_m * kCfg.head_dim);
#pragma unroll 1
  for (int strip = warp; strip < kCfg.block_m / 16 * kStripsARow; strip += kWarps) {
    const int row0 = strip / kStripsARow * 16, col0 = strip % kStripsARow * kCols;
    if (row0 >= t.count) break;
    float4 parts[kCols / 8];
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      parts[n] = dq_load(dq_part<kCfg.head_dim>(tile, row0 / 16, col0 / 8 + n), lane);
    }
    bool seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      seen[half] = row_sees(p.row_lse_log2[t.slot * kCfg.block_m + row0 + half * 8 + lane_row()]);
    }
    __syncwarp();  // the previous strip is stored
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      const float x[4] = {seen[0] ? parts[n].x * p.scale : 0.0f, seen[0] ? parts[n].y * p.scale : 0.0f,
                          seen[1] ? parts[n].z * p.scale : 0.0f, seen[1] ? parts[n].w * p.scale : 0.0f};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        char* to = sdQ.pointer(half * 8 + lane_row(), n * 8 + lane_col());
        if constexpr (kCfg.dtype == Dtype::kFloat32) {
          *reinterpret_cast<float2*>(to) = make_float2(x[2 * half], x[2 * half + 1]);
        } else {
          *reinterpret_cast<uint32*>(to) = pack_pair<kCfg.dtype>(x[2 * half], x[2 * half + 1]);
        }
      }
    }
    __syncwarp();
    const int64 query = static_cast<int64>(s.q_begin) + t.row0 + row0;
    const int64 first = p.d_q.batch * t.batch + p.d_q.row * query + p.d_q.head * t.head + col0;
    store_rows<16>(sdQ, 0, t.count - row0, p.head_dim - col0, p.d_q_aligned, [&](int row) {
      return static_cast<char*>(p.d_q.data) + (first + p.d_q.row * row) * dtype_bytes(kCfg.dtype);
    });
  }
}

// log2 of a sink's weight in a row of a query tile that is marked as far.
template <int kBlockM>
TESSERA_DEVICE float far_sink_log2(const BwdParams& p, int head, int64 row, float sink) {
  const int slot = static_cast<int>(row / kBlockM), batch = slot_owner<kBlockM>(p, slot);
  const Sequence s = load_sequence(p, batch);
  const int query = (slot - query_slot<kBlockM>(p, batch)) * kBlockM + static_cast<int>(row % kBlockM);
  const TwoFloats lse = load_lse(p, batch, head, static_cast<int64>(s.q_begin) + query);
  const float x = ((sink - lse.high) - lse.low) * kLog2e;
  return x > 0.0f ? 0.0f : x;
}

// Computes dSink of one head: each thread sums every kBwdRowsThreads-th query, then a tree adds the threads' sums. The
// stored LSE is the LSE less raise_log2, and the stored delta is delta / delta_unit.
template <int kBlockM>
TESSERA_DEVICE void reduce_sink(const BwdParams& p, int head, float raise_log2 = 0.0f, float delta_unit = 1.0f) {
  __shared__ double sums[kBwdRowsThreads];
  const int64 rows = static_cast<int64>(p.q_slots) * kBlockM, first = head * rows;
  const float sink = p.sink[p.sink_head * head];
  double sum = 0.0;
  for (int64 row = threadIdx.x; row < rows; row += kBwdRowsThreads) {
    const float lse = p.row_lse_log2[first + row];
    if (!row_sees(lse)) continue;
    const float weight_log2 =
        is_far(lse) ? far_sink_log2<kBlockM>(p, head, row, sink) : fmaf(sink, p.lse_log2e, -(lse + raise_log2));
    sum -= static_cast<double>(exp2f(weight_log2) * p.row_delta[first + row]);
  }
  sums[threadIdx.x] = sum;
  for (int distance = kBwdRowsThreads / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (threadIdx.x < distance) sums[threadIdx.x] += sums[threadIdx.x + distance];
  }
  if (threadIdx.x == 0) p.d_sink[p.d_sink_head * head] = static_cast<float>(sums[0]) * delta_unit;
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
      store_dq<kCfg>(p, s, t);
    } else {
      prepare_rows<kCfg>(p, s, t);
    }
  }
  if (p.after) {
    if (p.seqused_k) clear_unused_keys<kCfg.dtype>(p);
    if constexpr (kCfg.d_sink) {
      if (index >= tiles) reduce_sink<kCfg.block_m>(p, index - tiles);
    }
  } else {
    if (index == 0 && threadIdx.x == 0 && p.ticket) *p.ticket = 0;
    if constexpr (kCfg.d_bias) clear_bias_gradient(p);
    clear_unowned_gradients<kCfg.dtype>(p);
  }
}

}  // namespace tessera
