// The matrix products of one warp, with operands from shared memory (tile/shared_tile.cuh) and accumulators as in
// tile/fragment.cuh.
//
// 16-bit types use mma.m16n8k16. For float32, each number is split into two TF32 numbers, x = high + low, and a product
// is three products, low * high' + high * low' + high * high'. They are summed from zero for every 8 columns and then
// added in float32, because the tensor cores' own accumulation truncates.
#pragma once

#include "tessera/ptx/mma.cuh"
#include "tessera/tile/fragment.cuh"
#include "tessera/tile/shared_tile.cuh"

namespace tessera {

// x = high + low to 21 bits. An infinity appears only in high * high', where its sign meets the other number's; it is
// replaced by 0 in the products with a low part.
struct Tf32Pair {
  uint32 high, finite_high, low;
};
TESSERA_DEVICE Tf32Pair split_tf32(float x) {
  const uint32 high = ptx::cvt_rna_tf32(x);
  const bool finite = (high & 0x7fffffffu) < 0x7f800000u;
  return {high, finite ? high : 0u, finite ? ptx::cvt_rna_tf32(x - __uint_as_float(high)) : 0u};
}

TESSERA_DEVICE void mma_3xtf32(float (&d)[4], const Tf32Pair (&a)[4], const Tf32Pair& b0, const Tf32Pair& b1) {
  const uint32 high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
  const uint32 finite_high[4] = {a[0].finite_high, a[1].finite_high, a[2].finite_high, a[3].finite_high};
  const uint32 low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
  float sum[4] = {};
  ptx::mma_m16n8k8_tf32(sum, low, b0.finite_high, b1.finite_high);
  ptx::mma_m16n8k8_tf32(sum, finite_high, b0.low, b1.low);
  ptx::mma_m16n8k8_tf32(sum, high, b0.high, b1.high);
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] += sum[e];
}

// ---- 16-bit fragments ----

// Loads A [kM x 16 rows, kRowStep apart][16 columns from col] without transposing.
template <int kM, int kRowStep = 16, class Tile>
TESSERA_DEVICE void load_a(uint32 (&a)[kM][4], const Tile& sA, int row, int col) {
  const uint32 at = sA.at(row + lane_id() % 16, col + lane_id() / 16 * 8);
#pragma unroll
  for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], at + m * kRowStep * Tile::kPitchBytes);
}

// Loads A as the transpose of sA [16 rows = inner][16 kM columns = A's rows].
template <int kM, class Tile>
TESSERA_DEVICE void load_a_transposed(uint32 (&a)[kM][4], const Tile& sA, int row, int col) {
  const uint32 at = sA.at(row + lane_id() % 8 + lane_id() / 16 * 8, col + lane_id() / 8 % 2 * 8);
#pragma unroll
  for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4_trans(a[m], at + m * 16 * Tile::kElemBytes);
}

// Loads B for two neighbouring 8-column tiles and 16 inner columns from sB [n][inner]: b[0] and b[1] are the first
// tile's.
template <class Tile>
TESSERA_DEVICE void load_b_pair(uint32 (&b)[4], const Tile& sB, int n, int inner) {
  ptx::ldmatrix_x4(b, sB.at(n + lane_id() % 8 + lane_id() / 16 * 8, inner + lane_id() / 8 % 2 * 8));
}

// The same from sB [inner][n].
template <class Tile>
TESSERA_DEVICE void load_b_pair_transposed(uint32 (&b)[4], const Tile& sB, int inner, int n) {
  ptx::ldmatrix_x4_trans(b, sB.at(inner + lane_id() % 16, n + lane_id() / 16 * 8));
}

// ---- float32 fragments: the inner columns of a step of 8 are processed in the order 0 2 4 6 1 3 5 7 in A and B, so
// that a lane's two columns are neighbours ----

TESSERA_DEVICE float2 load_shared_pair(const char* at) { return *reinterpret_cast<const float2*>(at); }

// ---- products ----

// Fragments of B are loaded this many ahead of their products: a load takes about as long as two products of 16 x 16 x
// 16 with two tiles of rows.
inline constexpr int kFragmentsAhead = 2;

// for_fragments<kCount>(load, multiply): multiply(i, b_i) for i = 0 ... kCount - 1, with load(i, b_i) called earlier.
template <int kCount, class Load, class Multiply>
TESSERA_DEVICE void for_fragments(Load&& load, Multiply&& multiply) {
  constexpr int kBuffers = kFragmentsAhead + 1;
  uint32 b[kBuffers][4];
#pragma unroll
  for (int i = 0; i < min(kFragmentsAhead, kCount); ++i) load(i, b[i]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i + kFragmentsAhead < kCount) load(i + kFragmentsAhead, b[(i + kFragmentsAhead) % kBuffers]);
    multiply(i, b[i % kBuffers]);
  }
}

