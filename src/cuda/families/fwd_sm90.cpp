// The forward kernels of kernels/tessera/fwd_sm90/kernel.cuh and, for head sizes above 256, fwd_sm90_d512/kernel.cuh:
// the problems they support and their launch. The compiled configs of the latter are in fwd_sm90_d512.cpp. Every number
// depends only on the problem and the GPU.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <string>

#include "core/asking.hpp"
#include "core/geometry.hpp"
#include "core/score/bound.hpp"
#include "core/score/facts.hpp"
#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/estimate.hpp"
#include "cuda/families/block_lists.hpp"
#include "cuda/families/cluster_kernels.hpp"
#include "cuda/families/fwd_sm80.hpp"
#include "cuda/families/fwd_sm90_tiles.hpp"
#include "cuda/families/split_keys.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/runtime/tensor_map.hpp"
#include "cuda/work_order.hpp"
#include "tessera/config.hpp"

namespace tessera::cuda {
namespace {

constexpr int kWarpRows = 16;  // rows that a warp stores

constexpr int kDropoutKeys = 32;   // keys that one call of Philox serves; a tile must have a multiple of them
constexpr int64_t kPageRows = 16;  // a page must have a multiple of these rows, as every tile's block_n has

// The decisions for a problem.
struct FwdSm90Plan {
  bool pair;             // selects the config that is used
  FwdSm90Config config;  // for one block without a cluster
  FwdSm90D512Config pair_config;
  WorkOrder order;
  Grid grid;
  bool schedules_dynamically;  // the counter is in the workspace
  BlockLists lists;            // shape of a block mask's lists, which are stored in the workspace
  int program_words;           // of the lists, if they are a score program's
  int most_long_lists;         // see FwdSm90Params
  int short_tile_blocks;       // see FwdSm90Params
  int num_splits;              // parts of the keys
  int64_t arrivals_bytes;      // of the counters of their merge, in the workspace from kListsAt on, before the parts
};

struct Choice {
  bool pair = false;
  FwdSm90Config config{};
  FwdSm90D512Config pair_config{};
  int num_splits = 1;
  int64_t tiles = 0, work_tiles = 0;  // of a head (packed: of all sequences); of all heads and parts of the keys
  int block_m() const { return pair ? FwdSm90D512Config::kBlockM : config.consumers * kConsumerRows; }
  int block_n() const { return pair ? pair_config.block_n : config.block_n; }
  int cluster() const { return pair ? kFwdD512ClusterBlocks : config.cluster; }
  int64_t smem_bytes() const { return pair ? cuda::smem_bytes(pair_config) : cuda::smem_bytes(config); }
  bool pack_gqa() const { return !pair && config.pack_gqa; }
  int64_t heads(const tessera_plan& plan) const { return pack_gqa() ? plan.heads_kv : plan.heads_q; }
  int64_t rows_a_query(const tessera_plan& plan) const { return pack_gqa() ? group_of(plan) : 1; }
  void count_tiles(const tessera_plan& plan) {
    const bool packed = core::packed_q(plan.problem);
    tiles = tiles_of(packed, plan.batch, core::sizes(plan.problem).rows_q, rows_a_query(plan), block_m());
    work_tiles = tiles * heads(plan) * (packed ? 1 : plan.batch) * num_splits;
  }
};

bool by_pairs(const tessera_plan& plan) { return std::max(plan.head_dim, plan.head_dim_v) > kFwdSm90HeadDim; }

// Whether K/V blocks come from lists: of a block mask, or of a score program's mask.
bool reads_lists(const tessera_plan& plan) {
  return core::present(plan.problem.block_mask) || (!by_pairs(plan) && lists_program(plan));
}

// Whether the blocks of a cluster, which process neighbouring work tiles, always see the same keys.
bool cluster_shares_keys(const tessera_plan& plan, int cluster, int64_t tiles) {
  const tessera_problem& p = plan.problem;
  const bool dense = !core::packed_q(p) && !core::packed_k(p) && !core::paged(p);
  const bool unmasked = !p.causal && !core::present(p.causal_seqs) && p.window_left < 0 && p.window_right < 0;
  return dense && unmasked && tiles % cluster == 0 && plan.device.cores >= cluster;
}

// Whether keys may be split, or heads packed. In a mixed batch the host does not know how many work tiles there are;
// the parts of a call with a shared prefix were not measured.
bool may_divide(const tessera_plan& plan) {
  return !plan.problem.batch_invariant && plan.decode_queries == 0 && !is_part(plan);
}

// Few queries against a cache of many more keys, by this kernel alone: nearly all tiles of keys are seen in full.
bool has_long_cache(const tessera_plan& plan) { return may_divide(plan) && plan.max_seqlen_k >= 4 * plan.max_seqlen_q; }

// A chunk of a prompt, whose number of queries is known.
bool is_chunk(const tessera_plan& plan) {
  return has_long_cache(plan) && (!core::packed_q(plan.problem) || plan.batch == 1);
}

// The area selects the tile, and so the last bits; with batch_invariant a sequence therefore has the same area in every
// batch. shared_prefix requests (by num_splits) packed sequences that are chunks of the same keys; these see all but a
// prefix's last keys in full.
// Whether the only option leaves scores a stale max at little more than the cost of plain ones: ALiBi, or a score
// program without a mask whose factor is a head's or whose term is linear in the key (attention/score/growth.cuh). Not
// over pages.
bool is_nearly_plain(const tessera_plan& plan) {
  ScoreConfig score = score_config(plan);
  const bool alibi = score.alibi, program = score.program && !score.only_hides;
  score.alibi = score.program = score.scale_first = score.places = score.sequence_places = false;
  if (alibi == program || score.any() || core::paged(plan.problem)) return false;
  if (alibi) return !core::score::has_program(plan);
  const core::score::Facts facts = core::score::facts_of(*core::score::bind(plan).checked);
  return !facts.has_mask && (facts.scales_by_head || facts.grows_linearly);
}

Area area_of(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  if (score_config(plan).any() && !is_nearly_plain(plan)) return Area::kOptions;
  const bool any_lengths = core::packed_q(p) && !p.batch_invariant && plan.steps[0].num_splits <= 1 && !is_chunk(plan);
  if (p.window_left >= 0 || any_lengths) return Area::kPartial;
  return is_causal(p) ? Area::kCausal : Area::kFull;
}

// The number of rows by which the table's rows differ: the queries of a sequence; for packed sequences their mean, or
// their maximum if decode_sm90 serves those with few; under a window, no more than the keys that a query sees, since
// these decide how much a tile's masked edges cost.
int64_t table_rows(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  // The tile decides the last bits, which may not depend on the lengths of the other sequences.
  int64_t rows = p.batch_invariant ? INT64_MAX
                 : core::packed_q(p) && plan.decode_queries == 0
                     ? core::sizes(p).rows_q / std::max<int64_t>(plan.batch, 1)
                     : plan.max_seqlen_q;
  constexpr int64_t kChunkRows = 1024;  // two consumers with 128 rows, of which 512 queries waste none
  if (is_chunk(plan)) rows = std::max(rows, kChunkRows);
  if (p.window_left >= 0 && (p.causal || p.window_right >= 0)) {
    constexpr int64_t kMany = int64_t{1} << 32;
    rows = std::min(rows, std::min(p.window_left, kMany) + 1 + (p.causal ? 0 : std::min(p.window_right, kMany)));
  }
  return rows;
}

// Decides between tiles with all rows and tiles with half of them.
int64_t rows_a_multiprocessor(const tessera_plan& plan) {
  return plan.problem.batch_invariant ? INT64_MAX : divide_up(rows_total(plan) * plan.heads_q, plan.device.cores);
}

// Nanoseconds for each key (an H100, docs/lab/decode_sm90.md): for a query head's tile of up to kTileRows rows, with
// one tile on each multiprocessor; and for a KV head if memory limits the call, likewise where its heads share a tile.
struct KeyTimes {
  int head_dim;
  double tile, memory, memory_packed;
};
constexpr KeyTimes kKeyTimes[] = {
    {64, 6, 0.093, 0.080}, {128, 10, 0.179, 0.155}, {256, 18, 0.36, 0.31}, {512, 36, 0.72, 0.72}};
constexpr int64_t kTileRows = 128;

// Whether the query heads of a KV head are rows of one tile, so that its keys are read once for all of them: if the
// queries of one head do not fill a tile. With fewer keys it was not measured.
bool packs_heads(const tessera_plan& plan) {
  constexpr int64_t kLeastKeys = 256;
  const tessera_problem& p = plan.problem;
  const int64_t group = group_of(plan);
  return group > 1 && kConsumerRows % group == 0 && plan.max_seqlen_q < kTileRows && plan.max_seqlen_k >= kLeastKeys &&
         may_divide(plan) && !score_config(plan).any() && !core::present(p.block_mask) && p.dropout_p == 0;
}

// Work tiles that have rows, for each part of the keys. Packed sequences may also have padded tile indices.
int64_t filled_tiles(const tessera_plan& plan, const Choice& choice) {
  const int64_t of_head = divide_up(plan.max_seqlen_q * choice.rows_a_query(plan), choice.block_m());
  return std::min(choice.work_tiles / choice.num_splits, plan.batch * choice.heads(plan) * of_head);
}

// The fewest keys for which a part is worth its merge by combine/kernel, and the most parts.
constexpr int64_t kMinSplitKeys = 128, kMaxSplits = 132;

// The parts of a work tile's keys: `count` parts, merged by clusters of `merge_blocks` blocks (fwd_sm90/merge.cuh), or
// by combine/kernel if that is 1.
struct Parts {
  int64_t count = 1;
  int merge_blocks = 1;
  int64_t clusters() const { return count / merge_blocks; }
};

// The most blocks of a cluster on any GPU that has clusters.
constexpr int kMostMergeBlocks = 8;

// The blocks that run at the same time as clusters, which share a GPC. An H200's GPCs have 16 or 18 multiprocessors,
// and fewer in one: it holds 15 clusters of 8, 30 of 4 and 66 of 2. Another may have two such GPCs.
int64_t cluster_blocks_at_once(const tessera_plan& plan, int merge_blocks) {
  constexpr int64_t kGpc = 16;
  const int64_t cores = plan.device.cores, gpcs = cores / kGpc;
  if (merge_blocks <= 2 || gpcs <= 2) return cores / merge_blocks * merge_blocks;
  return (gpcs - 1) * kGpc;
}

// Clusters merge parts if every block has one part of a work tile, all of whose rows end as o, and no cluster only
// empty ones.
bool clusters_merge(const tessera_plan& plan, const Choice& choice, Parts parts) {
  const int64_t kv_blocks = divide_up(plan.max_seqlen_k, choice.block_n());
  return parts.merge_blocks > 1 && parts.count % parts.merge_blocks == 0 && parts.clusters() <= kMergeParts &&
         !merges_parts(plan.problem, 1) &&
         divide_up(kv_blocks, divide_up(kv_blocks, parts.count)) > parts.count - parts.merge_blocks &&
         filled_tiles(plan, choice) * parts.count <= cluster_blocks_at_once(plan, parts.merge_blocks);
}

// Of the merge of parts, in microseconds. By combine/kernel: the launch, the wait for one group of parts after another,
// and their writing and reading. By clusters: their barriers; the bytes that a block reads from the others, at 14 bytes
// a clock (counted); and with several clusters a counter, the sums' way through memory, and their reading by one block
// (fitted to an H200: 64/8 heads, 8192 keys and 8 queries take 14.0 us by combine, 18.3 by eight clusters of two).
double merge_us(const tessera_plan& plan, const Choice& choice, Parts parts) {
  if (parts.count <= 1) return 0;
  constexpr double kMergeUs = 2.5, kPartUs = 0.06, kBytesUs = 2e6;
  const auto count = static_cast<double>(parts.count);
  if (parts.merge_blocks == 1) {
    const auto bytes = count * static_cast<double>(rows_total(plan) * plan.heads_q * plan.head_dim_v * 4);
    return kMergeUs + kPartUs * count + 2 * bytes / kBytesUs;
  }
  constexpr double kClusterUs = 0.6, kClusterBytesUs = 25e3, kCounterUs = 0.9, kSumsBytesUs = 20e3;
  constexpr double kWrittenBytesUs = 8e3, kMostWrittenUs = 4;
  const int64_t rows = std::min<int64_t>(plan.max_seqlen_q * choice.rows_a_query(plan), choice.block_m());
  const auto bytes = static_cast<double>(rows * plan.head_dim_v * 4), blocks = static_cast<double>(parts.merge_blocks);
  const double of_blocks = kClusterUs + bytes * (1 - 1 / blocks) / kClusterBytesUs;
  const auto clusters = static_cast<double>(parts.clusters());
  if (clusters <= 1) return of_blocks;
  return of_blocks + kCounterUs + std::min(bytes / kWrittenBytesUs, kMostWrittenUs) +
         clusters * bytes / blocks / kSumsBytesUs;
}

// The time of all work tiles and of their merge, in microseconds, by which the number of parts is chosen. A block reads
// keys from memory no faster than it computes a full tile (an H200: 13 ns a key at D = 128, of both), so few blocks do
// not reach the rate of memory.
double split_us(const tessera_plan& plan, const Choice& choice, Parts parts) {
  constexpr double kTileUs = 2;  // of a work tile, without its keys
  constexpr double kReading = 1.3;
  const int64_t splits = parts.count;
  const KeyTimes& times = row_of(kKeyTimes, plan);
  const auto tiles = static_cast<double>(filled_tiles(plan, choice) * splits);
  const auto keys = static_cast<double>(padded_to(divide_up(plan.max_seqlen_k, splits), choice.block_n()));
  const double waves = std::ceil(tiles / cores_of(plan));
  const double memory_us = kv_heads(plan) * static_cast<double>(plan.max_seqlen_k) * times.memory_packed * 1e-3 *
                           std::sqrt(std::max(1.0, cores_of(plan) / tiles));
  const double us = std::max(memory_us, waves * keys * times.tile * kReading * 1e-3) + waves * kTileUs;
  return us + merge_us(plan, choice, parts);
}

// Whether a tile is mostly empty because query heads that read the same keys cannot share it.
bool mostly_empty(const tessera_plan& plan, const Choice& choice) {
  return !choice.pack_gqa() && group_of(plan) > 1 && plan.max_seqlen_q < kConsumerRows;
}

// kForcedSplits: the number of parts and, after a comma, the blocks of the clusters that merge them.
Parts forced_parts(const tessera_plan& plan, const Choice& choice, const std::string& text) {
  Parts parts{std::clamp<int64_t>(std::atoi(text.c_str()), 1, kMaxSplits)};
  if (const size_t comma = text.find(','); comma != std::string::npos) {
    parts.merge_blocks = std::clamp(std::atoi(text.c_str() + comma + 1), 1, kMostMergeBlocks);
  }
  if (!clusters_merge(plan, choice, parts)) parts.merge_blocks = 1;
  return parts;
}

// The parts that the keys are split into: more than one only if work tiles leave multiprocessors idle.
Parts parts_of(const tessera_plan& plan, const Choice& choice) {
  constexpr double kGain = 1.1;
  if (choice.pair || !may_divide(plan) || choice.config.block_mask || filled_tiles(plan, choice) == 0) return {};
  if (const std::string forced = environment_variable(kForcedSplits); !forced.empty()) {
    return forced_parts(plan, choice, forced);
  }
  if (mostly_empty(plan, choice)) return {};
  Parts best;
  for (int64_t count = 2; count <= kMaxSplits; ++count) {
    for (int merge_blocks = 1; merge_blocks <= kMostMergeBlocks; merge_blocks *= 2) {
      const Parts parts{count, merge_blocks};
      const bool combines = merge_blocks == 1 && count <= plan.max_seqlen_k / kMinSplitKeys;
      if (!combines && !clusters_merge(plan, choice, parts)) continue;
      if (split_us(plan, choice, parts) < split_us(plan, choice, best)) best = parts;
    }
  }
  return kGain * split_us(plan, choice, best) < split_us(plan, choice, Parts{}) ? best : Parts{};
}

Choice choice_of(const tessera_plan& plan, const Sm90Tile& tile) {
  const tessera_problem& p = plan.problem;
  Choice choice;
  FwdSm90Config& config = choice.config;
  config.dtype = static_cast<Dtype>(p.q.dtype);
  set_head_dims(config, plan.head_dim, plan.head_dim_v);
  config.varying_tile_cost = is_causal(p);
  config.block_mask = reads_lists(plan);
  config.score = score_config_beside_block_mask(plan);
  config.pack_gqa = packs_heads(plan);
  tile.apply(config);
  config.page_rows = core::paged(p) ? static_cast<int>(std::gcd(core::sizes(p).page_size, config.block_n)) : 0;
  choice.count_tiles(plan);
  const Parts parts = parts_of(plan, choice);
  choice.num_splits = static_cast<int>(parts.count), config.merge_blocks = parts.merge_blocks;
  config.split = merges_parts(p, choice.num_splits);
  if (config.split) choice.count_tiles(plan);
  if (config.split || config.pack_gqa || !cluster_shares_keys(plan, config.cluster, choice.tiles)) config.cluster = 1;
  config.varlen = varies_in_length(p);
  return choice;
}

Choice choose_pair(const tessera_plan& plan) {
  Choice choice;
  choice.pair = true;
  choice.pair_config = kFwdSm90D512.configure(plan);
  choice.count_tiles(plan);
  return choice;
}

// With a block mask, each consumer's rows and a tile's keys lie in one mask block. The plan uses the first row that
// fits. keys: the mask block must be a multiple of it; with options it is 64, for which the other areas have shown the
// registers to be sufficient, but for short programs, whose values fit beside 128 (of softcap, relative bias and
// documents: 45 instructions a score for 54). There are two consumers: three, for mask blocks of 64 queries, are 1.14
// times as fast with all blocks visible, but 0.72 to 0.9 times with a random quarter or more of them (an H100,
// docs/lab/block_masks.md).
struct BlockMaskTile {
  int head_dim, block_n, k_stages, v_stages, q_stages;
};
constexpr BlockMaskTile kBlockMaskTiles[] = {
    {64, 128, 4, 4, 4}, {64, 64, 6, 6, 4},  {128, 128, 2, 2, 4},
    {128, 64, 4, 4, 4}, {192, 64, 2, 2, 4}, {256, 64, 2, 2, 2},
};

// Whether nothing but a score program changes the scores, and it has few enough values, inputs and constants among
// them, for tiles of 128 keys.
bool is_short_program(const tessera_plan& plan) {
  constexpr size_t kMostValues = 32;
  const ScoreConfig score = score_config_beside_block_mask(plan);
  const bool alone = !score.entries() && !score.alibi && !score.softcap && !score.dropout;
  return score.program && alone && core::score::bind(plan).program().values.size() <= kMostValues;
}

std::optional<Choice> choose_for_block_mask(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const int64_t head_dim = std::max(plan.head_dim, plan.head_dim_v);
  const ScoreConfig score = score_config_beside_block_mask(plan);
  const bool options = score.scaled() || score.entries() || score.dropout;  // a program that only hides is none
  const int most_keys = options && !is_short_program(plan) ? 64 : 128;
  for (const BlockMaskTile& row : kBlockMaskTiles) {
    if (head_dim > row.head_dim || row.block_n > most_keys || p.mask_block_k % row.block_n != 0) continue;
    Sm90Tile tile{};
    tile.block_n = row.block_n, tile.consumers = kListHalves, tile.cluster = 1;
    tile.k_stages = row.k_stages, tile.v_stages = row.v_stages, tile.q_stages = row.q_stages;
    return choice_of(plan, tile);
  }
  return std::nullopt;
}

// Parts of few K/V blocks wait for the first one to arrive and, after the last one, for its products: where clusters
// merge the parts of packed heads, which memory or latency bounds, K/V blocks are half as long, and as many bytes in
// flight. (Counted: 0.9 us of 64/8 1 x 8192 with 16 tokens.)
std::optional<Choice> with_short_blocks(const tessera_plan& plan, Sm90Tile tile, const Choice& choice) {
  constexpr int64_t kFewPartKeys = 1024;
  constexpr int kLongBlock = 128;
  const int64_t part_keys = divide_up(plan.max_seqlen_k, choice.num_splits);
  if (!choice.config.merges() || !choice.pack_gqa() || tile.block_n != kLongBlock || part_keys > kFewPartKeys ||
      !environment_variable(kForcedTile).empty()) {
    return std::nullopt;
  }
  tile.block_n /= 2, tile.k_stages *= 2, tile.v_stages *= 2;
  if (!tile.in_range()) return std::nullopt;
  const Choice found = choice_of(plan, tile);
  return found.config.merges() ? std::optional(found) : std::nullopt;
}

// The tile from the table.
std::optional<Choice> find_choice(const tessera_plan& plan) {
  if (reads_lists(plan)) return choose_for_block_mask(plan);
  if (by_pairs(plan)) return choose_pair(plan);
  Sm90Case wanted{plan.head_dim, plan.head_dim_v, area_of(plan), table_rows(plan), rows_a_multiprocessor(plan)};
  if (packs_heads(plan)) wanted.area = Area::kFull, wanted.rows = 0, wanted.rows_a_sm = rows_of_kv_head(plan);
  const auto tile = find_sm90_tile(wanted);
  if (!tile || (plan.problem.dropout_p > 0 && tile->block_n % kDropoutKeys != 0)) return std::nullopt;
  const Choice choice = choice_of(plan, *tile);
  const std::optional<Choice> shorter = with_short_blocks(plan, *tile, choice);
  return shorter ? shorter : choice;
}

const std::optional<Choice>& choose(const tessera_plan& plan) {
  static thread_local core::Once<std::optional<Choice>> once;
  return once(plan, find_choice);
}

// Packed sequences with long caches whose work tiles are no more than the multiprocessors: the padded tile indices
// beside them take a block little time. By a counter, which is asked for two tiles ahead, one block would get several
// of them: 4 x 8192 keys with 8 queries each, 128 work tiles, took 97 us (an H200).
bool one_tile_a_block(const tessera_plan& plan, const Choice& choice) {
  return core::packed_q(plan.problem) && has_long_cache(plan) &&
         filled_tiles(plan, choice) * choice.num_splits <= plan.device.cores;
}

// One block for each multiprocessor; in a pair's kernel, one pair for each work tile.
int64_t blocks_of(const tessera_plan& plan, const Choice& choice) {
  if (choice.pair) return choice.work_tiles * choice.cluster();
  if (choice.config.merges()) return choice.work_tiles;  // a part each
  if (one_tile_a_block(plan, choice)) return choice.work_tiles;
  const int64_t resident = plan.device.cores / choice.config.cluster * choice.config.cluster;
  return std::min(choice.work_tiles, resident);
}

// Only the GPU knows which work tiles of a packed batch, or under a block mask, are long. Blocks then fetch the next
// tile from a counter in the workspace (dynamic persistent scheduler).
bool schedules_dynamically(const tessera_plan& plan, const Choice& choice) {
  return (core::packed_q(plan.problem) || choice.config.block_mask) && !choice.pair &&
         choice.work_tiles > blocks_of(plan, choice);
}

// If decode_sm90 serves some of the sequences, a list made on the GPU leaves these out: fetching a padded tile index of
// such a sequence costs 1.9 us. With the list, mixed batches take 1.00 to 1.06 times the sum of their two parts,
// without it 1.12 to 1.41 (an H100, docs/lab/decode_sm90.md).
bool lists_live_tiles(const tessera_plan& plan, const Choice& choice) {
  return plan.decode_queries > 0 && schedules_dynamically(plan, choice);
}

// Keys of a sequence, as far as the host knows them.
int64_t typical_keys(const tessera_plan& plan) {
  if (!core::packed_k(plan.problem)) return plan.max_seqlen_k / 2;
  return core::sizes(plan.problem).rows_k / std::max<int64_t>(1, plan.batch);
}

// Whether the lists of a program order the tiles of a head: FwdSm90Config::orders_lists, and few enough of them.
bool orders_lists(const tessera_plan& plan, const Choice& choice) {
  return choice.config.block_mask && lists_program(plan) && !varies_in_length(plan.problem);
}

WorkOrder order_of(const tessera_plan& plan, const Choice& choice, int64_t blocks) {
  if (orders_lists(plan, choice)) {
    return sections_of(plan, choice.tiles, choice.work_tiles / choice.tiles);
  }
  constexpr int kFixedBlocks = 2;  // the cost of decoding a tile index and storing its rows, in key tiles
  return cuda::order_of(plan, choice.tiles, choice.work_tiles / choice.tiles,
                        choice.block_m() / choice.rows_a_query(plan), kFixedBlocks * choice.block_n(),
                        schedules_dynamically(plan, choice) ? choice.work_tiles : blocks);
}

// The offset of a block mask's lists in the workspace, after the number of long lists and the counter, which the list
// kernel clears; and of split keys' parts, after the counter.
constexpr int64_t kListsAt = 64;

BlockLists lists_of(const tessera_plan& plan, const Choice& choice) {
  return block_lists_of(plan.problem, choice.tiles, divide_up(plan.max_seqlen_k, choice.config.block_n));
}

ProgramListsConfig listed_blocks(const tessera_plan& plan, const FwdSm90Config& config) {
  return program_lists_config(plan, config.consumers * kConsumerRows, config.block_n, false, true);
}

std::string refuse_pages(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  if (const int64_t rows = core::sizes(p).page_size; rows % kPageRows != 0) {
    return "pages of " + std::to_string(rows) + " keys, must be a multiple of " + std::to_string(kPageRows);
  }
  return "";
}

std::string refuse_layout(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const int64_t rows_k = core::paged(p) && core::sizes(p).pages == 0 ? 0 : core::sizes(p).rows_k;
  if (std::string reason = refuse_no_rows("k", rows_k); !reason.empty()) return reason;
  if (core::sizes(p).rows_q == 0 || plan.batch == 0 || plan.heads_q == 0) return "";  // nothing is launched
  struct Named {
    const char* name;
    const tessera_layout* layout;
  };
  for (const auto& [name, layout] : {Named{"q", &p.q}, Named{"k", &p.k}, Named{"v", &p.v}, Named{"o", &p.o}}) {
    const std::string reason = refuse_tensor_map(name, *layout);
    if (!reason.empty()) return reason;
  }
  return "";
}

// Whether a chunk of few queries beside sequences of about one token has few heads, so that one multiprocessor for each
// head reads all of the chunk's keys. Beside four tokens, a chunk of 32 queries and 65536 keys took 901 us, with its
// keys split 836; with 16 tokens of 32768 keys and 48 queries, 857 and 1235 (an H100 at dbf9cac). If everything except
// the chunk's time is proportional to the heads, the two cross at 50 KV heads over all sequences.
bool has_few_long_chunks(const tessera_plan& plan) {
  constexpr int64_t kHeads = 48, kMostRows = 128;
  return !plan.problem.batch_invariant && most_have_few(plan) && group_of(plan) > 1 &&
         plan.max_seqlen_q < kConsumerRows && rows_of_kv_head(plan) <= kMostRows && plan.batch * plan.heads_kv < kHeads;
}

// Whether at most a quarter of the multiprocessors (a third with a pair's kernel) have a block, although there are
// enough keys to split.
bool leaves_most_idle(const tessera_plan& plan, const Choice& choice) {
  const int64_t filled = choice.pair ? 3 * kFwdD512ClusterBlocks * choice.work_tiles : 4 * choice.work_tiles;
  return !plan.problem.batch_invariant && choice.num_splits == 1 && plan.max_seqlen_k >= kSplitKeys &&
         filled <= plan.device.cores;
}

// With batch_invariant the estimate may not depend on the batch, so it is a sequence's part of a busy GPU, and a packed
// sequence counts as full tiles. In a mixed batch it is also the part of a busy GPU, since only the GPU knows how many
// sequences decode_sm90 leaves.
double find_us(const tessera_plan& plan) {
  const Choice& choice = choose(plan).value();
  const KeyTimes& times = row_of(kKeyTimes, plan);
  const bool invariant = plan.problem.batch_invariant != 0, any_length = invariant && core::packed_q(plan.problem);
  const int64_t rows = any_length ? choice.block_m()
                                  : std::min<int64_t>(choice.block_m(), mean_queries(plan) * choice.rows_a_query(plan));
  const double tile = times.tile * static_cast<double>(std::max(rows, kTileRows)) / kTileRows;
  const bool idle = leaves_most_idle(plan, choice);
  double waves = static_cast<double>(filled_tiles(plan, choice) * choice.num_splits) / cores_of(plan);
  if (idle || (!invariant && plan.decode_queries == 0)) waves = std::ceil(waves);
  const double memory = choice.pack_gqa() ? times.memory_packed : times.memory;
  const double ns = std::max(kv_heads(plan) * memory, waves * tile / choice.num_splits);
  const bool few_read = idle || (has_few_long_chunks(plan) && !choice.pack_gqa());
  const bool listed = choice.config.block_mask && lists_program(plan);
  const double us = forward_us(plan, listed_part(listed) * (few_read ? kIdleFactor * ns : ns));
  if (mostly_empty(plan, choice)) return us + few_rows_us(plan);
  // Beyond kCallUs: the merge of parts, with clusters the scheduler before the first load too, and by combine less than
  // its launch, which overlaps; the second consumer of a tile.
  constexpr double kRolesUs = 0.8, kOverlapUs = 1, kSecondUs = 2;
  const double second_us = choice.pack_gqa() && rows_of_kv_head(plan) > kConsumerRows ? kSecondUs : 0;
  const Parts parts{choice.num_splits, choice.config.merge_blocks};
  if (!choice.config.split) return second_us + us;
  return second_us + us + merge_us(plan, choice, parts) + (parts.merge_blocks > 1 ? kRolesUs : -kOverlapUs);
}

double estimate_us(const tessera_plan& plan) {
  static thread_local core::Once<double> once;
  return once(plan, find_us);
}

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kTensorMapAlignment == 0; }

// A plan knows strides; addresses are only known at a call.
bool fits(const tessera_plan& /*plan*/, const tessera_buffers& buffers) {
  return aligned(buffers.q) && aligned(buffers.k) && aligned(buffers.v) && aligned(buffers.o);
}
constexpr Alignment kAlignment{fits, add_fwd_sm80_stand_in};

constexpr Supports kSupports{.direction = TESSERA_FORWARD,
                             .oldest_arch = kHopper,
                             .newest_arch = kHopper,  // wgmma exists only on this architecture
                             .dtypes = kHalfPrecision,
                             .head_dim = kFwdSm90D512HeadDim,
                             .tensors = kAllTensors,
                             .partials = true,
                             .programs = true};

// At launch; afterwards, with two consumers each has 232, with three 160, with four 112.
constexpr Limits kLimits{.registers = 168};
constexpr PrebuiltRow kPrebuilt[] = {
    {Use::kPrefill, 64, kLimits},       {Use::kPrefill, 96, kLimits},  {Use::kPrefill, 128, kLimits},
    {Use::kPrefill, 192, kLimits},      {Use::kPrefill, 256, kLimits}, {Use::kPagedPrefill, 64, kLimits},
    {Use::kPagedPrefill, 128, kLimits},
};

std::string find_refusal(const tessera_plan& plan) {
  if (std::string reason = refusal(kSupports, plan); !reason.empty()) return reason;
  if (std::string reason = refuse_pages(plan); !reason.empty()) return reason;
  if (std::string reason = refuse_layout(plan); !reason.empty()) return reason;
  if (std::string reason = refuse_block_lists(plan.problem); !reason.empty()) return reason;
  if (by_pairs(plan)) {
    if (std::string reason = kFwdSm90D512.refuse(plan); !reason.empty()) return reason;
  }
  if (merges_parts(plan.problem, 1)) {
    const char* const what = plan.problem.accumulate ? "accumulate" : "o of another dtype than q";
    if (by_pairs(plan)) return std::string(what) + ": head size above " + std::to_string(kFwdSm90HeadDim);
    if (core::present(plan.problem.block_mask)) return std::string(what) + ": a block mask";
  }
  const std::optional<Choice>& found = choose(plan);
  if (!found) {
    return std::string(kForcedTile) + ": '" + environment_variable(kForcedTile) +
           "', accepted a tile that fits: block_n,consumers,k_stages,v_stages,q_stages,cluster";
  }
  const Choice& choice = *found;
  if (std::string reason = refuse_shared_memory(choice.smem_bytes(), plan); !reason.empty()) return reason;
  constexpr int64_t kMaxWorkTiles = int64_t{1} << 30;  // the kernel's counter may exceed the tile count by one grid
  if (choice.work_tiles > kMaxWorkTiles) return "more than 2^30 tiles";
  const std::string stand_in = kFwdSm80.refuse(plan);
  if (!stand_in.empty()) return "fwd_sm80, which serves misaligned data, refuses: " + stand_in;
  return "";
}

std::string refuse(const tessera_plan& plan) {
  static thread_local core::Once<std::string> once;
  return once(plan, find_refusal);
}

// Of the counters by which the clusters' last blocks are found.
int64_t arrivals_bytes(const FwdSm90Config& config, const Choice& choice) {
  if (!config.merges() || choice.num_splits == config.merge_blocks) return 0;
  constexpr int64_t kCounterBytes = 8;
  return padded_to(choice.work_tiles / choice.num_splits * config.merge_blocks * kCounterBytes, kWorkspaceAlignment);
}

// Of the parts that are stored to the workspace: of every split or, with several clusters, of every cluster.
int64_t parts_bytes(const tessera_plan& plan, const Choice& choice) {
  const int stored = choice.num_splits / choice.config.merge_blocks;
  return choice.config.merges() && stored == 1 ? 0 : split_parts_bytes(plan, stored);
}

void configure(tessera_plan& plan) {
  Choice choice = find_choice(plan).value();
  choice.config.live_tiles = lists_live_tiles(plan, choice);
  const FwdSm90Config& config = choice.config;
  constexpr int kWarpgroupWarps = 4;
  tessera_plan_step& step = core::add_step(plan, kFwdSm90);
  if (plan.decode_queries > 0) step.sequences = TESSERA_STEP_MANY_QUERIES;
  step.block_m = choice.block_m(), step.block_n = choice.block_n();
  if (choice.pair) {
    const FwdSm90D512Config& pair = choice.pair_config;
    step.num_warps = kFwdD512Threads / 32, step.num_stages = pair.k_stages;
  } else {
    step.num_warps = (config.consumers + 1) * kWarpgroupWarps, step.num_stages = config.k_stages;
  }
  step.smem_bytes = choice.smem_bytes();
  step.num_splits = choice.num_splits;
  step.num_items = choice.work_tiles;
  const bool counted = schedules_dynamically(plan, choice);
  step.workspace_bytes = counted ? sizeof(int) : 0;
  if (config.live_tiles) step.workspace_bytes = live_tiles_bytes(plan.batch);
  if (config.split) step.workspace_bytes = kListsAt + arrivals_bytes(config, choice) + parts_bytes(plan, choice);
  FwdSm90Plan own{};
  own.num_splits = choice.num_splits, own.arrivals_bytes = arrivals_bytes(config, choice);
  if (config.block_mask) {
    if (lists_program(plan)) {
      const ProgramListsShape shape = program_lists_of(plan, listed_blocks(plan, config));
      own.lists = shape.lists, own.program_words = static_cast<int>(shape.words);
      own.most_long_lists = shape.count() / kListsALongOne;
      step.workspace_bytes = kListsAt + shape.bytes();
    } else {
      own.lists = lists_of(plan, choice);
      own.most_long_lists = static_cast<int>(lists_count(plan.problem, own.lists) / kListsALongOne);
      step.workspace_bytes = kListsAt + block_lists_bytes(plan.problem, own.lists);
    }
  }
  own.pair = choice.pair, own.config = config, own.pair_config = choice.pair_config;
  const int64_t blocks = blocks_of(plan, choice);
  own.grid.x = static_cast<uint32_t>(blocks);
  if (blocks > 0) own.order = order_of(plan, choice, choice.pair ? choice.work_tiles : blocks);
  own.schedules_dynamically = counted;
  own.short_tile_blocks = counted ? static_cast<int>(typical_keys(plan) / 2 / choice.block_n()) : 0;
  core::keep_config(step, own);
}

void list_live_tiles(const tessera_plan& plan, const FwdSm90Plan& own, const tessera_buffers& buffers, LiveTiles* tiles,
                     LaunchList& launches) {
  LiveTilesParams p{};
  fill_problem_params(p, plan, buffers);
  p.order = own.order, p.tiles = tiles;
  launch_live_tiles({own.config.consumers * kConsumerRows}, p, launches);
}

tessera_status list_launches(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches) {
  const auto own = core::config_of<FwdSm90Plan>(step);
  if (own.grid.x == 0) return ok();
  const tessera_problem& problem = plan.problem;
  FwdSm90Params p{};
  fill_problem_params(p, plan, buffers);
  p.o = row_tensor(problem.o, buffers.o);
  p.lse = stat_tensor(problem.lse, buffers.lse), p.lse_low = stat_tensor(problem.lse_low, buffers.lse_low);
  p.order = own.order;
  if (core::paged(problem)) p.page = Divisor(static_cast<int>(core::sizes(problem).page_size));
  p.masks = position_masks(problem, buffers);
  ListCounters counters{};
  if (own.schedules_dynamically) {
    p.tile_counter = static_cast<int*>(workspace);  // LiveTiles::counter
    if (own.config.live_tiles) {
      list_live_tiles(plan, own, buffers, static_cast<LiveTiles*>(workspace), launches);
      p.live = static_cast<LiveTiles*>(workspace);
    } else {
      launches.clear(p.tile_counter);
    }
    if (own.config.block_mask) {
      counters.long_lists = p.tile_counter;
      if (p.tile_counter) ++p.tile_counter;
      counters.tile_counter = p.tile_counter;
      p.long_lists = counters.long_lists;
      p.most_long_lists = own.most_long_lists;
    }
    p.short_tile_blocks = own.short_tile_blocks;
  }
  SplitParts parts{};
  if (own.config.split) {
    char* const memory = workspace ? static_cast<char*>(workspace) + kListsAt : nullptr;
    const int stored = own.num_splits / own.config.merge_blocks;
    parts = split_parts_at(plan, stored, memory ? memory + own.arrivals_bytes : nullptr);
    p.arrivals = reinterpret_cast<unsigned long long*>(memory);
    p.num_splits = Divisor(own.num_splits), p.clusters = Divisor(stored);
    p.merged_heads = Divisor(own.order.heads / own.num_splits);
    p.partial_o = parts.o, p.partial_lse = parts.lse, p.partial_lse_low = parts.lse_low;
  }
  if (own.config.block_mask) {
    void* memory = workspace ? static_cast<char*>(workspace) + kListsAt : nullptr;
    if (own.program_words > 0) {
      p.lists =
          list_program(plan, listed_blocks(plan, own.config), own.program_words, buffers, memory, launches, counters);
    } else {
      p.lists = list_blocks(plan, {own.config.consumers * kConsumerRows, own.config.block_n, false}, own.lists, buffers,
                            memory, launches, counters);
    }
  }
  if (const Driver* driver = launches.driver()) {
    const auto box = [](int rows) { return Box{BoxLayout::kSwizzled, rows, kSwizzledRowBytes}; };
    const int keys = own.pair               ? own.pair_config.block_n
                     : core::paged(problem) ? own.config.page_rows
                                            : own.config.block_n;
    Box q = box(kConsumerRows);
    if (own.config.pack_gqa) q.heads = static_cast<int>(group_of(plan)), q.rows = kConsumerRows / q.heads;
    TESSERA_RETURN_IF_ERROR(make_tensor_map(*driver, plan.device, "q", problem.q, buffers.q, q, p.q_map));
    TESSERA_RETURN_IF_ERROR(make_tensor_map(*driver, plan.device, "k", problem.k, buffers.k, box(keys), p.k_map));
    TESSERA_RETURN_IF_ERROR(make_tensor_map(*driver, plan.device, "v", problem.v, buffers.v, box(keys), p.v_map));
    if (!own.config.split) {
      TESSERA_RETURN_IF_ERROR(
          make_tensor_map(*driver, plan.device, "o", problem.o, buffers.o, box(kWarpRows), p.o_map));
    }
  }
  if (own.pair) {
    launch_fwd_sm90(own.pair_config, p, own.grid, launches);
  } else {
    launch_fwd_sm90(own.config, p, own.grid, launches);
  }
  const bool combines = own.config.split && !own.config.merges();
  return combines ? merge_split_parts(plan, own.num_splits, parts, buffers, launches) : ok();
}

}  // namespace

constinit const Family kFwdSm90{{"fwd_sm90", TESSERA_KERNEL_FWD_SM90, refuse, configure, estimate_us},
                                kSupports,
                                list_launches,
                                kPrebuilt,
                                sm90_tiles_json,
                                &kAlignment};

}  // namespace tessera::cuda
