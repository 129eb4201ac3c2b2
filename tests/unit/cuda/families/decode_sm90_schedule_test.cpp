// decode_sm90's schedule, kernels/tessera/decode_sm90/schedule.cuh, on the host (tests/emulated_warp): the blocks'
// ranges cover every tile of keys that a row sees exactly once, and the parts of a work tile know their number and each
// other's places.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/decode_sm90/schedule.cuh"

namespace tessera {
namespace {

constexpr int kN = 16;
constexpr DecodeSm90Config config_of(bool varlen, bool invariant) {
  return {.dtype = Dtype::kBFloat16,
          .head_dim = 128,
          .rows = kDecodeRows,
          .block_n = kN,
          .warps = 1,
          .stages = 2,
          .paged = false,
          .varlen = varlen,
          .invariant = invariant,
          .bulk = false,
          .boxes = 1,
          .score = {}};
}

// A random problem. Its arrays live as long as it does.
struct Drawn {
  DecodeSm90Params p{};
  std::vector<int> cu_q, cu_k, used;
  int blocks = 0;

  Drawn(std::mt19937& random, bool varlen, bool invariant) {
    const auto draw = [&random](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    p.batch = draw(1, draw(0, 1) ? 100 : 4);
    const int heads = draw(1, 3), rows = invariant ? 1 : draw(1, 3), groups = draw(1, 2), group = draw(1, 9);
    const int group_blocks = heads * rows, heads_kv = heads * groups;
    p.group_blocks = Divisor(group_blocks), p.group_heads = Divisor(heads), p.group_rows = Divisor(rows),
    p.head_groups = groups;
    p.heads_kv = Divisor(heads_kv), p.group = Divisor(group), p.heads_q = Divisor(heads_kv * group);
    p.causal = draw(0, 1), p.fixed_diagonal = draw(0, 3) == 0;
    p.window_left = draw(0, 2) ? -1 : draw(0, 300);
    p.window_right = draw(0, 2) ? -1 : draw(0, 300);
    p.seqlen_q = p.max_seqlen_q = draw(0, 5);
    p.seqlen_k = p.keys_limit = p.max_seqlen_k = draw(0, draw(0, 1) ? 3000 : 100);
    if (varlen && draw(0, 1)) {
      p.rows_q = p.batch * 3;
      for (int b = 0; b <= p.batch; ++b) cu_q.push_back(draw(0, p.rows_q));
      std::ranges::sort(cu_q);
      p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_q_stride = 1, p.max_seqlen_q = 5;
    }
    if (varlen && draw(0, 1)) {
      for (int b = 0; b < p.batch; ++b) used.push_back(draw(0, 3) ? draw(0, p.seqlen_k) : 0);
      p.seqused_k = used.data(), p.seqused_k_stride = 1;
    }
    p.min_tiles = draw(1, 8), p.short_tiles = draw(0, 40), p.most_parts = Divisor(draw(1, kDecodeMostParts));
    p.many_parts = invariant ? kDecodeMostParts : draw(2, 20), p.group_parts = Divisor(draw(2, p.many_parts));
    p.most_queries = 5;
    blocks = draw(group_blocks, 60), p.block_groups = Divisor(blocks / group_blocks);
  }
};

struct Part {
  int block_group, begin, end;
  bool whole_group;
  std::uint32_t in_memory;  // of its work tile
};

// batch_invariant: a group's sum replaces its parts if one group of blocks has all of them; otherwise each part
// remains.
void expect_groups(const std::vector<Part>& parts) {
  for (std::size_t first = 0; first < parts.size(); first += kDecodeGroupParts) {
    const std::size_t last = std::min(first + kDecodeGroupParts, parts.size()) - 1;
    const bool one_group = parts[first].block_group == parts[last].block_group;
    for (std::size_t n = first; n <= last; ++n) {
      if (first < last) {
        ASSERT_EQ(parts[n].whole_group, one_group);
      }
      ASSERT_EQ(parts.front().in_memory >> n & 1, !one_group || n == last);
    }
  }
}

// Many parts are merged in groups of at least two, whose sums have places and counters of their own. `all`: the block's
// part of the work tile `key`. The containers hold what earlier parts have.
template <class Key>
void expect_group(const DecodeSm90Params& p, const TileParts& all, int blocks, const Key& key, std::set<int>& slots,
                  std::map<int, std::pair<Key, int>>& counters, std::map<std::pair<Key, int>, int>& arrived) {
  const PartsMerge of_group(p, all, 0, blocks), of_sums(p, all, 1, blocks);
  if (all.count <= p.many_parts) {
    ASSERT_EQ(of_group.to_slot, -1);
    ASSERT_EQ(of_group.parts.count, all.count);
    return;
  }
  const int group = of_sums.parts.index;
  ASSERT_GE(of_group.parts.count, 2);
  ASSERT_LE(of_group.parts.count, p.group_parts.value + 1);
  ASSERT_EQ(of_group.parts.slot(of_group.parts.index), all.slot(all.index)) << "the group misses the block's part";
  ASSERT_EQ(of_sums.to_slot, -1);
  ASSERT_EQ(of_sums.parts.slot(group), of_group.to_slot) << "a sum is not where it is read";
  ASSERT_LT(group, of_sums.parts.count);
  if (of_group.parts.index == 0) {
    ASSERT_TRUE(slots.insert(of_group.to_slot).second) << "a sum in the place of another";
  }
  const std::pair of{key, group};
  const int counter = of_group.parts.counter;
  ASSERT_GE(counter, blocks);
  ASSERT_LT(counter, 2 * blocks);
  ASSERT_EQ(counters.try_emplace(counter, of).first->second, of) << "two groups with one counter";
  if (++arrived[of]; of_group.parts.index == of_group.parts.count - 1) {
    ASSERT_EQ(arrived[of], of_group.parts.count);
  }
}

template <DecodeSm90Config kConfig>
void deal() {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  constexpr int kTrials = 16;
  int merged = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(seed) + ", trial " + std::to_string(trial));
    const Drawn drawn(random, kConfig.varlen, kConfig.invariant);
    const DecodeSm90Params& p = drawn.p;
    std::vector<RangeSegments<kConfig>> dealt(static_cast<std::size_t>(drawn.blocks));
    std::array<int, 8> scan{};
    emulated::Warp::run([&](int lane) {
      for (int block = 0; block < drawn.blocks; ++block) {
        const auto at = static_cast<std::size_t>(block);
        find_range<kConfig>(p, block, lane, scan.data(), dealt[at]);
        __syncthreads();  // the next block's scan
      }
    });
    std::map<std::tuple<int, int, int>, std::vector<Part>> parts;     // of a work tile: (batch, head, first row)
    std::map<int, std::set<std::tuple<int, int, int>>> counters;      // who arrives where
    std::map<std::tuple<int, int, int>, std::set<int>> block_groups;  // who arrives
    std::set<int> slots;                                              // of works that several blocks share
    std::map<int, std::pair<std::tuple<int, int, int>, int>> group_counters;  // which group of parts arrives where
    std::map<std::pair<std::tuple<int, int, int>, int>, int> arrived;         // how many of its parts
    for (int block = 0; block < drawn.blocks; ++block) {
      RangeSegments<kConfig>& segments = dealt[static_cast<std::size_t>(block)];
      const int block_group = block / p.group_blocks;
      int tiles = 0;
      for (int n = 0; segments[n].rows > 0; ++n) {
        const Segment& segment = segments[n];
        segments.walk_over(p, n + 1, n + 2);
        segments.set_parts(p, n);
        tiles += segment.end - segment.begin;
        const std::tuple key{segment.batch, segment.head_kv, segment.row0};
        std::vector<Part>& of = parts[key];
        const bool split = kConfig.invariant && !segment.whole;
        of.push_back({block_group, segment.begin, segment.end, split && segment.whole_group,
                      split ? segments.parts_in_memory(segment) : 0});
        ASSERT_LT(segment.begin, segment.end);
        ASSERT_GE(segment.rows, 1);
        ASSERT_EQ(segment.whole, segment.end - segment.begin == segment.tiles);
        if (kConfig.invariant) {
          const int at_most = p.most_parts.value;
          const int least = segment.tiles > p.short_tiles ? 2 * p.min_tiles : p.min_tiles;
          const int most = std::max((segment.tiles + at_most - 1) / at_most, least);
          ASSERT_EQ(segment.first % most, 0) << "where a part begins depends on the batch";
          ASSERT_EQ(segment.end - segment.begin, std::min(most, segment.tiles - segment.first));
        }
        if (segment.whole) continue;
        ++merged;
        const TileParts& work = segment.parts;
        ASSERT_EQ(work.index, static_cast<int>(of.size()) - 1);
        ASSERT_LT(work.slot(work.index), decode_slots(kConfig, drawn.blocks));
        if (work.shared()) {
          ASSERT_TRUE(slots.insert(work.slot(work.index)).second) << "two parts in one place";
          counters[work.counter].insert(key);
          block_groups[key].insert(block_group);
          ASSERT_NO_FATAL_FAILURE(expect_group(p, work, drawn.blocks, key, slots, group_counters, arrived));
        }
        if (segment.last) {
          ASSERT_EQ(static_cast<int>(of.size()), work.count);
          ASSERT_EQ(work.shared() ? static_cast<int>(block_groups[key].size()) : 1, work.block_groups);
          if (kConfig.invariant) ASSERT_NO_FATAL_FAILURE(expect_groups(of));
        }
      }
      if (!kConfig.invariant) {
        ASSERT_TRUE(tiles == 0 || tiles <= segments.walk.range_tiles);
      }
    }
    for (const auto& [counter, works] : counters) ASSERT_EQ(works.size(), 1u) << "two works with one counter";
    for (int batch = 0; batch < p.batch; ++batch) {
      const Sequence s = load_sequence(p, batch);
      for (int head = 0; head < p.heads_kv; ++head)
        for (int row = 0; row < s.sq * p.group.value; ++row) {
          const auto found = parts.find({batch, head, row / kDecodeRows * kDecodeRows});
          ASSERT_NE(found, parts.end()) << "nobody writes a row";
          const std::vector<Part>& of = found->second;
          for (std::size_t n = 1; n < of.size(); ++n) {
            ASSERT_EQ(of[n].begin, of[n - 1].end);
            ASSERT_GE(of[n].block_group, of[n - 1].block_group);
          }
          const KeyRange keys = visible_keys(p, s, row / p.group);
          if (keys.low > keys.high) continue;
          ASSERT_LE(of.front().begin * kN, std::max(keys.low, 0)) << "a row misses keys it sees";
          ASSERT_GT(of.back().end * kN, keys.high) << "a row misses keys it sees";
        }
    }
  }
  EXPECT_GT(merged, 0);
}

TEST(DecodeSm90Schedule, DealsEveryTileOnce) { deal<config_of(true, false)>(); }
TEST(DecodeSm90Schedule, DealsEveryTileOfSequencesThatAreAlike) { deal<config_of(false, false)>(); }
TEST(DecodeSm90Schedule, DealsPartsThatDoNotDependOnTheBatch) {
  deal<config_of(true, true)>();
  deal<config_of(false, true)>();
}

}  // namespace
}  // namespace tessera
