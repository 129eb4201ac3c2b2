#include "cpu/packed_keys.hpp"

#include <algorithm>

#include "cpu/scratch.hpp"
#include "cpu/tables.hpp"

namespace tessera::cpu {
namespace {

using core::divide_up;

// The most bytes of packed keys and values.
constexpr int64_t kMaxPackedKeys_bytes = int64_t{512} << 20;
// The sum of K's and V's head sizes from which on packing ahead pays for a head's own items. With several query heads
// for a KV head it pays at any size.
constexpr int64_t kLeastHeadDims = 192;
// The least number of stages of 32 keys x 32 queries for each of several cores: a parallel region of its own, and keys
// in other cores' caches, cost a short call more than they save (docs/lab/amx.md).
constexpr int64_t kLeastStagesPerCore = 8192;

constexpr int64_t kTileRows = 32;

// Keys low ... high are those that queries first ... last see together, by position; none if low > high.
struct KeyRange {
  int64_t low, high;
  int64_t keys() const { return std::max<int64_t>(0, high - low + 1); }
};
KeyRange keys_seen(const tessera_problem& problem, const core::SequenceView& sequence, int64_t first, int64_t last) {
  const int64_t diagonal = core::diagonal(problem, sequence.sq, sequence.sk);
  KeyRange range{0, sequence.sk - 1};
  if (problem.window_left >= 0) range.low = std::max(range.low, first + diagonal - problem.window_left);
  if (problem.window_right >= 0) range.high = std::min(range.high, last + diagonal + problem.window_right);
  if (sequence.causal) range.high = std::min(range.high, last + diagonal);
  return range;
}

}  // namespace

int64_t packed_block_bytes(const tessera_plan& plan) {
  return carve_amx_packed_keys(nullptr, step_of(plan).block_n, plan.head_dim, plan.head_dim_v).bytes;
}

int64_t packed_keys_bytes(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  if (p.direction == TESSERA_BACKWARD || plan.kernel != TESSERA_KERNEL_TILED || !amx_kernels(plan)) return 0;
  const int64_t rows_an_item = int64_t{step_of(plan).block_m} * own_of(step_of(plan)).tiles_per_item,
                group = group_size(plan);
  const int64_t items = way_of(plan, plan.max_seqlen_q) == kPackedTile
                            ? divide_up(plan.max_seqlen_q * group, rows_an_item)
                            : divide_up(plan.max_seqlen_q, rows_an_item) * group;
  if (items < 2 || (group == 1 && plan.head_dim + plan.head_dim_v < kLeastHeadDims)) return 0;
  const int64_t stages =
      plan.batch * plan.heads_q * divide_up(plan.max_seqlen_q, kTileRows) * divide_up(plan.max_seqlen_k, kTileRows);
  if (plan.device.cores > 1 && stages / (p.causal ? 2 : 1) < kLeastStagesPerCore * plan.device.cores) return 0;
  int64_t blocks = plan.batch * divide_up(plan.max_seqlen_k, step_of(plan).block_n);
  if (core::packed_k(p)) blocks = std::min(blocks, core::sizes(p).rows_k / step_of(plan).block_n + plan.batch);
  const int64_t most = kMaxPackedKeys_bytes / packed_block_bytes(plan);
  return blocks <= most / plan.heads_kv ? blocks * plan.heads_kv * packed_block_bytes(plan) : 0;
}

PackedBlocks packed_blocks(const tessera_plan& plan, Way way, const core::SequenceView& sequence) {
  if (way == kDecode || sequence.sq == 0 || packed_keys_bytes(plan) == 0) return {};
  const KeyRange all = keys_seen(plan.problem, sequence, 0, sequence.sq - 1);
  if (all.keys() == 0) return {};
  // Keys that the items of a KV head read, each counted as often as it is read.
  const int64_t group = group_size(plan),
                rows_an_item = int64_t{step_of(plan).block_m} * own_of(step_of(plan)).tiles_per_item;
  int64_t read = 0;
  if (way == kPackedTile) {
    read = divide_up(sequence.sq * group, rows_an_item) * all.keys();  // an item may have any of the queries
  } else {
    for (int64_t first = 0; first < sequence.sq; first += rows_an_item) {
      const int64_t last = std::min(sequence.sq, first + rows_an_item) - 1;
      read += keys_seen(plan.problem, sequence, first, last).keys() * group;
    }
  }
  // Two items that, under a causal mask, read one and a half times the keys read enough.
  if (2 * read < 3 * all.keys()) return {};
  const int64_t first = all.low / step_of(plan).block_n;
  return {first, all.high / step_of(plan).block_n - first + 1};
}

}  // namespace tessera::cpu
