// A tile in shared memory, [rows][columns] with padded rows (tile/layout.hpp).
#pragma once

#include "tessera/tile/element.cuh"
#include "tessera/tile/layout.hpp"

namespace tessera {

inline constexpr int kLoadBytes = 16;

// kLaneOrder permutes each 32 rows: row r = 8 c + 2 n + e is stored at 8 n + 2 c + e. If the rows become the columns of
// a product, columns 2 c and 2 c + 1 of four tiles of 8, which are lane c's, are then eight neighbours.
template <Dtype kDtype, int kTileRows, int kTileCols, bool kLaneOrder = false>
struct SharedTile {
  static_assert(!kLaneOrder || kTileRows % 32 == 0);
  static_assert(kTileCols % 16 == 0, "the inner dimension of mma.m16n8k16");
  static constexpr Dtype kType = kDtype;
  static constexpr int kRows = kTileRows, kCols = kTileCols;
  static constexpr int kElemBytes = dtype_bytes(kDtype);
  static constexpr int kPitchBytes = pitch_bytes(kDtype, kCols);

  alignas(16) char data[kRows * kPitchBytes];

  // Where a row is stored. If two row indices share no set bit, the place of their sum is the sum of their places.
  TESSERA_HOST_DEVICE static constexpr int place(int row) {
    return kLaneOrder ? row / 32 * 32 + row / 2 % 4 * 8 + row / 8 % 4 * 2 + row % 2 : row;
  }

  TESSERA_DEVICE static uint32 at(uint32 base, int row, int col) { return base + row * kPitchBytes + col * kElemBytes; }
  TESSERA_DEVICE uint32 at(int row, int col) const { return at(shared_address(data), row, col); }
  TESSERA_DEVICE char* pointer(int row, int col) { return data + row * kPitchBytes + col * kElemBytes; }
};

// Lanes for `loads` loads of a row: the least sufficient power of two, at most a warp.
TESSERA_DEVICE constexpr int lanes_of(int loads) {
  int lanes = 1;
  while (lanes < loads && lanes < 32) lanes *= 2;
  return lanes;
}

}  // namespace tessera
