// Bias, mask and dropout where a kernel's rows are keys, as in the backward pass: made of what the forward pass has of
// queries, by exchange among the lanes of a warp.
#pragma once

#include "tessera/attention/dropout.cuh"
#include "tessera/attention/score/fragment.cuh"
#include "tessera/ptx/ldmatrix.cuh"

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

// Where a lane's row is a key and its columns are two queries, `query` and the next: bits[e][t] of query `query` + e and of the
// keys 32 group + row + {16 t, 16 t + 8}, in the low half and the high. A call has the words of two neighbouring keys, of which
// each lane wants one: so one of the two calls is the neighbour's, who wants the other half of mine. By all lanes of a warp.
TESSERA_DEVICE void transposed_dropout_bits(uint32 (&bits)[2][2], const ProblemParams& p, int head, int query,
                                            int group, int row) {
  const bool odd = row % 2 != 0;
  const PhiloxWords words = dropout_words(p, head, query + odd, group, row / 2);
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const uint32 low = __byte_perm(words.word[2 * t], words.word[2 * t + 1], 0x5410);
    const uint32 high = __byte_perm(words.word[2 * t], words.word[2 * t + 1], 0x7632);
    const uint32 mine = odd ? high : low, got = __shfl_xor_sync(0xffffffff, odd ? low : high, 4);
    bits[0][t] = odd ? got : mine, bits[1][t] = odd ? mine : got;
  }
}

}  // namespace tessera
