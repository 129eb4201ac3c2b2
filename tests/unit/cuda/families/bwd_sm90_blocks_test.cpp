// bwd_sm90's blocks of keys, attention/backward/key_block.cuh, on the host (tests/emulated_warp): every query meets
// every key that it sees, and a block that waits for the dQ semaphore waits for blocks that have started.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bwd_sm90_config.hpp"
#include "tessera/attention/backward/key_block.cuh"

namespace tessera {
namespace {

constexpr BwdSm90Config kConfig = bwd_sm90_config(true, true, false);
constexpr int kM = kConfig.block_m, kN = kConfig.block_n;

int tiles_of(int rows, int block) { return (rows + block - 1) / block; }

// A random problem. Its arrays live as long as it does.
struct Drawn {
  BwdSm90Params p{};
  std::vector<int> cu_q, cu_k, used;
  int blocks = 0;

  explicit Drawn(std::mt19937& random) {
    const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    const bool packed = draw(0, 1) != 0;
    p.batch = draw(1, 3);
    const int heads_kv = draw(1, 3), group = draw(1, 2);
    p.heads_kv = Divisor(heads_kv), p.group = Divisor(group), p.heads_q = Divisor(heads_kv * group);
    p.causal = draw(0, 1), p.fixed_diagonal = draw(0, 1);
    p.window_left = draw(0, 2) ? -1 : draw(0, 300);
    p.window_right = draw(0, 2) ? -1 : draw(0, 300);
    p.seqlen_q = p.rows_q = p.max_seqlen_q = draw(1, 500);
    p.seqlen_k = p.keys_limit = p.max_seqlen_k = draw(1, 700);
    if (packed) {
      for (int b = 0; b <= p.batch; ++b) cu_q.push_back(draw(0, p.rows_q)), cu_k.push_back(draw(0, p.keys_limit));
      std::ranges::sort(cu_q);
      std::ranges::sort(cu_k);
      p.cu_seqlens_q = cu_q.data(), p.keys.begins = cu_k.data();
      p.cu_seqlens_q_stride = p.keys.begins_stride = 1;
    }
    if (draw(0, 2) == 0) {
      for (int b = 0; b < p.batch; ++b) used.push_back(draw(0, p.seqlen_k));
      p.seqused_k = used.data(), p.seqused_k_stride = 1;
    }
    p.q_tiles = packed ? p.rows_q / kM + p.batch : tiles_of(p.seqlen_q, kM);
    p.q_slots = packed ? p.q_tiles : p.q_tiles * p.batch;
    p.key_tiles = Divisor(packed ? p.keys_limit / kN + p.batch : tiles_of(p.seqlen_k, kN));
    p.heads = packed ? heads_kv : heads_kv * p.batch;
    p.section_heads = Divisor(draw(1, p.heads));
    blocks = p.heads * p.key_tiles;
  }
};

TEST(BwdSm90Blocks, MeetWhatTheyMustAndAddInOrder) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  constexpr int kTrials = 3000;
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + ", trial " + std::to_string(trial));
    const Drawn drawn(random);
    const BwdSm90Params& p = drawn.p;
    std::map<int, int> added;                             // by tile of queries, within [heads_q, q_slots]
    std::set<std::pair<int, int>> met;                    // (tile, block of keys of its sequence)
    std::set<std::pair<int, int>> owners;                 // (row of k, KV head) that a block stores
    for (int index = 0; index < drawn.blocks; ++index) {  // in the order of their start
      const KeyBlock b = key_block<kConfig>(p, index);
      for (int key = b.key0; key < std::min(b.key0 + kN, b.s.k_rows); ++key) {
        const int row = p.keys.begins ? b.s.k_begin + key : b.batch * p.seqlen_k + key;
        ASSERT_TRUE(owners.insert({row, b.head_kv}).second) << "two blocks store a key";
      }
      ASSERT_EQ(b.steps, b.tiles * p.group);
      for (int h = 0; h < p.group; ++h)
        for (int tile = b.first_tile; tile < b.first_tile + b.tiles; ++tile) {
          const int slot = (b.head_kv * p.group + h) * p.q_slots + b.slot0 + tile;
          ASSERT_EQ(adders_before<kConfig>(p, b, tile * kM), added[slot]++) << "waits for a block that starts later";
          met.insert({slot, b.key0 / kN});
        }
    }
    // bwd_sm90_before clears the tiles to which, by visible_keys, no block adds; elsewhere the first block stores.
    for (int batch = 0; batch < p.batch; ++batch) {
      const Sequence s = load_sequence(p, batch);
      for (int head = 0; head < p.heads_q; ++head)
        for (int row0 = 0; row0 < s.sq; row0 += kM) {
          const KeyRange keys = visible_keys(p, s, row0, std::min(row0 + kM, s.sq) - 1).some;
          const int blocks = keys.low <= keys.high ? keys.high / kN - keys.low / kN + 1 : 0;
          const auto found = added.find(head * p.q_slots + query_slot<kM>(p, batch) + row0 / kM);
          ASSERT_EQ(found == added.end() ? 0 : found->second, blocks);
        }
    }
    for (int batch = 0; batch < p.batch; ++batch) {
      const Sequence s = load_sequence(p, batch);
      const int slot0 = query_slot<kM>(p, batch);
      for (int head = 0; head < p.heads_q; ++head)
        for (int query = 0; query < s.sq; query += 7) {
          const KeyRange keys = visible_keys(p, s, query);
          for (int tile = keys.low / kN; keys.low <= keys.high && tile <= keys.high / kN; ++tile) {
            ASSERT_TRUE(met.contains({head * p.q_slots + slot0 + query / kM, tile})) << "a query misses keys it sees";
          }
        }
      for (int key = 0; key < s.k_rows; ++key)
        for (int head = 0; head < p.heads_kv; ++head) {
          const int row = p.keys.begins ? s.k_begin + key : batch * p.seqlen_k + key;
          ASSERT_TRUE(owners.contains({row, head})) << "nobody stores a key";
        }
    }
  }
}

