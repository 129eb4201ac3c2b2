// The keys that a query sees by position: causal, window and length, which every kernel supports. Masks that are
// tensors are in attention/score.
#pragma once

#include "tessera/attention/sequence.cuh"
#include "tessera/tile/element.cuh"

namespace tessera {

// Keys low ... high are visible by causal, window and length; none if low > high.
struct KeyRange {
  int low, high;
  // Whether keys first ... first + count - 1 are all in the range.
  TESSERA_DEVICE bool holds(int first, int count) const { return low <= first && first + count - 1 <= high; }
};

template <ScoreConfig kScore = ScoreConfig{}>
TESSERA_DEVICE KeyRange visible_keys(const ProblemParams& p, const Sequence& s, int query) {
  const int position = query + (p.top_left ? 0 : s.sk - s.sq);
  KeyRange keys{0, s.sk - 1};
  if (kScore.causal_seqs ? s.causal : p.causal) keys.high = min(keys.high, position);
  // A window and a position are at most 2^31 - 1 each: their sum is computed in 64 bits.
  if (p.window_right >= 0) {
    keys.high = static_cast<int>(min(static_cast<int64>(keys.high), static_cast<int64>(position) + p.window_right));
  }
  if (p.window_left >= 0) keys.low = max(keys.low, position - p.window_left);
  return keys;
}

// For queries first ... last: the keys that some of them see, and the keys that all of them see.
struct TileRange {
  KeyRange some, all;
};

template <ScoreConfig kScore = ScoreConfig{}>
TESSERA_DEVICE TileRange visible_keys(const ProblemParams& p, const Sequence& s, int first, int last) {
  // Both ends grow with the query.
  const KeyRange a = visible_keys<kScore>(p, s, first), b = visible_keys<kScore>(p, s, last);
  return {{a.low, b.high}, {b.low, a.high}};
}

// The same relation from the other side: queries low ... high each see some of the keys first ... last.
TESSERA_DEVICE KeyRange seeing_queries(const ProblemParams& p, const Sequence& s, int first, int last) {
  const int diagonal = p.top_left ? 0 : s.sk - s.sq;
  int64 low = 0, high = s.sq - 1;
  int right = p.window_right;
  if (p.causal) right = right < 0 ? 0 : min(right, 0);
  if (right >= 0) low = max(low, static_cast<int64>(first) - diagonal - right);
  if (p.window_left >= 0) high = min(high, static_cast<int64>(last) - diagonal + p.window_left);
  if (first >= s.sk) high = -1;
  return {static_cast<int>(min(low, static_cast<int64>(s.sq))), static_cast<int>(max(high, static_cast<int64>(-1)))};
}

// In a lane's scores of one row, in tiles of 8 keys, those before column `low` and after column `high` become -inf.
template <int kN>
TESSERA_DEVICE void mask_outside(float (&s)[kN][4], int half, int low, int high) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (n * 8 + e < low || n * 8 + e > high) s[n][2 * half + e] = -infinity();
    }
}

}  // namespace tessera
