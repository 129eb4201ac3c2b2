// The order of bwd_sm90's blocks with a block mask, on the host (tests/emulated_gpu). Without determinism
// (kernels/tessera/bwd_sm90/rows.cuh), every tile of keys occurs once, those with long lists of all heads first, and
// otherwise in the default order. Deterministic (dq_order.cuh): blocks add to a tile of queries in the order in which
// they start.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "bwd_sm90_config.hpp"
#include "drawn_block_mask.hpp"
#include "tessera/block_lists/dq_order.cuh"
#include "tessera/block_lists/kernel.cuh"
#include "tessera/bwd_sm90/rows.cuh"
#include "unit_launch.hpp"

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
    EXPECT_EQ(emulated::run_blocks({}, kThreads, 0, [this] { order_key_tiles<kThreads>(p); }), 0);
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

constexpr BwdSm90Config kDeterministic = bwd_sm90_config(false, true, true);
constexpr BlockListsConfig kLists{kDeterministic.block_n, kDeterministic.block_m, true};

template <class Kernel>
void run_grid(int warps, const Kernel& kernel) {
  const auto blocks = static_cast<unsigned>((warps + kBlockListsWarps - 1) / kBlockListsWarps);
  EXPECT_EQ(emulated::run_blocks({.x = blocks}, 32 * kBlockListsWarps, 0, kernel), 0);
}

// Lists and orders as the kernels make them; then the blocks in the order in which they start.
TEST(DeviceBwdSm90Order, TurnsAreAsBlocksStart) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (int trial = 0; trial < 25; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + ", trial " + std::to_string(trial));
    DrawnBlockMask drawn(random, 2500, 5000, 900);
    BlockListsParams& made = drawn.p;
    BwdSm90Params p{};
    static_cast<ProblemParams&>(p) = made;
    const int heads_kv = p.heads_kv, group = p.group, masks = made.batches * made.heads;
    p.q_tiles = (p.seqlen_q + kLists.cols - 1) / kLists.cols, p.q_slots = p.q_tiles * p.batch;
    p.key_tiles = Divisor((p.seqlen_k + kLists.rows - 1) / kLists.rows);
    p.heads = p.batch * heads_kv, p.section_heads = Divisor(draw(1, p.heads));

    made.lists.tiles = p.key_tiles, made.lists.most = p.q_tiles;
    made.lists.head = made.heads > 1 ? made.lists.tiles : 0;
    made.lists.batch = made.batches > 1 ? made.heads * made.lists.tiles : 0;
    const int lists = masks * made.lists.tiles;
    const int64 entries = int64{lists} * made.lists.stride();
    std::vector<int> words(static_cast<size_t>(2 * entries), -1), adders(static_cast<size_t>(masks) * p.q_tiles, -1);
    made.lists.words = words.data();
    run_grid(lists, [&] { block_lists<kLists>(made); });
    DqOrderParams ordered{};
    static_cast<ProblemParams&>(ordered) = made;
    ordered.lists = made.lists, ordered.order = {entries, adders.data()};
    ordered.heads = made.heads, ordered.masks = masks, ordered.blocks = p.q_tiles;
    ordered.last_keys_first = last_keys_first(p);
    run_grid(masks * p.q_tiles, [&] { dq_order<DqOrderConfig{kLists.rows, kLists.cols, false, false}>(ordered); });
    p.lists = made.lists, p.dq_order = ordered.order;

    std::map<std::pair<int, int>, int> added;  // query head of a sequence, tile of queries
    for (int index = 0; index < p.heads * p.key_tiles; ++index) {
      KeyBlock b = key_block<kDeterministic>(p, index);
      use_lists<kLists.rows>(p, b);
      int last = p.q_tiles, head = b.load_head;
      for (int left = b.steps; left > 0; --left) {
        if (b.load_head != head) head = b.load_head, last = p.q_tiles;
        const int tile = list_block(b.load_entry);
        ASSERT_LT(tile, last) << "in descending order";
        last = tile;
        const int list = list_of<kLists.rows>(p, b, head);
        const int before = listed_adders_before<kDeterministic>(p, b, list, tile * kLists.cols);
        ASSERT_EQ(before, (added[{b.batch * heads_kv * group + head, tile}]++))
            << "waits for a block that starts later";
        ++b.load_tile;
        if (left > 1) find_entry<kLists.rows>(p, b);
      }
    }
    for (int batch = 0; batch < p.batch; ++batch)
      for (int head = 0; head < heads_kv * group; ++head)
        for (int tile = 0; tile < p.q_tiles; ++tile) {
          ASSERT_EQ(adders[static_cast<size_t>(p.lists.at(batch, head, 0) / p.lists.tiles * p.q_tiles + tile)],
                    (added[{batch * heads_kv * group + head, tile}]));
        }
  }
}

// Key tiles without a query.
TEST(DeviceBwdSm90Order, KeepsTheOrderOfEmptyLists) {
  Problem problem(1, 2, 1, 5, false);
  problem.make();
  for (int n = 0; n < 10; ++n) EXPECT_EQ(problem.order[n], n);
}

}  // namespace
}  // namespace tessera
