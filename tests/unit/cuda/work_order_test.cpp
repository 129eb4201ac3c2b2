// The order of fwd_sm90's work tiles under a causal mask: here every block of a grid processes its own tiles, as in the
// kernel's tile scheduler.
#include "cuda/work_order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/attention/work_order.hpp"

namespace tessera::cuda {
namespace {

constexpr int kMultiprocessors = 132;

// visit(block, work) for all of a grid.
template <class Visit>
void for_each_work(const WorkOrder& order, int blocks, const Visit& visit) {
  for (int block = 0; block < blocks; ++block) {
    for (BlockTiles at(order, block, blocks); at.index < work_tiles(order); at.advance(order, block, blocks)) {
      visit(block, at.index);
    }
  }
}

// Lists the work tiles that do not occur exactly once, or lie beyond a head's tiles; "" if there are none.
std::string faults(const WorkOrder& order, int blocks) {
  std::vector<int> done(work_tiles(order)), placed(work_tiles(order));
  std::string text;
  int before = -1, of_block = -1;
  for_each_work(order, blocks, [&](int block, int work) {
    if (block == of_block && work <= before) text += " not growing: " + std::to_string(work);
    of_block = block, before = work;
    ++done[work];
    const TileCoord place = tile_coord(order, work);
    if (place.head < 0 || place.head >= order.heads || place.slot < 0 || place.slot >= order.tiles) {
      text += " nowhere: " + std::to_string(work);
    } else {
      ++placed[place.head * order.tiles + place.slot];
    }
  });
  const auto once = [](const std::vector<int>& times) { return std::ranges::count(times, 1) == std::ssize(times); };
  if (!once(done)) text += " not each work once";
  if (!once(placed)) text += " not each tile once";
  return text;
}

std::string text_of(const WorkOrder& order) {
  return "tiles " + std::to_string(order.tiles) + ", heads " + std::to_string(order.heads) + ", paired " +
         std::to_string(order.paired_heads) + ", section " + std::to_string(order.swizzle_heads) + ", ascending " +
         std::to_string(order.ascending);
}

// Also where long heads of a packed batch would all come in pairs.
TEST(CudaWorkOrder, AsManyBlocksAsWorksHaveOneEach) {
  for (const bool packed : {false, true}) {
    TileGrid grid{};
    grid.tiles = 8, grid.heads = 4, grid.packed = packed, grid.group = 1, grid.head_bytes = int64_t{1} << 20;
    grid.tile_keys = 128, grid.fixed_keys = 256, grid.blocks = 32;
    std::vector<int> of_block(32);
    for_each_work(order_of(grid), 32, [&](int block, int) { ++of_block[block]; });
    EXPECT_EQ(std::ranges::count(of_block, 1), 32) << text_of(order_of(grid));
  }
}

TEST(CudaWorkOrder, EveryTileOnce) {
  for (const int tiles : {1, 2, 3, 4, 7, 8, 11, 43, 128, 171})
    for (const int heads : {1, 2, 3, 5, 8, 16, 37, 64})
      for (const int multiprocessors : {1, 2, 7, 132})
        for (const int64_t head_bytes : {int64_t{1} << 16, int64_t{1} << 18, int64_t{3} << 17, int64_t{1} << 20})
          for (const int group : {1, 4})
            for (const bool packed : {false, true}) {
              TileGrid grid{};
              grid.tiles = tiles, grid.heads = heads, grid.packed = packed, grid.group = group;
              grid.head_bytes = head_bytes, grid.tile_keys = 128, grid.fixed_keys = 256;
              grid.blocks = std::min(multiprocessors, tiles * heads);
              const WorkOrder order = order_of(grid);
              const std::string found = faults(order, static_cast<int>(grid.blocks));
              ASSERT_EQ(found, "") << text_of(order) << ", blocks " << grid.blocks;
            }
}

// Also with numbers that no problem leads to.
TEST(CudaWorkOrder, EveryTileOnceWhateverTheNumbers) {
  for (int blocks = 1; blocks <= 9; ++blocks)
    for (int tiles = 1; tiles <= 6; ++tiles)
      for (int heads = 1; heads <= 7; ++heads)
        for (int paired = 0; paired <= heads; ++paired) {
          if (paired * tiles % 2 != 0 && paired < heads) continue;
          for (int section = 1; section <= heads; ++section)
            for (const int ascending : {0, 1}) {
              const WorkOrder order{Divisor(tiles),           heads,    paired, Divisor(section),
                                    Divisor(section * tiles), ascending};
              ASSERT_EQ(faults(order, blocks), "") << text_of(order) << ", blocks " << blocks;
            }
        }
}

// A work's cycles: `fixed`, and `a_block` for each block of keys that its rows see.
struct Cost {
  int head_dim, block_m, block_n;
  double fixed, a_block;
};
// Fitted to an H200: docs/reference/kernels/fwd_sm90.md.
constexpr Cost kCosts[] = {
    {64, 128, 128, 3500, 1500},  {64, 192, 128, 4000, 1700}, {64, 256, 64, 4500, 1700},
    {128, 128, 128, 3500, 2370}, {128, 192, 80, 4000, 2222}, {256, 128, 64, 5000, 2500},
};

// By how much the block with the most to do passes the mean: 16384 tokens, 2048 / D heads.
double loss(const Cost& cost, int length) {
  TileGrid grid{};
  grid.tiles = (length + cost.block_m - 1) / cost.block_m;
  grid.heads = 16384 / length * 2048 / cost.head_dim;
  grid.group = 1;
  grid.head_bytes = int64_t{length} * 2 * cost.head_dim * 2;
  grid.tile_keys = cost.block_m, grid.fixed_keys = 2 * cost.block_n;
  grid.blocks = kMultiprocessors;
  const WorkOrder order = order_of(grid);
  std::vector<double> load(kMultiprocessors);
  for_each_work(order, kMultiprocessors, [&](int block, int work) {
    const int keys = (order.tiles - tile_coord(order, work).slot) * cost.block_m;
    load[block] += cost.fixed + cost.a_block * ((keys + cost.block_n - 1) / cost.block_n);
  });
  return std::ranges::max(load) * kMultiprocessors / std::accumulate(load.begin(), load.end(), 0.0) - 1;
}

TEST(CudaWorkOrder, BlocksHaveAsMuchToDo) {
  for (const Cost& cost : kCosts)
    for (int length = 512; length <= 16384; length *= 2) {
      // Few tiles a head, or sizes that go up by one block of keys and by two alternately, leave less to choose from.
      const double most = length >= 4096 ? 0.011 : length == 2048 && cost.block_m == 128 ? 0.006 : 0.032;
      EXPECT_LE(loss(cost, length), most) << cost.head_dim << " " << cost.block_m << " " << length;
    }
}

// Sections of about a round, 128 tiles of 132 blocks, would give the same blocks a head's largest tile in each: the
// first would have 1.47 of the mean.
TEST(CudaWorkOrder, SectionsAreNotOneRound) {
  const struct {
    int tiles, heads, kib;
  } rows[] = {{2, 256, 256}, {2, 2048, 256}, {3, 256, 384}, {6, 48, 384}, {3, 384, 192}, {4, 512, 256}, {5, 64, 480}};
  for (const auto& [tiles, heads, kib] : rows) {
    TileGrid grid{};
    grid.tiles = tiles, grid.heads = heads, grid.group = 1, grid.head_bytes = int64_t{kib} << 10;
    grid.tile_keys = 128, grid.fixed_keys = 128, grid.blocks = kMultiprocessors;
    const WorkOrder order = order_of(grid);
    std::vector<double> load(kMultiprocessors);
    for_each_work(order, kMultiprocessors,
                  [&](int block, int work) { load[block] += 128.0 * (1 + tiles - tile_coord(order, work).slot); });
    const double mean = std::accumulate(load.begin(), load.end(), 0.0) / kMultiprocessors;
    EXPECT_LE(std::ranges::max(load), 1.16 * mean) << text_of(order);
  }
}

}  // namespace
}  // namespace tessera::cuda
