// fwd_sm90_d512, a cluster of two blocks that share the head's columns: its compiled configs, and the options it lacks.
#include <algorithm>
#include <string>

#include "core/geometry.hpp"
#include "cuda/families/cluster_kernels.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {
namespace {

// A row serves head sizes up to this, with or without options that change scores, which need registers. At 512, tiles
// of 48 keys were 1.00 to 1.15 times as fast as 64 (docs/lab/large_heads.md).
struct PairTile {
  int head_dim;
  bool with_options;
  int block_n, k_stages, v_stages;
};
constexpr PairTile kPairTiles[] = {
    {384, false, 64, 3, 3},
    {512, true, 48, 3, 2},
};
// The tile for dropout, a multiple of the keys of a Philox call; its registers have no room for other options.
constexpr PairTile kPairDropoutTile{512, true, 64, 2, 2};

static_assert(std::end(kPairTiles)[-1].head_dim == kFwdSm90D512HeadDim);

std::string refuse(const tessera_plan& plan) {
  const std::string above = ": not supported at head sizes above " + std::to_string(kFwdSm90HeadDim);
  if (core::paged(plan.problem)) return "pages" + above;
  if (core::present(plan.problem.causal_seqs)) return "causal_seqs" + above;
  if (core::present(plan.problem.tree_mask)) return "tree_mask" + above;
  if (core::present(plan.problem.block_mask)) return "block_mask" + above;
  const ScoreConfig score = score_config(plan);
  if (score.dropout && (score.entries() || score.alibi || score.softcap)) return "dropout with other options" + above;
  return "";
}

FwdSm90D512Config configure(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  FwdSm90D512Config config{};
  config.dtype = static_cast<Dtype>(p.q.dtype);
  config.score = score_config(plan);
  const int64_t head_dim = std::max(plan.head_dim, plan.head_dim_v);
  const PairTile& tile =
      config.score.dropout ? kPairDropoutTile : *std::ranges::find_if(kPairTiles, [&](const PairTile& row) {
        return head_dim <= row.head_dim && row.with_options >= config.score.any();
      });
  config.half_dim = tile.head_dim / kFwdD512ClusterBlocks;
  config.block_n = tile.block_n, config.k_stages = tile.k_stages, config.v_stages = tile.v_stages;
  // dropout fits the registers only in the code for variable lengths
  config.varlen = varies_in_length(p) || config.score.dropout;
  return config;
}

}  // namespace

constinit const ClusterKernel<FwdSm90D512Config> kFwdSm90D512{refuse, configure};

}  // namespace tessera::cuda
