// Operations of the backward kernels for Hopper on tiles: clearing rows past a sequence's end; for a warp's 16 keys,
// masking transposed scores, [keys][queries], and storing dS, dK and dV; and the product and the additions of dQ.
#pragma once

#include "tessera/attention/backward/key_block.cuh"
#include "tessera/attention/backward/rows.cuh"
#include "tessera/attention/backward/sums.cuh"
#include "tessera/ptx/async_copy.cuh"
#include "tessera/ptx/wgmma.cuh"
#include "tessera/tile/fragment.cuh"
#include "tessera/tile/wgmma_tile.cuh"

namespace tessera {

// Sets rows first ... last - 1 of a tile to 0, by a warpgroup; several warpgroups may do so at once.
template <class Tile>
TESSERA_DEVICE void clear_rows(uint32 tile, int first, int last) {
  constexpr int kRowWords = Tile::kChunks * 8;  // of 16 bytes
#pragma unroll 1
  for (int word = first * kRowWords + static_cast<int>(not_hoisted(threadIdx.x % 128)); word < last * kRowWords;
       word += 128) {
    ptx::st_shared_zero_16(Tile::at(tile, word / kRowWords, word % kRowWords * 8));
  }
}

// dP - delta, scaled down like delta.
template <Dtype kDtype>
TESSERA_DEVICE float lowered_difference(float d_probability, float delta) {
  return bwd_lowers_early(kDtype) ? fmaf(d_probability, kBwdLower, -delta) : d_probability - delta;
}

// The queries of a step that see a lane's two keys by position (causal, window), relative to the lane's first query:
// low[half] ... high[half] see key 8 half. For other queries P and dS are set to 0 instead of multiplied by 0, so that
// a NaN of a query does not reach dV of keys that it does not see, and a NaN of V or dO does not reach dQ and dK.
struct SeeingQueries {
  int low[2], high[2];

  template <auto kCfg>
  TESSERA_DEVICE static SeeingQueries of(const BwdSm90Params& p, const KeyBlock& block, int first_key, int first_row) {
    SeeingQueries r;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + half * 8;
      const KeyRange queries = seeing_queries<kCfg.score>(p, block.s, key, key);
      r.low[half] = (key < block.s.sk ? queries.low : block.s.sq + kCfg.block_m) - first_row;
      r.high[half] = kCfg.window ? queries.high - first_row : kCfg.block_m;
    }
    return r;
  }
  TESSERA_DEVICE bool hides(int half, int query) const { return query < low[half] || query > high[half]; }
  // Clears the hidden elements of a pair of dS.
  TESSERA_DEVICE void clear_hidden(uint32& pair, int half, int query) const {
    if (hides(half, query)) pair &= 0xffff0000u;
    if (hides(half, query + 1)) pair &= 0x0000ffffu;
  }
};

// Turns the scores of a step whose query tile is marked as far (attention/backward/rows) into log2 P, scaled up by
// kBwdRaise_log2. A lane has queries 8 m + {0, 1} from `query` on.
template <int kM>
TESSERA_DEVICE void far_scores(const BwdSm90Params& p, const KeyBlock& block, int head, int query, ScoreUnit unit,
                               float (&rS)[kM][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      reload_memory();  // one row after another, to save registers
      const FarRow row(p, block.s, block.batch, head, query + m * 8 + e, unit);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rS[m][2 * half + e] = row.log2_weight(rS[m][2 * half + e]) + kBwdRaise_log2;
      }
    }
}

// Stores a warp's dS as [query][key], for the dQ warpgroup. rdS: A fragments of dS^T, of the keys from `key` on.
template <class Gradients, int kSteps>
TESSERA_DEVICE void hand_on_gradients(uint32 tile, int key, const uint32 (&rdS)[kSteps][4]) {
  const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32)), matrix = lane / 8;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::stmatrix_x4_trans(Gradients::at(tile, step * 16 + matrix / 2 * 8 + lane % 8, key + matrix % 2 * 8), rdS[step]);
  }
  ptx::fence_proxy_async();
}

