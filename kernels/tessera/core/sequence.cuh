// One sequence of the batch, and which keys its queries see. Offsets and lengths that lie outside what the tensors hold
// are taken as the nearest that does not: a kernel cannot refuse.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera {

struct Sequence {
  int q_begin, sq;  // its queries are rows q_begin ... of q
  int k_begin, sk;  // its keys that are in use
  int k_rows;       // its keys with those behind seqused_k
  int64 row_begin;  // its first query among all of the batch's
};

TESSERA_DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }

// kUneven: they may be packed, or use a part of their keys.
template <bool kUneven = true>
TESSERA_DEVICE Sequence load_sequence(const ProblemParams& p, int b) {
  Sequence s;
  s.q_begin = 0, s.sq = p.seqlen_q;
  s.k_begin = 0, s.k_rows = p.seqlen_k;
  s.row_begin = static_cast<int64>(b) * p.seqlen_q;
  if (kUneven && p.cu_seqlens_q) {
    s.q_begin = clamp(p.cu_seqlens_q[b * p.cu_seqlens_q_stride], 0, p.rows_q);
    const int end = clamp(p.cu_seqlens_q[(b + 1) * p.cu_seqlens_q_stride], s.q_begin, p.rows_q);
    s.sq = min(end - s.q_begin, p.max_seqlen_q);
    s.row_begin = s.q_begin;
  }
  if (kUneven && p.cu_seqlens_k) {
    s.k_begin = clamp(p.cu_seqlens_k[b * p.cu_seqlens_k_stride], 0, p.rows_k);
    const int end = clamp(p.cu_seqlens_k[(b + 1) * p.cu_seqlens_k_stride], s.k_begin, p.rows_k);
    s.k_rows = min(end - s.k_begin, p.max_seqlen_k);
  }
  s.sk = s.k_rows;
  if (kUneven && p.seqused_k) s.sk = clamp(p.seqused_k[b * p.seqused_k_stride], 0, min(s.k_rows, p.max_seqlen_k));
  return s;
}

TESSERA_DEVICE Sequence uniform(Sequence s) {
  s.q_begin = uniform(s.q_begin), s.sq = uniform(s.sq);
  s.k_begin = uniform(s.k_begin), s.sk = uniform(s.sk), s.k_rows = uniform(s.k_rows);
  return s;
}

// Keys low ... high are visible by causal, window and length; none where low > high.
struct KeyRange {
  int low, high;
  // Keys first ... first + count - 1 are among them.
  TESSERA_DEVICE bool holds(int first, int count) const { return low <= first && first + count - 1 <= high; }
};

TESSERA_DEVICE KeyRange visible_keys(const ProblemParams& p, const Sequence& s, int query) {
  const int position = query + (p.top_left ? 0 : s.sk - s.sq);
  KeyRange keys{0, s.sk - 1};
  if (p.causal) keys.high = min(keys.high, position);
  // A window is at most 2^31 - 1 and so is a position: the sum is taken in 64 bits.
  if (p.window_right >= 0) {
    keys.high = static_cast<int>(min(static_cast<int64>(keys.high), static_cast<int64>(position) + p.window_right));
  }
  if (p.window_left >= 0) keys.low = max(keys.low, position - p.window_left);
  return keys;
}

// Of queries first ... last: keys that some of them see, and keys that all of them see.
struct TileRange {
  KeyRange some, all;
};

TESSERA_DEVICE TileRange visible_keys(const ProblemParams& p, const Sequence& s, int first, int last) {
  const KeyRange a = visible_keys(p, s, first), b = visible_keys(p, s, last);  // both ends grow with the query
  return {{a.low, b.high}, {b.low, a.high}};
}

// Queries low ... high see keys first ... last: some of them. The same relation from the other side.
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

}  // namespace tessera
