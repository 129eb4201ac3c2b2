// From a consumer's sums and accumulators to O and LSE in global memory.
#pragma once

#include "tessera/attention/softmax.cuh"
#include "tessera/fwd_sm90/shared.cuh"
#include "tessera/ptx/async_copy.cuh"

namespace tessera {

// The query of its sequence, and the query head, that a row of the work tile is.
template <FwdSm90Config kCfg>
struct TileRow {
  int query, head;
  TESSERA_DEVICE TileRow(const FwdSm90Params& p, const WorkTile<kCfg>& tile, int row)
      : query(query_of_row<kCfg>(p, tile.row0 + row)), head(tile.head) {
    if constexpr (kCfg.pack_gqa) head = tile.head * p.group.value + tile.row0 + row - query * p.group.value;
  }
};

// The address of a row of the work tile in O.
template <FwdSm90Config kCfg>
TESSERA_DEVICE char* output_at(const FwdSm90Params& p, const WorkTile<kCfg>& tile, int row) {
  const TileRow<kCfg> of(p, tile, row);
  return static_cast<char*>(p.o.data) +
         (p.o.batch * tile.batch + p.o.head * of.head + p.o.row * (static_cast<int64>(tile.s.q_begin) + of.query)) * 2;
}

// With split keys: the index of a row of the work tile among the rows of all parts.
template <FwdSm90Config kCfg>
TESSERA_DEVICE int64 partial_row(const FwdSm90Params& p, const WorkTile<kCfg>& tile, int row) {
  const TileRow<kCfg> of(p, tile, row);
  return of.head * p.rows_total + tile.s.row_begin + of.query;
}

// Where clusters merge parts: a block's part of its work tile. O is where Q, K and V were, which are no longer needed;
// LSEs, written while other consumers still multiply, are where blocks without parts stage O.
template <FwdSm90Config kCfg>
struct PartBuffers {
  static constexpr int kRows = kConsumerRows * kCfg.consumers;
  static constexpr int kStride = kCfg.head_dim_v + 8;  // floats; the padding avoids bank conflicts
  static_assert(!kCfg.merges() || kRows * kStride * 4 <= fwd_sm90_layout(kCfg).o, "O where Q, K and V were");
  static constexpr int kMergedRows = (kRows + kCfg.merge_blocks - 1) / kCfg.merge_blocks;
  static_assert(!kCfg.merges() || kRows * 8 + 16 + kMergedRows * kMergeParts * 4 <=
                                      fwd_sm90_layout(kCfg).work_tiles - fwd_sm90_layout(kCfg).o);

