// What the forward kernels by mma.sync, fwd_sm80/kernel.cuh, its persistent one and fwd_sm80/pairs.cuh, have in common: which
// rows and keys a block has, their way into shared memory, the scores beyond the product, and a row's way out.
#pragma once

#include "tessera/attention/dropout.cuh"
#include "tessera/attention/mask.cuh"
#include "tessera/attention/scheduler.cuh"
#include "tessera/attention/score/fragment.cuh"
#include "tessera/attention/softmax.cuh"
#include "tessera/attention/unowned_rows.cuh"
#include "tessera/fwd_sm80/config.hpp"

namespace tessera {

struct Work {
  int batch, head, split;
  int tile;  // of the sequence; -1: none, there are fewer tiles than blocks
};

// Forward: place -> (batch, head, split, tile of block_m rows); of `place`, a head is a (batch, head, split).
template <int kBlockM, bool kSplit, ScoreConfig kScore>
TESSERA_DEVICE Work query_tile(const FwdParams& p, TileCoord place, const Divisor& heads, int rows_a_query) {
  Work w;
  int rest = place.head;
  w.split = 0;
  if constexpr (kSplit) w.split = rest % p.num_splits, rest /= p.num_splits;
  const SequenceHead of = sequence_head<kScore>(p, rest, heads);
  w.batch = of.batch, w.head = of.head;
  const int slot = place.slot;
  int tile = slot;
  if (p.cu_seqlens_q) {
    w.batch = find_sequence<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, rows_a_query, slot);
    tile = tile_at_slot<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, rows_a_query, slot, w.batch);
  }
  const Sequence s = load_sequence(p, w.batch);
  const int tiles = static_cast<int>((static_cast<int64>(s.sq) * rows_a_query + kBlockM - 1) / kBlockM);
  w.tile = tiles - 1 - tile;
  return w;
}

// Rows of no sequence (attention/unowned_rows.cuh), by the blocks of a grid with one for each place: those whose slots come after the last sequence's, of which there is
// always one. Where keys are split, their merge does it.
template <FwdConfig kCfg>
TESSERA_DEVICE void clear_unowned_outputs_at(const FwdParams& p, TileCoord place, int heads) {
  if (kCfg.split || !p.cu_seqlens_q || blockIdx.y != 0) return;
  const int first = slot_begin<kCfg.block_m>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q,
                                             kCfg.pack_gqa ? p.group : 1, p.batch);
  const int slots = p.tiles - first;
  if (place.slot < first) return;
  const int64 block = static_cast<int64>(place.head) * slots + place.slot - first;
  clear_unowned_outputs<kCfg.dtype>(p, block * kCfg.warps + static_cast<int>(threadIdx.x) / 32,
                                    static_cast<int64>(heads) * slots * kCfg.warps);
}

// Row r of the tile-space of a sequence: query r of the block's head, or, with packed heads, query r / group of head
// r % group of the group, so that a tile's queries are neighbours and see nearly the same keys.
template <FwdConfig kCfg>
struct QueryRows {
  int rows;  // of the sequence
  int group, head0;

  TESSERA_DEVICE QueryRows(const ProblemParams& p, const Sequence& s, int head_slot)
      : rows(kCfg.pack_gqa ? s.sq * p.group : s.sq),
        group(p.group),
        head0(kCfg.pack_gqa ? head_slot * p.group : head_slot) {}
  TESSERA_DEVICE int query(int row) const { return kCfg.pack_gqa ? row / group : row; }
  TESSERA_DEVICE int head(int row) const { return kCfg.pack_gqa ? head0 + row % group : head0; }
};

// A block's tile of query rows, and the tiles of keys that they see.
template <FwdConfig kCfg>
struct FwdBlock {
  static constexpr bool kPersistent = persistent(kCfg);  // keeps it in shared memory
  Work work;                                             // work.tile < 0: none, and nothing else here means anything
  Sequence s;
  QueryRows<kCfg> map;
  int head_kv;
  int row0, count;         // rows of the sequence
  TileRange visible;       // keys
  int first, last;         // [first, last), tiles of block_n keys
  int dv_begin, dv_count;  // columns of V: more than registers hold are taken in slices, each by a block of its own

