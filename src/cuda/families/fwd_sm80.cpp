// The forward kernels of kernels/tessera/fwd_sm80: their compiled tiles, workspace and launch. Every number depends
// only on the problem and the GPU.
#include "cuda/families/fwd_sm80.hpp"

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <span>
#include <string>

#include "core/asking.hpp"
#include "core/dtypes.hpp"
#include "core/geometry.hpp"
#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/estimate.hpp"
#include "cuda/families/block_lists.hpp"
#include "cuda/families/split_keys.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/runtime/tensor_map.hpp"
#include "cuda/tiles_json.hpp"
#include "cuda/work_order.hpp"
#include "tessera/config.hpp"

namespace tessera::cuda {
namespace {

// The problems that a row of the table serves.
enum class For {
  kAll,
  kBulkCopies,  // no options, and tiles that bulk copies can load
  kPages,       // keys in pages
};

// A row serves this type, query and key head sizes up to head_dim, and at most `rows` query rows for a (sequence,
// head). The plan uses the first that fits the problem and the GPU's shared memory.
struct FwdTile {
  bool float32;
  int head_dim;
  int64_t rows;
  int block_m, block_n, warps, stages;
  int slice;              // columns of V that a block computes
  int min_blocks_per_sm;  // resident blocks that registers and shared memory should allow
  RowMap row_map = RowMap::kContiguous;
  For problems = For::kAll;
};
constexpr int64_t kAny = INT64_MAX;
constexpr FwdTile kTiles[] = {
    // Few rows: one warp a block and many blocks, since reading K and V is the limit. If a warp must read the page
    // table before it can request a row, more blocks help more than larger tiles.
    {false, 64, 16, 16, 32, 1, 2, 64, 8, RowMap::kContiguous, For::kPages},
    {false, 64, 16, 16, 64, 1, 2, 64, 5},
    {false, 128, 16, 16, 32, 1, 3, 128, 4},
    {false, 256, 16, 16, 32, 1, 2, 256, 3},
    // Two tiles of 16 rows for each warp, so that a fragment of K or V is used twice.
    {false, 64, kAny, 128, 64, 4, 2, 64, 2, RowMap::kContiguous, For::kBulkCopies},
    {false, 64, kAny, 128, 64, 4, 2, 64, 2},
    {false, 128, kAny, 128, 64, 4, 2, 128, 2, RowMap::kContiguous, For::kBulkCopies},
    {false, 128, kAny, 128, 64, 4, 2, 128, 2, RowMap::kSpread},
    {false, 128, kAny, 128, 32, 4, 2, 128, 2},
    {false, 192, kAny, 128, 64, 8, 2, 192, 1, RowMap::kPairs},
    {false, 192, kAny, 128, 64, 8, 2, 192, 1},
    {false, 256, kAny, 128, 64, 8, 2, 256, 1, RowMap::kPairs},
    {false, 256, kAny, 128, 64, 8, 2, 256, 1},
    {false, 576, kAny, 64, 32, 4, 2, 256, 1},
    // For 99 KiB of shared memory.
    {false, 192, kAny, 64, 32, 4, 2, 192, 1},
    {false, 256, kAny, 64, 32, 4, 1, 256, 1},
    {false, 576, kAny, 16, 32, 1, 1, 128, 1},
    // float32: each product is three TF32 products, and registers hold both parts of a fragment.
    {true, 64, kAny, 64, 32, 4, 2, 64, 2},
    {true, 128, kAny, 64, 32, 4, 2, 64, 1},
    {true, 256, kAny, 32, 32, 2, 2, 64, 1},
    {true, 576, kAny, 16, 32, 1, 2, 64, 1},
    {true, 256, kAny, 32, 32, 2, 1, 64, 1},
    {true, 576, kAny, 16, 16, 1, 1, 64, 1},
};

// The same for K and V of 8 bits an element; one stage of 16-bit tiles, beside one of codes. The multiprocessor of any
// GPU that has more than 99 KiB of shared memory holds as many blocks as the rows say.
constexpr FwdTile kCodeTiles[] = {
    {false, 64, 16, 16, 64, 1, 1, 64, 5},
    {false, 128, 16, 16, 32, 1, 1, 128, 4},
    {false, 256, 16, 16, 32, 1, 1, 256, 3},
    {false, 64, kAny, 128, 64, 4, 1, 64, 2},
    {false, 128, kAny, 128, 32, 4, 1, 128, 2},
    {false, 192, kAny, 128, 64, 8, 1, 192, 1},
    {false, 256, kAny, 128, 32, 8, 1, 256, 1},
    {false, 576, kAny, 64, 32, 4, 1, 256, 1},
    // For 99 KiB of shared memory.
    {false, 256, kAny, 64, 32, 4, 1, 256, 1},
    {false, 576, kAny, 16, 32, 1, 1, 128, 1},
};

// The fewest keys for which a part is worth its merge; the most parts of any problem; and the most parts relative to
// what the GPU holds at once (rounds of blocks), beyond which more rounds do not improve the balance.
constexpr int64_t kMinSplitKeys = 256, kMaxSplits = 256, kMaxRounds = 4;
// The percentage of the GPU's resident blocks that saturates its memory.
constexpr int64_t kFullPercent = 90;
// The cost of merging a part, in keys that a block reads in the same time: a fixed cost for the way to memory and back,
// and a cost for each row, whose float32 is written and read (a key's K and V are only read).
constexpr int64_t kMergeKeys = 1, kMergeRowKeys = 2;

// The decisions for a problem.
struct FwdSm80Plan {
  FwdSm80Config config;  // aligned only for calls in which every row of q, k and v starts at a multiple of 16 bytes
  WorkOrder order;       // of persistent blocks
  Divisor tiles;         // tiles of a head (packed: of all sequences)
  Grid grid;
  int num_splits, split_keys;
  int program_words;  // of the lists of a score program's mask, which are the step's workspace; 0: none
};

struct Choice {
  const FwdTile* tile = nullptr;
  FwdSm80Config config{};
  bool pack_gqa = false;
  int64_t rows_a_query = 1;  // rows of a tile for each query: the heads that pack_gqa puts side by side
  // tiles of a head (packed: of all sequences); blocks of the grid without splits and slices
  int64_t tiles = 0, blocks = 0;
  int slices = 1;
};

int slice_width(const FwdTile& tile, const tessera_plan& plan) {
  return static_cast<int>(std::min<int64_t>(tile.slice, padded_to(plan.head_dim_v, 16)));
}

// kBulkCopies=0 lets tests run on any GPU what runs on GPUs before Hopper.
bool without_bulk_copies() { return environment_variable(kBulkCopies) == "0"; }

// Whether bulk copies can load the tiles, as far as the layouts tell.
bool takes_bulk_copies(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const core::Sizes size = core::sizes(p);
  return plan.device.arch >= kHopper && !core::paged(p) && size.rows_k > 0 && size.batch > 0 &&
         refuse_tensor_map("q", p.q).empty() && refuse_tensor_map("k", p.k).empty() &&
         refuse_tensor_map("v", p.v).empty() && !without_bulk_copies();
}

FwdSm80Config make_config(const tessera_plan& plan, const FwdTile& tile, bool pack_gqa) {
  FwdSm80Config config{};
  config.dtype = static_cast<Dtype>(plan.problem.q.dtype);
  config.head_dim = static_cast<int>(padded_to(plan.head_dim, 16));
  config.head_dim_v = slice_width(tile, plan);
  config.block_m = tile.block_m, config.block_n = tile.block_n, config.warps = tile.warps, config.stages = tile.stages;
  config.min_blocks_per_sm = tile.min_blocks_per_sm;
  config.aligned = true;
  config.paged = core::paged(plan.problem);
  config.pack_gqa = pack_gqa;
  if (core::is_8bit(plan.problem.k.dtype)) {
    config.codes = static_cast<Dtype>(plan.problem.k.dtype);
    config.key_scales = plan.problem.k_descale.rank == 3 || plan.problem.v_descale.rank == 3;
  }
  config.score = score_config(plan);
  config.row_map = tile.row_map;
  config.bulk = (tile.problems == For::kBulkCopies || tile.row_map == RowMap::kPairs) && takes_bulk_copies(plan);
  return config;
}

// Persistent blocks stage O in the memory of a tile of K and V, pairs in that of two tiles of V.
bool room_for_o(const FwdSm80Config& config) {
  return config.row_map == RowMap::kPairs || config.head_dim_v <= config.head_dim || config.block_m <= config.block_n;
}

Choice find_choice(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const bool float32 = p.q.dtype == TESSERA_FLOAT32;
  const int64_t group = plan.heads_kv > 0 ? plan.heads_q / plan.heads_kv : 1;
  Choice choice;
  for (const FwdTile& tile : core::is_8bit(p.k.dtype) ? std::span<const FwdTile>(kCodeTiles) : kTiles) {
    const int64_t head_dim = padded_to(plan.head_dim, 16);
    if (tile.float32 != float32 || head_dim > tile.head_dim || (tile.problems == For::kPages && !core::paged(p)))
      continue;
    choice.pack_gqa = group > 1 && plan.max_seqlen_q < tile.block_m;
    choice.rows_a_query = choice.pack_gqa ? group : 1;
    if (plan.max_seqlen_q * choice.rows_a_query > tile.rows) continue;
    choice.config = make_config(plan, tile, choice.pack_gqa);
    if ((persistent(choice.config) || choice.config.bulk) && choice.config.score.any()) continue;
    if (tile.problems == For::kBulkCopies && !choice.config.bulk) continue;
    if (persistent(choice.config) && !room_for_o(choice.config)) continue;
    if (smem_bytes(choice.config) > plan.device.smem_bytes) continue;
    choice.tile = &tile;
    const core::Sizes size = core::sizes(p);
    const bool packed = core::packed_q(p);
    const int64_t heads = choice.pack_gqa ? plan.heads_kv : plan.heads_q;
    choice.tiles = tiles_of(packed, plan.batch, size.rows_q, choice.rows_a_query, tile.block_m);
    if (packed) ++choice.tiles;  // a padded tile index, whose blocks clear the rows that belong to no sequence
    choice.blocks = choice.tiles * heads * (packed ? 1 : plan.batch);
    choice.slices = static_cast<int>(divide_up(plan.head_dim_v, slice_width(tile, plan)));
    return choice;
  }
  return choice;
}

const Choice& choose(const tessera_plan& plan) {
  static thread_local core::Once<Choice> once;
  return once(plan, find_choice);
}

// The number of parts that the keys are split into. All parts cost the same, run in rounds of as many blocks as the GPU
// holds, and their results are merged. The best number has the least time of rounds and merge, measured in keys;
// problems with many rows are split only if blocks would be idle.
int32_t splits_of(const Choice& choice, const tessera_plan& plan) {
  const FwdTile& tile = *choice.tile;
  const int64_t held = int64_t{tile.min_blocks_per_sm} * plan.device.cores, blocks = choice.blocks * choice.slices;
  if (plan.problem.batch_invariant || blocks == 0 || (tile.rows == kAny && blocks > held)) return 1;
  const int64_t rows = std::min<int64_t>(tile.block_m, plan.max_seqlen_q * choice.rows_a_query);
  const int64_t merge = kMergeKeys + kMergeRowKeys * rows * blocks / held;
  const auto keys_time = [&](int64_t parts) {
    const int64_t work_tiles = blocks * parts, last_round = work_tiles % held;
    const int64_t idle = last_round > 0 ? std::max<int64_t>(held * kFullPercent / 100 - last_round, 0) : 0;
    const int64_t part_keys = padded_to(divide_up(plan.max_seqlen_k, parts), tile.block_n);
    return part_keys * (work_tiles + idle) / held + (parts > 1 ? parts * merge : 0);
  };
  const int64_t most = std::min({plan.max_seqlen_k / kMinSplitKeys, kMaxRounds * held / blocks, kMaxSplits});
  int64_t best = 1;
  for (int64_t parts = 2; parts <= most; ++parts) {
    if (keys_time(parts) < keys_time(best)) best = parts;
  }
  return static_cast<int32_t>(best);
}

// One block for each work tile, or persistent blocks, which decode their tiles from `order`. The grid is persistent,
// with as many blocks as the GPU holds, if tiles differ in cost, and always for pairs: with one block on a
// multiprocessor, nothing else hides the first loads. If the work tiles of spread rows cost the same, the GPU's own
// scheduler is better: persistent blocks were up to 3 % slower.
Grid grid_of(const tessera_plan& plan, const Choice& choice, int num_splits, WorkOrder& order) {
  const int64_t work_tiles = choice.blocks * num_splits;
  int64_t blocks = work_tiles;
  if (persistent(choice.config) && work_tiles > 0) {
    const int64_t resident = plan.device.cores * choice.tile->min_blocks_per_sm / choice.slices;
    if (choice.tile->row_map == RowMap::kPairs || is_causal(plan.problem)) {
      blocks = persistent_blocks(plan, work_tiles, std::max<int64_t>(1, resident));
    }
    order = order_of(plan, choice.tiles, work_tiles / choice.tiles, choice.tile->block_m, choice.tile->block_n, blocks);
  }
  return {static_cast<uint32_t>(blocks), static_cast<uint32_t>(choice.slices), 1};
}

// The same for data whose rows do not all start at multiples of 16 bytes.
FwdSm80Config unaligned(FwdSm80Config config) {
  config.aligned = config.bulk = false;
  return config;
}

// Whether the tiles of keys come from lists of a score program's mask. A block mask beside it has blocks of any size.
bool reads_lists(const tessera_plan& plan, const FwdSm80Config& config) {
  constexpr int kLaneKeys = 32;  // a list's kernel evaluates so many keys at once
  return !config.split && !config.pack_gqa && config.block_n % kLaneKeys == 0 &&
         !core::present(plan.problem.block_mask) && lists_program(plan);
}
ProgramListsConfig listed_blocks(const tessera_plan& plan, const FwdSm80Config& config) {
  return program_lists_config(plan, config.block_m, config.block_n, false);
}

FwdSm80Plan planned(const tessera_plan& plan, const Choice& choice, int num_splits) {
  const tessera_problem& p = plan.problem;
  FwdSm80Plan own{};
  own.num_splits = num_splits;
  own.split_keys = static_cast<int>(
      padded_to(divide_up(std::max<int64_t>(1, plan.max_seqlen_k), num_splits), choice.config.block_n));
  own.tiles = Divisor(static_cast<int>(choice.tiles));
  own.grid = grid_of(plan, choice, num_splits, own.order);
  own.config = choice.config;
  own.config.split = merges_parts(plan.problem, num_splits);
  const bool may_be_aligned = rows_aligned(p.q, nullptr) && rows_aligned(p.k, nullptr) && rows_aligned(p.v, nullptr);
  if (!may_be_aligned) own.config = unaligned(own.config);
  if (reads_lists(plan, own.config)) {
    own.program_words = static_cast<int>(program_lists_of(plan, listed_blocks(plan, own.config)).words);
  }
  return own;
}

constexpr Supports kSupports{.direction = TESSERA_FORWARD,
                             .oldest_arch = 80,
                             .newest_arch = kAnyNewer,
                             .dtypes = kHalfPrecision | bits({TESSERA_FLOAT32}),
                             .head_dim = core::kMaxHeadDim,
                             .tensors = kAllTensors,
                             .cache_dtypes = bits({TESSERA_FLOAT8_E4M3, TESSERA_FLOAT8_E5M2}),
                             .partials = true,
                             .programs = true};

// clang-format off
constexpr PrebuiltRow kPrebuilt[] = {
    {Use::kPrefill, 64, {248, 0, 8}},
    {Use::kPrefill, 96, {255, 24, 16}},
    {Use::kPrefill, 128, {255, 180, 48}},
    {Use::kPrefill, 192, {255, 0, 0}},
    {Use::kPrefill, 256, {255, 0, 0}},
    {Use::kPagedPrefill, 64, {252, 0, 0}},
    {Use::kPagedPrefill, 128, {255, 132, 48}},
    {Use::kDecode, 64, {216, 0, 0}},
    {Use::kDecode, 128, {255, 0, 0}},
    {Use::kDecodeBatch, 64, {220, 0, 0}},
    {Use::kDecodeBatch, 128, {255, 0, 0}},
    {Use::kPagedDecode, 64, {234, 0, 0}},
    {Use::kPagedDecode, 128, {255, 0, 0}},
    {Use::kPagedDecodeBatch, 64, {232, 0, 0}},
    {Use::kPagedDecodeBatch, 128, {255, 0, 0}},
};
// clang-format on

std::string find_refusal(const tessera_plan& plan) {
  if (std::string reason = refusal(kSupports, plan); !reason.empty()) return reason;
  const Choice& choice = choose(plan);
  if (!choice.tile) {
    return "no tile of head size " + std::to_string(plan.head_dim) + " fits " +
           std::to_string(plan.device.smem_bytes >> 10) + " KiB of shared memory";
  }
  // the counter of persistent blocks may exceed the tile count by one grid
  constexpr int64_t kMaxBlocks = int64_t{1} << 30;
  return choice.blocks > kMaxBlocks ? "more than 2^30 tiles" : "";
}

std::string refuse(const tessera_plan& plan) {
  static thread_local core::Once<std::string> once;
  return once(plan, find_refusal);
}

void configure(tessera_plan& plan) { add_fwd_sm80(plan, Splits::kByLoad); }

// Nanoseconds for each key (an H100, docs/lab/decode_sm90.md).
//   few_rows             for a KV head with up to 16 rows, limited by memory
//   rows_32, rows_64     for a multiprocessor's tile with up to 32 packed rows of a KV head, and for every 64 of them:
//                        16 sequences of 8192 keys, 32 heads over 8, D = 128, took 350 us with 8 queries, 614 with 16
//   tile, tile_in_pages  for a multiprocessor's tile of 128 rows of one head
struct KeyTimes {
  int head_dim;
  double few_rows, rows_32, rows_64, tile, tile_in_pages;
};
constexpr KeyTimes kKeyTimes[] = {{64, 0.086, 25.68, 45.3, 18, 51},
                                  {128, 0.171, 42.8, 75.5, 30, 64},
                                  {256, 0.345, 77.04, 135.9, 54, 90},
                                  {core::kMaxHeadDim, 0.69, 154.08, 271.8, 108, 180}};
constexpr double kFloat32Factor = 6;

// Nanoseconds for each key of tiles of one head's rows.
double estimate_tiles_ns(const tessera_plan& plan, const KeyTimes& times) {
  constexpr int64_t kRows = 128;
  const tessera_problem& p = plan.problem;
  const bool packed = core::packed_q(p);
  const int64_t tiles = tiles_of(packed, plan.batch, core::sizes(p).rows_q, 1, kRows) * (packed ? 1 : plan.batch);
  const double busy = static_cast<double>(tiles * plan.heads_q) / cores_of(plan);
  const double tile = core::paged(p) ? times.tile_in_pages : times.tile;
  if (p.batch_invariant) return tile * busy;
  const double unsplit = tile * std::max(1.0, busy);
  // In a mixed batch the keys are not split.
  const bool split = plan.decode_queries == 0 && splits_of(choose(plan), plan) > 1;
  return split ? std::min(unsplit, 2 * times.rows_64 * busy) : unsplit;
}

// With batch_invariant the estimate may not depend on the batch, so a packed sequence counts as one of many queries.
double find_us(const tessera_plan& plan) {
  constexpr int64_t kFewRows = 16,
                    kPackedQueries = 64;  // a tile for few rows; number of queries from which on heads are not packed
  const KeyTimes& times = row_of(kKeyTimes, plan);
  const int64_t rows = rows_of_kv_head(plan);
  // Of K and V of 8 bits, over those of 16: by whole tiles of rows 4.98 ms for 2.65 (2 x 8192, 32/8 heads, D 128, an
  // H200); few rows, for which decode_sm90 is measured, were not.
  constexpr double kCodesFactor = 1.9;
  double more_us = few_rows_us(plan), of_codes = kIdleFactor;
  const bool any_length = plan.problem.batch_invariant && core::packed_q(plan.problem);
  double ns = 0;
  if (!any_length && rows <= kFewRows) {
    ns = kv_heads(plan) * times.few_rows;
  } else if (!any_length && group_of(plan) > 1 && plan.max_seqlen_q < kPackedQueries) {
    const double packed = rows <= 32 ? times.rows_32 : times.rows_64 * static_cast<double>(divide_up(rows, 64));
    ns = kv_heads(plan) * packed / cores_of(plan);
  } else {
    const bool listed = lists_program(plan) && !core::present(plan.problem.block_mask);
    ns = listed_part(listed) * estimate_tiles_ns(plan, times), more_us = 0, of_codes = kCodesFactor;
  }
  const double us = more_us + forward_us(plan, plan.problem.q.dtype == TESSERA_FLOAT32 ? kFloat32Factor * ns : ns);
  return core::is_8bit(plan.problem.k.dtype) ? of_codes * us : us;
}

double estimate_us(const tessera_plan& plan) {
  static thread_local core::Once<double> once;
  return once(plan, find_us);
}

tessera_status list_launches(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches) {
  const auto own = core::config_of<FwdSm80Plan>(step);
  if (own.grid.x == 0) return ok();
  const tessera_problem& problem = plan.problem;
  const bool codes = has_codes(own.config);
  FwdSm80CodesParams of_codes{};
  FwdSm80BulkParams of_all{};
  FwdSm80Params& p = codes ? static_cast<FwdSm80Params&>(of_codes) : of_all;
  fill_problem_params(p, plan, buffers);
  if (step.sequences == TESSERA_STEP_ALL_SEQUENCES) p.decoded_queries = 0;
  p.o = row_tensor(problem.o, buffers.o);
  p.o_aligned = rows_aligned(problem.o, buffers.o);
  p.lse = stat_tensor(problem.lse, buffers.lse), p.lse_low = stat_tensor(problem.lse_low, buffers.lse_low);
  p.tiles = own.tiles;
  p.order = own.order;
  p.masks = position_masks(problem, buffers);
  p.num_splits = own.num_splits;
  p.split_keys = own.split_keys;
  const bool merged = own.config.split;
  const SplitParts parts = merged ? split_parts_at(plan, own.num_splits, workspace) : SplitParts{};
  p.partial_o = parts.o, p.partial_lse = parts.lse, p.partial_lse_low = parts.lse_low;
  if (plan.batch == 0) return merge_split_parts(plan, 0, parts, buffers, launches);  // all rows are of no sequence
  const bool aligned =
      rows_aligned(problem.q, buffers.q) && rows_aligned(problem.k, buffers.k) && rows_aligned(problem.v, buffers.v);
  const FwdSm80Config config = aligned ? own.config : unaligned(own.config);
  if (const Driver* driver = launches.driver(); driver && config.bulk) {
    const auto box = [&](int rows, int columns) {
      return Box{BoxLayout::kPadded, rows, pitch_bytes(config.dtype, columns)};
    };
    const Box q = box(config.block_m, config.head_dim), k = box(config.block_n, config.head_dim);
    if (config.row_map != RowMap::kPairs) {
      TESSERA_RETURN_IF_ERROR(make_tensor_map(*driver, plan.device, "q", problem.q, buffers.q, q, of_all.q_map));
    }
    TESSERA_RETURN_IF_ERROR(make_tensor_map(*driver, plan.device, "k", problem.k, buffers.k, k, of_all.k_map));
    TESSERA_RETURN_IF_ERROR(make_tensor_map(*driver, plan.device, "v", problem.v, buffers.v,
                                            box(config.block_n, config.head_dim_v), of_all.v_map));
  }
  if (own.program_words > 0) {
    p.lists = list_program(plan, listed_blocks(plan, own.config), own.program_words, buffers, workspace, launches);
  }
  if (codes) {
    of_codes.k_scales = scale_tensor(problem.k_descale, buffers.k_descale, config.paged);
    of_codes.v_scales = scale_tensor(problem.v_descale, buffers.v_descale, config.paged);
    launch_fwd_sm80(config, of_codes, own.grid, launches);
  } else {
    launch_fwd_sm80(config, of_all, own.grid, launches);
  }
  return merged ? merge_split_parts(plan, own.num_splits, parts, buffers, launches) : ok();
}

std::string tiles_json() {
  constexpr const char* kRowMaps[] = {"contiguous", "spread", "pairs"};
  constexpr const char* kProblems[] = {"all", "bulk_copies", "pages"};
  return json_array(kTiles, [&](const FwdTile& tile) {
    FwdSm80Config config{};
    config.dtype = tile.float32 ? Dtype::kFloat32 : Dtype::kBFloat16;
    config.head_dim = tile.head_dim, config.head_dim_v = tile.slice;
    config.block_m = tile.block_m, config.block_n = tile.block_n, config.stages = tile.stages;
    config.row_map = tile.row_map, config.bulk = tile.problems == For::kBulkCopies;
    return json_object({{"float32", tile.float32},
                        {"head_dim", tile.head_dim},
                        {"most_rows", tile.rows == kAny ? JsonValue::raw("null") : JsonValue(tile.rows)},
                        {"block_m", tile.block_m},
                        {"block_n", tile.block_n},
                        {"warps", tile.warps},
                        {"stages", tile.stages},
                        {"slice", tile.slice},
                        {"min_blocks_per_sm", tile.min_blocks_per_sm},
                        {"row_map", kRowMaps[static_cast<int>(tile.row_map)]},
                        {"problems", kProblems[static_cast<int>(tile.problems)]},
                        {"smem_bytes", smem_bytes(config)}});
  });
}

}  // namespace

constinit const Family kFwdSm80{{"fwd_sm80", TESSERA_KERNEL_FWD_SM80, refuse, configure, estimate_us},
                                kSupports,
                                list_launches,
                                kPrebuilt,
                                tiles_json};

void add_fwd_sm80(tessera_plan& plan, Splits splits) {
  const Choice choice = find_choice(plan);
  const FwdTile& tile = *choice.tile;
  tessera_plan_step& step = core::add_step(plan, kFwdSm80);
  step.block_m = tile.block_m, step.block_n = tile.block_n;
  step.num_warps = tile.warps, step.num_stages = tile.stages;
  step.smem_bytes = smem_bytes(choice.config);
  step.num_splits = splits == Splits::kNone ? 1 : splits_of(choice, plan);
  step.num_items = choice.blocks * step.num_splits * choice.slices;
  if (merges_parts(plan.problem, step.num_splits)) step.workspace_bytes = split_parts_bytes(plan, step.num_splits);
  const FwdSm80Plan own = planned(plan, choice, step.num_splits);
  if (own.program_words > 0) step.workspace_bytes = program_lists_of(plan, listed_blocks(plan, own.config)).bytes();
  core::keep_config(step, own);
}

void add_fwd_sm80_stand_in(tessera_plan& plan) { add_fwd_sm80(plan, Splits::kNone); }

}  // namespace tessera::cuda
