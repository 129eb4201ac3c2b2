// bwd_sm90_d256, a cluster of two blocks: its compiled configs, and the options it lacks.
#include <algorithm>
#include <string>

#include "core/geometry.hpp"
#include "cuda/families/backward.hpp"
#include "cuda/families/block_lists.hpp"
#include "cuda/families/cluster_kernels.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {
namespace {

// The plan uses the first row that fits.
struct PairTile {
  int head_dim, head_dim_v;
};
constexpr PairTile kPairTiles[] = {{192, 128}, {192, 192}, {256, 256}};
static_assert(std::end(kPairTiles)[-1].head_dim == kBwdSm90D256HeadDim);
constexpr int kPairExchangeStages = 2;
// Half tiles of Q and dO in shared memory. One of six is given up for staging dQ on its way to memory, which gains 2 %;
// deterministic kernels add dQ from registers and need no staging.
constexpr int pair_half_slots(bool staged_dq) { return staged_dq ? 5 : 6; }

std::string refuse(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const bool turns_of_lists = p.deterministic && core::present(p.block_mask);
  return turns_of_lists
             ? "deterministic: not supported with a block_mask at head sizes above " + std::to_string(kBwdSm90HeadDim)
             : "";
}

BwdSm90D256Config configure(const tessera_plan& plan) {
  const PairTile& tile = *std::ranges::find_if(kPairTiles, [&plan](const PairTile& of) {
    return plan.head_dim <= of.head_dim && plan.head_dim_v <= of.head_dim_v;
  });
  const bool staged_dq = !plan.problem.deterministic;
  return {.dtype = static_cast<Dtype>(plan.problem.q.dtype),
          .head_dim = tile.head_dim,
          .head_dim_v = tile.head_dim_v,
          .half_slots = pair_half_slots(staged_dq),
          .exchange_stages = kPairExchangeStages,
          .window = plan.problem.window_left >= 0,
          .varlen = varies_in_length(plan.problem),
          .deterministic = plan.problem.deterministic != 0,
          .d_bias = core::present(plan.problem.d_bias),
          .score = score_config_beside_block_mask(plan),
          .block_mask = core::present(plan.problem.block_mask) || (!plan.problem.deterministic && lists_program(plan)),
          .staged_dq = staged_dq,
          .sums = writes_sums(plan.problem)};
}

}  // namespace

BlockShape shape_of(const BwdSm90D256Config& config) {
  using Config = BwdSm90D256Config;
  return {.head_dim = config.head_dim,
          .block_m = Config::block_m,
          .block_n = Config::block_n,
          .key_box_rows = Config::block_n,
          .cluster = kBwdD256ClusterBlocks,
          .threads = kBwdSm90Threads,
          .stages = config.exchange_stages,
          .smem_bytes = static_cast<int>(smem_bytes(config))};
}

constinit const ClusterKernel<BwdSm90D256Config> kBwdSm90D256{refuse, configure};

}  // namespace tessera::cuda
