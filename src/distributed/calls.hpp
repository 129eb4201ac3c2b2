// Converts the pairs of a step to few calls on neighbouring rows.
//
// A call measures causal masks and windows from the bottom-right corner of its own queries and keys, and a pair's
// window is given in the same way, so any pair can be a call, and neighbouring pairs that one call can compute are
// joined.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::distributed {

// Rows of the queries' tensor with rows of the keys' tensor.
struct Rectangle {
  int32_t sequence;
  int64_t q_row, q_length, k_row, k_length;
  int64_t window_left, window_right;
  int64_t q_begin, k_begin;  // the first query and key in their sequence

  int64_t q_end() const { return q_row + q_length; }
  bool full() const { return window_left < 0 && window_right < 0; }
  bool causal() const { return window_left < 0 && window_right == 0; }
};

// Joined, in the order of (q_row, k_row).
std::vector<Rectangle> joined(const std::vector<Rectangle>& rectangles);
// Only sorted: calls that have a place in their sequence are not joined.
std::vector<Rectangle> sorted(std::vector<Rectangle> rectangles);

}  // namespace tessera::distributed
