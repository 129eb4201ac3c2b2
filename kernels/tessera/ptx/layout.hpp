// What the instructions for matrices demand of tiles in shared memory, for the host and for tile/: the distance between
// rows, the swizzle, and the widths of wgmma.
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

// ---- widths of wgmma ------------------------------------------------------------------------------------------------
//
// The widths N that kernels use, and the numbers of the seven operands after the N / 2 accumulators of an asm
// statement.

// clang-format off
#define TESSERA_WGMMA_WIDTHS(X)              \
  X(32, 16, 17, 18, 19, 20, 21, 22)          \
  X(48, 24, 25, 26, 27, 28, 29, 30)          \
  X(64, 32, 33, 34, 35, 36, 37, 38)          \
  X(80, 40, 41, 42, 43, 44, 45, 46)          \
  X(96, 48, 49, 50, 51, 52, 53, 54)          \
  X(112, 56, 57, 58, 59, 60, 61, 62)         \
  X(128, 64, 65, 66, 67, 68, 69, 70)         \
  X(160, 80, 81, 82, 83, 84, 85, 86)         \
  X(176, 88, 89, 90, 91, 92, 93, 94)         \
  X(192, 96, 97, 98, 99, 100, 101, 102)      \
  X(256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

namespace tessera {

#define TESSERA_WIDTH(n, ...) n,
inline constexpr int kWgmmaWidths[] = {TESSERA_WGMMA_WIDTHS(TESSERA_WIDTH)};
#undef TESSERA_WIDTH

}  // namespace tessera
