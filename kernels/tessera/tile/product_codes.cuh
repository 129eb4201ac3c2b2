// The matrix products of one warp whose B operand is in shared memory as codes, 8-bit floats, which become float16 in
// registers: exactly, since both formats fit. A is float16. Tiles count two neighbouring codes as one element of 16
// bits (tile/shared_tile.cuh, tile/wgmma_tile.cuh), so that ldmatrix reads them.
//
// A register of ldmatrix has four codes. Two conversions make them the B operands of two tiles of 8 columns or of two
// halves of a step of 16 inner columns; which columns those are is free, as long as all operands agree:
//
//   A B^T   lane 4g + c has columns 4c ... 4c + 3 of each 16 of B's row g. The first two are inner columns 2c, 2c + 1
//           of the step, the last two 2c + 8, 2c + 9. A's columns are stored in this order (code_pair_place).
//   P B     transposed, lane 4g + c has columns 2g, 2g + 1 of B's rows 2c and 2c + 1. Of 16 columns the even ones are
//           the first tile of 8, the odd ones the second. So a lane has four neighbouring columns of a row of the
//           result, from 4c on: 4c and 4c + 2 in the first tile, 4c + 1 and 4c + 3 in the second (code_columns).
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

// acc += A B^T. A = sA [16 rows][inner], float16 in the order of code_pair_place; B = sB [columns of acc][inner].
template <Dtype kCodes, int kN, class TileA, class TileB>
TESSERA_DEVICE void product_abt_codes(float (&acc)[1][kN][4], const TileA& sA, const TileB& sB) {
  static_assert(TileA::kCols == 2 * TileB::kCols && kN % 2 == 0 && TileA::kCols % 32 == 0);
  constexpr int kPairs = kN / 2, kSteps = TileA::kCols / 32;
  uint32 a[2][2][1][4];  // of two steps, each of 32 columns
  const auto load_step = [&](int step) {
    load_a<1>(a[step % 2][0], sA, 0, step * 32);
    load_a<1>(a[step % 2][1], sA, 0, step * 32 + 16);
  };
  load_step(0);
  for_fragments<kSteps * kPairs>([&](int i, uint32(&b)[4]) { load_b_pair(b, sB, i % kPairs * 16, i / kPairs * 16); },
                                 [&](int i, const uint32(&b)[4]) {
                                   const int step = i / kPairs, n = i % kPairs * 2;
                                   if (n == 0 && step + 1 < kSteps) load_step(step + 1);
#pragma unroll
                                   for (int half = 0; half < 2; ++half) {
                                     const uint32 first = b[half], second = b[2 + half];
                                     mma_16bit<Dtype::kFloat16>(acc[0][n], a[step % 2][half][0],
                                                                low_codes<kCodes>(first), high_codes<kCodes>(first));
                                     mma_16bit<Dtype::kFloat16>(acc[0][n + 1], a[step % 2][half][0],
                                                                low_codes<kCodes>(second), high_codes<kCodes>(second));
                                   }
                                 });
}

// acc += P B. P is an accumulator, rounded to float16; B = sB [8 kInner rows][columns of acc].
template <Dtype kCodes, int kInner, int kN, class TileB>
TESSERA_DEVICE void product_pb_codes(float (&acc)[1][kN][4], const float (&p)[1][kInner][4], const TileB& sB) {
  static_assert(kInner % 2 == 0 && kN % 4 == 0);
  constexpr int kFragments = kN / 4;  // of 32 columns
  uint32 a[4];
  for_fragments<kInner / 2 * kFragments>(
      [&](int i, uint32(&b)[4]) { load_b_pair_transposed(b, sB, i / kFragments * 16, i % kFragments * 16); },
      [&](int i, const uint32(&b)[4]) {
        if (i % kFragments == 0) pack_a<Dtype::kFloat16>(a, p[0], i / kFragments);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int n = i % kFragments * 4 + half * 2;
          // the even column of both rows, then the odd one
          const uint32 upper = ptx::prmt<0x3120>(b[2 * half], 0), lower = ptx::prmt<0x3120>(b[2 * half + 1], 0);
          mma_16bit<Dtype::kFloat16>(acc[0][n], a, low_codes<kCodes>(upper), low_codes<kCodes>(lower));
          mma_16bit<Dtype::kFloat16>(acc[0][n + 1], a, high_codes<kCodes>(upper), high_codes<kCodes>(lower));
        }
      });
}

// The four neighbouring columns from column 16 i + 4c on, of row g (kHalf 0) or g + 8 (kHalf 1) of such an accumulator.
template <int kHalf, int kN>
TESSERA_DEVICE float4 code_columns(const float (&acc)[1][kN][4], int i) {
  const float(&even)[4] = acc[0][2 * i], (&odd)[4] = acc[0][2 * i + 1];
  return make_float4(even[2 * kHalf], odd[2 * kHalf], even[2 * kHalf + 1], odd[2 * kHalf + 1]);
}

}  // namespace tessera
