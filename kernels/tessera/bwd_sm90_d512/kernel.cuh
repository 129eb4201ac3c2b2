// Backward on Hopper at head sizes above 256: a cluster of four blocks owns 128 keys.
//
//                      rank 0, 1: side 0, 1 (K)            rank 2, 3: side 0, 1 (V)
//   64 keys of a side  S^T = K Q^T, P             P ->     dP^T = V dO^T, dS
//   128 keys, 256 columns of a side
//                      dV += P^T dO     <- dS, all ->      dK += dS^T Q
//   128 keys           dQ += dS K: 128 columns in each block
//
// Each block computes complete scores, the blocks exchange only P and dS in 16 bits, and dQ is added for 128 keys at
// once.
//
// Grid: four blocks for each tile of block_n keys and KV head, in clusters. Roles in each block: the producer, a
// warpgroup for the scores of the block's side, and one for dQ; the latter two also accumulate dV or dK of 64 keys
// each. 384 threads, one block on a multiprocessor.
//
//   config.hpp   BwdSm90D512Config, the layout of shared memory; the launch parameters are BwdSm90Params
//   shared.cuh   the offsets of tiles and barriers
//   loads.cuh    the producer: K or V once, and in each step Q and dO
//   scores.cuh   the score warpgroup: P or dS
//   dk_dv.cuh    the accumulation of dV or dK, in both warpgroups
//   dq.cuh       the dQ warpgroup
//   kernel.cuh   the roles of a block's warps
#pragma once

#include "tessera/bwd_sm90_d512/dq.cuh"
#include "tessera/bwd_sm90_d512/loads.cuh"
#include "tessera/bwd_sm90_d512/scores.cuh"

namespace tessera {

template <BwdSm90D512Config kCfg, D512Role kRole>
TESSERA_DEVICE void bwd_sm90_d512_block(const BwdSm90Params& p, char* shared_memory) {
  using Shared = BwdD512Shared<kCfg, kRole>;
  static_assert(Shared::kAt.bytes <= 227 * 1024, "shared memory of a block");
  const Shared shared(shared_memory);  // called by whole warps: its descriptor is uniform
  auto& block = *reinterpret_cast<KeyBlock*>(shared_memory + Shared::kAt.block);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.v_map);
    ptx::prefetch_tensormap(&p.q_map);
    ptx::prefetch_tensormap(&p.d_o_map);
    shared.init();
  }
  if (threadIdx.x == 32) block = key_block<kCfg>(p, static_cast<int>(blockIdx.x) / kBwdD512ClusterBlocks);
  __syncthreads();
  ptx::barrier_cluster_arrive_relaxed();
  const BwdD512Producer<Shared, kCfg> producer{p, shared, block};
  if (block.steps > 0) {
    if (threadIdx.x == 0) producer.load_side();
    if (threadIdx.x == 32) producer.load_key_parts();
    __syncwarp();
  }
  ptx::barrier_cluster_wait();  // the other blocks' barriers are initialised
  ptx::griddepcontrol_launch_dependents();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kBwdD512ProducerRegisters>();
    if (block.steps > 0) {
      if (threadIdx.x == 0) producer.load_factors();
      if (threadIdx.x == 32) producer.load_accumulated();
      if (kRole == kD512Keys && threadIdx.x == 64) producer.send_gradients();
    }
  } else {
    ptx::setmaxnreg_inc<kBwdD512ProductRegisters>();
    if (warpgroup == 1) {
      BwdD512ScoreWarpgroup<Shared, kCfg>(p, shared, block).run();
    } else {
      BwdD512DqWarpgroup<Shared, kCfg>(p, shared, block).run();
    }
  }
  // Nothing is in transit to this block: it has waited for all bytes, and for all arrivals at its barriers. This
  // barrier therefore orders no memory, and no block waits here for dQ's additions.
  __syncwarp();
  ptx::barrier_cluster_arrive_relaxed();
  ptx::barrier_cluster_wait();
}

template <BwdSm90D512Config kCfg>
TESSERA_DEVICE void bwd_sm90_d512(const BwdSm90Params& p) {
  extern __shared__ __align__(1024) char shared_memory[];
  if (ptx::cluster_ctarank() / 2 == kD512Values) {
    bwd_sm90_d512_block<kCfg, kD512Values>(p, shared_memory);
  } else {
    bwd_sm90_d512_block<kCfg, kD512Keys>(p, shared_memory);
  }
}

}  // namespace tessera
