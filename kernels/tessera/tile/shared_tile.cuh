// A tile in shared memory, [rows][columns], and how it is filled from global memory.
//
// Rows are 16 bytes (float32: 32) longer than their columns. Columns are a multiple of 16, so a 16-bit row is an odd
// number of 16-byte words: the eight rows that ldmatrix reads at once lie in different banks, and every address is a
// base and a constant, which an XOR swizzle's would not be.
#pragma once

#include "tessera/ptx/cp_async.cuh"
#include "tessera/tile/element.cuh"

namespace tessera {

inline constexpr int kLoadBytes = 16;

template <Dtype kDtype, int kTileRows, int kTileCols>
struct SharedTile {
  static_assert(kTileCols % 16 == 0, "the inner dimension of mma.m16n8k16");
  static constexpr Dtype kType = kDtype;
  static constexpr int kRows = kTileRows, kCols = kTileCols;
  static constexpr int kElemBytes = dtype_bytes(kDtype);
  static constexpr int kPitchBytes = kCols * kElemBytes + (kDtype == Dtype::kFloat32 ? 32 : 16);

  alignas(16) char data[kRows * kPitchBytes];

  TESSERA_DEVICE static uint32 at(uint32 base, int row, int col) { return base + row * kPitchBytes + col * kElemBytes; }
  TESSERA_DEVICE uint32 at(int row, int col) const { return at(shared_address(data), row, col); }
  TESSERA_DEVICE char* pointer(int row, int col) { return data + row * kPitchBytes + col * kElemBytes; }
};

// Rows of global memory for a tile: row r is at gRow(r), a byte pointer, and row_bytes long; rows from `count` on, and
// columns beyond row_bytes, become zero, so that nothing behind a sequence's end can reach a product.
// kAligned: every row starts at a multiple of 16 bytes; the copy is asynchronous, and the caller commits the group.
template <bool kAligned, int kThreads, class Tile, class RowPointer>
TESSERA_DEVICE void load_tile(Tile& sTile, int count, int row_bytes, RowPointer&& gRow) {
  constexpr int kLoadsPerRow = Tile::kCols * Tile::kElemBytes / kLoadBytes;
  constexpr int kLoads = Tile::kRows * kLoadsPerRow;
  const int first = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < (kLoads + kThreads - 1) / kThreads; ++i) {
    const int load = first + i * kThreads;
    if (kLoads % kThreads != 0 && load >= kLoads) break;
    const int row = load / kLoadsPerRow, offset = load % kLoadsPerRow * kLoadBytes;
    char* to = sTile.data + row * Tile::kPitchBytes + offset;
    const int wanted = row < count ? min(max(row_bytes - offset, 0), kLoadBytes) : 0;
    const char* from = gRow(wanted > 0 ? row : 0) + (wanted > 0 ? offset : 0);
    if constexpr (kAligned) {
      ptx::cp_async_cg_16(shared_address(to), from, wanted);
    } else if constexpr (Tile::kElemBytes == 2) {
      uint32 words[4] = {};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (n * 2 < wanted) {
          words[n / 2] |= static_cast<uint32>(reinterpret_cast<const unsigned short*>(from)[n]) << (16 * (n % 2));
        }
      }
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        reinterpret_cast<float*>(to)[n] = n * 4 < wanted ? reinterpret_cast<const float*>(from)[n] : 0.0f;
      }
    }
  }
}

// The same for rows `row_stride` bytes apart from `gRows` on. A whole tile, which all but a sequence's last are, takes an
// addition a load.
template <bool kAligned, int kThreads, class Tile>
TESSERA_DEVICE void load_tile_strided(Tile& sTile, int count, int row_bytes, const char* gRows, int64 row_stride) {
  constexpr int kLoadsPerRow = Tile::kCols * Tile::kElemBytes / kLoadBytes;
  constexpr int kRowsAPass = kThreads / kLoadsPerRow;
  if constexpr (kAligned && kThreads % kLoadsPerRow == 0 && Tile::kRows % kRowsAPass == 0) {
    if (count >= Tile::kRows && row_bytes == kLoadsPerRow * kLoadBytes) {
      const int row = static_cast<int>(threadIdx.x) / kLoadsPerRow;
      const int offset = static_cast<int>(threadIdx.x) % kLoadsPerRow * kLoadBytes;
      const char* from = gRows + row * row_stride + offset;
      const uint32 to = shared_address(sTile.data) + row * Tile::kPitchBytes + offset;
#pragma unroll
      for (int i = 0; i < Tile::kRows / kRowsAPass; ++i) {
        ptx::cp_async_cg_16(to + i * kRowsAPass * Tile::kPitchBytes, from, kLoadBytes);
        from += kRowsAPass * row_stride;
      }
      return;
    }
  }
  load_tile<kAligned, kThreads>(sTile, count, row_bytes, [&](int row) { return gRows + row_stride * row; });
}

// Rows first ... first + kRows - 1 of a tile, those below `count`, to global memory, by one warp. kAligned as above, but
// known at run time: every row starts at a multiple of 16 bytes.
template <int kRows, class Tile, class RowPointer>
TESSERA_DEVICE void store_rows(Tile& sTile, int first, int count, int columns, int aligned, RowPointer&& gRow) {
  constexpr int kElems = kLoadBytes / Tile::kElemBytes;
  constexpr int kStoresPerRow = Tile::kCols / kElems;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int store = lane; store < kRows * kStoresPerRow; store += 32) {
    const int row = first + store / kStoresPerRow, col = store % kStoresPerRow * kElems;
    if (row >= count || col >= columns) continue;
    const char* from = sTile.pointer(row, col);
    char* to = gRow(row) + col * Tile::kElemBytes;
    if (aligned && col + kElems <= columns) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      continue;
    }
    for (int n = 0; n < min(kElems, columns - col); ++n) {
      if constexpr (Tile::kElemBytes == 2) {
        reinterpret_cast<unsigned short*>(to)[n] = reinterpret_cast<const unsigned short*>(from)[n];
      } else {
        reinterpret_cast<float*>(to)[n] = reinterpret_cast<const float*>(from)[n];
      }
    }
  }
}

}  // namespace tessera
