#include "distributed/calls.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

namespace tessera::distributed {
namespace {

// Several neighbouring chunks, each with itself and with all chunks before it, as one causal call.
std::optional<Rectangle> triangle(const std::vector<Rectangle>& rectangles) {
  std::vector<Rectangle> diagonal;
  for (const Rectangle& r : rectangles) {
    if (r.causal()) diagonal.push_back(r);
  }
  if (diagonal.size() < 2) return std::nullopt;
  std::sort(diagonal.begin(), diagonal.end(), [](const auto& a, const auto& b) { return a.q_row < b.q_row; });
  for (size_t n = 0; n < diagonal.size(); ++n) {
    const Rectangle& r = diagonal[n];
    if (r.q_row != r.k_row || r.q_length != r.k_length) return std::nullopt;
    if (n > 0 && diagonal[n - 1].q_end() != r.q_row) return std::nullopt;
  }
  using Sides = std::array<int64_t, 4>;
  std::vector<Sides> below, others;
  for (size_t q = 0; q < diagonal.size(); ++q) {
    for (size_t k = 0; k < q; ++k) {
      below.push_back({diagonal[q].q_row, diagonal[q].q_length, diagonal[k].k_row, diagonal[k].k_length});
    }
  }
  for (const Rectangle& r : rectangles) {
    if (r.full()) others.push_back({r.q_row, r.q_length, r.k_row, r.k_length});
  }
  std::sort(below.begin(), below.end()), std::sort(others.begin(), others.end());
  if (diagonal.size() + others.size() != rectangles.size() || below != others) return std::nullopt;
  Rectangle whole = diagonal.front();
  whole.q_length = whole.k_length = diagonal.back().q_end() - whole.q_row;
  return whole;
}

// Joins full rectangles with the same rows on one side and neighbouring rows on the other.
template <class Same, class Begin, class Length>
void join(std::vector<Rectangle>& full, const Same& same, const Begin& begin, const Length& length) {
  std::sort(full.begin(), full.end(), [&](const Rectangle& a, const Rectangle& b) {
    return std::pair(same(a), a.*begin) < std::pair(same(b), b.*begin);
  });
  std::vector<Rectangle> result;
  for (const Rectangle& r : full) {
    Rectangle* const last = result.empty() ? nullptr : &result.back();
    if (last && same(*last) == same(r) && last->*begin + last->*length == r.*begin) {
      last->*length += r.*length;
    } else {
      result.push_back(r);
    }
  }
  full = std::move(result);
}

}  // namespace

std::vector<Rectangle> sorted(std::vector<Rectangle> rectangles) {
  std::sort(rectangles.begin(), rectangles.end(), [](const Rectangle& a, const Rectangle& b) {
    return std::pair(a.q_row, a.k_row) < std::pair(b.q_row, b.k_row);
  });
  return rectangles;
}

std::vector<Rectangle> joined(const std::vector<Rectangle>& rectangles) {
  std::map<int32_t, std::vector<Rectangle>> sequences;
  for (const Rectangle& r : rectangles) sequences[r.sequence].push_back(r);
  std::vector<Rectangle> result;
  for (const auto& [sequence, of_sequence] : sequences) {
    if (const auto whole = triangle(of_sequence)) {
      result.push_back(*whole);
      continue;
    }
    std::vector<Rectangle> full;
    for (const Rectangle& r : of_sequence) (r.full() ? full : result).push_back(r);
    join(
        full, [](const Rectangle& r) { return std::pair(r.q_row, r.q_length); }, &Rectangle::k_row,
        &Rectangle::k_length);
    join(
        full, [](const Rectangle& r) { return std::pair(r.k_row, r.k_length); }, &Rectangle::q_row,
        &Rectangle::q_length);
    result.insert(result.end(), full.begin(), full.end());
  }
  return sorted(std::move(result));
}

std::vector<std::vector<Rectangle>> grouped(const std::vector<Rectangle>& rectangles, bool same_mask,
                                            std::vector<Range>* written) {
  const auto simple = [](const Rectangle& r) { return r.full() || r.causal(); };
  // True if one call can compute both, and the rows of `r` follow those of `last`.
  const auto follows = [&](const Rectangle& last, const Rectangle& r) {
    const bool same_window = last.window_left == r.window_left && last.window_right == r.window_right;
    return (same_mask || same_window || (simple(last) && simple(r))) && r.q_row >= last.q_end() &&
           r.k_row >= last.k_end();
  };
  std::vector<std::vector<Rectangle>> groups;
  for (const Rectangle& r : rectangles) {
    std::vector<Range> before;  // what earlier calls, and the groups before the one that is tried, have written
    if (written) before = *written;
    const auto fits = [&](const std::vector<Rectangle>& group) {
      const Range between{group.back().q_end(), r.q_row};
      const auto overlaps = [&](const Range& rows) { return rows.begin < between.end && between.begin < rows.end; };
      if (follows(group.back(), r) && !(written && std::any_of(before.begin(), before.end(), overlaps))) return true;
      for (const Rectangle& other : group) before.push_back({other.q_row, other.q_end()});
      return false;
    };
    const auto group = std::find_if(groups.begin(), groups.end(), fits);
    group == groups.end() ? groups.push_back({r}) : group->push_back(r);
  }
  if (written) {
    for (const Rectangle& r : rectangles) written->push_back({r.q_row, r.q_end()});
  }
  return groups;
}

Packing packing_of(const std::vector<Rectangle>& group, bool same_mask, const int64_t* lengths) {
  Packing result{{0}, {0}, {}, 0, 0};
  const auto add = [&result](int64_t q_length, int64_t k_length, const std::array<int64_t, 4>& place) {
    result.cu_q.push_back(result.cu_q.back() + static_cast<int32_t>(q_length));
    result.cu_k.push_back(result.cu_k.back() + static_cast<int32_t>(k_length));
    for (const int64_t number : place) result.places.push_back(static_cast<int32_t>(number));
    result.max_q = std::max(result.max_q, q_length), result.max_k = std::max(result.max_k, k_length);
  };
  int64_t q_row = group.front().q_row, k_row = group.front().k_row;
  for (const Rectangle& r : group) {
    if (r.q_row > q_row) add(r.q_row - q_row, 0, {0, r.q_row - q_row, 0, 0});
    if (r.k_row > k_row) add(0, r.k_row - k_row, {0, 0, 0, r.k_row - k_row});
    if (same_mask) {
      add(r.q_length, r.k_length, {r.q_begin, lengths[r.sequence], r.k_begin, lengths[r.sequence]});
    } else if (r.full()) {  // the queries come after all keys
      add(r.q_length, r.k_length, {r.k_length, r.k_length + r.q_length, 0, r.k_length + r.q_length});
    } else {
      add(r.q_length, r.k_length, {0, r.q_length, 0, r.k_length});
    }
    q_row = r.q_end(), k_row = r.k_end();
  }
  return result;
}

}  // namespace tessera::distributed
