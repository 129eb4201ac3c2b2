// Forward on Hopper at head sizes above 256: a cluster of two blocks owns 128 queries and divides the head's columns,
// because 64 rows of O at 512 columns need twice the registers of a warpgroup.
//
//   block 0: columns 0 ... half_dim - 1 of Q, K, V          block 1: the others
//   S0 = Q K^T over its columns        S0 -> <- S1          S1 = Q K^T over its columns
//   S = S0 + S1, P = softmax(S)                             S = S0 + S1, P = softmax(S), the same bits
//   O += P V, its columns                                   O += P V, its columns
//
// Each block is thus a kernel for head size half_dim whose scores are completed through distributed shared memory.
// Grid: two blocks for each work tile of 128 queries, in clusters. Roles in each block: a producer warpgroup and two
// consumers of 64 queries each. 384 threads, one block on a multiprocessor.
//
//   config.hpp   FwdSm90D512Config, the layout of shared memory; the launch parameters are FwdSm90Params
//   shared.cuh   the cluster's work tile, the offsets of tiles and barriers
//   loads.cuh    the producer: one thread loads Q and K, another V
//   scores.cuh   the consumers: scores, softmax, products, results
//   kernel.cuh   the roles of a block's warpgroups
#pragma once

#include "tessera/attention/unowned_rows.cuh"
#include "tessera/fwd_sm90_d512/loads.cuh"
#include "tessera/fwd_sm90_d512/scores.cuh"

namespace tessera {

template <FwdSm90D512Config kCfg>
TESSERA_DEVICE void fwd_sm90_d512(const FwdSm90Params& p) {
  using Shared = FwdD512Shared<kCfg>;
  static_assert(kCfg.dtype != Dtype::kFloat32, "wgmma of 16-bit types");
  static_assert(!kCfg.score.facts().blocks, "a mask has an entry for every key");
  static_assert(!kCfg.score.dropout || kCfg.block_n % 32 == 0, "one Philox call decides 32 keys");
  static_assert(Shared::kAt.bytes <= 227 * 1024, "shared memory of a block");
  extern __shared__ __align__(1024) char shared_memory[];
  const Shared shared(shared_memory);  // called by whole warps: its descriptor is uniform
  auto& tile = *reinterpret_cast<FwdD512Tile*>(shared_memory + Shared::kAt.tile);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.q_map);
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.v_map);
    ptx::prefetch_tensormap(&p.o_map);
    shared.init();
  }
  if (threadIdx.x == 32) tile = FwdD512Tile::at<kCfg>(p, static_cast<int>(blockIdx.x) / kFwdD512ClusterBlocks);
  __syncthreads();
  ptx::barrier_cluster_arrive_relaxed();  // the other block's barriers are initialised
  ptx::barrier_cluster_wait();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<24>();
    if (tile.first < tile.last) {
      if (threadIdx.x == 0) load_q_and_k<kCfg>(p, shared, tile);
      if (threadIdx.x == 32) load_v<kCfg>(p, shared, tile);
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    if (kCfg.varlen && p.cu_seqlens_q) {  // clear rows of no sequence while the first tiles are loaded
      const int64 warp = static_cast<int64>(blockIdx.x) * Shared::kWarps + static_cast<int>(threadIdx.x) / 32 - 4;
      clear_unowned_outputs<kCfg.dtype>(p, warp, static_cast<int64>(gridDim.x) * Shared::kWarps);
    }
    if (uniform(tile.count) > 0) {
      FwdD512Consumer<kCfg> consumer(p, shared, tile, uniform(static_cast<int>(threadIdx.x) / 128 - 1));
      consumer.run();
    }
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();  // the other block may still send data to this block or arrive at its barriers
  ptx::barrier_cluster_wait();
}

}  // namespace tessera
