// Bias and mask of a tile that every query sees whole, by pairs of neighbouring keys (ProblemParams::entry_pairs): without a
// bound to test or a branch to take they are asked for all at once, long before the scores that they change.
#pragma once

#include "tessera/core/score.cuh"
#include "tessera/ptx/ldmatrix.cuh"

namespace tessera {

// A lane's share of kRows x kKeys blocks of 8 queries and 8 keys: of query lane / 4 of each, keys 2 (lane % 4) and the next.
template <ScoreConfig kScore, int kRows, int kKeys>
struct EntryPairs {
  static constexpr bool kTaken = kScore.entries() && !kScore.block_mask;
  using Raw = RawPair<kScore.bias_dtype>;
  Raw bias[kScore.bias ? kRows : 1][kKeys];
  uint32 mask[kScore.mask ? kRows : 1][kKeys];  // a byte a key

  // Of one query, the keys from `key` on, the lane's first.
  TESSERA_DEVICE void load(int row, const ScoreRow<kScore>& score_row, int64 key) {
#pragma unroll
    for (int k = 0; k < kKeys; ++k, key += 8) {
      if constexpr (kScore.bias) {
        bias[row][k] = *reinterpret_cast<const Raw*>(score_row.bias + key * dtype_bytes(kScore.bias_dtype));
      }
      if constexpr (kScore.mask) mask[row][k] = *reinterpret_cast<const unsigned short*>(score_row.mask + key);
    }
  }

  // The first key's entry, or the second's.
  TESSERA_DEVICE ScoreEntry of(int row, int k, bool second) const {
    ScoreEntry entry;
    if constexpr (kScore.bias) {
      const float2 both = unpack_pair<kScore.bias_dtype>(bias[row][k]);
      entry.bias = second ? both.y : both.x;
    }
    if constexpr (kScore.mask) entry.shown = mask[row][k] & (second ? 0xff00 : 0xff);
    return entry;
  }

  // Blocks become their transposes, where a kernel's rows are keys: of key lane / 4, queries 2 (lane % 4) and the next.
  TESSERA_DEVICE void transpose() {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        if constexpr (kScore.bias) bias[row][k] = transposed(bias[row][k]);
        if constexpr (kScore.mask) {
          const uint32 apart = ptx::movmatrix_trans(__byte_perm(mask[row][k], 0, 0x4140));
          mask[row][k] = __byte_perm(apart, 0, 0x4420);
        }
      }
  }

 private:
  TESSERA_DEVICE static uint32 transposed(uint32 pair) { return ptx::movmatrix_trans(pair); }
  TESSERA_DEVICE static float2 transposed(float2 pair) {  // the halves of both numbers
    const uint32 x = __float_as_uint(pair.x), y = __float_as_uint(pair.y);
    const uint32 low = ptx::movmatrix_trans(__byte_perm(x, y, 0x5410));
    const uint32 high = ptx::movmatrix_trans(__byte_perm(x, y, 0x7632));
    return make_float2(__uint_as_float(__byte_perm(low, high, 0x5410)), __uint_as_float(__byte_perm(low, high, 0x7632)));
  }
};

}  // namespace tessera
