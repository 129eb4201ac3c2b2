// Bias and mask of a tile whose keys are all there, by pairs of neighbouring keys or by eight: without a bound to test or a
// branch to take they are issued all at once, long before the scores that they change.
#pragma once

#include "tessera/attention/score/score.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// The n-th block of 8 of a tile's places for keys: which of the tile's keys stands at the i-th of them.
template <bool kLaneOrder>
TESSERA_DEVICE constexpr int key_at(int n, int i) {
  return kLaneOrder ? n / 4 * 32 + i / 2 * 8 + n % 4 * 2 + i % 2 : n * 8 + i;
}

// A lane's share of kRows x kKeys blocks of 8 queries and 8 keys: of query lane / 4 of each, keys 2 (lane % 4) and the next;
// kLaneOrder: of what stands there (SharedTile), which are eight neighbours of four blocks. kFused: visible_score.
template <ScoreConfig kScore, int kRows, int kKeys, bool kLaneOrder, bool kFused = true>
struct BiasMaskFragment {
  static_assert(kKeys % (kLaneOrder ? 4 : 2) == 0);
  static constexpr bool kTaken = kScore.bias_or_mask() && !kScore.block_mask;
  using Raw = RawPair<kScore.bias_dtype>;
  Raw bias[kScore.bias ? kRows : 1][kKeys];
  uint32 mask[kScore.mask ? kRows : 1][kKeys / 2];  // a byte a key, of two blocks

  // Of one query, the keys from the tile's first, `key`, on. p.bias_mask_keys is 2 or more.
  TESSERA_DEVICE void load(int row, const ProblemParams& p, const ScoreRow<kScore>& score_row, int64 key) {
    constexpr int kBytes = dtype_bytes(kScore.bias_dtype);
    if (kLaneOrder && p.bias_mask_keys == 8) {
      key += lane_col() * 4;
#pragma unroll
      for (int k = 0; k < kKeys; k += 4, key += 32) {
        if constexpr (kScore.bias) {
          const uint4* from = reinterpret_cast<const uint4*>(score_row.bias + key * kBytes);
          uint4 words[kBytes / 2];
#pragma unroll
          for (int i = 0; i < kBytes / 2; ++i) words[i] = from[i];
          const Raw* pairs = reinterpret_cast<const Raw*>(words);
#pragma unroll
          for (int i = 0; i < 4; ++i) bias[row][k + i] = pairs[i];
        }
        if constexpr (kScore.mask) {
          const uint2 words = *reinterpret_cast<const uint2*>(score_row.mask + key);
          mask[row][k / 2] = words.x, mask[row][k / 2 + 1] = words.y;
        }
      }
      return;
    }
    key += key_at<kLaneOrder>(0, lane_col());
    const auto pair_at = [&](int k) { return key + key_at<kLaneOrder>(k, 0); };
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      if constexpr (kScore.bias) bias[row][k] = *reinterpret_cast<const Raw*>(score_row.bias + pair_at(k) * kBytes);
    }
#pragma unroll
    for (int k = 0; k < kKeys; k += 2) {
      if constexpr (kScore.mask) {
        const auto both = [&](int of) {
          return *reinterpret_cast<const unsigned short*>(score_row.mask + pair_at(of));
        };
        mask[row][k / 2] = both(k) | static_cast<uint32>(both(k + 1)) << 16;
      }
    }
  }

  // Bias and mask of the first key, or of the second.
  TESSERA_DEVICE BiasMaskElement of(int row, int k, bool second) const {
    BiasMaskElement element;
    if constexpr (kScore.bias) {
      const float2 both = unpack_pair<kScore.bias_dtype>(bias[row][k]);
      element.bias = second ? both.y : both.x;
    }
    if constexpr (kScore.mask) element.visible = mask[row][k / 2] & (0xffu << (k % 2 * 16 + (second ? 8 : 0)));
    return element;
  }

  // Products of a lane's query with the tile's keys, elements 2 half and 2 half + 1, -> scores. The query sees all of them, or
  // the caller applies the mask afterwards.
  TESSERA_DEVICE void apply(float (&s)[kKeys][4], int half, int row, const ProblemParams& p, const Sequence& sequence,
                            const ScoreRow<kScore>& score_row, int key) const {
    if (kScore.softcap && __all_sync(0xffffffff, small_inputs(p, s, half))) {
      apply<true>(s, half, row, p, sequence, score_row, key);
    } else {
      apply<false>(s, half, row, p, sequence, score_row, key);
    }
  }
  template <bool kSmall>
  TESSERA_DEVICE void apply(float (&s)[kKeys][4], int half, int row, const ProblemParams& p, const Sequence& sequence,
                            const ScoreRow<kScore>& score_row, int key) const {
    key += key_at<kLaneOrder>(0, lane_col());
#pragma unroll
    for (int k = 0; k < kKeys; ++k)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[k][2 * half + e];
        const Score capped = capped_score<kScore, kSmall>(p, x);
        x = visible_score<kScore, kFused>(p, sequence, score_row, key, key_at<kLaneOrder>(k, e), capped,
                                          of(row, k, e != 0))
                .value;
      }
  }
};

}  // namespace tessera
