// Backward on Hopper at head sizes up to 256: a cluster of two blocks owns 128 keys and divides the products, not the
// keys.
//
//   block 0 holds K                        block 1 holds V and the second half of K's columns
//   S^T = K Q^T, P, dV += P^T dO    P ->   dP^T = V dO^T, dS, dK += dS^T Q
//   dQ's first half              <- dS     dQ's second half
//
// A warpgroup therefore accumulates only dV or dK of 64 keys x 256 columns, 128 registers a thread. The memory traffic
// of dQ is that of a kernel with 128 keys for each block; the shared memory of a single block is too small for 128
// keys.
//
// Grid: two blocks for each tile of block_n keys and KV head, in clusters. Roles in each block: the producer, two
// warpgroups of 64 keys each and one for dQ; deterministic, also threads that wait for dQ's semaphores; with dropout,
// also warps in block 0 that generate the dropout bits (attention/backward/scores.cuh). 512 threads, one block on a
// multiprocessor.
//
//   config.hpp   BwdSm90D256Config, the layout of shared memory; the launch parameters are BwdSm90Params
//   shared.cuh   the offsets of tiles and barriers, in both blocks
//   loads.cuh    the producer: the block's keys once, and in each step halves of Q and dO
//   scores.cuh   a key warpgroup: P or dS, and its dV or dK
//   dq.cuh       the dQ warpgroup, and deterministic the threads that wait for the semaphores
//   kernel.cuh   the roles of a block's warps
#pragma once

#include "tessera/attention/backward/scores.cuh"
#include "tessera/bwd_sm90_d256/dq.cuh"
#include "tessera/bwd_sm90_d256/loads.cuh"
#include "tessera/bwd_sm90_d256/scores.cuh"

namespace tessera {

// Deterministic: clusters are assigned keys in the order in which they start; block 0 passes the ticket to block 1.
template <class Shared, BwdSm90D256Config kCfg>
TESSERA_DEVICE void take_ticket(const BwdSm90Params& p, KeyBlock& block) {
  int index = 0;
  if (Shared::kRank == 0 && threadIdx.x == 32) {
    ptx::griddepcontrol_wait();  // the previous kernel cleared the ticket
    index = atomicAdd(p.ticket, 1);
    ptx::st_shared_cluster_s32(Shared::other_order_word(block), index);
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (threadIdx.x == 32)
    block = key_block<kCfg>(p, Shared::kRank == 0 ? index : ptx::ld_shared_s32(Shared::order_word(block)));
  __syncthreads();
}

template <BwdSm90D256Config kCfg, int kRank>
TESSERA_DEVICE void bwd_sm90_d256_block(const BwdSm90Params& p, char* shared_memory) {
  using Shared = BwdSm90D256Shared<kCfg, kRank>;
  const Shared shared(shared_memory);  // called by whole warps: its descriptor is uniform
  auto& block = *reinterpret_cast<KeyBlock*>(shared_memory + Shared::kAt.block);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(kRank == 0 ? &p.k_map : &p.v_map);
    ptx::prefetch_tensormap(&p.q_map);
    ptx::prefetch_tensormap(&p.d_o_map);
    shared.init();
  }
  if (!kCfg.deterministic && threadIdx.x == 32) {
    int index = static_cast<int>(blockIdx.x) / 2;
    if constexpr (kCfg.block_mask) {
      ptx::griddepcontrol_wait();  // the previous kernel computed the order
      if constexpr (!kCfg.program_lists()) index = p.order[index];
    }
    block = key_block<kCfg>(p, index);
    if constexpr (kCfg.block_mask) use_lists<kCfg.block_n, kCfg.program_lists()>(p, block);
  }
  __syncthreads();
  ptx::barrier_cluster_arrive_relaxed();  // the other block's barriers are initialised
  ptx::barrier_cluster_wait();
  if constexpr (kCfg.deterministic) take_ticket<Shared, kCfg>(p, block);
  ptx::griddepcontrol_launch_dependents();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  constexpr BwdSm90Registers kRegisters = bwd_registers(kCfg.half_dim(), kCfg.score.dropout);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kRegisters.producer>();
    BwdSm90D256Producer<Shared, kCfg> producer{p, shared, block};
    if (threadIdx.x == 0) producer.run();
    if (kRank == 1 && threadIdx.x == 32) producer.send_gradients();
    if constexpr (kCfg.deterministic) {
      const int thread = static_cast<int>(threadIdx.x) / 32 - (kRank == 0 ? 1 : 2);
      if (threadIdx.x % 32 == 0 && thread >= 0 && thread < Shared::kDqThreads) {
        D256SemaphoreThread<Shared, kCfg>{p, shared, block, thread}.run();
      }
    }
    if constexpr (kRank == 0 && kCfg.score.dropout) {
      constexpr int kFirstWarp = 4 - Shared::kDropoutWarps;
      const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
      if (warp >= kFirstWarp) DropoutWarps<Shared, kCfg>{p, shared, block}.run(warp - kFirstWarp);
    }
  } else if (warpgroup == 3) {
    ptx::setmaxnreg_dec<kRegisters.dq>();
    D256DqWarpgroup<Shared, kCfg>{p, shared, block}.run();
  } else {
    ptx::setmaxnreg_inc<kRegisters.scores>();
    KeyWarpgroup<Shared, kCfg>(p, shared, block, warpgroup - 1).run();
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();  // the other block may still send data to this block or arrive at its barriers
  ptx::barrier_cluster_wait();
}

template <BwdSm90D256Config kCfg>
TESSERA_DEVICE void bwd_sm90_d256(const BwdSm90Params& p) {
  static_assert(!(kCfg.staged_dq && kCfg.deterministic), "the semaphores order additions from registers");
  static_assert(kCfg.head_dim_v <= kCfg.head_dim, "dO's halves lie in the places of Q's");
  static_assert(kCfg.block_m > kListHidden, "a step's word: its first query and what is hidden");
  static_assert(kCfg.half_slots >= 5, "a step's four halves and a next one; the results leave through four");
  // The load of step j + 3's first half, item 4 (j + 3) of the ring, waits until item 4 (j + 3) - slots is released. A
  // warp releases that item after step j if it belongs to step j + 1 or later: LSE and delta of step j have then been
  // read.
  static_assert(4 * kBwdD256StatStages - (kCfg.half_slots + 2) >= 4, "rows of LSE and delta have no barriers");
  static_assert(bwd_sm90_d256_layout(kCfg, 0).bytes <= 227 * 1024 && bwd_sm90_d256_layout(kCfg, 1).bytes <= 227 * 1024,
                "shared memory of a block");
  extern __shared__ __align__(1024) char shared_memory[];
  if (ptx::cluster_ctarank() == 0) {
    bwd_sm90_d256_block<kCfg, 0>(p, shared_memory);
  } else {
    bwd_sm90_d256_block<kCfg, 1>(p, shared_memory);
  }
}

}  // namespace tessera