// The reverse: loads the A fragments of dS^T of the keys from `key` on.
template <class Gradients, int kSteps>
TESSERA_DEVICE void take_gradients(uint32 (&rdS)[kSteps][4], uint32 tile, int key) {
  const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32)), matrix = lane / 8;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::ldmatrix_x4_trans(rdS[step], Gradients::at(tile, step * 16 + matrix / 2 * 8 + lane % 8, key + matrix % 2 * 8));
  }
}

// Stages `factor` times a warp's accumulators of dK or dV in the tile's rows from `row` and columns from `first_col`
// on. Rows from the `used`-th of these on become 0.
template <Dtype kDtype, class Keys, int kN>
TESSERA_DEVICE void stage_accumulators(uint32 tile, int row, int first_col, const float (&acc)[1][kN][4], float factor,
                                       int used = 32) {
  const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32));
#pragma unroll
  for (int col = 0; col < kN * 8; col += 16) {
    uint32 words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const auto& x = acc[0][col / 8 + t / 2];
      const bool zero = used - lane / 4 <= t % 2 * 8;
      words[t] = zero ? 0 : pack_pair<kDtype>(x[t % 2 * 2] * factor, x[t % 2 * 2 + 1] * factor);
    }
    ptx::stmatrix_x4(Keys::at(tile, row + lane % 16, first_col + col + lane / 16 * 8), words);
  }
}

// Stores `factor` times a warp's accumulators of dK or dV of a split group, in float32, to its rows of the block's
// result.
template <int kN>
TESSERA_DEVICE void store_part_rows(const BwdSm90Params& p, const KeyBlock& block, float* parts, int block_n, int row,
                                    const float (&acc)[1][kN][4], float factor) {
  const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32));
  const int64 rows = static_cast<int64>(block.batch * p.heads_kv + block.head_kv) * (p.key_tiles * block_n);
  float* to = parts + (rows + block.key0 + row + lane / 4) * (kN * 8) + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(to + half * (8 * kN * 8) + n * 8) =
          make_float2(acc[0][n][half * 2] * factor, acc[0][n][half * 2 + 1] * factor);
    }
}

// Stores a warp's rows of dK or dV, from row `row` of the tile on, by bulk copies of 64 columns each, issued by one
// lane. Rows after the last key are not written: TMA clips what is outside the tensor.
template <class Keys>
TESSERA_DEVICE void store_key_rows(const BwdSm90Params& p, const KeyBlock& block, const TensorMap* map, uint32 tile,
                                   int row) {
#pragma unroll
  for (int col = 0; col < Keys::kCols; col += kChunkCols) {
    ptx::cp_async_bulk_tensor_store_4d(map, Keys::at(tile, row, col), col, block.s.k_begin + block.key0 + row,
                                       block.head_kv, p.keys.begins ? 0 : block.batch);
  }
  ptx::cp_async_bulk_commit_group();
}

// The same by ordinary stores, for rows within the sequence only: the rows after them in memory belong to the next
// sequence.
template <class Keys>
TESSERA_DEVICE void store_own_key_rows(const KeyBlock& block, const RowTensor& to, int columns, uint32 tile, int row) {
  constexpr int kRowWords = Keys::kCols / 8;  // of 16 bytes
  const int64 first = to.batch * block.batch + to.row * (static_cast<int64>(block.s.k_begin) + block.key0 + row) +
                      to.head * block.head_kv;
  const int rows = min(16, block.s.k_rows - block.key0 - row);
#pragma unroll 1
  for (int word = static_cast<int>(not_hoisted(threadIdx.x % 32)); word < rows * kRowWords; word += 32) {
    const int r = word / kRowWords, col = word % kRowWords * 8;
    if (col >= columns) continue;
    *reinterpret_cast<uint4*>(static_cast<unsigned short*>(to.data) + first + to.row * r + col) =
        ptx::ld_shared_16(Keys::at(tile, row + r, col));
  }
}

