// Forward: O = softmax(scale Q K^T + ...) V and LSE, FlashAttention-2's algorithm 1, by mma.sync and cp.async: on every
// GPU from Ampere on, and with every option there is.
//
// Grid: one block for each tile of block_m query rows, head and part of the keys. Block: `warps` warps, each with
// block_m / warps rows, all of whose scores and outputs it holds in registers: no exchange between warps. Shared memory:
// FwdSharedMemory. Its page, with what was measured: docs/kernels/fwd_sm80.md.
#pragma once

#include "tessera/core/online_softmax.cuh"
#include "tessera/core/philox.cuh"
#include "tessera/core/scheduler.cuh"
#include "tessera/core/score.cuh"
#include "tessera/tile/product.cuh"

namespace tessera {

template <FwdConfig kCfg>
struct FwdSharedMemory {
  union {
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ;
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v> sO;  // once the last product with Q is done
  };
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim> sK[kCfg.stages];
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v> sV[kCfg.stages];
};

// Row r of the tile-space of a sequence: query r of the block's head, or, with packed heads, query r / group of head
// r % group of the group, so that a tile's queries are neighbours and see nearly the same keys.
template <FwdConfig kCfg>
struct QueryRows {
  int rows;  // of the sequence
  int group, head0;

  TESSERA_DEVICE QueryRows(const ProblemParams& p, const Sequence& s, int head_slot)
      : rows(kCfg.pack_heads ? s.sq * p.group : s.sq),
        group(p.group),
        head0(kCfg.pack_heads ? head_slot * p.group : head_slot) {}
  TESSERA_DEVICE int query(int row) const { return kCfg.pack_heads ? row / group : row; }
  TESSERA_DEVICE int head(int row) const { return kCfg.pack_heads ? head0 + row % group : head0; }
};

// Keys first ... of K or V, columns col ..., into a tile.
template <FwdConfig kCfg, class Tile>
TESSERA_DEVICE void load_keys(Tile& sTile, const FwdParams& p, const RowTensor& tensor, const Sequence& s, int batch,
                              int head_kv, int first, int col, int columns) {
  constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const int count = min(s.sk - first, kCfg.block_n);
  const char* base = static_cast<const char*>(tensor.data) + (tensor.head * head_kv + col) * kBytes;
  if constexpr (kCfg.paged) {
    load_tile<kCfg.aligned, kCfg.warps * 32>(sTile, count, columns * kBytes, [&](int row) {
      const int key = min(first + row, s.sk - 1);
      const int page = p.page_table[p.page_table_batch * batch + p.page_table_col * (key / p.page_size)];
      return base + (tensor.batch * clamp(page, 0, p.pages - 1) + tensor.row * (key % p.page_size)) * kBytes;
    });
  } else {
    base += (tensor.batch * batch + tensor.row * (static_cast<int64>(s.k_begin) + first)) * kBytes;
    load_tile_strided<kCfg.aligned, kCfg.warps * 32>(sTile, count, columns * kBytes, base, tensor.row * kBytes);
  }
}

// -inf for the scores of keys that a row does not see by its position.
template <FwdConfig kCfg, int kM, int kN>
TESSERA_DEVICE void hide_keys(float (&rS)[kM][kN][4], const FwdParams& p, const Sequence& s, const QueryRows<kCfg>& map,
                              int row0, int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(row0 + m * 16 + half * 8 + lane_row(), map.rows - 1);
      const KeyRange keys = visible_keys(p, s, map.query(row));
      const int low = keys.low - key0 - lane_col(), high = keys.high - key0 - lane_col();
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e < low || n * 8 + e > high) rS[m][n][2 * half + e] = -infinity();
        }
    }
}

// Products to scores with every option, core/score.
template <FwdConfig kCfg, int kM, int kN>
TESSERA_DEVICE void apply_scores(float (&rS)[kM][kN][4], const FwdParams& p, const Sequence& s,
                                 const QueryRows<kCfg>& map, int batch, int row0, int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(row0 + m * 16 + half * 8 + lane_row(), map.rows - 1);
      const ScoreRow<kCfg.score> score_row(p, s, batch, map.head(row), map.query(row));
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = rS[m][n][2 * half + e];
          x = score<kCfg.score>(p, s, score_row, key0 + n * 8 + lane_col() + e, x).value;
        }
    }
}

