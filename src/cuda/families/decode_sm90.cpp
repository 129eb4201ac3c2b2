// The kernel of kernels/tessera/decode_sm90: what it takes, its tiles, and its launch. Every number depends on the problem and
// the GPU alone, and none on a sequence's length: which block reads which keys is decided on the GPU.
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/geometry.hpp"
#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/families/fwd_sm80.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"
#include "cuda/plan_config.hpp"
#include "cuda/registry.hpp"
#include "cuda/tiles_json.hpp"
#include "tessera/config.hpp"

namespace tessera::cuda {
namespace {

// A row: for head sizes up to head_dim.
struct DecodeTile {
  int head_dim;
  int block_n, warps, stages;
  bool bulk;
};
constexpr DecodeTile kTiles[] = {
    {64, 16, 8, 5, false},
    {128, 16, 8, 3, false},
    {256, 16, 4, 3, false},
};
constexpr int kMostHeadDim = kTiles[std::size(kTiles) - 1].head_dim;

// Rows of a KV head, beyond which keys would be read too often: once for every kDecodeRows of them.
constexpr int64_t kMostRows = 4 * kDecodeRows;
// Keys below which a part is not worth its merge.
constexpr int kMinPartKeys = 64;

// All that was decided for a problem.
struct DecodeSm90Plan {
  DecodeSm90Config config;
  FwdSm80Plan stand_in;  // where data starts at no multiple of 16 bytes
  Grid grid;
  int team, min_tiles, part_rows;
};

DecodeSm90Config make_config(const tessera_plan& plan) {
  const int64_t head_dim = std::max(plan.head_dim, plan.head_dim_v);
  const DecodeTile& tile =
      *std::ranges::find_if(kTiles, [head_dim](const DecodeTile& row) { return head_dim <= row.head_dim; });
  DecodeSm90Config config{};
  config.dtype = static_cast<Dtype>(plan.problem.q.dtype);
  config.head_dim = static_cast<int>(padded_to(std::max<int64_t>(1, head_dim), 16));
  config.block_n = tile.block_n, config.warps = tile.warps, config.stages = tile.stages;
  const tessera_problem& p = plan.problem;
  config.paged = core::paged(p);
  config.varlen = core::packed_q(p) || core::packed_k(p) || core::present(p.seqused_k);
  config.invariant = p.batch_invariant != 0;
  config.bulk = tile.bulk;
  config.score = score_config(plan.problem);
  return config;
}

// Blocks with neighbouring KV heads, whose keys lie side by side: as many as divide the heads and leave few of the GPU's
// multiprocessors without a block.
int team_of(const tessera_plan& plan) {
  constexpr int64_t kBusyPercent = 96;
  const int64_t cores = std::max<int64_t>(1, plan.device.cores);
  for (int64_t team = std::min(plan.heads_kv, cores); team > 1; --team) {
    if (plan.heads_kv % team == 0 && cores / team * team * 100 >= kBusyPercent * cores) return static_cast<int>(team);
  }
  return 1;
}

// Where a call's workspace has what: offsets in bytes.
struct DecodeWorkspace {
  int64_t arrivals, partial_stat, partial_o, bytes;
};
DecodeWorkspace workspace_of(const DecodeSm90Plan& own) {
  constexpr int64_t kAlignment = 64, kArrivalBytes = 8, kStatBytes = 8;
  const int64_t blocks = own.grid.x, slots = blocks * 2 * (own.config.invariant ? kDecodeMostParts : 1);
  DecodeWorkspace at{};
  at.partial_stat = at.arrivals + padded_to(blocks * kArrivalBytes, kAlignment);
  at.partial_o = at.partial_stat + padded_to(slots * own.part_rows * kStatBytes, kAlignment);
  at.bytes = at.partial_o + slots * own.part_rows * own.config.head_dim * 4;
  return at;
}

constexpr Supports kSupports{
    .direction = TESSERA_FORWARD,
    .oldest_arch = kHopper,
    .newest_arch = kHopper,  // measured there alone
    .dtypes = kHalfPrecision,
    .head_dim = kMostHeadDim,
    .tensors = all_tensors_but({"bias", "mask", "block_mask", "causal_seqs", "tree_mask", "prefix_groups"})};

constexpr Limits kLimits{.registers = 255};
constexpr PrebuiltRow kPrebuilt[] = {
    {Use::kDecode, 64, kLimits},
    {Use::kDecode, 128, kLimits},
    {Use::kPagedDecode, 64, kLimits},
    {Use::kPagedDecode, 128, kLimits},
};

int64_t group_of(const tessera_plan& plan) { return plan.heads_q / std::max<int64_t>(1, plan.heads_kv); }

std::string refuse_rows(const tessera_plan& plan) {
  const int64_t rows = plan.max_seqlen_q * group_of(plan);
  if (rows > kMostRows) {
    return std::to_string(plan.max_seqlen_q) + " queries x " + std::to_string(group_of(plan)) +
           " heads a KV head, at most " + std::to_string(kMostRows) + " rows";
  }
  return "";
}

std::string refuse_layout(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const struct {
    const char* name;
    const tessera_layout& layout;
  } loaded[] = {{"q", p.q}, {"k", p.k}, {"v", p.v}};
  for (const auto& [name, layout] : loaded) {
    if (!rows_aligned(layout, nullptr)) return std::string(name) + ": rows start at no multiples of 16 bytes";
  }
  if (core::paged(p) && (core::sizes(p).pages == 0 || core::sizes(p).rows_k == 0)) return "k: no pages";
  return "";
}

std::string refuse(const tessera_plan& plan) {
  if (std::string reason = refusal(kSupports, plan); !reason.empty()) return reason;
  if (plan.problem.dropout_p > 0) return "dropout_p: not taken";
  if (std::string reason = refuse_rows(plan); !reason.empty()) return reason;
  if (std::string reason = refuse_layout(plan); !reason.empty()) return reason;
  const DecodeSm90Config config = make_config(plan);
  if (std::string reason = refuse_shared_memory(smem_bytes(config), plan); !reason.empty()) return reason;
  constexpr int64_t kMaxTiles = int64_t{1} << 30;  // the kernel counts a share past them
  const int64_t row_tiles = divide_up(plan.max_seqlen_q * group_of(plan), kDecodeRows);
  const int64_t works = plan.batch * plan.heads_kv * row_tiles,
                tiles = divide_up(plan.max_seqlen_k, config.block_n) + 1;
  if (works > kMaxTiles || works * tiles > kMaxTiles) return "more than 2^30 tiles";
  const std::string stand_in = kFwdSm80.refuse(plan);
  return stand_in.empty() ? "" : "fwd_sm80, which serves misaligned data, refuses: " + stand_in;
}

DecodeSm90Plan planned(const tessera_plan& plan) {
  DecodeSm90Plan own{};
  own.config = make_config(plan);
  own.stand_in = plan_fwd_sm80(plan, Splits::kNone);
  own.grid.x = static_cast<uint32_t>(std::max(1, plan.device.cores));
  own.team = team_of(plan);
  own.min_tiles = kMinPartKeys / own.config.block_n;
  own.part_rows = static_cast<int>(std::min<int64_t>(kDecodeRows, plan.max_seqlen_q * group_of(plan)));
  return own;
}

void configure(tessera_plan& plan) {
  const DecodeSm90Plan own = planned(plan);
  plan.block_m = kDecodeRows, plan.block_n = own.config.block_n;
  plan.num_warps = own.config.warps, plan.num_stages = own.config.stages;
  plan.smem_bytes = smem_bytes(own.config);
  plan.tiles_per_item = plan.num_splits = 1;
  plan.num_items = own.grid.x;
  plan.shared_bytes = workspace_of(own).bytes;
  keep_config(plan, own);
}

tessera_status list_launches(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                             LaunchList& launches) {
  const DecodeSm90Plan own = config_of<DecodeSm90Plan>(plan);
  const tessera_problem& problem = plan.problem;
  // A plan knows strides, and addresses only come now. Rows of no sequence alone are fwd_sm80's, too.
  if (plan.batch == 0 || !rows_aligned(problem.q, buffers.q) || !rows_aligned(problem.k, buffers.k) ||
      !rows_aligned(problem.v, buffers.v)) {
    return list_fwd_sm80(plan, own.stand_in, buffers, nullptr, launches);
  }
  if (plan.heads_q == 0 || core::sizes(problem).rows_q == 0) return ok();
  DecodeSm90Params p{};
  fill_problem_params(p, plan, buffers);
  p.o = row_tensor(problem.o, buffers.o);
  p.o_aligned = rows_aligned(problem.o, buffers.o);
  p.lse = stat_tensor(problem.lse, buffers.lse);
  p.min_tiles = own.min_tiles;
  p.team = Divisor(own.team), p.head_groups = static_cast<int>(plan.heads_kv) / own.team;
  p.part_rows = own.part_rows;
  const DecodeWorkspace at = workspace_of(own);
  char* const base = static_cast<char*>(workspace);
  if (base) {
    p.arrivals = reinterpret_cast<unsigned long long*>(base + at.arrivals);
    p.partial_stat = reinterpret_cast<float*>(base + at.partial_stat);
    p.partial_o = reinterpret_cast<float*>(base + at.partial_o);
  }
  launch_decode_sm90(own.config, p, own.grid, launches);
  return ok();
}

std::string tiles_json() {
  return json_array(kTiles, [](const DecodeTile& tile) {
    return json_object({{"head_dim", tile.head_dim},
                        {"block_n", tile.block_n},
                        {"warps", tile.warps},
                        {"stages", tile.stages},
                        {"bulk", tile.bulk}});
  });
}

}  // namespace

constinit const Family kDecodeSm90{
    {TESSERA_KERNEL_DECODE_SM90, refuse, configure}, "decode_sm90", kSupports, list_launches, kPrebuilt, tiles_json};

}  // namespace tessera::cuda
