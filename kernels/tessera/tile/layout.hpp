// How tiles lie in shared memory, for the host and for the tiles themselves: tile/shared_tile.cuh, tile/wgmma_tile.cuh.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// ---- where ldmatrix reads them --------------------------------------------------------------------------------------

// From a row to the next: 16 bytes (float32: 32) more than its columns. Columns are a multiple of 16, so a 16-bit row is
// an odd number of 16-byte words: the eight rows that ldmatrix reads at once lie in different banks, and every address
// is a base and a constant, which an XOR swizzle's would not be.
TESSERA_HOST_DEVICE constexpr int pitch_bytes(Dtype dtype, int columns) {
  return columns * dtype_bytes(dtype) + (dtype == Dtype::kFloat32 ? 32 : 16);
}
TESSERA_HOST_DEVICE constexpr int padded_bytes(Dtype dtype, int rows, int columns) {
  return rows * pitch_bytes(dtype, columns);
}

// ---- where TMA fills them and wgmma reads them ----------------------------------------------------------------------

// CU_TENSOR_MAP_SWIZZLE_128B: chunks of 64 columns of 16 bits, 128 bytes a row, one chunk after the other.
inline constexpr int kChunkCols = 64, kChunkRowBytes = 128;
inline constexpr int kSwizzleBytes = 1024;  // the pattern's period, to which a tile is aligned

TESSERA_HOST_DEVICE constexpr int chunks_of(int columns) { return (columns + kChunkCols - 1) / kChunkCols; }
TESSERA_HOST_DEVICE constexpr int swizzled_bytes(int rows, int columns) {
  return chunks_of(columns) * rows * kChunkRowBytes;
}

// The upper half of all matrix descriptors of such tiles: 8 rows of 128 bytes lie one after another, swizzled over all
// 128.
inline constexpr uint32 kDescriptorHigh = 8 * kChunkRowBytes / 16 | 1u << 30;

}  // namespace tessera
