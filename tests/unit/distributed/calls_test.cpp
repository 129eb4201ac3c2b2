// Rectangles of queries with keys as the sequences of packed calls.
#include "distributed/calls.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace tessera::distributed {
namespace {

constexpr Rectangle full(int64_t q_row, int64_t q_length, int64_t k_row, int64_t k_length) {
  return {0, q_row, q_length, k_row, k_length, -1, -1, 0, 0};
}
constexpr Rectangle causal(int64_t q_row, int64_t q_length, int64_t k_row, int64_t k_length) {
  return {0, q_row, q_length, k_row, k_length, -1, 0, 0, 0};
}

TEST(PackedCalls, HaveRowsBetweenAsSequences) {
  const std::vector<Rectangle> group{causal(8, 16, 0, 16), full(32, 4, 16, 40), causal(36, 6, 60, 10)};
  const Packing packing = packing_of(group, false, nullptr);
  EXPECT_EQ(packing.cu_q, (std::vector<int32_t>{0, 16, 24, 28, 28, 34}));
  EXPECT_EQ(packing.cu_k, (std::vector<int32_t>{0, 16, 16, 56, 60, 70}));
  EXPECT_EQ(packing.max_q, 16);
  EXPECT_EQ(packing.max_k, 40);
  const auto row = [&](size_t n) {
    return std::vector<int32_t>(packing.places.begin() + 4 * n, packing.places.begin() + 4 * (n + 1));
  };
  EXPECT_EQ(row(0), (std::vector<int32_t>{0, 16, 0, 16}));
  EXPECT_EQ(row(1), (std::vector<int32_t>{0, 8, 0, 0}));     // queries without keys
  EXPECT_EQ(row(2), (std::vector<int32_t>{40, 44, 0, 44}));  // a causal call shows it all 40 keys
  EXPECT_EQ(row(3), (std::vector<int32_t>{0, 0, 0, 4}));     // keys without queries
  EXPECT_EQ(row(4), (std::vector<int32_t>{0, 6, 0, 10}));    // the last query sees the last key
}

TEST(PackedCalls, HavePlacesInTheWhole) {
  const int64_t lengths[] = {100, 30};
  const std::vector<Rectangle> group{{0, 0, 20, 0, 70, -1, 0, 50, 0}, {1, 20, 30, 70, 30, -1, 0, 0, 0}};
  const Packing packing = packing_of(group, true, lengths);
  EXPECT_EQ(packing.cu_q, (std::vector<int32_t>{0, 20, 50}));
  EXPECT_EQ(packing.cu_k, (std::vector<int32_t>{0, 70, 100}));
  EXPECT_EQ(packing.places, (std::vector<int32_t>{50, 100, 0, 100, 0, 30, 0, 30}));
}

TEST(PackedCalls, AreFew) {
  // The chunks of many sequences, each with itself: one call.
  std::vector<Rectangle> rectangles;
  for (int64_t n = 0; n < 48; ++n) rectangles.push_back(causal(10 * n, 10, 10 * n, 10));
  EXPECT_EQ(grouped(rectangles, false, nullptr).size(), 1u);
  // A window does not go with another one, nor with the whole.
  rectangles[20].window_left = 4;
  EXPECT_EQ(grouped(rectangles, false, nullptr).size(), 2u);
  EXPECT_EQ(grouped(rectangles, true, nullptr).size(), 1u);  // the window is that of the whole
  // The same queries with other keys are two calls.
  EXPECT_EQ(grouped({full(0, 8, 0, 8), full(0, 8, 16, 8)}, false, nullptr).size(), 2u);
}

// Calls write their rows in order, those between their sequences as rows that see nothing.
TEST(PackedCalls, KeepWhatEarlierOnesHaveWritten) {
  std::mt19937 random(7);
  const auto draw = [&random](int64_t below) { return std::uniform_int_distribution<int64_t>(0, below - 1)(random); };
  int64_t calls = 0, rectangles = 0;
  for (int trial = 0; trial < 200; ++trial) {
    constexpr int64_t kChunks = 24, kRows = 8;
    std::map<int64_t, int64_t> owner;  // the rectangle that wrote a row last, by its number
    std::vector<Range> written;
    std::vector<int64_t> chunks(kChunks);
    for (int64_t n = 0; n < kChunks; ++n) chunks[static_cast<size_t>(n)] = n;
    std::shuffle(chunks.begin(), chunks.end(), random);
    for (int64_t first = 0; first < kChunks;) {  // steps, each with some of the chunks' queries
      const int64_t count = std::min(kChunks - first, 1 + draw(12));
      std::vector<Rectangle> step;
      for (int64_t n = first; n < first + count; ++n) {
        const int64_t chunk = chunks[static_cast<size_t>(n)];
        step.push_back(draw(2) ? full(chunk * kRows, kRows, draw(kChunks) * kRows, kRows)
                               : causal(chunk * kRows, kRows, draw(kChunks) * kRows, kRows));
      }
      step = sorted(step);
      size_t in_groups = 0;
      for (const std::vector<Rectangle>& group : grouped(step, false, &written)) {
        for (int64_t row = group.front().q_row; row < group.back().q_end(); ++row) owner[row] = -1;
        for (size_t n = 0; n < group.size(); ++n) {
          if (n > 0) {
            EXPECT_GE(group[n].q_row, group[n - 1].q_end());
            EXPECT_GE(group[n].k_row, group[n - 1].k_end());
          }
          for (int64_t row = group[n].q_row; row < group[n].q_end(); ++row) owner[row] = row / kRows;
        }
        in_groups += group.size(), ++calls;
      }
      EXPECT_EQ(in_groups, step.size());
      rectangles += count, first += count;
    }
    for (int64_t row = 0; row < kChunks * kRows; ++row) ASSERT_EQ(owner[row], row / kRows) << "trial " << trial;
  }
  EXPECT_LT(calls, rectangles * 9 / 10);
}

}  // namespace
}  // namespace tessera::distributed
