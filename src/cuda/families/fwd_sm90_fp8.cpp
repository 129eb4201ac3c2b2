// The forward kernel of kernels/tessera/fwd_sm90/fp8/kernel.cuh: the problems it supports, its tiles and its launch.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "core/asking.hpp"
#include "core/geometry.hpp"
#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/estimate.hpp"
#include "cuda/families/cluster_kernels.hpp"
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

// A row serves head sizes up to these, scales of 128 keys only if block_n divides them. The plan uses the first that
// fits. Each is the largest without spills.
struct Fp8Tile {
  int head_dim, head_dim_v;
  int block_n, consumers, q_stages, k_stages, v_stages, raw_stages, o_cols;
};
constexpr Fp8Tile kTiles[] = {
    {64, 64, 128, 2, 4, 4, 4, 2, 64},  {128, 128, 128, 2, 4, 3, 3, 2, 64}, {192, 128, 128, 2, 2, 2, 2, 2, 64},
    {192, 192, 64, 2, 2, 3, 2, 2, 64}, {256, 256, 64, 2, 2, 3, 2, 2, 64},
};
constexpr int64_t kMostHeadDim = 256;

// The numbers of kForcedFp8Tile, in order.
constexpr int Fp8Tile::*kForced[] = {&Fp8Tile::block_n,  &Fp8Tile::consumers,  &Fp8Tile::q_stages, &Fp8Tile::k_stages,
                                     &Fp8Tile::v_stages, &Fp8Tile::raw_stages, &Fp8Tile::o_cols};

std::optional<Fp8Tile> parse(const char* text) {
  Fp8Tile tile{};
  for (size_t n = 0; n < std::size(kForced); ++n) {
    char* end = nullptr;
    tile.*kForced[n] = static_cast<int>(std::clamp(std::strtol(text, &end, 10), 0L, 256L));
    if (end == text || *end != (n + 1 < std::size(kForced) ? ',' : '\0')) return std::nullopt;
    text = end + 1;
  }
  const bool fits = tile.block_n > 0 && tile.block_n % 32 == 0 && tile.block_n <= 128 && tile.consumers >= 2 &&
                    tile.consumers <= 4 && tile.raw_stages > 0 && (tile.o_cols == 64 || tile.o_cols == 128) &&
                    whole_q_stages(tile.consumers, tile.q_stages) &&
                    kv_rings_cannot_deadlock(tile.consumers, tile.block_n, tile.k_stages, tile.v_stages);
  return fits && tile.k_stages > 0 && tile.v_stages > 0 ? std::optional(tile) : std::nullopt;
}

// Of 128 keys each.
bool has_block_scales(const tessera_problem& p) { return p.k_descale.rank == 3 || p.v_descale.rank == 3; }

std::optional<Fp8Tile> find_tile(const tessera_plan& plan) {
  if (const std::string forced = environment_variable(kForcedFp8Tile); !forced.empty()) return parse(forced.c_str());
  for (const Fp8Tile& tile : kTiles) {
    const bool whole_scales = !has_block_scales(plan.problem) || kScaleTokens % tile.block_n == 0;
    if (plan.head_dim <= tile.head_dim && plan.head_dim_v <= tile.head_dim_v && whole_scales) return tile;
  }
  return std::nullopt;
}

struct Fp8Plan {
  FwdSm90Fp8Config config;
  WorkOrder order;
  Grid grid;
  bool schedules_dynamically;  // the counter is in the workspace
  int short_tile_blocks;       // see FwdSm90Params
};

FwdSm90Fp8Config config_of(const tessera_plan& plan, const Fp8Tile& tile) {
  constexpr int64_t kChunkColumns = 64;
  const tessera_problem& p = plan.problem;
  FwdSm90Fp8Config config{};
  config.head_dim = static_cast<int>(padded_to(plan.head_dim, 32));
  config.head_dim_v = static_cast<int>(padded_to(plan.head_dim_v, kChunkColumns));
  config.block_n = tile.block_n, config.consumers = tile.consumers;
  config.q_stages = tile.q_stages, config.k_stages = tile.k_stages;
  config.v_stages = tile.v_stages, config.raw_stages = tile.raw_stages;
  config.o_cols = config.head_dim_v % tile.o_cols == 0 ? tile.o_cols : static_cast<int>(kChunkColumns);
  config.dtype_o = static_cast<Dtype>(p.o.dtype);
  config.varying_tile_cost = is_causal(p);
  config.varlen = varies_in_length(p);
  config.block_scales = has_block_scales(p);
  config.score = score_config(plan);
  return config;
}

