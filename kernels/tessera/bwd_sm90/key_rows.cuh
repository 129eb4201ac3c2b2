// What the Hopper backward kernels do with a warp's 16 keys: scores transposed, [keys][queries], and the way of dK and dV out.
#pragma once

#include "tessera/bwd_sm90/block.cuh"
#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/tile/numbers.cuh"

namespace tessera {

// S = -inf where a key is not visible. A lane has keys first_key and first_key + 8, and of each eight queries those at
// first_row and first_row + 1.
template <auto kCfg, int kM>
TESSERA_DEVICE void mask_keys(const BwdSm90Params& p, const KeyBlock& block, int first_key, int first_row,
                              float (&rS)[1][kM][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first_key + half * 8;
    const KeyRange queries = seeing_queries(p, block.s, key, key);
    const int low = (key < block.s.sk ? queries.low : block.s.sq + kCfg.block_m) - first_row;
    const int high = queries.high - first_row;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = rS[0][m][2 * half + e];
        if (m * 8 + e < low || (kCfg.window && m * 8 + e > high)) x = -infinity();
      }
  }
}

// A warp's rows of dK or dV, from row `row` of the tile on, leave by one lane's bulk copies of 64 columns each. Those after the
// last key are not written: TMA clips what lies outside the tensor.
template <auto kCfg, class Keys>
TESSERA_DEVICE void store_key_rows(const BwdSm90Params& p, const KeyBlock& block, const TensorMap* map, uint32 tile,
                                   int row) {
#pragma unroll
  for (int col = 0; col < kCfg.head_dim; col += kChunkCols) {
    ptx::cp_async_bulk_tensor_store_4d(map, Keys::at(tile, row, col), col, block.s.k_begin + block.key0 + row,
                                       block.head_kv, p.cu_seqlens_k ? 0 : block.batch);
  }
  ptx::cp_async_bulk_commit_group();
}

// The same by ordinary stores, of those that the sequence has: what follows in memory is another's.
template <auto kCfg, class Keys>
TESSERA_DEVICE void store_own_key_rows(const KeyBlock& block, const RowTensor& to, int columns, uint32 tile, int row) {
  constexpr int kRowWords = kCfg.head_dim / 8;  // of 16 bytes
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

}  // namespace tessera
