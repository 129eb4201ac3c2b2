// Where the tiles of a packed batch are: which sequence owns a slot, and which of its tiles is in it.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/ptx/device.cuh"

namespace tessera {

// The last sequence that begins at or before `slot`; first_slot(b): where sequence b does. The first one where none
// does.
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

// Tiles of a packed batch are in slots (padded tile indices). Sequence b, whose rows start at row cu[b], has the slots
// from cu[b] / rows + b on, `rows` being a tile's: since ceil(n / rows) <= floor((r + n) / rows) + 1 for any r < rows,
// the slots of two sequences never overlap, and no prefix sum over lengths is needed. The grid has total / rows + batch
// of them.
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

// Which of its tiles the sequence that owns a slot has there: none of them, and a large number, where the slot lies
// before the first sequence's.
template <int kRows>
TESSERA_DEVICE int tile_at_slot(const ProblemParams& p, const int* offsets, int64 stride, int64 limit, int rows_a_query,
                                int slot, int b) {
  const int tile = slot - slot_begin<kRows>(p, offsets, stride, limit, rows_a_query, b);
  return tile < 0 ? 0x7fffffff : tile;
}

}  // namespace tessera
