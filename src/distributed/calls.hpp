// Converts the pairs of a step to few calls on neighbouring rows.
//
// A call measures causal masks and windows from the bottom-right corner of its own queries and keys, and a pair's
// window is given in the same way, so any pair can be a call. Neighbouring pairs that one call can compute are joined,
// and in packed batches calls on different rows become sequences of one packed call.
#pragma once

#include <cstdint>
#include <vector>

#include "distributed/band.hpp"

namespace tessera::distributed {

// Rows of the queries' tensor with rows of the keys' tensor.
struct Rectangle {
  int32_t sequence;
  int64_t q_row, q_length, k_row, k_length;
  int64_t window_left, window_right;
  int64_t q_begin, k_begin;  // the first query and key in their sequence

  int64_t q_end() const { return q_row + q_length; }
  int64_t k_end() const { return k_row + k_length; }
  bool full() const { return window_left < 0 && window_right < 0; }
  bool causal() const { return window_left < 0 && window_right == 0; }
};

// Joined, in the order of (q_row, k_row).
std::vector<Rectangle> joined(const std::vector<Rectangle>& rectangles);
// Only sorted: calls that have a place in their sequence are not joined.
std::vector<Rectangle> sorted(std::vector<Rectangle> rectangles);

// Rectangles in the order of (q_row, k_row), in few groups: each is a packed call's sequences, or one rectangle alone.
// same_mask: a packed call has the mask of the whole, and each sequence has its place in it.
// written: the queries of earlier calls, to which those of these are added. No group then has such queries between its
// own, so that a call may write the rows between its sequences, too.
std::vector<std::vector<Rectangle>> grouped(const std::vector<Rectangle>& rectangles, bool same_mask,
                                            std::vector<Range>* written);

// The sequences of a packed call on all rows from the first to the last of a group. Rows between two rectangles are
// sequences, too, of queries without keys or of keys without queries.
struct Packing {
  std::vector<int32_t> cu_q, cu_k;  // where each sequence begins, and the end
  std::vector<int32_t> places;      // tessera_problem.places
  int64_t max_q = 0, max_k = 0;     // the longest sequence
};
// same_mask: as above; the whole sequences' lengths are in `lengths`. Otherwise a place is one in which a causal call
// shows each rectangle what it sees.
Packing packing_of(const std::vector<Rectangle>& group, bool same_mask, const int64_t* lengths);

}  // namespace tessera::distributed
