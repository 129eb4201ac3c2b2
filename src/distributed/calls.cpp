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

}  // namespace tessera::distributed
