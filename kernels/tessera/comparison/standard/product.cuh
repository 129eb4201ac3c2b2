// C = factor A B for every head of a batch, with 16-bit elements and float32 sums, by mma.sync and cp.async: the
// products of standard attention and its gradients, S = Q K^T, O = P V, dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T
// Q. The whole matrix of scores goes to device memory, and the products do not skip masked tiles, as in frameworks that
// call a matrix library.
//
// Grid: (columns of C / block_n, rows / kStandardBlockM, heads). Block: kStandardWarps warps; shared memory:
// StandardProductSharedMemory. Page: docs/reference/kernels/comparison.md.
#pragma once

#include "tessera/attention/dropout.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/comparison/standard/config.hpp"
#include "tessera/tile/product.cuh"
#include "tessera/tile/shared_tile.cuh"

namespace tessera {

template <StandardProductConfig kCfg>
union StandardProductSharedMemory {
  static constexpr int kARows = kCfg.transpose_a ? kStandardBlockK : kStandardBlockM;
  static constexpr int kACols = kCfg.transpose_a ? kStandardBlockM : kStandardBlockK;
  static constexpr int kBRows = kCfg.transpose_b ? kCfg.block_n : kStandardBlockK;
  static constexpr int kBCols = kCfg.transpose_b ? kStandardBlockK : kCfg.block_n;
  using B = SharedTile<kCfg.dtype, kBRows, kBCols>;
  struct {
    SharedTile<kCfg.dtype, kARows, kACols> sA[kCfg.stages];
    B sB[kCfg.stages];
  } operands;
  SharedTile<kCfg.dtype, kStandardBlockM, kCfg.block_n> sC;
};

// Loads a tile of a head's matrix [rows][columns], from row `first` and column `col` on. Elements past its end become
// zero.
template <bool kAligned, class Tile>
TESSERA_DEVICE void load_matrix_tile(Tile& sTile, const RowTensor& matrix, SequenceHead of, int rows, int columns,
                                     int first, int col) {
  const char* from = static_cast<const char*>(matrix.data) +
                     (matrix.batch * of.batch + matrix.head * of.head + matrix.row * first + col) * Tile::kElemBytes;
  load_tile_strided<kAligned, kStandardWarps * 32>(
      sTile, rows - first, min(columns - col, Tile::kCols) * Tile::kElemBytes, from, matrix.row * Tile::kElemBytes);
}

// For each half of `pair`, the larger of it and 0.
template <Dtype kDtype>
TESSERA_DEVICE uint32 max_pair_zero(uint32 pair) {
  return kDtype == Dtype::kFloat16 ? ptx::max_f16x2(pair, 0) : ptx::max_bf16x2(pair, 0);
}

// Replaces a warp's products A B by P = exp(factor A B - LSE): 0 for masked keys, negative for dropped ones. The tile
// starts at row `row` and key `key`, a multiple of 32.
template <StandardProductConfig kCfg, int kM, int kN>
TESSERA_DEVICE void standard_probabilities(float (&rP)[kM][kN][4], const StandardProductParams& p, SequenceHead of,
                                           int row, int key) {
  const Sequence s = load_sequence<false>(p, of.batch);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = min(row + m * 16 + half * 8 + lane_row(), s.sq - 1);
      const KeyRange keys = visible_keys(p, s, query);
      const float lse = p.lse.data[p.lse.batch * of.batch + p.lse.head * of.head + p.lse.row * query];
      const float minus_lse = lse == -infinity() ? -infinity() : -lse * kLog2e;
      [[maybe_unused]] const char* mask =
          static_cast<const char*>(p.mask.data) + p.mask.batch * of.batch + p.mask.head * of.head + p.mask.row * query;
      [[maybe_unused]] PhiloxWords words;
      if constexpr (kCfg.dropout) {
        static_assert(kN == 4, "a call of Philox decides four tiles of 8 keys");
        words = dropout_words(DropoutKeys<false>(p), of.batch * p.heads_q + of.head, query, key / 32, lane_id() % 4);
      }
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = key + n * 8 + lane_col() + e;
          float& x = rP[m][n][2 * half + e];
          bool seen = at >= keys.low && at <= keys.high;
          if constexpr (kCfg.mask) seen = seen && mask[p.mask.col * at];
          x = seen ? ptx::ex2_approx_ftz(fmaf(x, p.factor * kLog2e, minus_lse)) : 0.0f;
          if constexpr (kCfg.dropout) {
            const bool kept =
                e == 0 ? keeps_low(words.word[n], p.dropout_threshold) : keeps_high(words.word[n], p.dropout_threshold);
            x = kept ? x : -x;
          }
        }
    }
}