// Rotated, a head's blocks wait for one another: on as many multiprocessors as they are, going on in any order, all
// end. Producer and dQ thread pass over the same tiles.
TEST(BwdSm90Blocks, RotatedAddInOrderWhereAHeadIsResident) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  struct Running {
    KeyBlock b;
    int tile, head, left;
  };
  for (int trial = 0; trial < 500; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + ", trial " + std::to_string(trial));
    BwdSm90Params p{};
    p.batch = draw(1, 2);
    const int heads_kv = draw(1, 2), group = draw(1, 3);
    p.heads_kv = Divisor(heads_kv), p.group = Divisor(group), p.heads_q = Divisor(heads_kv * group);
    p.window_left = p.window_right = -1;
    const int key_tiles = draw(1, 9);
    p.rotation = draw(1, 3);
    p.seqlen_k = p.keys_limit = p.max_seqlen_k = key_tiles * kN - draw(0, kN - 1);
    p.q_tiles = (key_tiles - 1) * p.rotation + draw(1, p.rotation);
    p.seqlen_q = p.rows_q = p.max_seqlen_q = p.q_tiles * kM - draw(0, kM - 1);
    p.q_slots = p.q_tiles * p.batch;
    p.key_tiles = Divisor(key_tiles), p.section_heads = Divisor(1);
    p.heads = heads_kv * p.batch;
    const int blocks = p.heads * key_tiles, multiprocessors = draw(key_tiles, key_tiles + 3);
    std::vector<Running> running;
    std::map<int, int> added;
    std::set<std::pair<int, int>> met;
    int started = 0;
    while (started < blocks || !running.empty()) {
      while (started < blocks && std::ssize(running) < multiprocessors) {
        const KeyBlock b = key_block<kConfig>(p, started++);
        ASSERT_EQ(b.steps, p.q_tiles * group);
        running.push_back({b, start_tile<kConfig>(p, b), b.head_kv * group, b.steps});
      }
      std::vector<int> next;  // the blocks that come next in the order
      for (int i = 0; i < std::ssize(running); ++i) {
        const auto& [b, tile, head, left] = running[i];
        const int before = adders_before<kConfig>(p, b, tile * kM), slot = head * p.q_slots + b.slot0 + tile;
        ASSERT_GE(before, added[slot]) << "a before has passed";
        if (before == added[slot]) next.push_back(i);
      }
      ASSERT_FALSE(next.empty()) << "all wait";
      const int i = next[draw(0, static_cast<int>(next.size()) - 1)];
      auto& [b, tile, head, left] = running[i];
      const int slot = head * p.q_slots + b.slot0 + tile;
      ++added[slot];
      ASSERT_TRUE(met.insert({slot, b.key0 / kN}).second);
      tile = next_tile(b, tile);
      if (tile == start_tile<kConfig>(p, b)) ++head;
      if (--left == 0) running.erase(running.begin() + i);
    }
    EXPECT_EQ(std::ssize(met), int64_t{p.q_slots} * heads_kv * group * key_tiles) << "a block misses a tile";
  }
}

// A step without a mask has none to apply.
TEST(BwdSm90Blocks, KnowWhichQueriesSeeAllOfTheirKeys) {
  std::mt19937 random(std::random_device{}());
  int unmasked = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const Drawn drawn(random);
    for (int index = 0; index < drawn.blocks; ++index) {
      const KeyBlock b = key_block<kConfig>(drawn.p, index);
      for (int tile = b.first_tile; tile < b.first_tile + b.tiles; ++tile) {
        const int row0 = tile * kM;
        if (row0 < b.full_low || row0 + kM - 1 > b.full_high) continue;  // masked
        ++unmasked;
        for (int query = row0; query < std::min(row0 + kM, b.s.sq); ++query) {
          ASSERT_TRUE(visible_keys(drawn.p, b.s, query).holds(b.key0, kN));
        }
      }
    }
  }
  EXPECT_GT(unmasked, 100);
}

}  // namespace
}  // namespace tessera
