// The matrix products of one warp with a matrix in shared memory as codes, 8-bit floats, which become float16 in
// registers: exactly, since both formats fit. The other operand is float16. Tiles count two neighbouring codes as one
// element of 16 bits (tile/shared_tile.cuh, tile/wgmma_tile.cuh), so that ldmatrix reads them.
//
// A register of ldmatrix has four codes. Two conversions make them operands of two halves of a step of 16 inner columns
// or of two columns of the result; which columns those are is free, as long as all operands agree:
//
//   A B^T     lane 4g + c has columns 4c ... 4c + 3 of each 16 of B's row g. The first two are inner columns 2c, 2c + 1
//             of the step, the last two 2c + 8, 2c + 9. A's columns are stored in this order (code_pair_place).
//   B^T P^T   the transpose of P B, because P's rows then are a multiple of 8, not of 16: one query of eight heads
//             wastes no product. Transposed, lane 4g + c has columns 2g, 2g + 1 of B's rows 2c and 2c + 1. Of 16
//             columns the even ones are the first 8 rows of the A operand, the odd ones the last 8. P's accumulator is
//             the B operand as it is. So a lane has two neighbouring columns, from 16 n + 2g on, of rows 8 t + 2c and
//             8 t + 2c + 1 of P B: code_columns.
#pragma once

#include "tessera/ptx/math.cuh"
#include "tessera/tile/product.cuh"

namespace tessera {

// The codes in bits 0 ... 15 or, kHigh, those in bits 16 ... 31.
template <Dtype kCodes, bool kHigh>
TESSERA_DEVICE uint32 pair_of_codes(uint32 codes) {
  static_assert(dtype_bytes(kCodes) == 1);
  return kCodes == Dtype::kFloat8E4M3 ? ptx::cvt_rn_f16x2_e4m3x2<kHigh>(codes) : ptx::cvt_rn_f16x2_e5m2x2<kHigh>(codes);
}
template <Dtype kCodes>
TESSERA_DEVICE uint32 low_codes(uint32 codes) {
  return pair_of_codes<kCodes, false>(codes);
}
template <Dtype kCodes>
TESSERA_DEVICE uint32 high_codes(uint32 codes) {
  return pair_of_codes<kCodes, true>(codes);
}

// Where pair `pair` of a row of A's columns is stored: the pairs of each 16 columns in the order 0 2 4 6 1 3 5 7.
TESSERA_HOST_DEVICE constexpr int code_pair_place(int pair) { return pair / 8 * 8 + pair % 2 * 4 + pair % 8 / 2; }

// A's fragments for columns 16 k ... 16 k + 15: A = sA, float16 in the order of code_pair_place, 16 rows of each tile
// or, of one tile, only the first eight, which are then there twice: the products of the others are not used.
template <int kM, class TileA>
TESSERA_DEVICE void load_a_codes(uint32 (&a)[kM][4], const TileA& sA, int k) {
  if constexpr (TileA::kRows == 8) {
    static_assert(kM == 1);
    ptx::ldmatrix_x4(a[0], sA.at(lane_id() % 8, k * 16 + lane_id() / 16 * 8));
  } else {
    static_assert(TileA::kRows == 16 * kM);
    load_a<kM>(a, sA, 0, k * 16);
  }
}

// acc += A B^T. of_a(a, k): load_a_codes(); B = sB [columns of acc][inner]. Fragments of A are asked for ahead of their
// products.
template <Dtype kCodes, int kM, int kN, class OfA, class TileB>
TESSERA_DEVICE void product_abt_codes(float (&acc)[kM][kN][4], OfA&& of_a, const TileB& sB) {
  static_assert(kN % 2 == 0 && TileB::kCols % 16 == 0);
  constexpr int kPairs = kN / 2, kSteps = TileB::kCols / 16;
  uint32 a[2][2][kM][4];  // of two steps, each of 32 columns
  const auto load_step = [&](int step) {
    of_a(a[step % 2][0], 2 * step);
    of_a(a[step % 2][1], 2 * step + 1);
  };
  load_step(0);
  for_fragments<kSteps * kPairs>([&](int i, uint32(&b)[4]) { load_b_pair(b, sB, i % kPairs * 16, i / kPairs * 16); },
                                 [&](int i, const uint32(&b)[4]) {
                                   const int step = i / kPairs, n = i % kPairs * 2;
                                   if (n == 0 && step + 1 < kSteps) load_step(step + 1);
#pragma unroll
                                   for (int half = 0; half < 2; ++half)
#pragma unroll
                                     for (int tile = 0; tile < 2; ++tile) {
                                       const uint32 codes = b[2 * tile + half];
                                       const uint32 b0 = low_codes<kCodes>(codes), b1 = high_codes<kCodes>(codes);
#pragma unroll
                                       for (int m = 0; m < kM; ++m) {
                                         mma_16bit<Dtype::kFloat16>(acc[m][n + tile], a[step % 2][half][m], b0, b1);
                                       }
                                     }
                                 });
}

// acc += B^T P^T: acc[t][n] has rows 8 t ... 8 t + 7 of P, columns 16 n ... 16 n + 15 of B. P is an accumulator,
// rounded to float16, of which the second half of the last tile's rows may be left out; B = sB [8 kInner
// rows][columns].
template <Dtype kCodes, int kT, int kN, int kM, int kInner, class TileB>
TESSERA_DEVICE void product_btpt_codes(float (&acc)[kT][kN][4], const float (&p)[kM][kInner][4], const TileB& sB) {
  static_assert(kInner % 2 == 0 && kN % 2 == 0 && kM == (kT + 1) / 2 && TileB::kCols == 8 * kN);
  constexpr int kFragments = kN / 2;  // of 32 columns
  uint32 rows[kT][2];
  for_fragments<kInner / 2 * kFragments>(
      [&](int i, uint32(&b)[4]) { load_b_pair_transposed(b, sB, i / kFragments * 16, i % kFragments * 16); },
      [&](int i, const uint32(&b)[4]) {
        if (i % kFragments == 0) {
#pragma unroll
          for (int t = 0; t < kT; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float(&of)[4] = p[t / 2][i / kFragments * 2 + half];
              rows[t][half] = pack_pair<Dtype::kFloat16>(of[t % 2 * 2], of[t % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // the even column of both of B's rows, then the odd one
          const uint32 upper = ptx::prmt<0x3120>(b[2 * half], 0), lower = ptx::prmt<0x3120>(b[2 * half + 1], 0);
          const uint32 a[4] = {low_codes<kCodes>(upper), high_codes<kCodes>(upper), low_codes<kCodes>(lower),
                               high_codes<kCodes>(lower)};
#pragma unroll
          for (int t = 0; t < kT; ++t) {
            mma_16bit<Dtype::kFloat16>(acc[t][i % kFragments * 2 + half], a, rows[t][0], rows[t][1]);
          }
        }
      });
}

// The two neighbouring columns from 16 n + 2g on, of row 8 t + 2c (kHalf 0) or 8 t + 2c + 1 of such an accumulator's
// tile acc[t][n].
template <int kHalf>
TESSERA_DEVICE float2 code_columns(const float (&tile)[4]) {
  return make_float2(tile[kHalf], tile[2 + kHalf]);
}
// The same rows' numbers from those of an accumulator with rows across lanes: `x` is that of row g.
TESSERA_DEVICE float2 across_rows(float x) {
  const int lane = lane_col() * 4;
  return make_float2(__shfl_sync(0xffffffff, x, lane), __shfl_sync(0xffffffff, x, lane + 4));
}

}  // namespace tessera