  TESSERA_DEVICE static float* o(FwdSm90SharedMemory<kCfg>& shared) { return reinterpret_cast<float*>(&shared); }
  TESSERA_DEVICE static float2* lse(FwdSm90SharedMemory<kCfg>& shared) {
    return reinterpret_cast<float2*>(shared.sO[0].data);
  }
  // Whether this block is the last to arrive with its rows.
  TESSERA_DEVICE static int* flag(FwdSm90SharedMemory<kCfg>& shared) {
    return reinterpret_cast<int*>(lse(shared) + kRows);
  }
  // The weights of the parts of a row that this block merges.
  TESSERA_DEVICE static float* weights(FwdSm90SharedMemory<kCfg>& shared, int row) {
    return reinterpret_cast<float*>(flag(shared) + 4) + row * kMergeParts;
  }
};

template <FwdSm90Config kCfg>
TESSERA_DEVICE void store_row_lse(const ConsumerGroup<kCfg>& group, const WorkTile<kCfg>& tile, int row,
                                  TwoFloats lse) {
  const FwdSm90Params& p = group.p;
  if constexpr (kCfg.merges()) {
    PartBuffers<kCfg>::lse(group.shared)[row] = make_float2(lse.high, lse.low);
  } else if constexpr (kCfg.split) {
    const int64 at = partial_row(p, tile, row);
    p.partial_lse[at] = lse.high, p.partial_lse_low[at] = lse.low;
  } else {
    const TileRow<kCfg> of(p, tile, row);
    store_lse(p, tile.batch, of.head, static_cast<int64>(tile.s.q_begin) + of.query, lse);
  }
}

// Stores O = 0 and LSE = -inf for a warp's 16 rows from row0 on, which see no key. The merge of split keys reads no O
// of such rows.
template <FwdSm90Config kCfg>
TESSERA_DEVICE void store_unseen_rows(const ConsumerGroup<kCfg>& group, const WorkTile<kCfg>& tile, int row0) {
  const FwdSm90Params& p = group.p;
  const int words = p.head_dim_v / 8;
  const int count = min(tile.count - row0, 16);
#pragma unroll 1
  for (int word = lane_id(); !kCfg.split && word < count * words; word += 32) {
    *reinterpret_cast<uint4*>(output_at(p, tile, row0 + word / words) + word % words * 16) = make_uint4(0, 0, 0, 0);
  }
  if (lane_id() < count) store_row_lse(group, tile, row0 + lane_id(), unseen_lse());
}

template <FwdSm90Config kCfg>
struct Epilogue {
  static constexpr int kD = kCfg.head_dim_v / 8;
  float factor[2];  // of a lane's two rows: 1 / l, with the factors of sink and dropout; negative: the row sees no key
  // Where clusters merge parts: whether these rows see a key of the part; O stays in registers until store_parts.
  bool has_part = false;

  // Finishes the rows' sums after all keys: stores the LSE to global memory and sets `factor`.
  TESSERA_DEVICE void finish_sums(const WorkTile<kCfg>& tile, OnlineSoftmax<1>& softmax,
                                  const ConsumerGroup<kCfg>& group) {
    softmax.finish();
    const auto& p = group.p;
    const bool seen[2] = {softmax.sum[0][0] != 0.0f, softmax.sum[0][1] != 0.0f};  // NaN counts as seen
    RowTotal total[2] = {softmax.total(0, 0), softmax.total(0, 1)};
    float scale[2] = {1.0f, 1.0f};
    if (!kCfg.split && p.sink) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int head = tile.head;
        if constexpr (kCfg.pack_gqa) {
          const int row = group.consumer * kConsumerRows + warp_row() + half * 8 + warp_lane() / 4;
          head = TileRow<kCfg>(p, tile, min(row, tile.count - 1)).head;
        }
        if (seen[half]) scale[half] = total[half].join_sink(p, p.sink[p.sink_head * head]);
      }
    }
    if (kCfg.split || p.lse.data) {
      // Of the four lanes that have a row, lane 0 stores the LSE of that row and lane 1 that of the row eight below.
      const int lane = warp_lane(), half = lane % 4;
      const int row = group.consumer * kConsumerRows + warp_row() + half * 8 + lane / 4;
      if (half < 2 && row < tile.count) {
        const RowTotal mine = half ? total[1] : total[0];
        const bool low = kCfg.split || p.lse_low.data;
        store_row_lse(group, tile, row,
                      (half ? seen[1] : seen[0]) ? mine.lse(p, ptx::lg2_approx_ftz(mine.sum), low) : unseen_lse());
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kCfg.score.dropout) scale[half] *= p.dropout_scale;
      factor[half] = seen[half] ? scale[half] * ptx::rcp_approx_ftz(total[half].sum) : -1.0f;
    }
  }

  // Of split keys: O / l in float32, registers -> workspace or the block's part of the merge (PartBuffers). A row's
  // eight columns are 32 bytes of four lanes.
  TESSERA_DEVICE void store_parts(const WorkTile<kCfg>& tile, const float (&rO)[1][kD][4],
                                  const ConsumerGroup<kCfg>& group) const {
    const int lane = warp_lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = group.consumer * kConsumerRows + warp_row() + half * 8 + lane / 4;
      if (row >= tile.count || factor[half] < 0.0f) continue;  // the merge reads no O of a row that sees no key
      float* to = PartBuffers<kCfg>::o(group.shared) + row * PartBuffers<kCfg>::kStride;
      if constexpr (!kCfg.merges()) to = group.p.partial_o + partial_row(group.p, tile, row) * group.p.head_dim_v;
      to += lane % 4 * 2;
#pragma unroll
      for (int d = 0; d < kD; ++d) {
        if (d * 8 >= group.p.head_dim_v) break;
        *reinterpret_cast<float2*>(to + d * 8) =
            make_float2(rO[0][d][2 * half] * factor[half], rO[0][d][2 * half + 1] * factor[half]);
      }
    }
  }

  // O / l: registers -> shared -> global, o_chunks chunks of columns at a time. TMA stores a warp's 16 rows; if a
  // packed sequence ends among them, the next rows belong to another sequence, and the lanes store only the rows of
  // this one. With pack_gqa, rows are of several heads, and the lanes store them.
  TESSERA_DEVICE void store(const WorkTile<kCfg>& tile, float (&rO)[1][kD][4], const ConsumerGroup<kCfg>& group) {
    if constexpr (kCfg.merges()) return static_cast<void>(has_part = true);
    if constexpr (kCfg.split) return store_parts(tile, rO, group);
    using OutputTile = typename FwdSm90SharedMemory<kCfg>::OutputTile;
    if (__any_sync(0xffffffff, factor[0] < 0.0f || factor[1] < 0.0f)) [[unlikely]] {
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) rO[0][d][e] = factor[e / 2] < 0.0f ? 0.0f : rO[0][d][e];
#pragma unroll
      for (int half = 0; half < 2; ++half) factor[half] = factor[half] < 0.0f ? 0.0f : factor[half];  // no -0
    }
    const int row0 = group.consumer * kConsumerRows + warp_row(), lane = warp_lane();
    const bool all_rows = !kCfg.pack_gqa && (!kCfg.varlen || !group.p.cu_seqlens_q || row0 + 16 <= tile.count);
    const uint32 base = shared_address(group.shared.sO[row0 / 16].data);