// Stores a warp's 16 staged rows of dK or dV. Rows past the last key are not written.
template <auto kCfg, class Tile>
TESSERA_DEVICE void store_staged_rows(const BwdSm90Params& p, const KeyBlock& block, uint32 tile, int row,
                                      const TensorMap* map, const RowTensor& to, int columns) {
  if (kCfg.varlen && block.key0 + row + 16 > block.s.k_rows) {
    __syncwarp();
    store_own_key_rows<Tile>(block, to, columns, tile, row);
    return;
  }
  ptx::fence_proxy_async();
  __syncwarp();
  if (static_cast<int>(not_hoisted(threadIdx.x % 32)) == 0) store_key_rows<Tile>(p, block, map, tile, row);
}
// How many of the rows from `row` on are keys that the sequence uses; dK and dV of the others are 0.
template <auto kCfg>
TESSERA_DEVICE int used_rows(const KeyBlock& block, int row) {
  return kCfg.varlen ? block.s.sk - block.key0 - row : 32;
}

// Stores dV or dK of a warp's 16 rows, staged in the memory of the tile itself.
template <auto kCfg, class Tile>
TESSERA_DEVICE void store_gradient(const BwdSm90Params& p, const KeyBlock& block, uint32 tile, int row,
                                   const float (&acc)[1][Tile::kCols / 8][4], float factor, const TensorMap* map,
                                   const RowTensor& to, int columns) {
  stage_accumulators<kCfg.dtype, Tile>(tile, row, 0, acc, factor, used_rows<kCfg>(block, row));
  store_staged_rows<kCfg, Tile>(p, block, tile, row, map, to, columns);
}

// Writes `factor` times a warp's accumulators of 16 rows, from row `row` of the tile and column `col` on, to the sums
// of dV (kValues) or dK.
template <auto kCfg, bool kValues, int kN>
TESSERA_DEVICE void write_key_sums(const BwdSm90Params& p, const KeyBlock& block, int row, int col,
                                   const float (&acc)[1][kN][4], float factor) {
  const GradientSum sum{kValues ? p.d_v : p.d_k, kValues ? p.head_dim_v : p.head_dim,
                        kValues ? p.d_v_aligned : p.d_k_aligned, p.accumulate};
  const int64 key = static_cast<int64>(block.s.k_begin) + block.key0 + row;
  sum.write({block.batch, block.head_kv, key, col, block.s.k_rows - block.key0 - row, used_rows<kCfg>(block, row)},
            acc[0], factor);
}

// ---- dQ -------------------------------------------------------------------------------------------------------------

// Issues the product of a part of 64 queries of dQ: dS times kN * 8 columns of K.
template <Dtype kDtype, class Gradients, class Keys, int kN>
TESSERA_DEVICE void issue_dq_part(float (&rdQ)[1][kN][4], const TileDescriptor& d_s, const TileDescriptor& k) {
  ptx::wgmma_forget(flat(rdQ));
  ptx::wgmma_fence();
#pragma unroll
  for (int key = 0; key < Gradients::kCols; key += 16) {
    ptx::Wgmma<kDtype, kN * 8, true>::ss(flat(rdQ), inner_major<Gradients>(d_s, 0, key), outer_major<Keys>(k, key),
                                         key > 0);
  }
  ptx::wgmma_commit_group();
}

// Writes a warp's 16 rows of a part of dQ to shared memory, contiguous in the order of the accumulators.
template <int kN>
TESSERA_DEVICE void stage_dq_part(uint32 staged, const float (&rdQ)[1][kN][4], int lane) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float(&x)[4] = rdQ[0][n];
    ptx::st_shared_f32x4(staged + n * 512 + lane * 16, x[0], x[1], x[2], x[3]);
  }
}
// Does the same, then adds them to global memory by a bulk copy of the warp's first lane.
template <int kN>
TESSERA_DEVICE void add_staged_dq_part(float* to, uint32 staged, const float (&rdQ)[1][kN][4], int lane) {
  stage_dq_part(staged, rdQ, lane);
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
    ptx::cp_reduce_async_bulk_add_f32(to, staged, kN * 512);
    ptx::cp_async_bulk_commit_group();
  }
}

}  // namespace tessera
