// The order of bwd_sm90's blocks with a block mask, kernels/tessera/bwd_sm90/order.cuh, on the host (tests/emulated_block): every tile of
// keys comes once, those with long lists of all heads first, and otherwise as without an order.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tessera/bwd_sm90/order.cuh"

namespace tessera {
namespace {

constexpr int kThreads = 128;

struct Problem {
  BwdSm90Params p{};
  std::vector<int> counts, words, order;

  // Heads of the mask: 1, or one each.
  Problem(int batch, int heads_kv, int group, int tiles, bool mask_heads) {
    p.batch = batch;
    p.heads_kv = Divisor(heads_kv), p.group = Divisor(group), p.heads_q = Divisor(heads_kv * group);
    p.heads = batch * heads_kv;
    p.key_tiles = Divisor(tiles), p.section_heads = Divisor(1);
    p.lists.tiles = tiles;
    p.lists.head = mask_heads ? tiles : 0;
    counts.assign(static_cast<size_t>(mask_heads ? heads_kv * group : 1) * tiles, 0);
    order.assign(static_cast<size_t>(p.heads) * tiles, -1);
  }
  void make() {
    words.assign(counts.size() * static_cast<size_t>(p.lists.stride()), -1);
    p.lists.words = words.data(), p.order = order.data();
    for (int list = 0; list < std::ssize(counts); ++list) *p.lists.count(list) = counts[static_cast<size_t>(list)];
    emulated::Block::run(kThreads, [this] { order_key_tiles<kThreads>(p); });
  }
  int steps(int index) const { return steps_of(p, key_tile_place(p, index)); }
};

TEST(DeviceBwdSm90Order, StartsWithLongLists) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (int trial = 0; trial < 60; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + ", trial " + std::to_string(trial));
    Problem problem(draw(1, 3), draw(1, 3), draw(1, 2), draw(1, 100), draw(0, 1));
    problem.p.section_heads = Divisor(draw(1, problem.p.heads));
    const int most_long = draw(0, 3);
    for (int& count : problem.counts) count = draw(0, 20) <= most_long ? draw(0, 2000) : draw(0, 9);
    problem.make();

    const int tiles = problem.p.heads * problem.p.key_tiles;
    int64 all = 0;
    for (int n = 0; n < tiles; ++n) all += problem.steps(n);
    std::vector<int> expected;
    for (const bool is_long : {true, false})
      for (int n = 0; n < tiles; ++n) {
        if ((problem.steps(n) * int64{tiles} > 2 * all) == is_long) expected.push_back(n);
      }
    ASSERT_EQ(problem.order, expected);
  }
}

// As many steps as a million tokens of many heads have.
TEST(DeviceBwdSm90Order, CountsBeyond32Bits) {
  Problem problem(1, 40, 8, 300, false);
  std::ranges::fill(problem.counts, 1 << 20);
  problem.counts[7] = (1 << 22) + 1;
  problem.make();
  for (int head = 0; head < problem.p.heads; ++head) EXPECT_EQ(problem.order[head], head * 300 + 7);
}

// Key tiles without a query.
TEST(DeviceBwdSm90Order, KeepsTheOrderOfEmptyLists) {
  Problem problem(1, 2, 1, 5, false);
  problem.make();
  for (int n = 0; n < 10; ++n) EXPECT_EQ(problem.order[n], n);
}

}  // namespace
}  // namespace tessera
