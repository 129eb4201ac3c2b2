// Single instructions for arithmetic and conversion.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// 2^x. Returns 0 for -inf and for results below 2^-126.
TESSERA_DEVICE float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x). Returns -inf for 0.
TESSERA_DEVICE float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, accurate to one unit in the last place.
TESSERA_DEVICE float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// `low` in bits 0 ... 15, `high` in bits 16 ... 31, each rounded to nearest.
TESSERA_DEVICE uint32 cvt_rn_f16x2(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// The same; values out of range become the largest finite number.
TESSERA_DEVICE uint32 cvt_rn_satfinite_f16x2(float low, float high) {
  uint32 pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
TESSERA_DEVICE uint32 cvt_rn_bf16x2(float low, float high) {
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// The same; negative values become 0.
TESSERA_DEVICE uint32 cvt_rn_relu_bf16x2(float low, float high) {
  uint32 pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// a b of each half, and a b + c.
TESSERA_DEVICE uint32 mul_f16x2(uint32 a, uint32 b) {
  uint32 pair;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
TESSERA_DEVICE uint32 fma_rn_bf16x2(uint32 a, uint32 b, uint32 c) {
  uint32 pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// The maximum of each half.
TESSERA_DEVICE uint32 max_f16x2(uint32 a, uint32 b) {
  uint32 pair;
  asm("max.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
TESSERA_DEVICE uint32 max_bf16x2(uint32 a, uint32 b) {
  uint32 pair;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

// Two e4m3 in bits 0 ... 15, `low` in bits 0 ... 7, each rounded to nearest; what is too large becomes 448.
TESSERA_DEVICE unsigned short cvt_rn_satfinite_e4m3x2(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// The same for e5m2; what is too large becomes 57344.
TESSERA_DEVICE unsigned short cvt_rn_satfinite_e5m2x2(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two e4m3 or e5m2, exactly: those in bits 0 ... 15 of `codes` or, kHigh, in bits 16 ... 31, which takes no shift. The
// lower code becomes bits 0 ... 15. NaN stays NaN.
template <bool kHigh>
TESSERA_DEVICE uint32 cvt_rn_f16x2_e4m3x2(uint32 codes) {
  uint32 pair;
  if constexpr (kHigh) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(pair) : "r"(codes));
  } else {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(pair) : "r"(codes));
  }
  return pair;
}
template <bool kHigh>
TESSERA_DEVICE uint32 cvt_rn_f16x2_e5m2x2(uint32 codes) {
  uint32 pair;
  if constexpr (kHigh) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e5m2x2 %0, h;}" : "=r"(pair) : "r"(codes));
  } else {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e5m2x2 %0, l;}" : "=r"(pair) : "r"(codes));
  }
  return pair;
}

// Four bytes of the eight that b and a have, b's being bytes 4 ... 7: byte n of the result is byte (kBytes >> 4n) % 8.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prmt
template <uint32 kBytes>
TESSERA_DEVICE uint32 prmt(uint32 a, uint32 b) {
  uint32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "n"(kBytes));
  return bytes;
}

TESSERA_DEVICE float cvt_f32_f16(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// Rounds to the 10 bits of mantissa that the tensor cores read; ties away from zero.
TESSERA_DEVICE uint32 cvt_rna_tf32(float x) {
  uint32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

}  // namespace tessera::ptx