// The number of work tiles of a head (packed: of all sequences), and of all heads.
struct TileCounts {
  int64_t of_head, all;
};
TileCounts tiles_of_plan(const tessera_plan& plan, const FwdSm90Fp8Config& config) {
  const bool packed = core::packed_q(plan.problem);
  const int64_t of_head =
      tiles_of(packed, plan.batch, core::sizes(plan.problem).rows_q, 1, int64_t{config.consumers} * kConsumerRows);
  return {of_head, of_head * plan.heads_q * (packed ? 1 : plan.batch)};
}

constexpr Supports kSupports{
    .direction = TESSERA_FORWARD,
    .oldest_arch = kHopper,
    .newest_arch = kHopper,  // wgmma exists only on this architecture
    .dtypes = bits({TESSERA_FLOAT8_E4M3}),
    .head_dim = kMostHeadDim,
    .tensors = kAllTensors & ~kScoreTensors &
               ~tensors({"page_table", "page_indptr", "page_indices", "dropout_state", "places"})};

// At launch; afterwards each of two consumers has 216 up to head size 128, and 232 above.
constexpr Limits kLimits{.registers = 128};
// Of producers, which have 24 registers above head size 128.
constexpr Limits kLargeLimits{.registers = 128, .spill_bytes = 24, .stack_bytes = 8};
constexpr PrebuiltRow kPrebuilt[] = {
    {Use::kPrefill, 64, kLimits}, {Use::kPrefill, 128, kLimits}, {Use::kPrefill, 256, kLargeLimits}};

// TMA and the stores of O need rows at multiples of 16 bytes; TMA sees two elements as one.
std::string refuse_layout(const tessera_plan& plan) {
  constexpr int64_t kColumns = 16;
  const tessera_problem& p = plan.problem;
  if (std::string reason = refuse_no_rows("k", core::sizes(p).rows_k); !reason.empty()) return reason;
  char text[128];
  const struct {
    const char* name;
    const tessera_layout& layout;
  } named[] = {{"q", p.q}, {"k", p.k}, {"v", p.v}, {"o", p.o}};
  for (const auto& [name, layout] : named) {
    const int64_t columns = layout.shape[layout.rank - 1];
    if (columns % kColumns != 0) {
      std::snprintf(text, sizeof text, "%s: head size %" PRId64 ", must be a multiple of %" PRId64, name, columns,
                    kColumns);
      return text;
    }
    const auto bytes = static_cast<int64_t>(tessera_dtype_bytes(layout.dtype));
    for (int axis = 0; axis + 1 < layout.rank; ++axis) {
      const int64_t stride = layout.strides[axis] * bytes;
      const bool is_o = &layout == &p.o;
      if (layout.shape[axis] <= 1 || (stride % kTensorMapAlignment == 0 && (is_o || stride >= columns * bytes)))
        continue;
      std::snprintf(text, sizeof text, "%s: stride of %" PRId64 " bytes, must be a multiple of %" PRId64 "%s", name,
                    stride, kTensorMapAlignment, is_o ? "" : " from a row's bytes on");
      return text;
    }
  }
  return "";
}

std::string find_refusal(const tessera_plan& plan) {
  if (std::string reason = refusal(kSupports, plan); !reason.empty()) return reason;
  const tessera_problem& p = plan.problem;
  if (p.dropout_p > 0) return "dropout: not supported";
  if (is_part(plan)) return "a part of a call with a shared prefix: not supported";
  if (std::string reason = refuse_layout(plan); !reason.empty()) return reason;
  const std::optional<Fp8Tile> tile = find_tile(plan);
  if (!tile) {
    return std::string(kForcedFp8Tile) + ": '" + environment_variable(kForcedFp8Tile) +
           "', accepted a tile that fits: block_n,consumers,q_stages,k_stages,v_stages,raw_stages,o_cols";
  }
  const FwdSm90Fp8Config config = config_of(plan, *tile);
  if (config.block_scales && kScaleTokens % config.block_n != 0) return "scales of 128 keys with tiles across them";
  if (std::string reason = refuse_shared_memory(smem_bytes(config), plan); !reason.empty()) return reason;
  constexpr int64_t kMaxWorkTiles = int64_t{1} << 30;  // the kernel's counter may exceed the tile count by one grid
  if (tiles_of_plan(plan, config).all > kMaxWorkTiles) return "more than 2^30 tiles";
  return "";
}

std::string refuse(const tessera_plan& plan) {
  static thread_local core::Once<std::string> once;
  return once(plan, find_refusal);
}

// Of FlashAttention-3's e4m3 kernel at 4096 tokens, which this one has not reached. No other family serves these
// problems, so that nothing depends on it.
constexpr Rate kRates[] = {{64, 598}, {128, 838}, {256, 1064}};
double estimate_us(const tessera_plan& plan) { return us_at_rate(plan, kRates); }