  TESSERA_DEVICE FwdBlock(const FwdParams& p, TileCoord place)
      : work(query_tile<kCfg.block_m, kCfg.split, kCfg.score>(p, place, kCfg.pack_gqa ? p.heads_kv : p.heads_q,
                                                              kCfg.pack_gqa ? p.group : 1)),
        s(kPersistent ? load_sequence(p, work.batch) : uniform(load_sequence(p, work.batch))),
        map(p, s, work.head),
        head_kv(kCfg.pack_gqa ? work.head : work.head / p.group),
        row0(work.tile * kCfg.block_m),
        count(min(map.rows - row0, kCfg.block_m)),
        visible(visible_keys(p, s, map.query(row0), map.query(row0 + count - 1))),
        dv_begin(static_cast<int>(blockIdx.y) * kCfg.head_dim_v),
        dv_count(min(p.head_dim_v - dv_begin, kCfg.head_dim_v)) {
    const int begin = max(max(visible.some.low, 0), kCfg.split ? work.split * p.split_keys : 0);
    const int end = min(visible.some.high + 1, kCfg.split ? (work.split + 1) * p.split_keys : s.sk);
    first = begin / kCfg.block_n, last = (end + kCfg.block_n - 1) / kCfg.block_n;
    // A window that ends before this part of the keys or begins behind it: a tile that is taken all the same must be one
    // that no row sees.
    if (kCfg.split && last <= first) first = last = (s.sk + kCfg.block_n - 1) / kCfg.block_n;
  }

  // What rows first ... of the block see; of those behind its last what that sees.
  TESSERA_DEVICE TileRange seen_by(const FwdParams& p, int first, int rows) const {
    const auto query = [&](int row) { return map.query(row0 + min(row, count - 1)); };
    return visible_keys(p, s, query(first), query(first + rows - 1));
  }
};

template <FwdConfig kCfg>
struct FwdSharedMemory {
  union {
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ;
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v> sO;  // once the last product with Q is done
  };
  static constexpr bool kLaneOrder = kCfg.score.lane_order(kCfg.block_n);
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim, kLaneOrder> sK[kCfg.stages];
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v, kLaneOrder> sV[kCfg.stages];
};

// ---- global -> shared memory ----

template <FwdConfig kCfg, class Tile>
TESSERA_DEVICE void load_queries(Tile& sQ, const FwdParams& p, const FwdBlock<kCfg>& b) {
  constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const char* base = static_cast<const char*>(p.q.data) + p.q.batch * b.work.batch * kBytes;
  if constexpr (!kCfg.pack_gqa) {
    base += (p.q.row * (static_cast<int64>(b.s.q_begin) + b.row0) + p.q.head * b.work.head) * kBytes;
    load_tile_strided<kCfg.aligned, kCfg.warps * 32>(sQ, b.count, p.head_dim * kBytes, base, p.q.row * kBytes);
    return;
  }
  load_tile<kCfg.aligned, kCfg.warps * 32>(sQ, b.count, p.head_dim * kBytes, [&](int row) {
    const int64 query = b.s.q_begin + b.map.query(b.row0 + row);
    return base + (p.q.row * query + p.q.head * b.map.head(b.row0 + row)) * kBytes;
  });
}

// Where keys first ... of K or V lie, from column col on; not of pages.
template <FwdConfig kCfg>
TESSERA_DEVICE const char* key_rows(const FwdParams& p, const RowTensor& tensor, const FwdBlock<kCfg>& b, int first,
                                    int col) {
  constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const char* base = static_cast<const char*>(tensor.data) + (tensor.head * b.head_kv + col) * kBytes;
  return base + (tensor.batch * b.work.batch + tensor.row * (static_cast<int64>(b.s.k_begin) + first)) * kBytes;
}

// Keys first ... of K or V, columns col ..., into a tile.
template <FwdConfig kCfg, class Tile>
TESSERA_DEVICE void load_keys(Tile& sTile, const FwdParams& p, const RowTensor& tensor, const FwdBlock<kCfg>& b,
                              int first, int col, int columns) {
  constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const int count = min(b.s.sk - first, kCfg.block_n);
  if constexpr (kCfg.paged) {
    const char* base = static_cast<const char*>(tensor.data) + (tensor.head * b.head_kv + col) * kBytes;
    load_tile_scattered<kCfg.aligned, kCfg.warps * 32>(sTile, count, columns * kBytes, base, [&](int row) {
      const int key = min(first + row, b.s.sk - 1);
      const int page = p.page_table[p.page_table_batch * b.work.batch + p.page_table_col * (key / p.page_size)];
      return (tensor.batch * clamp(page, 0, p.pages - 1) + tensor.row * (key % p.page_size)) * kBytes;
    });
  } else {
    load_tile_strided<kCfg.aligned, kCfg.warps * 32>(sTile, count, columns * kBytes, key_rows(p, tensor, b, first, col),
                                                     tensor.row * kBytes);
  }
}

// ---- scores: tiles of 16 rows, kRowStep apart, from row `row0` of the sequence on ----

