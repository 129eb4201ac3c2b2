// Rows of queries in the backward pass: what is stored for each of them between its kernels, and how P of rows with a
// large LSE is computed.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/element.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/ptx/math.cuh"
#include "tessera/ptx/synchronization.cuh"

namespace tessera {

// ---- tiles of queries in the workspace ------------------------------------------------------------------------------
//
// What the backward pass stores for every query between its kernels: tiles of block_m queries, [heads_q, q_slots], so
// that every tile starts at a multiple of 16 bytes and has the same size, whatever the lengths of a packed batch.

// The padded index of a sequence's first query tile.
template <int kBlockM>
TESSERA_DEVICE int query_slot(const BwdParams& p, int batch) {
  if (!p.cu_seqlens_q) return batch * p.q_tiles;
  return slot_begin<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, batch);
}
// The tile of keys from key0 on, as lists count tiles: where keys are packed, by its padded index.
template <int kBlockN>
TESSERA_DEVICE int listed_key_tile(const BwdParams& p, int batch, int key0) {
  const int tile = key0 / kBlockN;
  if (!p.keys.begins) return tile;
  return tile + slot_begin<kBlockN>(p, p.keys.begins, p.keys.begins_stride, p.keys_limit, 1, batch);
}

// The sequence that owns a padded query tile index.
template <int kBlockM>
TESSERA_DEVICE int slot_owner(const BwdParams& p, int slot) {
  if (!p.cu_seqlens_q) return slot / p.q_tiles;
  return find_sequence<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, slot);
}

// Whether one block has all keys that the query tile from row0 on sees. It may then store dQ; if several blocks have
// such keys, they add to zeros.
template <int kBlockM, int kBlockN>
TESSERA_DEVICE bool one_block_adds(const ProblemParams& p, const Sequence& s, int row0) {
  const KeyRange keys = visible_keys(p, s, row0, min(row0 + kBlockM, s.sq) - 1).some;
  return keys.low <= keys.high && keys.low / kBlockN == keys.high / kBlockN;
}

// A tile of dQ, [block_m][head_dim] float32, as fragments of 16 x 8 in the order of the accumulators, so that what a
// warp adds at once is contiguous: [lane][4] with vector additions, [4][lane] without.
template <int kHeadDim>
TESSERA_DEVICE int dq_part_offset(int part_row, int part_col) {
  return (part_row * (kHeadDim / 8) + part_col) * (16 * 8);
}
template <int kHeadDim>
TESSERA_DEVICE float* dq_part(float* tile, int part_row, int part_col) {
  return tile + dq_part_offset<kHeadDim>(part_row, part_col);
}

TESSERA_DEVICE void dq_add(float* part, int lane, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ptx::red_add_v4_f32(part + lane * 4, x);
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) ptx::red_add_f32(part + e * 32 + lane, x[e]);
#endif
}

// On Hopper, replaces the first addition to a fragment.
TESSERA_DEVICE void dq_store(float* part, int lane, const float (&x)[4]) {
  *reinterpret_cast<float4*>(part + lane * 4) = make_float4(x[0], x[1], x[2], x[3]);
}

TESSERA_DEVICE float4 dq_load(const float* part, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return *reinterpret_cast<const float4*>(part + lane * 4);
#else
  return make_float4(part[lane], part[32 + lane], part[64 + lane], part[96 + lane]);
#endif
}

// ---- far rows -------------------------------------------------------------------------------------------------------
//
// The backward pass of rows whose scores have a large common offset (padding of -1e9, activations in the thousands): in
// a single float, the error of the LSE times log2(e) would exceed the error allowed for P. The preprocess
// (row_passes.cuh) marks query tiles that contain such a row as far. Their P is computed from the two floats that the
// forward pass saved, in the way in which the forward pass computed it: the large part is subtracted first. All other
// tiles pay one comparison.

// The values of row_lse_log2 for all rows of a marked tile.
inline constexpr float kFarRow = -0x1p126f, kFarUnseenRow = -0x1p127f;
TESSERA_DEVICE bool is_far(float row_lse_log2) { return row_lse_log2 <= kFarRow; }
TESSERA_DEVICE bool row_sees(float row_lse_log2) { return row_lse_log2 != infinity() && row_lse_log2 != kFarUnseenRow; }

// A row of a marked tile: converts scores, in the units in which they are held, to log2 P.
struct FarRow {
  float first, second, high, low_log2;

  TESSERA_DEVICE FarRow(const BwdParams& p, const Sequence& s, int batch, int head, int query, ScoreUnit unit) {
    TwoFloats lse{infinity(), 0.0f};
    if (query < s.sq) lse = load_lse(p, batch, head, static_cast<int64>(s.q_begin) + query);
    if (lse.high == -infinity()) lse.high = infinity();  // the row sees nothing
    const bool huge = is_huge(lse.high * kLog2e);
    first = huge ? unit.natural : 1.0f, second = huge ? 1.0f : unit.natural;
    high = lse.high, low_log2 = lse.low * kLog2e;
  }
  // An LSE without its low float may be too small, so weights are limited to 1. NaN stays NaN.
  TESSERA_DEVICE float log2_weight(float score) const {
    const float x = fmaf(fmaf(__fmul_rn(score, first), second, -high), kLog2e, -low_log2);
    return x > 0.0f ? 0.0f : x;
  }
};

}  // namespace tessera
