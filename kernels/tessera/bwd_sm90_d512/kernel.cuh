// Backward on Hopper at head sizes above 256: a cluster of two blocks owns 64 keys and splits the head's columns, since dK and
// dV of 64 keys at 512 columns are all the registers of two multiprocessors' key warpgroups.
//
//   block r: columns 256 r ... 256 r + 255 of K, V, Q, dO, dK, dV and dQ
//   S^T = K Q^T and dP^T = V dO^T over these, completed by the other block's share; P, dS: the same bits in both
//   dV += P^T dO, dK += dS^T Q, dQ += dS K: these columns
//
// Grid: two blocks for each tile of block_n keys and KV head, in clusters. Roles, in each block: producer (producer.cuh), a
// warpgroup for dV and one for dK (keys.cuh), one for dQ (dq.cuh). 512 threads, one block a multiprocessor. Shared memory:
// BwdSm90D512Layout.
#pragma once

#include "tessera/bwd_sm90_d512/dq.cuh"
#include "tessera/bwd_sm90_d512/keys.cuh"
#include "tessera/bwd_sm90_d512/producer.cuh"

namespace tessera {

template <BwdSm90D512Config kCfg>
TESSERA_DEVICE void bwd_sm90_d512(const BwdSm90Params& p) {
  using Shared = BwdD512Shared<kCfg>;
  // The load of step j + 3's first half waits until step j + 1's has been released, by both key warpgroups after step j: then
  // LSE and delta of step j have been read.
  static_assert(kCfg.half_slots == 8 && kBwdD512StatStages == 3, "rows of LSE and delta have no barriers");
  static_assert(Shared::kAt.bytes <= 227 * 1024, "shared memory of a block");
  extern __shared__ __align__(1024) char shared_memory[];
  const Shared shared(shared_memory);  // by whole warps: its descriptor is uniform
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
  ptx::barrier_cluster_arrive_relaxed();  // the other block's barriers are initialised
  ptx::barrier_cluster_wait();
  ptx::griddepcontrol_launch_dependents();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<bwd_registers(kCfg.half_dim).producer>();
    if (threadIdx.x == 0) BwdD512Producer<kCfg>{p, shared, block}.run();
  } else if (warpgroup == 3) {
    ptx::setmaxnreg_dec<bwd_registers(kCfg.half_dim).dq>();
    BwdD512DqWarpgroup<kCfg>{p, shared, block}.run();
  } else {
    ptx::setmaxnreg_inc<bwd_registers(kCfg.half_dim).scores>();
    if (warpgroup == 1) {
      BwdD512KeyWarpgroup<kCfg, kD512Values>(p, shared, block).run();
    } else {
      BwdD512KeyWarpgroup<kCfg, kD512Keys>(p, shared, block).run();
    }
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();  // the other block may still send here, or arrive at this one's barriers
  ptx::barrier_cluster_wait();
}

}  // namespace tessera
