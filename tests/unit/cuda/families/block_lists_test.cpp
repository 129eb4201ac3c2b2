// The lists of a block mask, kernels/tessera/block_lists, and the steps that bwd_sm90 derives from them, on the host
// (tests/emulated_warp). A block is listed if one of its keys is visible to one of its queries, and hidden from a half
// of rows that sees none.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "bwd_sm90_config.hpp"
#include "drawn_block_mask.hpp"
#include "tessera/attention/backward/key_block.cuh"
#include "tessera/block_lists/entry.cuh"

namespace tessera {
namespace {

constexpr int kHalf = 64;  // rows

// A random problem with a block mask, the same for the whole batch or not, and for all heads or not.
struct Drawn : DrawnBlockMask {
  explicit Drawn(std::mt19937& random) : DrawnBlockMask(random, 500, 700, 300) {}

  const char* mask_of(int batch, int head) const {
    return mask.data() + p.block_mask.batch * batch + p.block_mask.head * head;
  }
  bool visible(int batch, int head, int query, int key) const {
    if (query >= p.seqlen_q || key >= p.seqlen_k) return false;
    const Sequence s = load_sequence<false>(p, batch);
    return visible_keys(p, s, query).holds(key, 1) &&
           mask_of(batch, head)[query / p.mask_block_q * cols + key / p.mask_block_k] != 0;
  }
  bool sees(int batch, int head, int q0, int queries, int k0, int keys) const {
    for (int q = q0; q < q0 + queries; ++q)
      for (int k = k0; k < k0 + keys; ++k)
        if (visible(batch, head, q, k)) return true;
    return false;
  }
};

template <BlockListsConfig kConfig>
void expect_entries(const Drawn& drawn) {
  const BlockListsParams& p = drawn.p;
  const int length = kConfig.transposed ? p.seqlen_k : p.seqlen_q, other = kConfig.transposed ? p.seqlen_q : p.seqlen_k;
  for (int batch = 0; batch < p.batches; ++batch)
    for (int head = 0; head < p.heads; ++head)
      for (int tile = 0; tile * kConfig.rows < length; ++tile)
        for (int block = 0; block * kConfig.cols < other; ++block) {
          int entry = -1;
          const Sequence s = load_sequence<false>(p, batch);
          const bool listed = list_entry<kConfig>(p, s, drawn.mask_of(batch, head), tile, block, entry);
          bool some = false;
          for (int half = 0; half < kListHalves; ++half) {
            const int row = tile * kConfig.rows + half * kHalf, col = block * kConfig.cols;
            const bool sees = kConfig.transposed ? drawn.sees(batch, head, col, kConfig.cols, row, kHalf)
                                                 : drawn.sees(batch, head, row, kHalf, col, kConfig.cols);
            ASSERT_EQ(list_hides(entry, half), !sees) << tile << " " << block << " " << half;
            some |= sees;
          }
          ASSERT_EQ(listed, some);
          ASSERT_EQ(list_block(entry), block);
        }
}

TEST(DeviceBlockLists, ListWhatIsVisible) {
  std::mt19937 random(3);
  for (int n = 0; n < 12; ++n) {
    SCOPED_TRACE(n);
    const Drawn drawn(random);
    if (drawn.p.mask_block_k % 128 == 0) expect_entries<BlockListsConfig{128, 128, false}>(drawn);
    expect_entries<BlockListsConfig{128, 64, false}>(drawn);
    expect_entries<BlockListsConfig{128, 64, true}>(drawn);
    if (HasFatalFailure()) return;
  }
}

constexpr BwdSm90Config kBackward = bwd_sm90_config(false, false, true);

// The steps that bwd_sm90's producer makes for each block of keys: each listed tile of queries of each of the group's
// heads, once.
TEST(DeviceBlockLists, AreBackwardsSteps) {
  std::mt19937 random(4);
  constexpr BlockListsConfig kConfig{kBackward.block_n, kBackward.block_m, true};
  for (int n = 0; n < 30; ++n) {
    SCOPED_TRACE(n);
    const Drawn drawn(random);
    BwdSm90Params p{};
    static_cast<ProblemParams&>(p) = drawn.p;
    p.q_tiles = p.q_slots = (p.seqlen_q + kConfig.cols - 1) / kConfig.cols, p.q_slots *= p.batch;
    p.key_tiles = Divisor((p.seqlen_k + kConfig.rows - 1) / kConfig.rows);
    p.heads = static_cast<int>(p.heads_kv) * p.batch, p.section_heads = Divisor(1);
    BlockLists& lists = p.lists;
    lists.tiles = p.key_tiles, lists.most = p.q_tiles;
    lists.head = drawn.p.heads > 1 ? lists.tiles : 0;
    lists.batch = drawn.p.batches > 1 ? drawn.p.heads * lists.tiles : 0;
    const int count = drawn.p.batches * drawn.p.heads * lists.tiles;
    std::vector<int> words(static_cast<size_t>(count) * lists.stride());
    lists.words = words.data();
    for (int list = 0; list < count; ++list) {
      const int tile = list % lists.tiles, head = list / lists.tiles % drawn.p.heads,
                batch = list / lists.tiles / drawn.p.heads;
      for (int block = lists.most - 1; block >= 0; --block) {
        int entry = 0;
        const Sequence s = load_sequence<false>(p, batch);
        if (list_entry<kConfig>(drawn.p, s, drawn.mask_of(batch, head), tile, block, entry)) {
          lists.entries(list)[(*lists.count(list))++] = entry;
        }
      }
    }

    std::set<std::tuple<int, int, int, int>> met;  // batch, query head, keys' tile, queries' tile
    for (int index = 0; index < p.heads * p.key_tiles; ++index) {
      KeyBlock block = key_block<kBackward>(p, index);
      use_lists<kBackward.block_n>(p, block);
      for (int left = block.steps; left > 0; --left) {
        ASSERT_LT(block.load_head, (block.head_kv + 1) * p.group);
        ASSERT_TRUE(
            met.emplace(block.batch, block.load_head, block.key0 / kConfig.rows, list_block(block.load_entry)).second);
        ++block.load_tile;
        if (left > 1) find_entry<kBackward.block_n>(p, block);
      }
    }
    for (int batch = 0; batch < p.batch; ++batch)
      for (int head = 0; head < p.heads_q; ++head)
        for (int tile = 0; tile < p.key_tiles; ++tile)
          for (int block = 0; block < p.q_tiles; ++block) {
            const bool sees = drawn.sees(drawn.p.batches > 1 ? batch : 0, drawn.p.heads > 1 ? head : 0,
                                         block * kConfig.cols, kConfig.cols, tile * kConfig.rows, kConfig.rows);
            ASSERT_EQ(met.contains({batch, head, tile, block}), sees);
          }
  }
}

}  // namespace
}  // namespace tessera
