// A sequence of the batch: its rows, its place among the tiles of a packed batch, and the keys that its queries see by
// position.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/ptx/device.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// ---- rows -----------------------------------------------------------------------------------------------------------
//
// Offsets and lengths outside the tensors are clamped to the nearest valid value, because a kernel cannot return an
// error.

struct Sequence {
  int q_begin, sq;  // its queries are rows q_begin ... of q
  // Its keys in use are rows k_begin ... of k and v; pages in CSR: the index of its first page's entry.
  int k_begin, sk;
  int k_rows;  // all of its keys, also those from seqused_k on
  // What each sequence says itself: with ScoreConfig::causal_seqs whether it is causal; with sequence_places its
  // diagonal: query i is aligned with key i + diagonal.
  int own;
  int64 row_begin;  // index of its first query among all queries of the batch
};

TESSERA_DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }

// Paged: the address of the page table entry of the sequence's first page; the entries are keys.table_col apart.
TESSERA_DEVICE const int* pages_of(const ProblemParams& p, const Sequence& s, int b) {
  return p.keys.table + p.keys.table_batch * b + p.keys.table_col * s.k_begin;
}

// kVarlen: sequences may be packed, or use only some of their keys (seqused_k). kPaged: keys are in pages.
template <bool kVarlen = true, bool kPaged = false>
TESSERA_DEVICE Sequence load_sequence(const ProblemParams& p, int b) {
  Sequence s;
  s.q_begin = 0, s.sq = p.seqlen_q;
  s.k_begin = 0, s.k_rows = p.seqlen_k;
  s.row_begin = static_cast<int64>(b) * p.seqlen_q;
  if (kVarlen && p.cu_seqlens_q) {
    s.q_begin = clamp(p.cu_seqlens_q[b * p.cu_seqlens_q_stride], 0, p.rows_q);
    const int end = clamp(p.cu_seqlens_q[(b + 1) * p.cu_seqlens_q_stride], s.q_begin, p.rows_q);
    s.sq = min(end - s.q_begin, p.max_seqlen_q);
    if (s.sq <= p.decoded_queries) s.sq = 0;
    s.row_begin = s.q_begin;
  }
  if (kVarlen && p.keys.begins) {
    s.k_begin = clamp(p.keys.begins[b * p.keys.begins_stride], 0, p.keys_limit);
    const int end = clamp(p.keys.begins[(b + 1) * p.keys.begins_stride], s.k_begin, p.keys_limit);
    if constexpr (kPaged) {
      const int64 keys = static_cast<int64>(end - s.k_begin) * p.keys.page_size;
      s.k_rows = static_cast<int>(min(keys, static_cast<int64>(p.max_seqlen_k)));
    } else {
      s.k_rows = min(end - s.k_begin, p.max_seqlen_k);
    }
  }
  s.sk = s.k_rows;
  if (kVarlen && p.seqused_k) s.sk = clamp(p.seqused_k[b * p.seqused_k_stride], 0, min(s.k_rows, p.max_seqlen_k));
  return s;
}

// Where a sequence's queries and keys are in its whole, with ScoreConfig::sequence_places.
struct SequencePlace {
  int first_q, total_q, first_k, total_k;

  TESSERA_DEVICE SequencePlace(const ProblemParams& p, int b) {
    const int* const from = p.places.data + p.places.batch * b;
    const int64 col = p.places.col;
    first_q = from[0], total_q = from[col], first_k = from[2 * col], total_k = from[3 * col];
  }
  // The key that query 0 is aligned with bottom-right.
  TESSERA_DEVICE int bottom_right() const { return (total_k - first_k) - (total_q - first_q); }
};

// The same; also loads what each sequence says itself: whether it is causal, and its diagonal.
template <bool kVarlen, bool kPaged, ScoreConfig kScore, class Params>
TESSERA_DEVICE Sequence load_sequence(const Params& p, int b) {
  static_assert(!(kScore.causal_seqs && kScore.sequence_places), "Sequence::own is one of them");
  Sequence s = load_sequence<kVarlen, kPaged>(p, b);
  if constexpr (kScore.causal_seqs) s.own = p.masks.causal_seqs[b * p.masks.causal_seqs_stride];
  if constexpr (kScore.sequence_places) {
    const SequencePlace place(p, b);
    s.own = p.places.top_left ? place.first_q - place.first_k : place.bottom_right();
  }
  return s;
}

template <ScoreConfig kScore = ScoreConfig{}>
TESSERA_DEVICE Sequence uniform(Sequence s) {
  s.q_begin = uniform(s.q_begin), s.sq = uniform(s.sq);
  s.k_begin = uniform(s.k_begin), s.sk = uniform(s.sk), s.k_rows = uniform(s.k_rows);
  if constexpr (kScore.causal_seqs || kScore.sequence_places) s.own = uniform(s.own);
  return s;
}

