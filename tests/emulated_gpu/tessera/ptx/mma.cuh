#pragma once

#include "matrices.hpp"
#include "tessera/ptx/math.cuh"

namespace tessera::ptx {

inline void mma_m16n8k16_f16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  emulated::mma_16bit("mma.f16", false, d, a, b0, b1);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  emulated::mma_16bit("mma.bf16", true, d, a, b0, b1);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  emulated::mma_tf32(d, a, b0, b1);
}

inline void ldmatrix_x4(uint32 (&r)[4], uint32 shared) { emulated::load_matrices("ldmatrix", r, shared, false); }
inline void ldmatrix_x4_trans(uint32 (&r)[4], uint32 shared) {
  emulated::load_matrices("ldmatrix.trans", r, shared, true);
}
inline void stmatrix_x4(uint32 shared, const uint32 (&r)[4]) { emulated::store_matrices("stmatrix", shared, r, false); }
inline void stmatrix_x4_trans(uint32 shared, const uint32 (&r)[4]) {
  emulated::store_matrices("stmatrix.trans", shared, r, true);
}
inline uint32 movmatrix_trans(uint32 pair) { return emulated::transpose_matrix(pair); }

template <class T>
T emulated_ld_shared(uint32 shared) {
  T x;
  std::memcpy(static_cast<void*>(&x), emulated::here().own_shared(shared, sizeof x, sizeof x), sizeof x);
  return x;
}
template <class T>
void emulated_st_shared(uint32 shared, const T& x) {
  std::memcpy(emulated::here().own_shared(shared, sizeof x, sizeof x), &x, sizeof x);
}
inline uint4 ld_shared_16(uint32 shared) { return emulated_ld_shared<uint4>(shared); }
inline int ld_shared_s32(uint32 shared) { return emulated_ld_shared<int>(shared); }
inline float2 ld_shared_f32x2(uint32 shared) { return emulated_ld_shared<float2>(shared); }
inline float4 ld_shared_f32x4(uint32 shared) { return emulated_ld_shared<float4>(shared); }
inline void st_shared_s32(uint32 shared, int a) { emulated_st_shared(shared, a); }
inline void st_shared_s32x2(uint32 shared, int a, int b) { emulated_st_shared(shared, make_int2(a, b)); }
inline void st_shared_f32x4(uint32 shared, float a, float b, float c, float d) {
  emulated_st_shared(shared, make_float4(a, b, c, d));
}
inline void st_shared_zero_16(uint32 shared) { emulated_st_shared(shared, make_uint4(0, 0, 0, 0)); }

}  // namespace tessera::ptx
