// Tiles in shared memory as TMA fills them and wgmma reads them: columns in chunks of 64, of 128 bytes a row, whose 16-byte
// words are swizzled by the row (CU_TENSOR_MAP_SWIZZLE_128B); chunk c of a tile of n rows starts n * 128 bytes after the
// one before. And wgmma's descriptors of them.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout
#pragma once

#include "tessera/ptx/mma.cuh"
#include "tessera/ptx/wgmma.cuh"
#include "tessera/tile/fragment.cuh"
#include "tessera/tile/layout.hpp"

namespace tessera {

template <int kTileRows, int kTileCols>
struct SwizzledTile {
  static constexpr int kRows = kTileRows, kCols = kTileCols, kChunks = chunks_of(kTileCols);
  static constexpr int kChunkBytes = kRows * kChunkRowBytes, kBytes = kChunks * kChunkBytes;
  static_assert(kRows % 8 == 0, "the swizzle repeats every 8 rows");
  alignas(kSwizzleBytes) char data[kBytes];

  // The 16-byte word of columns col ... col + 7 of a row.
  TESSERA_DEVICE static uint32 at(uint32 base, int row, int col) {
    return base + col / kChunkCols * kChunkBytes + row * kChunkRowBytes + ((col % kChunkCols / 8) ^ (row % 8)) * 16;
  }
};

// A descriptor's address, in units of 16 bytes. Kept, where from the address alone it were made anew for each tile.
TESSERA_DEVICE uint32 descriptor_address(uint32 address) { return uniform(not_hoisted((address & 0x3FFFF) >> 4)); }

// What a tile's descriptors have in common.
struct TileDescriptor {
  uint32 address;  // descriptor_address
  uint32 high;     // kDescriptorHigh
};

// `offset` of where the operand starts in the tile and the leading dimension's stride in bytes.
TESSERA_DEVICE unsigned long long wgmma_descriptor(const TileDescriptor& tile, int offset, int leading_bytes) {
  const uint32 low = tile.address + (offset >> 4 | leading_bytes >> 4 << 16);
  return static_cast<unsigned long long>(tile.high) << 32 | low;
}

// Columns k ... k + 15, from a row on that is a multiple of 8, of a tile that lies [rows][inner]: A, and B of a product with
// the tile's transpose.
template <class Tile>
TESSERA_DEVICE unsigned long long inner_major(const TileDescriptor& tile, int row, int k) {
  const int offset = k / kChunkCols * Tile::kChunkBytes + row * kChunkRowBytes + k % kChunkCols * 2;
  return wgmma_descriptor(tile, offset, 16);
}

// Rows k ... k + 15 of a tile that lies [inner][columns]: B of a product with the tile itself.
template <class Tile>
TESSERA_DEVICE unsigned long long outer_major(const TileDescriptor& tile, int k) {
  return wgmma_descriptor(tile, k * kChunkRowBytes, Tile::kChunkBytes);
}

// A warp's accumulator of wgmma, [1][n / 8][4] as mma's, as the flat array that wgmma takes.
template <int kN>
TESSERA_DEVICE float (&flat(float (&acc)[1][kN][4]))[kN * 4] {
  return reinterpret_cast<float(&)[kN * 4]>(acc);
}

// acc = A B^T by one warp with mma.sync, 16 rows of A from `row` on: what wgmma computed, again.
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