template <StandardProductConfig kCfg>
TESSERA_DEVICE void standard_product(const StandardProductParams& p) {
  using Shared = StandardProductSharedMemory<kCfg>;
  constexpr int kWarpCols = 32, kWarpsN = kCfg.block_n / kWarpCols, kWarpsM = kStandardWarps / kWarpsN;
  constexpr int kM = kStandardBlockM / kWarpsM / 16, kN = kWarpCols / 8;
  static_assert(kM * kWarpsM * 16 == kStandardBlockM && kWarpsM * kWarpsN == kStandardWarps, "warps share evenly");
  static_assert(sizeof(Shared) == standard_product_bytes(kCfg), "as the host has it");
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<Shared*>(shared_memory);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int warp_m = warp / kWarpsN * (kM * 16), warp_n = warp % kWarpsN * kWarpCols;
  const int row0 = static_cast<int>(blockIdx.y) * kStandardBlockM, col0 = static_cast<int>(blockIdx.x) * kCfg.block_n;
  const SequenceHead of{static_cast<int>(blockIdx.z) / p.heads_q, static_cast<int>(blockIdx.z) % p.heads_q};

  const int steps = (p.inner + kStandardBlockK - 1) / kStandardBlockK;
  const auto load = [&](int step, int stage) {
    const int k = step * kStandardBlockK;
    if (step < steps) {
      // The matrix of scores is operand A of every product but those that compute it; its pitch makes it aligned.
      constexpr bool kAlignedA = kCfg.aligned || !kCfg.transpose_b;
      if constexpr (kCfg.transpose_a) {
        load_matrix_tile<kAlignedA>(shared.operands.sA[stage], p.a, of, p.inner, p.rows, k, row0);
      } else {
        load_matrix_tile<kAlignedA>(shared.operands.sA[stage], p.a, of, p.rows, p.inner, row0, k);
      }
      if constexpr (kCfg.transpose_b) {
        load_matrix_tile<kCfg.aligned>(shared.operands.sB[stage], p.b, of, p.columns, p.inner, col0, k);
      } else {
        load_matrix_tile<kCfg.aligned>(shared.operands.sB[stage], p.b, of, p.inner, p.columns, k, col0);
      }
    }
    ptx::cp_async_commit_group();  // an empty group keeps the count
  };

  constexpr int kAhead = kCfg.stages - 1;
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) load(stage, stage);
  float rC[kM][kN][4];
  clear(rC);
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<kAhead - 1>();
    __syncthreads();  // the tiles are visible to all warps, and all are done with the previous ones
    load(step + kAhead, stage == 0 ? kAhead : stage - 1);
    auto& sA = shared.operands.sA[stage];
    auto& sB = shared.operands.sB[stage];
    if constexpr (kCfg.transpose_b) {
      product_abt(rC, sA, warp_m, sB, warp_n);
    } else {
      multiply_steps<typename Shared::B, kWarpsN, kStandardBlockK / 16>(
          rC, warp_n,
          [&](uint32(&a)[kM][4], int k) {
            if constexpr (kCfg.transpose_a) {
              load_a_transposed<kM>(a, sA, k * 16, warp_m);
            } else {
              load_a<kM>(a, sA, warp_m, k * 16);
            }
            if constexpr (kCfg.dropout) {
#pragma unroll
              for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int word = 0; word < 4; ++word) a[m][word] = max_pair_zero<kCfg.dtype>(a[m][word]);
            }
          },
          [&](uint32(&b)[4], int k, int n) { load_b_pair_transposed(b, sB, k * 16, warp_n + n * 8); });
    }
    stage = stage + 1 == kCfg.stages ? 0 : stage + 1;
  }

  float factor = p.factor;
  if constexpr (kCfg.probabilities) {
    standard_probabilities<kCfg>(rC, p, of, row0 + warp_m, col0 + warp_n);
    factor = 1.0f;
  }
  ptx::cp_async_wait_all();
  __syncthreads();  // no warp still reads or fills the tiles, whose memory C reuses
  store_accumulator<kWarpsN>(shared.sC, rC, warp_m, warp_n, factor);
  __syncthreads();
  constexpr int kRows = kStandardBlockM / kStandardWarps, kBytes = dtype_bytes(kCfg.dtype);
  char* to =
      static_cast<char*>(p.c.data) + (p.c.batch * of.batch + p.c.head * of.head + p.c.row * row0 + col0) * kBytes;
  store_rows_strided<kRows>(shared.sC, warp * kRows, p.rows - row0, min(p.columns - col0, kCfg.block_n), p.c_aligned,
                            to, p.c.row * kBytes);
}

}  // namespace tessera