// acc += A B^T. A = sA [rows][inner], tiles of 16 rows kRowStep apart from row `row` on; B = sB [columns of acc][inner]
// from row `row_b` on. 16-bit types: calls beside(i) after the products of the i-th fragment of B.
template <int kRowStep = 16, int kM, int kN, class TileA, class TileB, class Beside>
TESSERA_DEVICE void product_abt(float (&acc)[kM][kN][4], TileA& sA, int row, TileB& sB, int row_b, Beside&& beside) {
  static_assert(TileA::kCols == TileB::kCols && kN % 2 == 0);
  if constexpr (TileA::kElemBytes == 2) {
    constexpr int kPairs = kN / 2, kSteps = TileA::kCols / 16;
    uint32 a[2][kM][4];
    load_a<kM, kRowStep>(a[0], sA, row, 0);
    for_fragments<kSteps * kPairs>(
        [&](int i, uint32(&b)[4]) { load_b_pair(b, sB, row_b + i % kPairs * 16, i / kPairs * 16); },
        [&](int i, const uint32(&b)[4]) {
          const int k = i / kPairs, n = i % kPairs * 2;
          if (n == 0 && k + 1 < kSteps) load_a<kM, kRowStep>(a[(k + 1) % 2], sA, row, (k + 1) * 16);
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            mma_16bit<TileA::kType>(acc[m][n], a[k % 2][m], b[0], b[1]);
            mma_16bit<TileA::kType>(acc[m][n + 1], a[k % 2][m], b[2], b[3]);
          }
          beside(i);
        });
  } else {
#pragma unroll 2
    for (int k = 0; k < TileA::kCols; k += 8) {
      Tf32Pair a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const float2 upper = load_shared_pair(sA.pointer(row + m * kRowStep + lane_row(), k + lane_col()));
        const float2 lower = load_shared_pair(sA.pointer(row + m * kRowStep + 8 + lane_row(), k + lane_col()));
        a[m][0] = split_tf32(upper.x), a[m][1] = split_tf32(lower.x);
        a[m][2] = split_tf32(upper.y), a[m][3] = split_tf32(lower.y);
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 pair = load_shared_pair(sB.pointer(row_b + n * 8 + lane_row(), k + lane_col()));
        const Tf32Pair b0 = split_tf32(pair.x), b1 = split_tf32(pair.y);
#pragma unroll
        for (int m = 0; m < kM; ++m) mma_3xtf32(acc[m][n], a[m], b0, b1);
      }
    }
  }
}

template <int kRowStep = 16, int kM, int kN, class TileA, class TileB>
TESSERA_DEVICE void product_abt(float (&acc)[kM][kN][4], TileA& sA, int row, TileB& sB, int row_b) {
  product_abt<kRowStep>(acc, sA, row, sB, row_b, [](int) {});
}

// acc += P B. P is an accumulator [kM][kInner tiles][4], rounded to the tile's type; B = sB [8 kInner rows from
// `row_b`] [columns of acc from col_b].
template <int kM, int kInner, int kN, class TileB>
TESSERA_DEVICE void product_pb(float (&acc)[kM][kN][4], const float (&p)[kM][kInner][4], TileB& sB, int row_b,
                               int col_b = 0) {
  static_assert(kInner % 2 == 0 && kN % 2 == 0);
  if constexpr (TileB::kElemBytes == 2) {
    constexpr int kPairs = kN / 2;
    uint32 a[kM][4];
    for_fragments<kInner / 2 * kPairs>(
        [&](int i, uint32(&b)[4]) { load_b_pair_transposed(b, sB, row_b + i / kPairs * 16, col_b + i % kPairs * 16); },
        [&](int i, const uint32(&b)[4]) {
          const int n = i % kPairs * 2;
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            if (n == 0) pack_a<TileB::kType>(a[m], p[m], i / kPairs);
            mma_16bit<TileB::kType>(acc[m][n], a[m], b[0], b[1]);
            mma_16bit<TileB::kType>(acc[m][n + 1], a[m], b[2], b[3]);
          }
        });
  } else {
#pragma unroll
    for (int k = 0; k < kInner; ++k) {
      Tf32Pair a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        a[m][0] = split_tf32(p[m][k][0]), a[m][1] = split_tf32(p[m][k][2]);
        a[m][2] = split_tf32(p[m][k][1]), a[m][3] = split_tf32(p[m][k][3]);
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const char* at = sB.pointer(row_b + k * 8 + lane_col(), col_b + n * 8 + lane_row());
        const Tf32Pair b0 = split_tf32(*reinterpret_cast<const float*>(at));
        const Tf32Pair b1 = split_tf32(*reinterpret_cast<const float*>(at + TileB::kPitchBytes));
#pragma unroll
        for (int m = 0; m < kM; ++m) mma_3xtf32(acc[m][n], a[m], b0, b1);
      }
    }
  }
}

// The same for a P packed by pack_rows, 16-bit types, with all rows of B.
template <int kM, int kSteps, int kN, class TileB>
TESSERA_DEVICE void product_pb(float (&acc)[kM][kN][4], const uint32 (&p)[kM][kSteps][4], TileB& sB) {
  static_assert(kN % 2 == 0 && kSteps * 16 == TileB::kRows);
  constexpr int kPairs = kN / 2;
  for_fragments<kSteps * kPairs>(
      [&](int i, uint32(&b)[4]) { load_b_pair_transposed(b, sB, i / kPairs * 16, i % kPairs * 16); },
      [&](int i, const uint32(&b)[4]) {
        const int k = i / kPairs, n = i % kPairs * 2;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_16bit<TileB::kType>(acc[m][n], p[m][k], b[0], b[1]);
          mma_16bit<TileB::kType>(acc[m][n + 1], p[m][k], b[2], b[3]);
        }
      });
}

// ---- products whose A operand is in shared memory -------------------------------------------------------------------
//
// The products of the backward pass whose A operand is in shared memory; otherwise they are as in product.cuh. B is
// [inner][columns]. Its columns are split among kParts warps, a multiple of 16 each, so the last parts may lie partly
// or wholly beyond the tile; columns beyond it are not accessed.

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