// The head and the sequence of a block.
struct SequenceHead {
  int batch, head;
};

// The head and the sequence at `index`; packed: the head. Normally all heads of one sequence are neighbours, because
// they usually read the same mask and keys. If all sequences read the same bias (or mask), which differs between heads,
// all sequences of one head are neighbours instead: the bias is read from memory once, and from the L2 cache for the
// other sequences' tiles.
template <ScoreConfig kScore, class Heads>
TESSERA_DEVICE SequenceHead sequence_head(const ProblemParams& p, int index, const Heads& heads) {
  if (kScore.entries() && p.head_by_head) return {index % p.batch, index / p.batch};
  return {index / heads, index % heads};
}

// ---- padded tile indices (slots) of a packed batch ------------------------------------------------------------------
//
// Which sequence owns a slot, and which of its tiles the slot is.

// The last sequence that begins at or before `slot`, or the first sequence if none does; first_slot(b): where sequence
// b begins.
template <class FirstSlot>
TESSERA_DEVICE int last_sequence_from(int batch, int slot, const FirstSlot& first_slot) {
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_slot(middle) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The tiles of a packed batch have padded tile indices, slots. Sequence b, whose rows start at row cu[b], has the slots
// from cu[b] / rows + b on, where `rows` is the rows of a tile: because ceil(n / rows) <= floor((r + n) / rows) + 1 for
// any r < rows, the slots of two sequences never overlap, and no prefix sum over lengths is needed. The grid has total
// / rows + batch slots.
template <int kRows>
TESSERA_DEVICE int slot_begin(const ProblemParams& p, const int* offsets, int64 stride, int64 limit, int rows_a_query,
                              int b) {
  const int64 rows = min(max(static_cast<int64>(offsets[b * stride]), static_cast<int64>(0)), limit) * rows_a_query;
  return static_cast<int>(rows / kRows) + b;
}

// The sequence that owns a slot.
template <int kRows>
TESSERA_DEVICE int find_sequence(const ProblemParams& p, const int* offsets, int64 stride, int64 limit,
                                 int rows_a_query, int slot) {
  return last_sequence_from(p.batch, slot,
                            [&](int b) { return slot_begin<kRows>(p, offsets, stride, limit, rows_a_query, b); });
}

// The index of the tile at a slot within the sequence that owns it: a large number, so that it has no rows, if the slot
// is before the first sequence's.
template <int kRows>
TESSERA_DEVICE int tile_at_slot(const ProblemParams& p, const int* offsets, int64 stride, int64 limit, int rows_a_query,
                                int slot, int b) {
  const int tile = slot - slot_begin<kRows>(p, offsets, stride, limit, rows_a_query, b);
  return tile < 0 ? 0x7fffffff : tile;
}

// ---- prefix sums over sequences -------------------------------------------------------------------------------------
//
// A prefix sum by a block, which gives the position of a sequence's tiles among those of all sequences.

// Returns the sum of `mine` over the threads before this one; called by all threads of the block. total: the sum over
// all threads. sums: in shared memory, one element for each warp. Integer: int or int64.
template <int kWarps, class Integer>
TESSERA_DEVICE Integer sum_before(int thread, Integer mine, Integer* sums, Integer& total) {
  const int lane = thread % 32, warp = thread / 32;
  Integer before = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Integer other = __shfl_up_sync(0xffffffff, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const Integer sum = sums[w];
    if (w < warp) before += sum;
    total += sum;
  }
  return before - mine;
}

// ---- visible keys ---------------------------------------------------------------------------------------------------
//
// The keys that a query sees by position: causal, window and length, which every kernel supports. Masks that are
// tensors are in attention/score.

// Keys low ... high are visible by causal, window and length; none if low > high.
struct KeyRange {
  int low, high;
  // Whether keys first ... first + count - 1 are all in the range.
  TESSERA_DEVICE bool holds(int first, int count) const { return low <= first && first + count - 1 <= high; }
};

// Query i is aligned with key i + diagonal_of(...), from which causal and the window are measured.
template <ScoreConfig kScore>
TESSERA_DEVICE int diagonal_of(const ProblemParams& p, const Sequence& s) {
  if constexpr (kScore.sequence_places) return s.own;
  return p.fixed_diagonal ? p.diagonal : s.sk - s.sq;
}

template <ScoreConfig kScore = ScoreConfig{}>
TESSERA_DEVICE KeyRange visible_keys(const ProblemParams& p, const Sequence& s, int query) {
  const int position = query + diagonal_of<kScore>(p, s);
  KeyRange keys{0, s.sk - 1};
  if (kScore.causal_seqs ? s.own : p.causal) keys.high = min(keys.high, position);
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
template <ScoreConfig kScore = ScoreConfig{}>
TESSERA_DEVICE KeyRange seeing_queries(const ProblemParams& p, const Sequence& s, int first, int last) {
  const int diagonal = diagonal_of<kScore>(p, s);
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
