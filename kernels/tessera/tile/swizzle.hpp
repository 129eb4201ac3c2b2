// How tiles lie in shared memory where TMA fills them and wgmma reads them (CU_TENSOR_MAP_SWIZZLE_128B): chunks of 64 columns
// of 16 bits, 128 bytes a row, one chunk after the other. tile/wgmma_tile.cuh has the tiles themselves.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

inline constexpr int kChunkCols = 64, kChunkRowBytes = 128;
inline constexpr int kSwizzleBytes = 1024;  // the pattern's period, to which a tile is aligned

TESSERA_HOST_DEVICE constexpr int chunks_of(int columns) { return (columns + kChunkCols - 1) / kChunkCols; }
TESSERA_HOST_DEVICE constexpr int swizzled_bytes(int rows, int columns) {
  return chunks_of(columns) * rows * kChunkRowBytes;
}

// The upper half of all matrix descriptors of such tiles: 8 rows of 128 bytes lie one after another, swizzled over all 128.
inline constexpr uint32 kDescriptorHigh = 8 * kChunkRowBytes / 16 | 1u << 30;

}  // namespace tessera
