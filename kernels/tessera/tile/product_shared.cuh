// The products of the backward pass whose A operand lies in shared memory: as product.cuh's in everything else. B is
// [inner][columns], shared out among kParts warps, a multiple of 16 columns each: the last shares may lie beyond the
// tile in part or altogether, and what lies there is left alone.
#pragma once

#include "tessera/tile/product.cuh"

namespace tessera {

// kParts warps have kN tiles of 8 columns each: does the n-th of the one that starts at `col` lie beyond all columns?
template <int kColumns, int kParts, int kN>
TESSERA_DEVICE bool beyond(int col, int n) {
  return kParts * kN * 8 > kColumns && col + n * 8 >= kColumns;
}

// acc += a times 16 rows of B from row `row_b`, 16 bits.
template <int kParts, int kM, int kN, class TileB>
TESSERA_DEVICE void multiply_columns(float (&acc)[kM][kN][4], const uint32 (&a)[kM][4], TileB& sB, int row_b,
                                     int col_b) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    if (beyond<TileB::kCols, kParts, kN>(col_b, n)) break;
    uint32 b[4];
    load_b_pair_transposed(b, sB, row_b, col_b + n * 8);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      mma_16bit<TileB::kType>(acc[m][n], a[m], b[0], b[1]);
      mma_16bit<TileB::kType>(acc[m][n + 1], a[m], b[2], b[3]);
    }
  }
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
#pragma unroll
    for (int k = 0; k < TileA::kCols; k += 16) {
      uint32 a[kM][4];
      load_a<kM>(a, sA, row, k);
      multiply_columns<kParts>(acc, a, sB, k, col_b);
    }
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
#pragma unroll
    for (int k = 0; k < TileA::kRows; k += 16) {
      uint32 a[kM][4];
      load_a_transposed<kM>(a, sA, k, col_a);
      multiply_columns<kParts>(acc, a, sB, k, col_b);
    }
  } else {
#pragma unroll 2
    for (int k = 0; k < TileA::kRows; k += 8) {
      Tf32Pair a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const char* at = sA.pointer(k + lane_col(), col_a + m * 16 + lane_row());
        const char* next = at + TileA::kPitchBytes;  // the inner index after it
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

// An accumulator, rounded to the tile's type, into a tile from (row, col) on.
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