// Zero for what dropout takes away.
template <FwdConfig kCfg, int kM, int kN>
TESSERA_DEVICE void drop(float (&rP)[kM][kN][4], const FwdParams& p, const QueryRows<kCfg>& map, int batch, int row0,
                         int key0) {
  static_assert(kN == 2 || kN % 4 == 0, "a call of Philox decides four tiles of 8 keys");
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + m * 16 + half * 8 + lane_row();
      const int head = batch * p.heads_q + map.head(row);
#pragma unroll
      for (int n = 0; n < kN; n += 4) {
        const PhiloxWords words = dropout_words(p, head, map.query(row), (key0 + n * 8) / 32, lane_col() / 2);
#pragma unroll
        for (int t = 0; t < min(4, kN); ++t) {
          // A tile of 16 keys is either half of a group.
          const uint32 word = kN == 2 && key0 % 32 != 0 ? words.word[(t + 2) % 4] : words.word[t];
          if (!keeps_low(word, p.dropout_threshold)) rP[m][n + t][2 * half] = 0.0f;
          if (!keeps_high(word, p.dropout_threshold)) rP[m][n + t][2 * half + 1] = 0.0f;
        }
      }
    }
}

template <FwdConfig kCfg>
TESSERA_DEVICE void fwd_sm80(const FwdParams& p) {
  constexpr int kThreads = kCfg.warps * 32, kBytes = dtype_bytes(kCfg.dtype);
  constexpr int kM = kCfg.block_m / kCfg.warps / 16;  // tiles of 16 rows a warp
  constexpr int kN = kCfg.block_n / 8, kD = kCfg.head_dim_v / 8;
  static_assert(kM * kCfg.warps * 16 == kCfg.block_m, "a warp has a multiple of 16 rows");
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<FwdSharedMemory<kCfg>*>(shared_memory);

  // 1. Which tile is mine, and which keys it sees.
  const Work work =
      query_tile<kCfg.block_m>(p, kCfg.pack_heads ? p.heads_kv : p.heads_q, kCfg.pack_heads ? p.group : 1);
  if (work.tile < 0) return;
  const Sequence s = load_sequence(p, work.batch);
  const QueryRows<kCfg> map(p, s, work.head);
  const int head_kv = kCfg.pack_heads ? work.head : work.head / p.group;
  const int row0 = work.tile * kCfg.block_m, count = min(map.rows - row0, kCfg.block_m);
  const TileRange visible = visible_keys(p, s, map.query(row0), map.query(row0 + count - 1));
  const int key_begin = max(max(visible.some.low, 0), kCfg.split ? work.split * p.split_keys : 0);
  const int key_end = min(visible.some.high + 1, kCfg.split ? (work.split + 1) * p.split_keys : s.sk);
  const int first = key_begin / kCfg.block_n, last = (key_end + kCfg.block_n - 1) / kCfg.block_n;  // [first, last)

  // Values wider than a warp's registers are taken in slices, each by a block of its own that computes S again.
  const int dv_begin = static_cast<int>(blockIdx.y) * kCfg.head_dim_v;
  const int dv_count = min(p.head_dim_v - dv_begin, kCfg.head_dim_v);

  // 2. Q: global -> shared, with the first tiles of K and V.
  const char* gQ = static_cast<const char*>(p.q.data) + p.q.batch * work.batch * kBytes;
  load_tile<kCfg.aligned, kThreads>(shared.sQ, count, p.head_dim * kBytes, [&](int row) {
    const int64 query = s.q_begin + map.query(row0 + row);
    return gQ + (p.q.row * query + p.q.head * map.head(row0 + row)) * kBytes;
  });
  // Two groups a tile, empty ones behind the last: the count stays.
  const auto load_block = [&](int block, int stage) {
    const int key0 = block * kCfg.block_n;
    if (block < last) load_keys<kCfg>(shared.sK[stage], p, p.k, s, work.batch, head_kv, key0, 0, p.head_dim);
    ptx::cp_async_commit_group();
    if (block < last) load_keys<kCfg>(shared.sV[stage], p, p.v, s, work.batch, head_kv, key0, dv_begin, dv_count);
    ptx::cp_async_commit_group();
  };
  constexpr int kAhead = kCfg.stages - 1;  // tiles that are loaded before they are needed
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) load_block(first + stage, stage);

  // 3. For every tile of keys that a row of mine sees.
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * (kM * 16);
  float rO[kM][kD][4];
  clear(rO);
  OnlineSoftmax<kM> softmax;
  [[maybe_unused]] RegisterA<kM, kCfg.head_dim> rQ;
  int stage = 0;
  for (int block = first; block < last; ++block) {
    // Of the first tile only K has to be there before its product, of the others, loaded long ago, V too: one barrier less.
    const bool v_later = kCfg.stages == 1 || block == first;
    if constexpr (kAhead == 0) {
      __syncthreads();  // everybody is done with the tile before
      load_block(block, 0);
    }
    if (v_later) {
      ptx::cp_async_wait_group<kAhead == 0 ? 1 : 2 * kAhead - 1>();
    } else {
      ptx::cp_async_wait_group<kAhead == 0 ? 0 : 2 * kAhead - 2>();
    }
    __syncthreads();  // the tile is there for everybody, and everybody is done with the one before
    if constexpr (kAhead > 0) load_block(block + kAhead, stage == 0 ? kAhead : stage - 1);
    if constexpr (kCfg.q_in_registers) {
      if (block == first) rQ.load(shared.sQ, warp_row);
    }

    //    S = Q K^T; where a row sees a part of the tile, or options change scores, -inf for what is not visible; online
    //    softmax, P in place of S and O rescaled. The optimistic way first, where it can be gone: core/online_softmax.
    const int key0 = block * kCfg.block_n;
    const bool whole = key0 >= visible.all.low && key0 + kCfg.block_n - 1 <= visible.all.high;
    float rS[kM][kN][4];
    bool optimistic = !kCfg.score.any() && whole && softmax.ready;
    for (;; optimistic = false) {
      clear(rS);
      if constexpr (kCfg.q_in_registers) {
        product_abt(rS, rQ, shared.sK[stage], 0);
      } else {
        product_abt(rS, shared.sQ, warp_row, shared.sK[stage], 0);
      }
      if constexpr (!kCfg.score.any()) {
        if (optimistic) {
          if (softmax.template try_update<kCfg.dtype>(rS, p.scale_log2)) break;
          continue;
        }
        if (!whole) hide_keys<kCfg>(rS, p, s, map, row0 + warp_row, key0);
      } else {
        apply_scores<kCfg>(rS, p, s, map, work.batch, row0 + warp_row, key0);
      }
      softmax.update(rS, kCfg.score.any() ? 1.0f : p.scale_log2, rO);
      break;
    }

    //    dropout, behind the sum: the LSE is that before it
    if constexpr (kCfg.score.dropout) drop<kCfg>(rS, p, map, work.batch, row0 + warp_row, key0);

    //    O += P V
    if (v_later) {
      ptx::cp_async_wait_group<2 * kAhead>();
      __syncthreads();
    }
    product_pb(rO, rS, shared.sV[stage], 0);
    stage = stage + 1 == kCfg.stages ? 0 : stage + 1;
  }

  // 4. O / l and LSE: registers -> (shared ->) global. A row that sees nothing: 0 and -inf.
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // nobody reads or fills Q, whose place O takes
  softmax.finish();
  const int64 partial = static_cast<int64>(work.split) * p.heads_q;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = warp_row + m * 16 + half * 8 + lane_row(), row = row0 + local;
      const int query = map.query(row), head = map.head(row);
      float ref = softmax.ref[m][half], sum = softmax.sum[m][half], scale = 1.0f;
      const bool seen = sum != 0.0f;  // NaN counts as seen
      if (!kCfg.split && p.sink && seen && local < count) {
        const float sink = p.sink[p.sink_head * head] * kLog2e;
        const float joint = fmaxf(sink, ref);
        scale = ptx::ex2_approx_ftz(ref - joint);
        sum = sum * scale + ptx::ex2_approx_ftz(sink - joint);
        ref = joint;
      }
      if constexpr (kCfg.score.dropout) scale *= p.dropout_scale;
      const float factor = seen ? scale / sum : 0.0f;
      const float lse = seen ? (ref + log2f(sum)) * kLn2 : -infinity();
      const int64 partial_row = (partial + head) * p.rows_total + s.row_begin + query;
      if (local < count && lane_col() == 0 && dv_begin == 0) {
        if constexpr (kCfg.split) {
          p.partial_lse[partial_row] = lse;
        } else if (p.lse.data) {
          p.lse.data[p.lse.batch * work.batch + p.lse.head * head + p.lse.row * (s.q_begin + query)] = lse;
        }
      }
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        const float low = seen ? rO[m][d][2 * half] * factor : 0.0f;
        const float high = seen ? rO[m][d][2 * half + 1] * factor : 0.0f;
        const int col = d * 8 + lane_col();
        if constexpr (kCfg.split) {
          float* to = p.partial_o + partial_row * p.head_dim_v + dv_begin + col;
          if (local < count && col < dv_count) to[0] = low;
          if (local < count && col + 1 < dv_count) to[1] = high;
        } else if constexpr (kBytes == 2) {
          *reinterpret_cast<uint32*>(shared.sO.pointer(local, col)) = pack_pair<kCfg.dtype>(low, high);
        } else {
          *reinterpret_cast<float2*>(shared.sO.pointer(local, col)) = make_float2(low, high);
        }
      }
    }
  if constexpr (!kCfg.split) {
    __syncwarp();  // a warp stores its own rows
    store_rows<kM * 16>(shared.sO, warp_row, count, dv_count, p.o_aligned, [&](int local) {
      const int64 query = s.q_begin + map.query(row0 + local);
      return static_cast<char*>(p.o.data) +
             (p.o.batch * work.batch + p.o.row * query + p.o.head * map.head(row0 + local) + dv_begin) * kBytes;
    });
  }
}

}  // namespace tessera
