// Operations of a warp on matrices in its registers, by all of its lanes; `what` is the instruction's name.
#pragma once

#include <cstdint>

namespace tessera::emulated {

// D [16][8] += A [16][16] B [16][8], 16-bit elements; float32 (tf32): A [16][8], B [8][8].
void mma_16bit(const char* what, bool bfloat16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// Loads and stores four 8 x 8 matrices of 16-bit elements; each lane passes the address of a row in shared memory.
void load_matrices(const char* what, uint32_t (&r)[4], uint32_t shared, bool transposed);
void store_matrices(const char* what, uint32_t shared, const uint32_t (&r)[4], bool transposed);
uint32_t transpose_matrix(uint32_t pair);

}  // namespace tessera::emulated
