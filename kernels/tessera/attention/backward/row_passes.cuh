// The passes over rows of queries before and after the main kernel of the backward pass: what the preprocess and the
// postprocess of bwd_sm80 (bwd_sm80/rows.cuh) and of the kernels for Hopper (bwd_sm90/rows.cuh) have in common.
#pragma once

#include "tessera/attention/backward/rows.cuh"
#include "tessera/attention/backward/sums.cuh"
#include "tessera/attention/unowned_rows.cuh"
#include "tessera/tile/shared_tile.cuh"

namespace tessera {

inline constexpr int kBwdRowsThreads = 128;

// One tile of queries of one head.
struct QueryTile {
  int batch, head;
  int row0, count;  // row0: within the sequence; count <= 0: the padded tile index belongs to no sequence
  int64 slot;       // the tile's padded index in [heads_q, q_slots]
};

template <int kBlockM, ScoreConfig kScore = ScoreConfig{}>
TESSERA_DEVICE QueryTile query_tile_of(const BwdParams& p, int index, Sequence& s) {
  QueryTile t;
  const int slot = index / p.heads_q;
  t.head = index % p.heads_q;
  t.batch = slot_owner<kBlockM>(p, slot);
  s = load_sequence<true, false, kScore>(p, t.batch);
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

// Clears dQ, dK and dV of rows that belong to no sequence, one warp for each row. In sums to which the call adds they
// stay as they are.
template <auto kCfg>
TESSERA_DEVICE void clear_unowned_gradients(const BwdParams& p) {
  constexpr Dtype kDtype = kCfg.sums ? Dtype::kFloat32 : kCfg.dtype;
  if constexpr (kCfg.sums) {
    if (p.accumulate) return;
  }
  constexpr int kWarps = kBwdRowsThreads / 32;
  const int64 warp = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64 warps = static_cast<int64>(gridDim.x) * kWarps;
  if (p.cu_seqlens_q) {
    const UnownedRows rows(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q);
    rows.for_each(p.heads_q, warp, warps,
                  [&](int row, int head) { clear_row<kDtype>(p.d_q, 0, row, head, p.head_dim); });
  }
  if (p.keys.begins) {
    const UnownedRows rows(p, p.keys.begins, p.keys.begins_stride, p.keys_limit);
    rows.for_each(p.heads_kv, warp, warps, [&](int row, int head) {
      clear_row<kDtype>(p.d_k, 0, row, head, p.head_dim);
      clear_row<kDtype>(p.d_v, 0, row, head, p.head_dim_v);
    });
  }
}

// Columns of dQ that a warp converts at once: the largest number up to 64 that divides all columns.
TESSERA_HOST_DEVICE constexpr int strip_columns(int columns) {
  return columns % 64 == 0 ? 64 : columns % 48 == 0 ? 48 : columns % 32 == 0 ? 32 : 16;
}

struct VisitNothing {
  TESSERA_DEVICE void operator()(int, int, float, float) const {}
};

// Converts dQ of a tile's queries, one warp for each strip of 16 queries and strip_columns columns, through shared
// memory, so that whole cache lines are stored; sums are written from registers. dQ of a query that sees nothing is set
// to 0, because its products may be NaN. visit(row, col, low, high): a lane's elements of the accumulator, of columns
// `col` and the next of a query that sees something. dQ is `scale` times it.
template <auto kCfg, class Visit = VisitNothing>
TESSERA_DEVICE void store_dq(const BwdParams& p, const Sequence& s, const QueryTile& t, float scale,
                             Visit&& visit = {}) {
  constexpr int kWarps = kBwdRowsThreads / 32, kCols = strip_columns(kCfg.head_dim),
                kStripsARow = kCfg.head_dim / kCols;
  __shared__ SharedTile<kCfg.dtype, 16, kCols> strips[kWarps];
  const int lane = lane_id(), warp = static_cast<int>(threadIdx.x) / 32;
  [[maybe_unused]] auto& sdQ = strips[warp];
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
      const int row = row0 + half * 8 + lane_row();
      seen[half] = row_sees(p.row_lse_log2[t.slot * kCfg.block_m + row]);
      if (!seen[half] || row >= t.count) continue;
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
        visit(row, col0 + n * 8 + lane_col(), half ? parts[n].z : parts[n].x, half ? parts[n].w : parts[n].y);
      }
    }
    if constexpr (kCfg.sums) {
      float x[kCols / 8][4];
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
        x[n][0] = seen[0] ? parts[n].x : 0.0f, x[n][1] = seen[0] ? parts[n].y : 0.0f;
        x[n][2] = seen[1] ? parts[n].z : 0.0f, x[n][3] = seen[1] ? parts[n].w : 0.0f;
      }
      const int64 query = static_cast<int64>(s.q_begin) + t.row0 + row0;
      const int count = t.count - row0;
      GradientSum{p.d_q, p.head_dim, p.d_q_aligned, p.accumulate}.write({t.batch, t.head, query, col0, count, count}, x,
                                                                        scale);
      continue;
    }
    __syncwarp();  // the previous strip is stored
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      const float x[4] = {seen[0] ? parts[n].x * scale : 0.0f, seen[0] ? parts[n].y * scale : 0.0f,
                          seen[1] ? parts[n].z * scale : 0.0f, seen[1] ? parts[n].w * scale : 0.0f};
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

// The preprocess has a group of lanes for each row, of which the first three load lse, lse_low and d_lse, each into the
// same register.
struct RowStats {
  const float* rows;  // of a sequence and a head; NULL: nothing to load
  int64 step;
  TESSERA_DEVICE RowStats(const BwdParams& p, int lane, int batch, int head) {
    const StatTensor& from = lane == 0 ? p.lse : lane == 1 ? p.lse_low : p.d_lse;
    rows = lane < 3 && from.data ? from.at(batch, head, 0) : nullptr, step = from.row;
  }
  TESSERA_DEVICE void load(float& stat, int64 row) const {
    if (rows) stat = rows[step * row];
  }
};
// To be called by all lanes of a warp: the first lane receives another lane's value.
TESSERA_DEVICE float row_stat(float stat, int lane) { return __shfl_xor_sync(0xffffffff, stat, lane); }

// Called by a whole block of the preprocess after it has written a tile's row_lse_log2; `found`: this thread found a
// far row.
template <int kRows, int kThreads>
TESSERA_DEVICE void mark_far_tile(float* row_lse_log2, bool found) {
  if (!__syncthreads_or(found)) return;
  for (int row = static_cast<int>(threadIdx.x); row < kRows; row += kThreads) {
    row_lse_log2[row] = row_lse_log2[row] == infinity() ? kFarUnseenRow : kFarRow;
  }
}

// The LSE in log2 units for scores that are not far, less raise_log2.
TESSERA_DEVICE float lse_log2(const BwdParams& p, TwoFloats lse, float raise_log2 = 0.0f) {
  return fmaf(lse.high, p.lse_log2e, fmaf(lse.high, p.lse_log2e_low, fmaf(lse.low, p.lse_log2e, -raise_log2)));
}
TESSERA_DEVICE bool is_far(const BwdParams& p, TwoFloats lse) {
  return !(fabsf(lse.high * p.lse_log2e) < p.far_lse_log2);
}

}  // namespace tessera
