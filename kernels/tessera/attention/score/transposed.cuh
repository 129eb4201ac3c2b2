// Bias and mask where a kernel's rows are keys, as in the backward pass: made of what the forward pass has of queries, by exchange
// among the lanes of a warp.
#pragma once

#include "tessera/attention/score/fragment.cuh"
#include "tessera/ptx/mma.cuh"

namespace tessera {

// A lane's share of 8 x 8 elements, two neighbours of one row -> two of one column.
TESSERA_DEVICE uint32 transposed_pair(uint32 pair) { return ptx::movmatrix_trans(pair); }
TESSERA_DEVICE float2 transposed_pair(float2 pair) {  // the low 16 bits of both numbers, and the high ones
  const uint32 x = __float_as_uint(pair.x), y = __float_as_uint(pair.y);
  const uint32 low = ptx::movmatrix_trans(__byte_perm(x, y, 0x5410));
  const uint32 high = ptx::movmatrix_trans(__byte_perm(x, y, 0x7632));
  return make_float2(__uint_as_float(__byte_perm(low, high, 0x5410)), __uint_as_float(__byte_perm(low, high, 0x7632)));
}

// Blocks become their transposes: of key lane / 4, queries 2 (lane % 4) and the next.
template <ScoreConfig kScore, int kRows, int kKeys, bool kLaneOrder>
TESSERA_DEVICE void transpose(BiasMaskFragment<kScore, kRows, kKeys, kLaneOrder>& fragment) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if constexpr (kScore.bias) {
#pragma unroll
      for (int k = 0; k < kKeys; ++k) fragment.bias[row][k] = transposed_pair(fragment.bias[row][k]);
    }
    if constexpr (kScore.mask) {
#pragma unroll
      for (int k = 0; k < kKeys / 2; ++k) {
        uint32& bytes = fragment.mask[row][k];
        const uint32 first = ptx::movmatrix_trans(__byte_perm(bytes, 0, 0x4140));  // a byte of 16 bits
        const uint32 second = ptx::movmatrix_trans(__byte_perm(bytes, 0, 0x4342));
        bytes = __byte_perm(first, second, 0x6420);
      }
    }
  }
}

}  // namespace tessera
