// The backward kernels of kernels/tessera/bwd_sm80: their compiled tiles, workspace and launches. Every number depends
// only on the problem and the GPU.
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/geometry.hpp"
#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/estimate.hpp"
#include "cuda/families/backward.hpp"
#include "cuda/families/block_lists.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/score_program.hpp"
#include "cuda/tiles_json.hpp"
#include "tessera/config.hpp"

namespace tessera::cuda {
namespace {

// A row serves this type and head sizes up to head_dim. The plan uses the first row that fits the problem and the GPU's
// shared memory, so a row must come before all smaller tiles that also serve its problems.
struct BwdTile {
  bool float32;
  int head_dim;
  int block_m, block_n, warps;
  bool s_dp_split;  // only for problems to which the split applies
  int column_parts, stages;
  int min_blocks_per_sm;  // resident blocks that the registers should allow
};
// The numbers beside the first rows are speed-ups over PyTorch's FlashAttention-2 (its time over that of all three
// kernels), bfloat16 on an H200, geometric mean of lengths 512, 4096 and 16384, full and causal.
constexpr BwdTile kTiles[] = {
    {false, 64, 128, 128, 4, false, 1, 1, 2},  // 1.14
    {false, 64, 64, 128, 8, false, 1, 2, 1},   // 0.83
    {false, 128, 64, 128, 8, true, 2, 2, 1},   // 1.02
    {false, 128, 64, 128, 8, false, 2, 2, 1},  // 0.98
    {false, 128, 64, 128, 8, false, 1, 2, 1},  // 0.85
    {false, 256, 64, 64, 8, true, 4, 2, 1},    // 1.01
    {false, 256, 64, 64, 8, false, 4, 2, 1},   // 0.91
    {false, 256, 32, 64, 8, false, 2, 2, 1},   // for 163 KiB of shared memory
    {false, 192, 32, 32, 4, false, 2, 2, 1},   // for 99 KiB
    {false, 512, 32, 32, 8, false, 4, 2, 1},
    {false, 256, 16, 32, 4, false, 2, 2, 1},  // for 99 KiB
    {false, 512, 16, 32, 8, false, 4, 2, 1},  // for 163 KiB
    {false, 512, 16, 16, 8, false, 8, 1, 1},  // for 99 KiB
    // float32: each product is three TF32 products, and registers hold both parts of a fragment.
    {true, 64, 32, 64, 4, false, 1, 2, 1},
    {true, 128, 32, 64, 8, false, 2, 2, 1},
    {true, 256, 32, 32, 8, false, 4, 2, 1},
    {true, 256, 16, 32, 8, false, 4, 2, 1},
    {true, 512, 16, 16, 8, false, 8, 2, 1},
    {true, 256, 16, 16, 4, false, 4, 1, 1},
    {true, 512, 16, 16, 8, false, 8, 1, 1},
    {true, 512, 16, 16, 8, false, 8, 0, 1},
};

constexpr int64_t kReservedBytes = 1024;  // shared memory that the driver reserves for each block

struct Choice {
  const BwdTile* tile = nullptr;
  BwdConfig config{};
  int64_t owned_batches = 1, owned_heads = 1;  // see BwdParams
  int64_t tiles = 0, blocks = 0;               // key tiles of a head (packed: of all sequences); blocks of the grid
  int64_t q_tiles = 0, q_slots = 0;
};

BwdConfig make_config(const tessera_plan& plan, const BwdTile& tile) {
  const tessera_problem& problem = plan.problem;
  BwdConfig config{};
  config.dtype = static_cast<Dtype>(problem.q.dtype);
  config.head_dim = static_cast<int>(padded_to(plan.head_dim, 16));
  config.head_dim_v = static_cast<int>(padded_to(plan.head_dim_v, 16));
  config.block_m = tile.block_m, config.block_n = tile.block_n, config.warps = tile.warps, config.stages = tile.stages;
  config.s_dp_split = tile.s_dp_split, config.column_parts = tile.column_parts;
  config.min_blocks_per_sm = tile.min_blocks_per_sm;
  // Equal parts of the columns. Deterministic problems cannot use bulk copies: the next block must wait until an
  // addition is complete, and a bulk copy only signals that it has read its source.
  config.bulk_dq =
      tile.s_dp_split && plan.device.arch >= kHopper && config.head_dim % 64 == 0 && !problem.deterministic;
  config.d_bias = core::present(problem.d_bias);
  config.d_captured = program_sums_bytes(plan) > 0;
  config.deterministic = problem.deterministic != 0;
  config.sums = writes_sums(problem);
  config.score = score_config(plan);
  // A saved LSE needs no row maximum, but a hidden score must be -inf.
  config.score.scale_first = (config.score.entries() || config.score.only_hides) && problem.scale <= 0;
  return config;
}

Choice choose(const tessera_plan& plan) {
  const tessera_problem& problem = plan.problem;
  Choice choice;
  for (const BwdTile& tile : kTiles) {
    if (tile.float32 != (problem.q.dtype == TESSERA_FLOAT32)) continue;
    if (std::max(plan.head_dim, plan.head_dim_v) > tile.head_dim) continue;
    choice.config = make_config(plan, tile);
    const bool plain = plan.head_dim == plan.head_dim_v && !choice.config.score.any() && !choice.config.d_bias &&
                       !choice.config.score.sequence_places;
    if (tile.s_dp_split && !plain) continue;
    // A block may use an SM's shared memory except what the driver reserves for each resident block.
    const int64_t reserved = int64_t{tile.min_blocks_per_sm - 1} * kReservedBytes;
    if (tile.min_blocks_per_sm * smem_bytes(choice.config) + reserved > plan.device.smem_bytes) continue;
    choice.tile = &tile;
    break;
  }
  if (!choice.tile || plan.batch == 0) return choice;
  // Blocks add to a deterministic dBias in order only if one block owns all batches and heads that share an entry.
  if (problem.deterministic && core::present(problem.d_bias)) {
    if (problem.d_bias.shape[0] == 1) choice.owned_batches = plan.batch;
    if (problem.d_bias.shape[1] == 1) choice.owned_heads = plan.heads_kv;
  }
  const core::Sizes size = core::sizes(problem);
  const bool slots = core::packed_k(problem) && choice.owned_batches == 1;
  choice.tiles = slots ? tiles_of(true, plan.batch, size.rows_k, 1, choice.config.block_n)
                       : divide_up(plan.max_seqlen_k, choice.config.block_n);
  const int64_t owners = plan.heads_kv > 0 ? plan.heads_kv / choice.owned_heads : 0;
  choice.blocks = choice.tiles * owners * (slots ? 1 : plan.batch / choice.owned_batches);
  const bool packed = core::packed_q(problem);
  choice.q_tiles = tiles_of(packed, plan.batch, size.rows_q, 1, choice.config.block_m);
  choice.q_slots = packed ? choice.q_tiles : choice.q_tiles * plan.batch;
  return choice;
}

// Whether query tiles come from lists of a score program's mask. A block mask beside it has blocks of any size. A
// list's kernel evaluates 32 keys at once, of each half of a tile's keys.
bool reads_lists(const tessera_plan& plan, const BwdConfig& config) {
  return config.block_n % (32 * kListHalves) == 0 && !core::present(plan.problem.block_mask) && lists_program(plan);
}
ProgramListsConfig listed_blocks(const tessera_plan& plan, const BwdConfig& config) {
  return program_lists_config(plan, config.block_n, config.block_m, true);
}

BwdSm80Plan planned(const tessera_plan& plan, const Choice& choice) {
  const tessera_problem& p = plan.problem;
  BwdSm80Plan own{};
  own.config = choice.config;
  own.config.aligned = rows_aligned(p.q, nullptr) && rows_aligned(p.k, nullptr) && rows_aligned(p.v, nullptr) &&
                       rows_aligned(p.d_o, nullptr);
  const BwdConfig& config = own.config;
  BwdRowsConfig& rows = own.rows;
  rows.dtype = config.dtype, rows.head_dim = config.head_dim, rows.head_dim_v = config.head_dim_v;
  rows.block_m = config.block_m, rows.store_keys = config.bulk_dq ? config.block_n : 0;
  rows.d_bias = config.d_bias, rows.d_sink = core::present(p.d_sink);
  rows.sums = config.sums;
  rows.aligned = rows_aligned(p.o, nullptr) && rows_aligned(p.d_o, nullptr);
  own.tiles = static_cast<int>(choice.tiles);
  own.q_tiles = static_cast<int>(choice.q_tiles), own.q_slots = static_cast<int>(choice.q_slots);
  own.owned_batches = static_cast<int>(choice.owned_batches), own.owned_heads = static_cast<int>(choice.owned_heads);
  const int64_t query_tiles = choice.q_slots * plan.heads_q, sinks = rows.d_sink ? plan.heads_q : 0;
  const bool packed = core::packed_q(p) || core::packed_k(p);  // then some rows may belong to no sequence
  const bool clears = query_tiles > 0 || config.d_bias || config.deterministic || packed;
  own.before.x = clears ? static_cast<uint32_t>(std::max<int64_t>(1, query_tiles)) : 0;
  own.products.x = static_cast<uint32_t>(choice.blocks);
  own.after.x = static_cast<uint32_t>(query_tiles + sinks);
  own.workspace = backward_workspace(query_tiles, config.block_m, config.head_dim, config.deterministic);
  if (reads_lists(plan, config)) {
    own.program_words = static_cast<int>(program_lists_of(plan, listed_blocks(plan, config)).words);
  }
  return own;
}

constexpr Supports kSupports{.direction = TESSERA_BACKWARD,
                             .oldest_arch = 80,
                             .newest_arch = kAnyNewer,
                             .dtypes = kHalfPrecision | bits({TESSERA_FLOAT32}),
                             .head_dim = core::kMaxHeadDimV,
                             .tensors = kAllTensors & ~kServingTensors,
                             .partials = true,
                             .programs = true};

// clang-format off
constexpr PrebuiltRow kPrebuilt[] = {
    // Compiled for sm_100, it spills 236 bytes if far rows are possible (attention/far_rows), otherwise at most 60.
    {Use::kTraining, 64, {255, 236, 56}},
    {Use::kTraining, 96, {255, 60, 24}},
    {Use::kTraining, 128, {255, 16, 16}},
    {Use::kTraining, 192, {255, 60, 24}},
    {Use::kTraining, 256, {255, 60, 24}},
};
// clang-format on

std::string refuse(const tessera_plan& plan) {
  if (std::string reason = refusal(kSupports, plan); !reason.empty()) return reason;
  const Choice choice = choose(plan);
  if (!choice.tile) {
    return "no tile of head sizes " + std::to_string(plan.head_dim) + ", " + std::to_string(plan.head_dim_v) +
           " fits " + std::to_string(plan.device.smem_bytes >> 10) + " KiB of shared memory";
  }
  const bool fits = choice.blocks <= INT32_MAX && choice.q_slots <= INT32_MAX / std::max<int64_t>(1, plan.heads_q + 1);
  return fits ? "" : "more than 2^31 tiles";
}

// Rates of an H100 (docs/status.md); at head size 512 a third of bwd_sm90's. float32: each product is three TF32
// products.
constexpr Rate kRates[] = {{64, 250}, {128, 250}, {256, 222}, {512, 150}};
double estimate_us(const tessera_plan& plan) {
  constexpr double kFloat32Factor = 6;
  const double listed = core::score::has_program(plan) ? listed_part(reads_lists(plan, choose(plan).config)) : 1.0;
  return listed * us_at_rate(plan, kRates) * (plan.problem.q.dtype == TESSERA_FLOAT32 ? kFloat32Factor : 1);
}

tessera_status list_launches(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches) {
  auto own = core::config_of<BwdSm80Plan>(step);
  const tessera_problem& problem = plan.problem;
  BwdSm80Params p{};
  fill_backward_params(p, plan, own.workspace, buffers, workspace);
  p.tiles = own.tiles, p.block_n = own.config.block_n, p.q_tiles = own.q_tiles, p.q_slots = own.q_slots;
  p.owned_batches = own.owned_batches, p.owned_heads = own.owned_heads;
  const bool d_o_aligned = rows_aligned(problem.d_o, buffers.d_o);
  own.config.aligned &= rows_aligned(problem.q, buffers.q) && rows_aligned(problem.k, buffers.k) &&
                        rows_aligned(problem.v, buffers.v) && d_o_aligned;
  own.rows.aligned &= rows_aligned(problem.o, buffers.o) && d_o_aligned;
  if (own.program_words > 0) {
    char* const memory = workspace ? static_cast<char*>(workspace) + own.workspace.bytes : nullptr;
    const ProgramListsConfig lists = listed_blocks(plan, own.config);
    p.lists = list_program(plan, lists, own.program_words, buffers, memory, launches);
    if (own.config.deterministic) {
      p.dq_order = order_program(plan, lists, own.program_words, p.lists, buffers, false, launches);
    }
  }
  launch_bwd_rows(own.rows, p, own.before, launches);
  launch_bwd_sm80(own.config, p, own.products, launches);
  p.after = 1;
  if (bwd_raises(own.config)) p.scale *= kBwdLower;
  launch_bwd_rows(own.rows, p, own.after, launches);
  return ok();
}

std::string tiles_json() {
  return json_array(kTiles, [](const BwdTile& tile) {
    BwdConfig config{};
    config.dtype = tile.float32 ? Dtype::kFloat32 : Dtype::kBFloat16;
    config.head_dim = config.head_dim_v = tile.head_dim;
    config.block_m = tile.block_m, config.block_n = tile.block_n, config.stages = tile.stages;
    config.s_dp_split = tile.s_dp_split, config.column_parts = tile.column_parts;
    return json_object({{"float32", tile.float32},
                        {"head_dim", tile.head_dim},
                        {"block_m", tile.block_m},
                        {"block_n", tile.block_n},
                        {"warps", tile.warps},
                        {"s_dp_split", tile.s_dp_split},
                        {"column_parts", tile.column_parts},
                        {"stages", tile.stages},
                        {"min_blocks_per_sm", tile.min_blocks_per_sm},
                        {"smem_bytes", smem_bytes(config)}});
  });
}

}  // namespace

void add_bwd_sm80(tessera_plan& plan) {
  const Choice choice = choose(plan);
  const BwdConfig& config = choice.config;
  tessera_plan_step& step = core::add_step(plan, kBwdSm80);
  step.block_m = config.block_m, step.block_n = config.block_n;
  step.num_warps = config.warps, step.num_stages = config.stages;
  step.smem_bytes = smem_bytes(config);
  step.num_items = choice.blocks;
  const BwdSm80Plan own = planned(plan, choice);
  int64_t lists = 0;
  if (own.program_words > 0) {
    const ProgramListsShape shape = program_lists_of(plan, listed_blocks(plan, config));
    lists = shape.bytes() + (config.deterministic ? shape.order_bytes() : 0);
  }
  step.workspace_bytes = own.workspace.bytes + lists + program_sums_bytes(plan);
  core::keep_config(step, own);
}

constinit const Family kBwdSm80{{"bwd_sm80", TESSERA_KERNEL_BWD_SM80, refuse, add_bwd_sm80, estimate_us},
                                kSupports,
                                list_launches,
                                kPrebuilt,
                                tiles_json};

}  // namespace tessera::cuda