void configure(tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  Fp8Plan own{};
  own.config = config_of(plan, find_tile(plan).value());
  const FwdSm90Fp8Config& config = own.config;
  const TileCounts tiles = tiles_of_plan(plan, config);
  const int64_t blocks = std::min<int64_t>(tiles.all, plan.device.cores);
  // Only the GPU knows which work tiles of a packed batch are long: blocks fetch the next from a counter.
  own.schedules_dynamically = core::packed_q(p) && tiles.all > blocks;
  own.grid.x = static_cast<uint32_t>(blocks);
  if (blocks > 0) {
    constexpr int kFixedBlocks = 2;  // the cost of decoding a tile index and storing its rows, in key tiles
    own.order = order_of(plan, tiles.of_head, tiles.all / tiles.of_head, int64_t{config.consumers} * kConsumerRows,
                         kFixedBlocks * config.block_n, own.schedules_dynamically ? tiles.all : blocks);
  }
  const int64_t keys =
      core::packed_k(p) ? core::sizes(p).rows_k / std::max<int64_t>(1, plan.batch) : plan.max_seqlen_k / 2;
  own.short_tile_blocks = own.schedules_dynamically ? static_cast<int>(keys / 2 / config.block_n) : 0;

  tessera_plan_step& step = core::add_step(plan, kFwdSm90Fp8);
  constexpr int kWarpgroupWarps = 4;
  step.block_m = config.consumers * kConsumerRows, step.block_n = config.block_n;
  step.num_warps = (config.consumers + kFp8ProducerWarpgroups) * kWarpgroupWarps, step.num_stages = config.k_stages;
  step.smem_bytes = smem_bytes(config);
  step.num_items = tiles.all;
  step.workspace_bytes = own.schedules_dynamically ? sizeof(int) : 0;
  core::keep_config(step, own);
}

tessera_status check_alignment(const tessera_buffers& buffers) {
  const struct {
    const char* name;
    const void* data;
  } named[] = {{"q", buffers.q}, {"k", buffers.k}, {"v", buffers.v}, {"o", buffers.o}};
  for (const auto& [name, data] : named) {
    TESSERA_RETURN_IF_ERROR(check_address_beside_codes(name, data, TESSERA_FLOAT8_E4M3));
  }
  return ok();
}

tessera_status list_launches(const tessera_plan& plan, const tessera_plan_step& step, const tessera_buffers& buffers,
                             void* workspace, LaunchList& launches) {
  const auto own = core::config_of<Fp8Plan>(step);
  if (own.grid.x == 0) return ok();
  TESSERA_RETURN_IF_ERROR(check_alignment(buffers));
  const tessera_problem& problem = plan.problem;
  FwdSm90Fp8Params p{};
  fill_problem_params(p, plan, buffers);
  p.o = row_tensor(problem.o, buffers.o);
  p.lse = stat_tensor(problem.lse, buffers.lse), p.lse_low = stat_tensor(problem.lse_low, buffers.lse_low);
  p.order = own.order;
  p.masks = position_masks(problem, buffers);
  p.q_scales = scale_tensor(problem.q_descale, buffers.q_descale, false);
  p.k_scales = scale_tensor(problem.k_descale, buffers.k_descale, false);
  p.v_scales = scale_tensor(problem.v_descale, buffers.v_descale, false);
  p.o_bytes = static_cast<int>(tessera_dtype_bytes(problem.o.dtype));
  if (own.schedules_dynamically) {
    p.tile_counter = static_cast<int*>(workspace);
    launches.clear(p.tile_counter);
    p.short_tile_blocks = own.short_tile_blocks;
  }
  if (const Driver* driver = launches.driver()) {
    const auto map = [&](const char* name, const tessera_layout& layout, const void* data, int rows, TensorMap& to) {
      return make_tensor_map(*driver, plan.device, name, codes_in_pairs(layout), data,
                             {BoxLayout::kSwizzled, rows, kSwizzledRowBytes}, to);
    };
    TESSERA_RETURN_IF_ERROR(map("q", problem.q, buffers.q, kConsumerRows, p.q_map));
    TESSERA_RETURN_IF_ERROR(map("k", problem.k, buffers.k, own.config.block_n, p.k_map));
    TESSERA_RETURN_IF_ERROR(map("v", problem.v, buffers.v, own.config.block_n, p.v_map));
  }
  launch_fwd_sm90_fp8(own.config, p, own.grid, launches);
  return ok();
}

}  // namespace

constinit const Family kFwdSm90Fp8{
    {"fwd_sm90_fp8", TESSERA_KERNEL_AUTO, refuse, configure, estimate_us}, kSupports, list_launches, kPrebuilt};

}  // namespace tessera::cuda