// -inf for keys that a row does not see by its position.
template <FwdConfig kCfg, int kRowStep = 16, int kM, int kN>
TESSERA_DEVICE void apply_mask(float (&rS)[kM][kN][4], const FwdParams& p, const FwdBlock<kCfg>& b, int row0,
                               int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(row0 + m * kRowStep + half * 8 + lane_row(), b.map.rows - 1);
      const KeyRange keys = visible_keys(p, b.s, b.map.query(row));
      mask_outside(rS[m], half, keys.low - key0 - lane_col(), keys.high - key0 - lane_col());
    }
}

// What the elements of a lane's row share: of a tile of 16 rows the first half or the second.
template <int kRowStep, FwdConfig kCfg>
TESSERA_DEVICE ScoreRow<kCfg.score> score_row(const FwdParams& p, const FwdBlock<kCfg>& b, int row0, int m, int half) {
  const int row = min(row0 + m * kRowStep + half * 8 + lane_row(), b.map.rows - 1);
  return {p, b.s, b.work.batch, b.map.head(row), b.map.query(row)};
}

// Products to scores with every option, attention/score/score.
template <FwdConfig kCfg, int kRowStep = 16, int kM, int kN>
TESSERA_DEVICE void apply_scores(float (&rS)[kM][kN][4], const FwdParams& p, const FwdBlock<kCfg>& b, int row0,
                                 int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ScoreRow<kCfg.score> row = score_row<kRowStep>(p, b, row0, m, half);
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = rS[m][n][2 * half + e];
          const int key = key0 + key_at<kCfg.score.lane_order(kCfg.block_n)>(n, lane_col() + e);
          x = score<kCfg.score>(p, b.s, row, key, x).value;
        }
    }
}

// The same for a tile that every row sees whole, or whose mask is applied afterwards; of bias and mask what load_bias_mask
// found.
template <FwdConfig kCfg, int kM, int kN>
using FwdBiasMask = BiasMaskFragment<kCfg.score, kM * 2, kN, kCfg.score.lane_order(kCfg.block_n)>;

template <FwdConfig kCfg, int kM, int kN>
TESSERA_DEVICE void load_bias_mask(FwdBiasMask<kCfg, kM, kN>& entries, const FwdParams& p, const FwdBlock<kCfg>& b,
                                   int row0, int key0) {
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) entries.load(i, p, score_row<16>(p, b, row0, i / 2, i % 2), key0);
}
template <FwdConfig kCfg, int kM, int kN>
TESSERA_DEVICE void apply_whole_scores(float (&rS)[kM][kN][4], const FwdBiasMask<kCfg, kM, kN>& entries,
                                       const FwdParams& p, const FwdBlock<kCfg>& b, int row0, int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      entries.apply(rS[m], half, m * 2 + half, p, b.s, score_row<16>(p, b, row0, m, half), key0);
    }
}

// Zero for what dropout takes away.
template <FwdConfig kCfg, int kRowStep = 16, int kM, int kN>
TESSERA_DEVICE void drop(float (&rP)[kM][kN][4], const FwdParams& p, const FwdBlock<kCfg>& b, int row0, int key0) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + m * kRowStep + half * 8 + lane_row();
      tessera::drop(rP[m], half, p, b.work.batch * p.heads_q + b.map.head(row), b.map.query(row), key0);
    }
}

// ---- results ----

// A row's sum and reference, once all keys have passed -> its LSE, and what its accumulators are multiplied by.
template <FwdConfig kCfg>
struct FwdRow {
  bool there, seen;  // in the sequence; by a key: a row that sees nothing has 0 and -inf
  int64 partial;     // in the parts of a split
  float lse, factor;

  TESSERA_DEVICE FwdRow(const FwdParams& p, const FwdBlock<kCfg>& b, int local, float ref, float sum)
      : there(local < b.count), seen(sum != 0.0f) {  // NaN counts as seen
    const int head = b.map.head(b.row0 + local);
    partial = (static_cast<int64>(b.work.split) * p.heads_q + head) * p.rows_total + b.s.row_begin +
              b.map.query(b.row0 + local);
    float scale = 1.0f;
    if (!kCfg.split && p.sink && seen && there) scale = join_sink(p.sink[p.sink_head * head] * kLog2e, ref, sum);
    if constexpr (kCfg.score.dropout) scale *= p.dropout_scale;
    if constexpr (kCfg.dtype == Dtype::kFloat32) {
      factor = seen ? scale / sum : 0.0f;
      lse = seen ? (ref + log2f(sum)) * kLn2 : -infinity();
    } else {  // 38 instructions less
      factor = seen ? scale * ptx::rcp_approx_ftz(sum) : 0.0f;
      lse = seen ? (ref + ptx::lg2_approx_ftz(sum)) * kLn2 : -infinity();
    }
  }
};

