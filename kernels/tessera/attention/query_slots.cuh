// What the backward pass stores for every query between its kernels: tiles of block_m queries, [heads_q, q_slots], so
// that every tile starts at a multiple of 16 bytes and has the same size, whatever the lengths of a packed batch.
#pragma once

#include "tessera/attention/backward.hpp"
#include "tessera/attention/mask.cuh"
#include "tessera/attention/packed_slots.cuh"
#include "tessera/ptx/atomic.cuh"

namespace tessera {

// The padded index of a sequence's first query tile.
template <int kBlockM>
TESSERA_DEVICE int query_slot(const BwdParams& p, int batch) {
  if (!p.cu_seqlens_q) return batch * p.q_tiles;
  return slot_begin<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, 1, batch);
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

}  // namespace tessera
