// The Hopper kernels in which the blocks of a cluster share a head's columns, for head sizes that exceed one block.
// Their problems, plans and launches are fwd_sm90's and bwd_sm90's. The file of each kernel's name has its compiled
// configs and the options it lacks.
#pragma once

#include <string>

#include "core/geometry.hpp"
#include "tessera/config.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

template <class Config>
struct ClusterKernel {
  std::string (*refuse)(const tessera_plan& plan);  // the first option that it lacks, as text; "": it supports all
  Config (*configure)(const tessera_plan& plan);    // for a problem that it supports
};
extern const ClusterKernel<FwdSm90D512Config> kFwdSm90D512;
extern const ClusterKernel<BwdSm90D256Config> kBwdSm90D256;
extern const ClusterKernel<BwdSm90D512Config> kBwdSm90D512;

// The largest head sizes: of one block, and of clusters.
inline constexpr int kFwdSm90HeadDim = 256, kFwdSm90D512HeadDim = 512;
inline constexpr int kBwdSm90HeadDim = 128, kBwdSm90D256HeadDim = 256,
                     kBwdSm90D512HeadDim = BwdSm90D512Config::head_dim;

// The shape of any of these kernels' blocks, for launches and tensor maps.
struct BlockShape {
  int head_dim, block_m, block_n, key_box_rows, cluster, threads, stages, smem_bytes;
};
BlockShape shape_of(const BwdSm90D256Config& config);
BlockShape shape_of(const BwdSm90D512Config& config);

// True if a sequence may end anywhere within a tile.
inline bool varies_in_length(const tessera_problem& p) {
  return core::packed_q(p) || core::packed_k(p) || core::present(p.seqused_k);
}

}  // namespace tessera::cuda