// By one lane of each row.
template <FwdConfig kCfg>
TESSERA_DEVICE void store_lse(const FwdParams& p, const FwdBlock<kCfg>& b, int local, const FwdRow<kCfg>& row) {
  if (!row.there || b.dv_begin != 0) return;
  if constexpr (kCfg.split) {
    p.partial_lse[row.partial] = row.lse;
  } else if (p.lse.data) {
    const int query = b.map.query(b.row0 + local), head = b.map.head(b.row0 + local);
    p.lse.data[p.lse.batch * b.work.batch + p.lse.head * head + p.lse.row * (b.s.q_begin + query)] = row.lse;
  }
}

// Two neighbours of an accumulator: into the tile that goes to o, or, where keys are split, to their place in a part.
template <FwdConfig kCfg, class Tile>
TESSERA_DEVICE void put_output(Tile& sO, const FwdParams& p, const FwdBlock<kCfg>& b, const FwdRow<kCfg>& row,
                               int local, int col, float low, float high) {
  low *= row.factor, high *= row.factor;
  if constexpr (kCfg.split || Tile::kElemBytes == 4) {  // a row that sees nothing may have met NaN in V
    low = row.seen ? low : 0.0f, high = row.seen ? high : 0.0f;
  }
  if constexpr (kCfg.split) {
    float* to = p.partial_o + row.partial * p.head_dim_v + b.dv_begin + col;
    if (row.there && col < b.dv_count) to[0] = low;
    if (row.there && col + 1 < b.dv_count) to[1] = high;
  } else if constexpr (Tile::kElemBytes == 2) {
    const uint32 both = pack_pair<kCfg.dtype>(low, high);
    *reinterpret_cast<uint32*>(sO.pointer(local, col)) = row.seen ? both : 0;
  } else {
    *reinterpret_cast<float2*>(sO.pointer(local, col)) = make_float2(low, high);
  }
}

// kRows rows of the tile from `first` on -> o, by one warp.
template <int kRows, FwdConfig kCfg, class Tile>
TESSERA_DEVICE void store_output(Tile& sO, const FwdParams& p, const FwdBlock<kCfg>& b, int first) {
  char* base = static_cast<char*>(p.o.data) + (p.o.batch * b.work.batch + b.dv_begin) * Tile::kElemBytes;
  if constexpr (!kCfg.pack_gqa) {
    base += (p.o.row * (static_cast<int64>(b.s.q_begin) + b.row0) + p.o.head * b.work.head) * Tile::kElemBytes;
    store_rows_strided<kRows>(sO, first, b.count, b.dv_count, p.o_aligned, base, p.o.row * Tile::kElemBytes);
    return;
  }
  store_rows<kRows>(sO, first, b.count, b.dv_count, p.o_aligned, [&](int local) {
    const int64 query = b.s.q_begin + b.map.query(b.row0 + local);
    return base + (p.o.row * query + p.o.head * b.map.head(b.row0 + local)) * Tile::kElemBytes;
  });
}

// A warp's rows once all keys have passed, tiles of 16 from row `row` of the block on, kRowStep apart: O / l and LSE,
// registers -> (shared ->) global. A row that sees nothing: 0 and -inf. Nobody else needs their places in sO.
template <int kRowStep = 16, FwdConfig kCfg, class Tile, int kM, int kD>
TESSERA_DEVICE void finish_rows(Tile& sO, const FwdParams& p, const FwdBlock<kCfg>& b, OnlineSoftmax<kM>& softmax,
                                const float (&rO)[kM][kD][4], int row) {
  softmax.finish();
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = row + m * kRowStep + half * 8 + lane_row();
      const FwdRow<kCfg> result(p, b, local, softmax.ref[m][half], softmax.sum[m][half]);
      if (lane_col() == 0) store_lse(p, b, local, result);
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        put_output(sO, p, b, result, local, d * 8 + lane_col(), rO[m][d][2 * half], rO[m][d][2 * half + 1]);
      }
    }
  if constexpr (!kCfg.split) {
    __syncwarp();  // a warp stores its own rows
                   // Written out it takes time to compile, as a loop the registers that a persistent kernel has not.
#pragma unroll(FwdBlock <kCfg>::kPersistent ? kM : 1)
    for (int m = 0; m < kM; ++m) store_output<16>(sO, p, b, row + m * kRowStep);
  }
}

}  // namespace tessera
