// The visible part of a range of queries with a range of keys, by causal mask and window, in positions of one sequence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/distributed.h"

namespace tessera::distributed {

struct Range {
  int64_t begin, end;
  int64_t length() const { return end - begin; }
  bool operator<(const Range& other) const { return begin < other.begin; }
};

// The rows of several ranges as ranges that do not touch, in order.
inline std::vector<Range> united(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end());
  size_t count = 0;
  for (const Range& range : ranges) {
    if (count > 0 && range.begin <= ranges[count - 1].end) {
      ranges[count - 1].end = std::max(ranges[count - 1].end, range.end);
    } else {
      ranges[count++] = range;
    }
  }
  ranges.resize(count);
  return ranges;
}

struct Band {
  int64_t left, right;  // query i sees keys i - left .. i + right, -1 = unbounded
};

inline Band band_of(const tessera_ranks_problem& p) { return {p.window_left, p.causal ? 0 : p.window_right}; }

struct Visible {
  Range q, k;
};

// Both ranges without the queries that see no key and the keys that no query sees. nullopt if nothing is visible.
inline std::optional<Visible> cut_to_visible(const Band& band, Range q, Range k) {
  if (q.length() <= 0 || k.length() <= 0) return std::nullopt;
  if (band.left >= 0) k.begin = std::max(k.begin, q.begin - band.left);
  if (band.right >= 0) k.end = std::min(k.end, q.end + band.right);
  if (k.length() <= 0) return std::nullopt;
  if (band.right >= 0) q.begin = std::max(q.begin, k.begin - band.right);
  if (band.left >= 0) q.end = std::min(q.end, k.end + band.left);
  if (q.length() <= 0) return std::nullopt;
  return Visible{q, k};
}

// Sum over i in `range` of min(i + offset, limit).
inline int64_t sum_of_min(Range range, int64_t offset, int64_t limit) {
  const int64_t turn = std::clamp(limit - offset, range.begin, range.end), rising = turn - range.begin;
  return rising * (range.begin + offset) + rising * (rising - 1) / 2 + (range.end - turn) * limit;
}

// Visible (query, key) pairs of ranges cropped by cut_to_visible.
inline int64_t visible_area(const Band& band, const Visible& v) {
  const int64_t ends = band.right < 0 ? v.q.length() * v.k.end : sum_of_min(v.q, band.right + 1, v.k.end);
  const int64_t begins =
      band.left < 0 ? v.q.length() * v.k.begin : -sum_of_min({1 - v.q.end, 1 - v.q.begin}, band.left, -v.k.begin);
  return ends - begins;
}

// The band as the window of a call on these ranges only, measured from their bottom-right corner; -1 on a side where it
// hides nothing.
inline Band local_band(const Band& band, const Visible& v) {
  const int64_t corner = v.q.end - v.k.end;
  const bool cuts_left = band.left >= 0 && v.q.end - 1 - band.left > v.k.begin;
  const bool cuts_right = band.right >= 0 && v.q.begin + band.right < v.k.end - 1;
  return {cuts_left ? band.left - corner : -1, cuts_right ? band.right + corner : -1};
}

}  // namespace tessera::distributed
