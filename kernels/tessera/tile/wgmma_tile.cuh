// Tiles in shared memory as TMA fills them and wgmma reads them: columns in chunks of 64, of 128 bytes a row, whose 16-byte
// words are swizzled by the row (CU_TENSOR_MAP_SWIZZLE_128B); chunk c of a tile of n rows starts n * 128 bytes after the
// one before. And wgmma's descriptors of them.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout
#pragma once

#include "tessera/ptx/ldmatrix.cuh"
#include "tessera/ptx/wgmma.cuh"
#include "tessera/tile/product.cuh"

namespace tessera {

inline constexpr int kChunkCols = 64, kChunkRowBytes = 128;

TESSERA_HOST_DEVICE constexpr int chunks_of(int columns) { return (columns + kChunkCols - 1) / kChunkCols; }

template <int kTileRows, int kTileCols>
struct SwizzledTile {
  static constexpr int kRows = kTileRows, kCols = kTileCols, kChunks = chunks_of(kTileCols);
  static constexpr int kChunkBytes = kRows * kChunkRowBytes, kBytes = kChunks * kChunkBytes;
  static_assert(kRows % 8 == 0, "the swizzle repeats every 8 rows");
  alignas(1024) char data[kBytes];

  // The 16-byte word of columns col ... col + 7 of a row.
  TESSERA_DEVICE static uint32 at(uint32 base, int row, int col) {
    return base + col / kChunkCols * kChunkBytes + row * kChunkRowBytes + ((col % kChunkCols / 8) ^ (row % 8)) * 16;
  }
};

// The first lane's value, which the compiler then knows for the whole warp's: a loop over it is uniform, and what is made
// from it lives in uniform registers.
template <class T>
TESSERA_DEVICE T uniform(T x) {
  return __shfl_sync(0xffffffff, x, 0);
}

// A descriptor's address of a tile, in units of 16 bytes. Each of the tile's descriptors is then one addition away.
TESSERA_DEVICE uint32 descriptor_address(uint32 address) { return uniform((address & 0x3FFFF) >> 4); }

// Both strides in bytes; `offset` too, of where the operand starts in the tile.
TESSERA_DEVICE unsigned long long wgmma_descriptor(uint32 tile, int offset, int leading_bytes, int stride_bytes) {
  constexpr uint32 kSwizzle128 = 1u << 30;
  const uint32 low = tile + (offset >> 4 | leading_bytes >> 4 << 16), high = stride_bytes >> 4 | kSwizzle128;
  return static_cast<unsigned long long>(high) << 32 | low;
}

inline constexpr int kEightRowsBytes = 8 * kChunkRowBytes;

// Columns k ... k + 15, from a row on that is a multiple of 8, of a tile that lies [rows][inner]: A, and B of a product with
// the tile's transpose.
template <class Tile>
TESSERA_DEVICE unsigned long long inner_major(uint32 tile, int row, int k) {
  const int offset = k / kChunkCols * Tile::kChunkBytes + row * kChunkRowBytes + k % kChunkCols * 2;
  return wgmma_descriptor(tile, offset, 16, kEightRowsBytes);
}

// Rows k ... k + 15 of a tile that lies [inner][columns]: B of a product with the tile itself.
template <class Tile>
TESSERA_DEVICE unsigned long long outer_major(uint32 tile, int k) {
  return wgmma_descriptor(tile, k * kChunkRowBytes, Tile::kChunkBytes, kEightRowsBytes);
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
