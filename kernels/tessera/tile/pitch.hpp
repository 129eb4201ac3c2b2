// How tiles lie in shared memory where ldmatrix reads them: tile/shared_tile.cuh has the tiles themselves.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// From a row to the next: 16 bytes (float32: 32) more than its columns. Columns are a multiple of 16, so a 16-bit row is an
// odd number of 16-byte words: the eight rows that ldmatrix reads at once lie in different banks, and every address is a
// base and a constant, which an XOR swizzle's would not be.
TESSERA_HOST_DEVICE constexpr int pitch_bytes(Dtype dtype, int columns) {
  return columns * dtype_bytes(dtype) + (dtype == Dtype::kFloat32 ? 32 : 16);
}
TESSERA_HOST_DEVICE constexpr int padded_bytes(Dtype dtype, int rows, int columns) {
  return rows * pitch_bytes(dtype, columns);
}

}  // namespace tessera
