#include "cuda/work_order.hpp"

#include <algorithm>

#include "core/geometry.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {
namespace {

// The most keys that a block processes if the tiles of the last `tail` heads form one section and the others are laid
// out in pairs. Loads are linear in a block's number between the blocks that are evaluated.
int64_t largest_load(const TileGrid& grid, int64_t tail) {
  const int64_t blocks = grid.blocks, tail_tiles = tail * grid.tiles;
  const int64_t pairs = (grid.heads - tail) * grid.tiles / 2, rounds = pairs / blocks, left_over = pairs % blocks;
  const int64_t pair_keys = 2 * grid.fixed_keys + (grid.tiles + 1) * grid.tile_keys;
  // The incomplete round of pairs, which the section fills up, is the section's first round and runs forwards.
  const int64_t section_rounds = (left_over + tail_tiles) / blocks, left = (left_over + tail_tiles) % blocks;
  const int64_t edge = section_rounds % 2 ? blocks - left : left;  // in the last round
  int64_t largest = 0;
  for (const int64_t block : {int64_t{0}, left_over - 1, left_over, blocks - 1, edge - 1, edge}) {
    if (block < 0 || block >= blocks) continue;
    const bool has_pair = block < left_over;
    int64_t keys = (rounds + has_pair) * pair_keys;
    for (int64_t round = has_pair; round <= section_rounds; ++round) {
      const int64_t at = round * blocks + (round % 2 ? blocks - 1 - block : block) - left_over;
      if (at < tail_tiles) keys += grid.fixed_keys + (grid.tiles - at / tail) * grid.tile_keys;
    }
    largest = std::max(largest, keys);
  }
  return largest;
}

// Heads of the section that ends the grid: between one and two rounds of pairs, so that its keys and values are at most
// twice those in use by pairs. Among these, the number with the smallest largest load.
int64_t tail_of(const TileGrid& grid) {
  constexpr int64_t kCandidates = 32;
  const int64_t least = divide_up(2 * grid.blocks, grid.tiles);
  const int64_t most = std::max(divide_up(4 * grid.blocks, grid.tiles), least + 1);
  const int64_t step = 1 + (most - least) / kCandidates;
  int64_t best = grid.heads, best_load = INT64_MAX;
  for (int64_t tail = least; tail <= std::min(most, grid.heads); tail += step) {
    if ((grid.heads - tail) * grid.tiles % 2 != 0) continue;
    const int64_t load = largest_load(grid, tail);
    if (load < best_load) best = tail, best_load = load;
  }
  return best;
}

WorkOrder make_order(const TileGrid& grid, int64_t paired, int64_t section, int64_t sections) {
  WorkOrder order{};
  order.tiles = Divisor(static_cast<int>(grid.tiles)), order.heads = static_cast<int>(grid.heads);
  order.paired_heads = static_cast<int>(paired);
  order.swizzle_heads = Divisor(static_cast<int>(std::max<int64_t>(1, section)));
  order.swizzle_tiles = Divisor(order.swizzle_heads * order.tiles);
  order.ascending = sections % 2 == 0;
  return order;
}

// All heads in sections of equal size, with at most `most_bytes` of keys and values each.
WorkOrder sections_of(const TileGrid& grid, int64_t most_bytes) {
  const int64_t fit = std::max<int64_t>(1, most_bytes / std::max<int64_t>(1, grid.head_bytes)) * grid.group;
  const int64_t section = divide_up(grid.heads, divide_up(grid.heads, fit));
  return make_order(grid, 0, section, divide_up(grid.heads, section));
}

// The most keys that a block processes in the first rounds, which repeat, as a multiple of the mean.
double largest_of_mean(const TileGrid& grid, const WorkOrder& order) {
  constexpr int kRounds = 16;
  const int blocks = static_cast<int>(grid.blocks), end = std::min(work_tiles(order), kRounds * blocks);
  int64_t largest = 0, all = 0;
  for (int block = 0; block < blocks; ++block) {
    int64_t keys = 0;
    for (BlockTiles at(order, block, blocks); at.index < end; at.advance(order, block, blocks)) {
      keys += grid.fixed_keys + (grid.tiles - tile_coord(order, at.index).slot) * grid.tile_keys;
    }
    largest = std::max(largest, keys), all += keys;
  }
  return static_cast<double>(largest) * blocks / static_cast<double>(all);
}

// The smallest sections, unless larger ones balance the blocks better by more than kCost, the slowdown of larger
// sections. Sections of about one round give the same blocks the largest tiles each time, since rounds and sections
// reverse direction together.
WorkOrder sections_of(const TileGrid& grid) {
  constexpr int64_t kSmallest = int64_t{16} << 20, kLarger[] = {int64_t{24} << 20, int64_t{32} << 20};
  constexpr double kCost = 1.04;
  WorkOrder best = sections_of(grid, kSmallest);
  double least = largest_of_mean(grid, best) / kCost;
  for (const int64_t bytes : kLarger) {
    if (least <= 1) break;  // no order has a maximum below the mean
    const WorkOrder order = sections_of(grid, bytes);
    const double load = largest_of_mean(grid, order);
    if (load < least) best = order, least = load;
  }
  return best;
}

int64_t head_bytes(const tessera_plan& plan) {
  return plan.max_seqlen_k * (plan.head_dim + plan.head_dim_v) *
         static_cast<int64_t>(tessera_dtype_bytes(plan.problem.q.dtype));
}

}  // namespace

