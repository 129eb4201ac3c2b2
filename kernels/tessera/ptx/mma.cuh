// D = A B + D on the tensor cores by one warp, with float32 accumulators. With g = lane / 4 and c = lane % 4, a lane
// holds the elements (g, 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1) of the accumulator.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

TESSERA_DEVICE void mma_m16n8k16_f16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

TESSERA_DEVICE void mma_m16n8k16_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

TESSERA_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- fragments from and to shared memory ----------------------------------------------------------------------------

// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane l gives the address of row l % 8 of matrix l /
// 8, and receives from each matrix the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 (transposed: of column l / 4).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
TESSERA_DEVICE void ldmatrix_x4(uint32 (&r)[4], uint32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

TESSERA_DEVICE void ldmatrix_x4_trans(uint32 (&r)[4], uint32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Stores four 8 x 8 matrices: the reverse of ldmatrix_x4.
TESSERA_DEVICE void stmatrix_x4(uint32 shared, const uint32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same, each matrix transposed: row r of memory is column r of the registers' matrix.
TESSERA_DEVICE void stmatrix_x4_trans(uint32 shared, const uint32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements among a warp's lanes. Lane l holds the elements 2 (l % 4) and 2 (l % 4)
// + 1 of row l / 4.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-movmatrix
TESSERA_DEVICE uint32 movmatrix_trans(uint32 pair) {
  uint32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// 16 bytes of shared memory.
TESSERA_DEVICE uint4 ld_shared_16(uint32 shared) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}
TESSERA_DEVICE int ld_shared_s32(uint32 shared) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}
TESSERA_DEVICE void st_shared_s32(uint32 shared, int a) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(shared), "r"(a) : "memory");
}
TESSERA_DEVICE void st_shared_s32x2(uint32 shared, int a, int b) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(shared), "r"(a), "r"(b) : "memory");
}
TESSERA_DEVICE float2 ld_shared_f32x2(uint32 shared) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
  return x;
}
TESSERA_DEVICE float4 ld_shared_f32x4(uint32 shared) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}
TESSERA_DEVICE void st_shared_f32x4(uint32 shared, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
TESSERA_DEVICE void st_shared_zero_16(uint32 shared) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}

}  // namespace tessera::ptx
