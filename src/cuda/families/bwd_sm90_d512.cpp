// bwd_sm90_d512, a cluster of four blocks: its compiled configs, and the options it lacks.
#include <string>

#include "core/geometry.hpp"
#include "cuda/families/backward.hpp"
#include "cuda/families/cluster_kernels.hpp"
#include "cuda/kernels.hpp"
#include "cuda/params.hpp"

namespace tessera::cuda {
namespace {

std::string refuse(const tessera_plan& plan) {
  const tessera_problem& p = plan.problem;
  const struct {
    const char* name;
    bool given;
  } options[] = {{"softcap", p.softcap > 0},
                 {"dropout_p", p.dropout_p > 0},
                 {"bias", core::present(p.bias)},
                 {"mask", core::present(p.mask)},
                 {"alibi_slopes", core::present(p.alibi_slopes)},
                 {"cu_seqlens_q", core::packed_q(p)},
                 {"cu_seqlens_k", core::packed_k(p)},
                 {"seqused_k", core::present(p.seqused_k)},
                 {"places", core::present(p.places)},
                 {"deterministic", p.deterministic != 0},
                 {"block_mask", core::present(p.block_mask)}};
  for (const auto& [name, given] : options) {
    if (given) return std::string(name) + ": not supported at head sizes above " + std::to_string(kBwdSm90D256HeadDim);
  }
  return "";
}

BwdSm90D512Config configure(const tessera_plan& plan) {
  return {.dtype = static_cast<Dtype>(plan.problem.q.dtype),
          .window = plan.problem.window_left >= 0,
          .sums = writes_sums(plan.problem)};
}

}  // namespace

BlockShape shape_of(const BwdSm90D512Config& config) {
  using Config = BwdSm90D512Config;
  return {.head_dim = Config::head_dim,
          .block_m = Config::block_m,
          .block_n = Config::block_n,
          .key_box_rows = Config::score_keys,
          .cluster = kBwdD512ClusterBlocks,
          .threads = kBwdD512Threads,
          .stages = Config::stages,
          .smem_bytes = static_cast<int>(smem_bytes(config))};
}

constinit const ClusterKernel<BwdSm90D512Config> kBwdSm90D512{refuse, configure};

}  // namespace tessera::cuda