// Pairs balance the work and keep few heads' keys and values in use: 568 instead of 452 TFLOP/s at D = 256, length
// 2048. But heads of few bytes are bound by memory, and pairs read them less evenly: 162 instead of 218 TFLOP/s at
// D = 64, length 512. These use the L2 swizzle: a section has as many heads as fit 16 MiB of keys and values (query
// heads that share keys count once), which stay in the cache while the section's tiles run. Such sections are 1 to
// 5 % faster than sections of 32 MiB on an H200, 9 % on an H100 (docs/lab/fwd_sm90.md).
WorkOrder order_of(const TileGrid& grid) {
  constexpr int64_t kPairedHeadBytes = int64_t{512} << 10;
  if (grid.equal || grid.blocks >= grid.tiles * grid.heads) {
    return make_order(grid, 0, 1, grid.heads);  // the order does not matter: tiles cost the same, or each block has one
  }
  if (grid.head_bytes < kPairedHeadBytes) return sections_of(grid);
  const int64_t section = grid.packed ? 0 : tail_of(grid);
  return make_order(grid, grid.heads - section, section, 1);
}

bool is_causal(const tessera_problem& problem) {
  const bool some_causal = problem.causal || core::present(problem.causal_seqs);
  return (some_causal || problem.window_right >= 0) && problem.window_left < 0;
}

int64_t persistent_blocks(const tessera_plan& plan, int64_t work_tiles, int64_t resident) {
  constexpr int64_t kTilesOfABlock = 4, kMostBlocks = 16;  // tiles per block; blocks per multiprocessor
  int64_t blocks = resident;
  if (core::packed_q(plan.problem)) {
    blocks *= std::clamp<int64_t>(work_tiles / (kTilesOfABlock * resident), 1, kMostBlocks);
  }
  return std::min(blocks, work_tiles);
}

WorkOrder order_of(const tessera_plan& plan, int64_t tiles, int64_t heads, int64_t rows, int64_t fixed_keys,
                   int64_t blocks) {
  const tessera_problem& p = plan.problem;
  TileGrid grid{};
  grid.tiles = tiles, grid.heads = heads;
  grid.equal = !is_causal(p);
  grid.packed = core::packed_q(p);
  grid.group = plan.heads_q / std::max<int64_t>(1, plan.heads_kv);
  grid.head_bytes = head_bytes(plan);
  grid.tile_keys = rows;
  const core::Place place = core::place_of(p, plan.max_seqlen_q, plan.max_seqlen_k);
  grid.fixed_keys = fixed_keys + std::clamp<int64_t>(core::diagonal(p, place), 0, plan.max_seqlen_k);
  grid.blocks = blocks;
  return order_of(grid);
}

WorkOrder sections_of(const tessera_plan& plan, int64_t tiles, int64_t heads) {
  constexpr int64_t kBytes = int64_t{32} << 20;
  TileGrid grid{};
  grid.tiles = tiles, grid.heads = heads;
  grid.group = plan.heads_q / std::max<int64_t>(1, plan.heads_kv);
  grid.head_bytes = head_bytes(plan);
  return sections_of(grid, kBytes);
}

}  // namespace tessera::cuda
