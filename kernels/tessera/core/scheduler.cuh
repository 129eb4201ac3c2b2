// Which tile a block works on.
#pragma once

#include "tessera/core/sequence.cuh"
#include "tessera/core/work_order.hpp"

namespace tessera {

struct Work {
  int batch, head, split;
  int tile;  // of the sequence; -1: none, there are fewer tiles than blocks
};

struct SequenceHead {
  int batch, head;
};

// Which of the batch's heads comes at `index`; packed: which head. Of one sequence they share a mask, as a rule, and keys.
// But where all sequences share a bias (or mask) of which every head has its own, one head of all of them comes first: its
// entries come from memory once, and for the other sequences' tiles they are in the L2 cache.
template <ScoreConfig kScore, class Heads>
TESSERA_DEVICE SequenceHead sequence_head(const ProblemParams& p, int index, const Heads& heads) {
  if (kScore.entries() && p.head_by_head) return {index % p.batch, index / p.batch};
  return {index / heads, index % heads};
}

// Tiles of a packed batch stand in slots. Sequence b, whose rows start at row cu[b], has the slots from cu[b] / rows + b
// on, `rows` being a tile's: since ceil(n / rows) <= floor((r + n) / rows) + 1 for any r < rows, the slots of two
// sequences never overlap, and no prefix sum over lengths is needed. The grid has total / rows + batch of them.
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
  int low = 0, high = p.batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (slot_begin<kRows>(p, offsets, stride, limit, rows_a_query, middle) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Which of its tiles the sequence that owns a slot has there: none of them, and a large number, where the slot lies before the
// first sequence's.
template <int kRows>
TESSERA_DEVICE int tile_at_slot(const ProblemParams& p, const int* offsets, int64 stride, int64 limit, int rows_a_query,
                                int slot, int b) {
  const int tile = slot - slot_begin<kRows>(p, offsets, stride, limit, rows_a_query, b);
  return tile < 0 ? 0x7fffffff : tile;
}

// Forward: place -> (batch, head, split, tile of block_m rows); of `place`, a head is a (batch, head, split).
template <int kBlockM, bool kSplit, ScoreConfig kScore>
TESSERA_DEVICE Work query_tile(const FwdParams& p, WorkPlace place, const Divisor& heads, int rows_a_query) {
  Work w;
  int rest = place.head;
  w.split = 0;
  if constexpr (kSplit) w.split = rest % p.num_splits, rest /= p.num_splits;
  const SequenceHead of = sequence_head<kScore>(p, rest, heads);
  w.batch = of.batch, w.head = of.head;
  const int slot = place.slot;
  int tile = slot;
  if (p.cu_seqlens_q) {
    w.batch = find_sequence<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, rows_a_query, slot);
    tile = tile_at_slot<kBlockM>(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q, rows_a_query, slot, w.batch);
  }
  const Sequence s = load_sequence(p, w.batch);
  const int tiles = static_cast<int>((static_cast<int64>(s.sq) * rows_a_query + kBlockM - 1) / kBlockM);
  w.tile = tiles - 1 - tile;
  return w;
}

}  // namespace tessera
