// Layouts of tiles in shared memory, for the host and for tile/shared_tile.cuh and tile/wgmma_tile.cuh.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// ---- tiles that ldmatrix reads --------------------------------------------------------------------------------------

// The distance between rows: the row's bytes and 16 more (float32: 32). Columns are a multiple of 16, so a 16-bit row
// is an odd number of 16-byte words. The eight rows that ldmatrix reads at once are then in different banks, and every
// address is a base plus a constant, unlike with an XOR swizzle.
TESSERA_HOST_DEVICE constexpr int pitch_bytes(Dtype dtype, int columns) {
  return columns * dtype_bytes(dtype) + (dtype == Dtype::kFloat32 ? 32 : 16);
}
TESSERA_HOST_DEVICE constexpr int padded_bytes(Dtype dtype, int rows, int columns) {
  return rows * pitch_bytes(dtype, columns);
}

// ---- tiles that TMA fills and wgmma reads ---------------------------------------------------------------------------

// CU_TENSOR_MAP_SWIZZLE_128B: chunks of 64 columns of 16 bits, 128 bytes a row, one chunk after the other.
inline constexpr int kChunkCols = 64, kChunkRowBytes = 128;
inline constexpr int kSwizzleBytes = 1024;  // the pattern's period; tiles are aligned to it

TESSERA_HOST_DEVICE constexpr int chunks_of(int columns) { return (columns + kChunkCols - 1) / kChunkCols; }
TESSERA_HOST_DEVICE constexpr int swizzled_bytes(int rows, int columns) {
  return chunks_of(columns) * rows * kChunkRowBytes;
}

// The upper half of the matrix descriptors of all such tiles: groups of 8 rows of 128 bytes are contiguous and swizzled
// over all 128 bytes.
inline constexpr uint32 kDescriptorHigh = 8 * kChunkRowBytes / 16 | 1u << 30;

}  // namespace tessera
