// The first FlashAttention, kernels/tessera/comparison/fwd_fa1 and bwd_fa1, for comparison: the problems it supports,
// its tiles and launches. One block computes a whole head of a sequence.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string>

#include "core/geometry.hpp"
#include "core/status.hpp"
#include "cuda/estimate.hpp"
#include "cuda/families/backward.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/tiles_json.hpp"
#include "tessera/config.hpp"

namespace tessera::cuda {
namespace {

constexpr int kMostHeadDim = 128;
constexpr uint64_t kTensors =
    ~(kServingTensors | kPlaceTensors | (kScoreTensors & ~tensors({"mask"})) |
      tensors({"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "sink", "d_sink", "d_bias"}));

constexpr Supports supports(tessera_direction direction) {
  return {direction, 80, kAnyNewer, kHalfPrecision, kMostHeadDim, kTensors};
}
constexpr Supports kFwdSupports = supports(TESSERA_FORWARD), kBwdSupports = supports(TESSERA_BACKWARD);

// Conditions of both passes: lengths are the tensors', and Q, K and V have the same head size.
std::string refuse_shapes(const tessera_plan& plan) {
  if (core::packed_q(plan.problem) || core::packed_k(plan.problem)) return "packed sequences: not supported";
  if (plan.head_dim != plan.head_dim_v) {
    return "v: head size " + std::to_string(plan.head_dim_v) + ", must be that of q and k, " +
           std::to_string(plan.head_dim);
  }
  if (core::is_part(plan.problem)) return "a global place: not supported";
  if (plan.problem.softcap > 0) return "softcap: not supported";
  return plan.batch * plan.heads_q > INT32_MAX ? "more than 2^31 heads" : "";
}

// Padded to a tile's head size, so that not every head size compiles its own kernel.
int padded_head_dim(const tessera_plan& plan) { return plan.head_dim <= 64 ? 64 : kMostHeadDim; }

bool one_of(int value, std::initializer_list<int> accepted) {
  return std::find(accepted.begin(), accepted.end(), value) != accepted.end();
}

// ---- forward --------------------------------------------------------------------------------------------------------

// A row serves head sizes up to head_dim. The plan uses the first that fits the GPU's shared memory.
struct FwdFa1Tile {
  int head_dim, block_m, block_n, warps;
};
constexpr FwdFa1Tile kFwdTiles[] = {
    {64, 128, 128, 8}, {128, 128, 128, 8}, {128, 64, 64, 4},  // for 99 KiB of shared memory
};

struct FwdFa1Plan {
  FwdSm80Config config;  // aligned; otherwise the same config without alignment
  int tiles;             // of queries
  Grid grid;
  int64_t o_accum, row_max, row_sum;  // offsets in the workspace, in bytes
};

FwdSm80Config fwd_config(const tessera_plan& plan, const FwdFa1Tile& tile) {
  FwdSm80Config config{};
  config.dtype = static_cast<Dtype>(plan.problem.q.dtype);
  config.head_dim = config.head_dim_v = padded_head_dim(plan);
  config.block_m = tile.block_m, config.block_n = tile.block_n, config.warps = tile.warps;
  config.stages = config.min_blocks_per_sm = 1;
  config.aligned = true;
  config.score = score_config(plan);
  return config;
}

// kFa1Keys, set to draw the figure of block sizes. 0: the table's tile.
int forced_keys() {
  const std::string text = environment_variable(kFa1Keys);
  return text.empty() ? 0 : static_cast<int>(std::strtol(text.c_str(), nullptr, 10));
}

// config.warps is 0 if no tile fits.
FwdSm80Config choose_forward(const tessera_plan& plan) {
  const int keys = forced_keys();
  for (FwdFa1Tile tile : kFwdTiles) {
    if (keys > 0) tile.block_n = keys;
    const FwdSm80Config config = fwd_config(plan, tile);
    if (plan.head_dim <= tile.head_dim && fwd_fa1_layout(config).bytes <= plan.device.smem_bytes) return config;
  }
  return {};
}

std::string refuse_forward(const tessera_plan& plan) {
  if (std::string reason = refusal(kFwdSupports, plan); !reason.empty()) return reason;
  if (std::string reason = refuse_shapes(plan); !reason.empty()) return reason;
  if (!one_of(forced_keys(), {0, 32, 64, 128, 256})) {
    return std::string(kFa1Keys) + ": " + environment_variable(kFa1Keys) + ", accepted 32, 64, 128 and 256";
  }
  if (choose_forward(plan).warps > 0) return "";
  return refuse_shared_memory(fwd_fa1_layout(fwd_config(plan, std::end(kFwdTiles)[-1])).bytes, plan);
}

// An H100, GPT-2 medium's attention (docs/reference/papers.md).
constexpr Rate kFwdRates[] = {{64, 145}}, kBwdRates[] = {{64, 199}};
double estimate_forward_us(const tessera_plan& plan) { return us_at_rate(plan, kFwdRates); }
double estimate_backward_us(const tessera_plan& plan) { return us_at_rate(plan, kBwdRates); }

void configure_forward(tessera_plan& plan) {
  FwdFa1Plan own{};
  const FwdSm80Config& config = own.config = choose_forward(plan);
  own.tiles = static_cast<int>(divide_up(plan.max_seqlen_q, config.block_m));
  own.grid.x = static_cast<uint32_t>(plan.batch * plan.heads_q);
  const int64_t rows = int64_t{own.grid.x} * own.tiles * config.block_m;
  own.row_max = rows * config.head_dim * 4;
  own.row_sum = own.row_max + rows * 4;
  tessera_plan_step& step = core::add_step(plan, kFwdFa1);
  step.block_m = config.block_m, step.block_n = config.block_n;
  step.num_warps = config.warps, step.num_stages = config.stages;
  step.smem_bytes = fwd_fa1_layout(config).bytes;
  step.num_items = own.grid.x;
  step.workspace_bytes = own.row_sum + rows * 4;
  core::keep_config(step, own);
}

tessera_status list_forward(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                            void* workspace, LaunchList& launches) {
  const auto own = core::config_of<FwdFa1Plan>(step);
  const tessera_problem& problem = plan.problem;
  FwdFa1Params p{};
  fill_problem_params(p, plan, buffers);
  p.o = row_tensor(problem.o, buffers.o);
  p.o_aligned = rows_aligned(problem.o, buffers.o);
  p.lse = stat_tensor(problem.lse, buffers.lse), p.lse_low = stat_tensor(problem.lse_low, buffers.lse_low);
  p.tiles = Divisor(own.tiles);
  p.num_splits = 1;
  if (char* const bytes = static_cast<char*>(workspace)) {
    p.o_accum = reinterpret_cast<float*>(bytes + own.o_accum);
    p.row_max = reinterpret_cast<float*>(bytes + own.row_max);
    p.row_sum = reinterpret_cast<float*>(bytes + own.row_sum);
  }
  FwdSm80Config config = own.config;
  config.aligned =
      rows_aligned(problem.q, buffers.q) && rows_aligned(problem.k, buffers.k) && rows_aligned(problem.v, buffers.v);
  launch_fwd_fa1(config, p, own.grid, launches);
  return ok();
}

std::string fwd_tiles_json() {
  return json_array(kFwdTiles, [](const FwdFa1Tile& tile) {
    FwdSm80Config config{};
    config.dtype = Dtype::kBFloat16, config.head_dim = tile.head_dim;
    config.block_m = tile.block_m, config.block_n = tile.block_n;
    return json_object({{"head_dim", tile.head_dim},
                        {"block_m", tile.block_m},
                        {"block_n", tile.block_n},
                        {"warps", tile.warps},
                        {"smem_bytes", fwd_fa1_layout(config).bytes}});
  });
}

// ---- backward -------------------------------------------------------------------------------------------------------

// As bwd_sm80's with several blocks on a multiprocessor, although here it is one.
struct BwdFa1Tile {
  int head_dim, block_m, block_n, warps, column_parts, stages;
};
constexpr BwdFa1Tile kBwdTiles[] = {
    {64, 64, 128, 8, 1, 2}, {128, 64, 128, 8, 2, 2}, {128, 32, 64, 4, 1, 2},  // for 99 KiB of shared memory
};

struct BwdFa1Plan {
  BwdConfig config;    // aligned; otherwise the same config without alignment
  BwdRowsConfig rows;  // likewise
  int tiles, q_tiles, q_slots;
  Grid rows_grid, products;
  BwdWorkspace workspace;
};

BwdConfig bwd_config(const tessera_plan& plan, const BwdFa1Tile& tile) {
  BwdConfig config{};
  config.dtype = static_cast<Dtype>(plan.problem.q.dtype);
  config.head_dim = config.head_dim_v = padded_head_dim(plan);
  config.block_m = tile.block_m, config.block_n = tile.block_n, config.warps = tile.warps;
  config.column_parts = tile.column_parts, config.stages = tile.stages;
  config.min_blocks_per_sm = 1;
  config.aligned = true;
  config.score = score_config(plan);
  config.score.scale_first = config.score.entries() && plan.problem.scale <= 0;  // a saved LSE needs no row maximum
  return config;
}

const BwdFa1Tile* choose_backward(const tessera_plan& plan) {
  const auto fits = [&plan](const BwdFa1Tile& tile) {
    return plan.head_dim <= tile.head_dim && smem_bytes(bwd_config(plan, tile)) <= plan.device.smem_bytes;
  };
  const auto* const found = std::ranges::find_if(kBwdTiles, fits);
  return found == std::end(kBwdTiles) ? nullptr : found;
}

std::string refuse_backward(const tessera_plan& plan) {
  if (std::string reason = refusal(kBwdSupports, plan); !reason.empty()) return reason;
  if (std::string reason = refuse_shapes(plan); !reason.empty()) return reason;
  const BwdFa1Tile* const tile = choose_backward(plan);
  if (!tile) return refuse_shared_memory(smem_bytes(bwd_config(plan, std::end(kBwdTiles)[-1])), plan);
  const int64_t q_slots = divide_up(plan.max_seqlen_q, tile->block_m) * plan.batch;
  return q_slots > INT32_MAX / (plan.heads_q + 1) ? "more than 2^31 tiles" : "";
}

void configure_backward(tessera_plan& plan) {
  BwdFa1Plan own{};
  const BwdConfig& config = own.config = bwd_config(plan, *choose_backward(plan));
  own.rows.dtype = config.dtype, own.rows.head_dim = config.head_dim, own.rows.head_dim_v = config.head_dim_v;
  own.rows.block_m = config.block_m, own.rows.aligned = true;
  own.tiles = static_cast<int>(divide_up(plan.max_seqlen_k, config.block_n));
  own.q_tiles = static_cast<int>(divide_up(plan.max_seqlen_q, config.block_m));
  own.q_slots = own.q_tiles * static_cast<int>(plan.batch);
  own.rows_grid.x = static_cast<uint32_t>(own.q_slots * plan.heads_q);
  own.products.x = own.tiles > 0 ? static_cast<uint32_t>(plan.batch * plan.heads_kv) : 0;
  own.workspace = backward_workspace(own.rows_grid.x, config.block_m, config.head_dim, false);
  tessera_plan_step& step = core::add_step(plan, kBwdFa1);
  step.block_m = config.block_m, step.block_n = config.block_n;
  step.num_warps = config.warps, step.num_stages = config.stages;
  step.smem_bytes = smem_bytes(config);
  step.num_items = own.products.x;
  step.workspace_bytes = own.workspace.bytes;
  core::keep_config(step, own);
}

tessera_status list_backward(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches) {
  const auto own = core::config_of<BwdFa1Plan>(step);
  const tessera_problem& problem = plan.problem;
  BwdParams p{};
  fill_backward_params(p, plan, own.workspace, buffers, workspace);
  p.dq_semaphore = p.ticket = nullptr;  // one block adds to a tile of dQ, so the additions are already in order
  p.tiles = own.tiles, p.block_n = own.config.block_n, p.q_tiles = own.q_tiles, p.q_slots = own.q_slots;
  p.owned_batches = p.owned_heads = 1;
  BwdConfig config = own.config;
  config.aligned = rows_aligned(problem.q, buffers.q) && rows_aligned(problem.k, buffers.k) &&
                   rows_aligned(problem.v, buffers.v) && rows_aligned(problem.d_o, buffers.d_o);
  BwdRowsConfig rows = own.rows;
  rows.aligned = rows_aligned(problem.o, buffers.o) && rows_aligned(problem.d_o, buffers.d_o);
  launch_bwd_rows(rows, p, own.rows_grid, launches);
  launch_bwd_fa1(config, p, own.products, launches);
  p.after = 1;
  launch_bwd_rows(rows, p, own.rows_grid, launches);
  return ok();
}

std::string bwd_tiles_json() {
  return json_array(kBwdTiles, [](const BwdFa1Tile& tile) {
    return json_object({{"head_dim", tile.head_dim},
                        {"block_m", tile.block_m},
                        {"block_n", tile.block_n},
                        {"warps", tile.warps},
                        {"column_parts", tile.column_parts},
                        {"stages", tile.stages}});
  });
}

}  // namespace

constinit const Family kFwdFa1{
    {"fwd_fa1", TESSERA_KERNEL_FWD_FA1, refuse_forward, configure_forward, estimate_forward_us, true},
    kFwdSupports,
    list_forward,
    {},
    fwd_tiles_json};
constinit const Family kBwdFa1{
    {"bwd_fa1", TESSERA_KERNEL_BWD_FA1, refuse_backward, configure_backward, estimate_backward_us, true},
    kBwdSupports,
    list_backward,
    {},
    bwd_tiles_json};

}  // namespace tessera::cuda