#pragma unroll
    for (int pass = 0; pass < kCfg.head_dim_v; pass += OutputTile::kCols) {
      const int cols = min(kCfg.head_dim_v - pass, OutputTile::kCols);
      ptx::cp_async_bulk_wait_group_read();
      __syncwarp();  // TMA has read the previous pass's columns
#pragma unroll
      for (int col = 0; col < cols; col += 16) {
        uint32 words[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const auto& o = rO[0][(pass + col) / 8 + t / 2];
          const float l = factor[t % 2];
          words[t] = pack_pair<kCfg.dtype>(o[t % 2 * 2] * l, o[t % 2 * 2 + 1] * l);
        }
        ptx::stmatrix_x4(OutputTile::at(base, lane % 16, col + lane / 16 * 8), words);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (!all_rows) [[unlikely]] {
        for (int word = lane; word < min(tile.count - row0, 16) * cols / 8; word += 32) {
          const int row = word / (cols / 8), col = word % (cols / 8) * 8;
          if (pass + col >= group.p.head_dim_v) continue;
          *reinterpret_cast<uint4*>(output_at(group.p, tile, row0 + row) + (pass + col) * 2) =
              ptx::ld_shared_16(OutputTile::at(base, row, col));
        }
      } else if (lane == 0) {
#pragma unroll
        for (int col = 0; col < cols; col += kChunkCols) {
          ptx::cp_async_bulk_tensor_store_4d(&group.p.o_map, OutputTile::at(base, 0, col), pass + col,
                                             tile.s.q_begin + tile.row0 + row0, tile.head, tile.q_batch(group.p));
        }
        ptx::cp_async_bulk_commit_group();
      }
    }
  }
};

}  // namespace tessera
