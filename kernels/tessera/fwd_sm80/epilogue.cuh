// From a warp's sums and accumulators to O and LSE, or to the partial results of a split, in global memory.
#pragma once

#include "tessera/attention/softmax.cuh"
#include "tessera/fwd_sm80/shared.cuh"
#include "tessera/tile/shared_tile.cuh"

namespace tessera {

// Turns a row's sum and maximum over all keys into its LSE and the factor of its accumulators.
template <FwdSm80Config kCfg>
struct FwdRow {
  bool there, seen;  // there: the row is in the sequence; seen: it sees a key, otherwise its O is 0 and its LSE -inf
  int64 partial;     // index in the partial results of a split
  TwoFloats lse;
  float factor;

  TESSERA_DEVICE FwdRow(const FwdSm80Params& p, const FwdBlock<kCfg>& b, int local, RowTotal total)
      : there(local < b.count), seen(total.sum != 0.0f) {  // NaN counts as seen
    const int head = b.map.head(b.row0 + local);
    partial = (static_cast<int64>(b.work.split) * p.heads_q + head) * p.rows_total + b.s.row_begin +
              b.map.query(b.row0 + local);
    float scale = 1.0f;
    if (!kCfg.split && p.sink && seen && there) scale = total.join_sink(p, p.sink[p.sink_head * head]);
    if constexpr (kCfg.score.dropout) scale *= p.dropout_scale;
    const bool low = kCfg.split || p.lse_low.data;
    if constexpr (kCfg.dtype == Dtype::kFloat32) {
      factor = seen ? scale / total.sum : 0.0f;
      lse = seen ? total.lse(p, log2f(total.sum), low) : unseen_lse();
    } else {  // 38 instructions less
      factor = seen ? scale * ptx::rcp_approx_ftz(total.sum) : 0.0f;
      lse = seen ? total.lse(p, ptx::lg2_approx_ftz(total.sum), low) : unseen_lse();
    }
  }
};

// Called by one lane of each row.
template <FwdSm80Config kCfg>
TESSERA_DEVICE void store_row_lse(const FwdSm80Params& p, const FwdBlock<kCfg>& b, int local, const FwdRow<kCfg>& row) {
  if (!row.there || b.dv_begin != 0) return;
  if constexpr (kCfg.split) {
    p.partial_lse[row.partial] = row.lse.high, p.partial_lse_low[row.partial] = row.lse.low;
  } else {
    const int query = b.map.query(b.row0 + local), head = b.map.head(b.row0 + local);
    store_lse(p, b.work.batch, head, static_cast<int64>(b.s.q_begin) + query, row.lse);
  }
}

// Writes two neighbours of an accumulator to the tile that is stored to o or, if keys are split, to the partial result.
template <FwdSm80Config kCfg, class Tile>
TESSERA_DEVICE void put_output(Tile& sO, const FwdSm80Params& p, const FwdBlock<kCfg>& b, const FwdRow<kCfg>& row,
                               int local, int col, float low, float high) {
  low *= row.factor, high *= row.factor;
  // The accumulators of a row that sees nothing may hold NaN from V.
  if constexpr (kCfg.split || Tile::kElemBytes == 4) {
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

// Stores kRows rows of the tile from `first` on to o, by one warp.
template <int kRows, FwdSm80Config kCfg, class Tile>
TESSERA_DEVICE void store_output(Tile& sO, const FwdSm80Params& p, const FwdBlock<kCfg>& b, int first) {
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

// Finishes a warp's rows after all keys: tiles of 16 rows from row `row` of the block on, kRowStep apart. O / l and
// LSE: registers -> (shared ->) global. A row that sees nothing gets 0 and -inf. No other warp uses these rows of sO.
template <int kRowStep = 16, FwdSm80Config kCfg, class Tile, int kM, int kD>
TESSERA_DEVICE void finish_rows(Tile& sO, const FwdSm80Params& p, const FwdBlock<kCfg>& b, OnlineSoftmax<kM>& softmax,
                                const float (&rO)[kM][kD][4], int row) {
  softmax.finish();
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = row + m * kRowStep + half * 8 + lane_row();
      const FwdRow<kCfg> result(p, b, local, softmax.total(m, half));
      if (lane_col() == 0) store_row_lse(p, b, local, result);
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        put_output(sO, p, b, result, local, d * 8 + lane_col(), rO[m][d][2 * half], rO[m][d][2 * half + 1]);
      }
    }
  if constexpr (!kCfg.split) {
    // A warp stores its own rows Unrolled it costs compile time; as a loop it costs registers that a persistent kernel
    // lacks.
    __syncwarp();
#pragma unroll(FwdBlock <kCfg>::kPersistent ? kM : 1)
    for (int m = 0; m < kM; ++m) store_output<16>(sO, p, b, row + m * kRowStep);
  }
}

}  // namespace tessera
