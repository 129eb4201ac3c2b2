// Replaces the device's own header: the code under test uses fragments, but multiplies and transposes none.
#pragma once

#include "tessera/ptx/device.cuh"

unsigned __byte_perm(unsigned a, unsigned b, unsigned selector);

namespace tessera::ptx {

void mma_m16n8k16_f16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
void mma_m16n8k16_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
uint32 movmatrix_trans(uint32 pair);

}  // namespace tessera::ptx
