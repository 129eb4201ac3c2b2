// Tiles in shared memory that TMA fills and wgmma reads, and wgmma's descriptors of them. The columns form chunks of 64
// with 128 bytes a row, whose 16-byte words are swizzled by the row (CU_TENSOR_MAP_SWIZZLE_128B). Chunk c + 1 of a tile
// of n rows starts n * 128 bytes after chunk c.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout
#pragma once

#include "tessera/ptx/layout.hpp"
#include "tessera/ptx/mma.cuh"
#include "tessera/ptx/wgmma.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

template <int kTileRows, int kTileCols>
struct SwizzledTile {
  static constexpr int kRows = kTileRows, kCols = kTileCols, kChunks = chunks_of(kTileCols);
  static constexpr int kChunkBytes = kRows * kChunkRowBytes, kBytes = kChunks * kChunkBytes;
  static_assert(kRows % 8 == 0, "the swizzle repeats every 8 rows");
  alignas(kSwizzleBytes) char data[kBytes];

  // The address of the 16-byte word of columns col ... col + 7 of a row.
  TESSERA_DEVICE static uint32 at(uint32 base, int row, int col) {
    return base + col / kChunkCols * kChunkBytes + row * kChunkRowBytes + ((col % kChunkCols / 8) ^ (row % 8)) * 16;
  }
};

// A descriptor's address, in units of 16 bytes. `not_hoisted` keeps it in a register; otherwise the compiler recomputes
// it for every tile.
TESSERA_DEVICE uint32 descriptor_address(uint32 address) { return uniform(not_hoisted((address & 0x3FFFF) >> 4)); }

// The common part of a tile's descriptors.
struct TileDescriptor {
  uint32 address;  // from descriptor_address()
  uint32 high;     // kDescriptorHigh
};

// The descriptor of an operand that starts `offset` bytes into the tile; leading_bytes is the stride of its leading
// dimension.
TESSERA_DEVICE unsigned long long wgmma_descriptor(const TileDescriptor& tile, int offset, int leading_bytes) {
  const uint32 low = tile.address + (offset >> 4 | leading_bytes >> 4 << 16);
  return static_cast<unsigned long long>(tile.high) << 32 | low;
}

// Columns k ... k + 15, from a row on that is a multiple of 8, of a tile stored as [rows][inner]: operand A, or B of a
// product with the tile's transpose.
template <class Tile>
TESSERA_DEVICE unsigned long long inner_major(const TileDescriptor& tile, int row, int k) {
  const int offset = k / kChunkCols * Tile::kChunkBytes + row * kChunkRowBytes + k % kChunkCols * 2;
  return wgmma_descriptor(tile, offset, 16);
}

// Rows k ... k + 15 of a tile stored as [inner][columns]: operand B of a product with the tile itself.
template <class Tile>
TESSERA_DEVICE unsigned long long outer_major(const TileDescriptor& tile, int k) {
  return wgmma_descriptor(tile, k * kChunkRowBytes, Tile::kChunkBytes);
}

// A warp's wgmma accumulator, [1][n / 8][4] as for mma, as the flat array that the wgmma wrappers expect.
template <int kN>
TESSERA_DEVICE float (&flat(float (&acc)[1][kN][4]))[kN * 4] {
  return reinterpret_cast<float(&)[kN * 4]>(acc);
}

// acc = A B^T by one warp with mma.sync, for 16 rows of A from `row` on: recomputes a result of wgmma.
template <Dtype kDtype, class TileA, class TileB, int kN>
TESSERA_DEVICE void warp_product_abt(float (&acc)[1][kN][4], uint32 a_base, int row, uint32 b_base) {
  static_assert(TileA::kCols == TileB::kCols);
  clear(acc);
  const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32));
#pragma unroll 1
  for (int k = 0; k < TileA::kCols; k += 16) {
    uint32 a[4];
    ptx::ldmatrix_x4(a, TileA::at(a_base, row + lane % 16, k + lane / 16 * 8));
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32 b[4];
      ptx::ldmatrix_x4(b, TileB::at(b_base, n * 8 + lane % 8 + lane / 16 * 8, k + lane / 8 % 2 * 8));
      mma_16bit<kDtype>(acc[0][n], a, b[0], b[1]);
      mma_16bit<kDtype>(acc[0][n + 1], a, b[2], b[3]);
    }
  }
}

}  // namespace tessera
