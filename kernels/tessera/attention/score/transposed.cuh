// Entries of 8 x 8 scores for kernels whose rows are keys, as in the backward pass: they are loaded as in the forward
// pass, one query for each row, and the lanes of a warp exchange them.
#pragma once

#include "tessera/ptx/mma.cuh"
#include "tessera/tile/element.cuh"

namespace tessera {

// A lane's part of 8 x 8 elements, two neighbours of a row, becomes its part of the transpose, two neighbours of a
// column.
TESSERA_DEVICE uint32 transposed_pair(uint32 pair) { return ptx::movmatrix_trans(pair); }
TESSERA_DEVICE float2 transposed_pair(float2 pair) {  // the low 16 bits of both numbers, and the high ones
  const uint32 x = __float_as_uint(pair.x), y = __float_as_uint(pair.y);
  const uint32 low = ptx::movmatrix_trans(__byte_perm(x, y, 0x5410));
  const uint32 high = ptx::movmatrix_trans(__byte_perm(x, y, 0x7632));
  return make_float2(__uint_as_float(__byte_perm(low, high, 0x5410)), __uint_as_float(__byte_perm(low, high, 0x7632)));
}

// The same for bytes: the two low bytes of `pair` are neighbours; the result has one byte in each 16 bits.
TESSERA_DEVICE uint32 transposed_bytes(uint32 pair) { return ptx::movmatrix_trans(__byte_perm(pair, 0, 0x4140)); }

}  // namespace tessera
