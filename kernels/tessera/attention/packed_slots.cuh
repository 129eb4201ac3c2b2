// The padded tile indices of a packed batch (slots): which sequence owns one, and which of its tiles it stands for.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/ptx/device.cuh"

namespace tessera {

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

}  // namespace tessera
