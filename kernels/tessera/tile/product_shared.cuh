// The products of the backward pass whose A operand is in shared memory; otherwise they are as in product.cuh. B is
// [inner][columns]. Its columns are split among kParts warps, a multiple of 16 each, so the last parts may lie partly
// or wholly beyond the tile; columns beyond it are not accessed.
#pragma once

#include "tessera/tile/product.cuh"

namespace tessera {

// kParts warps have kN tiles of 8 columns each. True if the n-th tile of the warp that starts at column `col` lies
// beyond all columns.
template <int kColumns, int kParts, int kN>
TESSERA_DEVICE bool beyond(int col, int n) {
  return kParts * kN * 8 > kColumns && col + n * 8 >= kColumns;
}

// acc += A B over kSteps of 16 inner columns, 16-bit types. load_a(a, k) loads the k-th step's fragments of A,
// load_b(b, k, n) those of B for the columns 8 n ... of the accumulator; both are called ahead of their products.
template <class TileB, int kParts, int kSteps, int kM, int kN, class LoadA, class LoadB>
TESSERA_DEVICE void multiply_steps(float (&acc)[kM][kN][4], int col_b, LoadA&& load_a, LoadB&& load_b) {
  constexpr int kPairs = kN / 2;
  const auto skip = [&](int i) { return beyond<TileB::kCols, kParts, kN>(col_b, i % kPairs * 2); };
  uint32 a[2][kM][4];
  load_a(a[0], 0);
  for_fragments<kSteps * kPairs>(
      [&](int i, uint32(&b)[4]) {
        if (!skip(i)) load_b(b, i / kPairs, i % kPairs * 2);
      },
      [&](int i, const uint32(&b)[4]) {
        const int k = i / kPairs, n = i % kPairs * 2;
        if (n == 0 && k + 1 < kSteps) load_a(a[(k + 1) % 2], k + 1);
        if (skip(i)) return;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_16bit<TileB::kType>(acc[m][n], a[k % 2][m], b[0], b[1]);
          mma_16bit<TileB::kType>(acc[m][n + 1], a[k % 2][m], b[2], b[3]);
        }
      });
}

// acc += a times 8 rows of B from row `row_b`, float32.
template <int kParts, int kM, int kN, class TileB>
TESSERA_DEVICE void multiply_columns(float (&acc)[kM][kN][4], const Tf32Pair (&a)[kM][4], TileB& sB, int row_b,
                                     int col_b) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    if (beyond<TileB::kCols, kParts, kN>(col_b, n)) break;
    const char* at = sB.pointer(row_b + lane_col(), col_b + n * 8 + lane_row());
    const Tf32Pair b0 = split_tf32(*reinterpret_cast<const float*>(at));
    const Tf32Pair b1 = split_tf32(*reinterpret_cast<const float*>(at + TileB::kPitchBytes));
#pragma unroll
    for (int m = 0; m < kM; ++m) mma_3xtf32(acc[m][n], a[m], b0, b1);
  }
}

// acc += A B: A = sA [rows][inner] from row `row`, B = sB [inner][columns of acc from col_b].
template <int kParts, int kM, int kN, class TileA, class TileB>
TESSERA_DEVICE void product_ab(float (&acc)[kM][kN][4], TileA& sA, int row, TileB& sB, int col_b) {
  static_assert(TileA::kCols == TileB::kRows && kN % 2 == 0);
  if constexpr (TileA::kElemBytes == 2) {
    multiply_steps<TileB, kParts, TileA::kCols / 16>(
        acc, col_b, [&](uint32(&a)[kM][4], int k) { load_a<kM>(a, sA, row, k * 16); },
        [&](uint32(&b)[4], int k, int n) { load_b_pair_transposed(b, sB, k * 16, col_b + n * 8); });
  } else {
#pragma unroll 2
    for (int k = 0; k < TileA::kCols; k += 8) {
      Tf32Pair a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const float2 upper = load_shared_pair(sA.pointer(row + m * 16 + lane_row(), k + lane_col()));
        const float2 lower = load_shared_pair(sA.pointer(row + m * 16 + 8 + lane_row(), k + lane_col()));
        a[m][0] = split_tf32(upper.x), a[m][1] = split_tf32(lower.x);
        a[m][2] = split_tf32(upper.y), a[m][3] = split_tf32(lower.y);
      }
      multiply_columns<kParts>(acc, a, sB, k, col_b);
    }
  }
}

// acc += A^T B: A = sA [inner][rows from column `col_a`], B = sB [inner][columns of acc from col_b].
template <int kParts, int kM, int kN, class TileA, class TileB>
TESSERA_DEVICE void product_atb(float (&acc)[kM][kN][4], TileA& sA, int col_a, TileB& sB, int col_b) {
  static_assert(TileA::kRows == TileB::kRows && kN % 2 == 0);
  if constexpr (TileA::kElemBytes == 2) {
    multiply_steps<TileB, kParts, TileA::kRows / 16>(
        acc, col_b, [&](uint32(&a)[kM][4], int k) { load_a_transposed<kM>(a, sA, k * 16, col_a); },
        [&](uint32(&b)[4], int k, int n) { load_b_pair_transposed(b, sB, k * 16, col_b + n * 8); });
  } else {
#pragma unroll 2
    for (int k = 0; k < TileA::kRows; k += 8) {
      Tf32Pair a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const char* at = sA.pointer(k + lane_col(), col_a + m * 16 + lane_row());
        const char* next = at + TileA::kPitchBytes;  // the next inner index
        constexpr int kEightRows = 8 * TileA::kElemBytes;
        a[m][0] = split_tf32(*reinterpret_cast<const float*>(at));
        a[m][1] = split_tf32(*reinterpret_cast<const float*>(at + kEightRows));
        a[m][2] = split_tf32(*reinterpret_cast<const float*>(next));
        a[m][3] = split_tf32(*reinterpret_cast<const float*>(next + kEightRows));
      }
      multiply_columns<kParts>(acc, a, sB, k, col_b);
    }
  }
}

// Stores an accumulator, rounded to the tile's type, into a tile from (row, col) on.
template <int kParts, int kM, int kN, class Tile>
TESSERA_DEVICE void store_accumulator(Tile& sTile, const float (&acc)[kM][kN][4], int row, int col, float factor) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (beyond<Tile::kCols, kParts, kN>(col, n)) break;
        char* to = sTile.pointer(row + m * 16 + half * 8 + lane_row(), col + n * 8 + lane_col());
        const float low = acc[m][n][2 * half] * factor, high = acc[m][n][2 * half + 1] * factor;
        if constexpr (Tile::kElemBytes == 2) {
          *reinterpret_cast<uint32*>(to) = pack_pair<Tile::kType>(low, high);
        } else {
          *reinterpret_cast<float2*>(to) = make_float2(low, high);
        }
      }
}

}  // namespace tessera
