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

}  // namespace tessera::ptx
