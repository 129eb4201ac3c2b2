// Values in registers: elements of the three types, named constants, and fragments, a lane's elements of a matrix.
#pragma once

#include "tessera/ptx/device.cuh"
#include "tessera/ptx/math.cuh"
#include "tessera/ptx/mma.cuh"

namespace tessera {

// Named constants; NVRTC lacks <numbers>.

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

TESSERA_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// Makes x / divisor of its approximation x reciprocal by two corrections (Markstein, "Computation of elementary
// functions on the IBM RISC System/6000 processor", 1990): the first one leaves an error below one unit in the last
// place, from which the second one gives the quotient that IEEE 754 asks for, if no step underflows. For a positive
// divisor. A remainder of 0 is +0 here, whose product is -0, which changes the sign of no zero; if the approximation is
// infinite, the result is wrong or NaN.
TESSERA_DEVICE float corrected_quotient(float approximation, float x, float divisor, float reciprocal) {
  float quotient = approximation;
#pragma unroll
  for (int n = 0; n < 2; ++n) quotient = fmaf(fmaf(quotient, divisor, -x), -reciprocal, quotient);
  return quotient;
}

// Elements of the three types, in registers and in memory.

// Packs two neighbouring elements of a row into 16 bits each.
template <Dtype kDtype>
TESSERA_DEVICE uint32 pack_pair(float low, float high) {
  static_assert(kDtype != Dtype::kFloat32, "float32 is not packed");
  return kDtype == Dtype::kFloat16 ? ptx::cvt_rn_f16x2(low, high) : ptx::cvt_rn_bf16x2(low, high);
}

// Two neighbouring elements in their storage type, and as numbers.
template <Dtype kDtype>
struct RawPairOf {
  using Type = uint32;
};
template <>
struct RawPairOf<Dtype::kFloat32> {
  using Type = float2;
};
template <Dtype kDtype>
using RawPair = typename RawPairOf<kDtype>::Type;

template <Dtype kDtype>
TESSERA_DEVICE float2 unpack_pair(const RawPair<kDtype>& pair) {
  if constexpr (kDtype == Dtype::kFloat32) {
    return pair;
  } else if constexpr (kDtype == Dtype::kFloat16) {
    return make_float2(ptx::cvt_f32_f16(static_cast<unsigned short>(pair)),
                       ptx::cvt_f32_f16(static_cast<unsigned short>(pair >> 16)));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}

// Loads two neighbouring elements.
template <Dtype kDtype>
TESSERA_DEVICE float2 load_pair(const char* at) {
  return unpack_pair<kDtype>(*reinterpret_cast<const RawPair<kDtype>*>(at));
}

template <Dtype kDtype>
TESSERA_DEVICE float load_element(const void* data, int64 index) {
  if constexpr (kDtype == Dtype::kFloat32) return static_cast<const float*>(data)[index];
  const unsigned short bits = static_cast<const unsigned short*>(data)[index];
  if constexpr (kDtype == Dtype::kFloat16) return ptx::cvt_f32_f16(bits);
  return __uint_as_float(static_cast<uint32>(bits) << 16);
}

template <Dtype kDtype>
TESSERA_DEVICE void store_element(void* data, int64 index, float x) {
  if constexpr (kDtype == Dtype::kFloat32) {
    static_cast<float*>(data)[index] = x;
  } else {
    static_cast<unsigned short*>(data)[index] = static_cast<unsigned short>(pack_pair<kDtype>(x, 0.0f));
  }
}

// ---- fragments ------------------------------------------------------------------------------------------------------
//
// Fragments: the elements of a matrix that each lane of a warp holds. Every accumulator is [kM][kN][4]: kM x kN tiles
// of 16 x 8. With g = lane / 4 and c = lane % 4, a lane holds (g, 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1) of
// each, for every element type; wgmma's accumulator is the same with kM = 1.

TESSERA_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
TESSERA_DEVICE int lane_row() { return lane_id() / 4; }      // g
TESSERA_DEVICE int lane_col() { return lane_id() % 4 * 2; }  // 2c

template <int kM, int kN>
TESSERA_DEVICE void clear(float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.0f;
}

// Packs a 16 x 16 part of an accumulator as the A operand of another product.
template <Dtype kDtype, int kN>
TESSERA_DEVICE void pack_a(uint32 (&a)[4], const float (&acc)[kN][4], int k) {
  a[0] = pack_pair<kDtype>(acc[2 * k][0], acc[2 * k][1]);
  a[1] = pack_pair<kDtype>(acc[2 * k][2], acc[2 * k][3]);
  a[2] = pack_pair<kDtype>(acc[2 * k + 1][0], acc[2 * k + 1][1]);
  a[3] = pack_pair<kDtype>(acc[2 * k + 1][2], acc[2 * k + 1][3]);
}

// Packs a whole accumulator once it is final; it then needs half of the registers.
template <Dtype kDtype, int kM, int kSteps, int kN>
TESSERA_DEVICE void pack_rows(uint32 (&a)[kM][kSteps][4], const float (&acc)[kM][kN][4]) {
  static_assert(kN == 2 * kSteps);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int k = 0; k < kSteps; ++k) pack_a<kDtype>(a[m][k], acc[m], k);
}

// D += A B for one tile, for both 16-bit types.
template <Dtype kDtype>
TESSERA_DEVICE void mma_16bit(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  if constexpr (kDtype == Dtype::kFloat16) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  } else {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  }
}

// ---- rows -----------------------------------------------------------------------------------------------------------
//
// Reductions over a row of a warp's accumulator, which four neighbouring lanes hold.

TESSERA_DEVICE float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
TESSERA_DEVICE float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// ---- transposes -----------------------------------------------------------------------------------------------------
//
// Entries of 8 x 8 scores for kernels whose rows are keys, as in the backward pass: they are loaded as in the forward
// pass, one query for each row, and the lanes of a warp exchange them.

// A lane's part of 8 x 8 elements, two neighbours of a row, becomes its part of the transpose, two neighbours of a
// column.
TESSERA_DEVICE uint32 transposed_pair(uint32 pair) { return ptx::movmatrix_trans(pair); }
TESSERA_DEVICE float2 transposed_pair(float2 pair) {  // the low 16 bits of both numbers, and the high ones
  const uint32 x = __float_as_uint(pair.x), y = __float_as_uint(pair.y);
  const uint32 low = ptx::movmatrix_trans(__byte_perm(x, y, 0x5410));
  const uint32 high = ptx::movmatrix_trans(__byte_perm(x, y, 0x7632));
  return make_float2(__uint_as_float(__byte_perm(low, high, 0x5410)), __uint_as_float(__byte_perm(low, high, 0x7632)));
}

// The same for bytes: the two low bytes of `pair` are neighbours; the result has one byte in each 16 bits.
TESSERA_DEVICE uint32 transposed_bytes(uint32 pair) { return ptx::movmatrix_trans(__byte_perm(pair, 0, 0x4140)); }

}  // namespace tessera
