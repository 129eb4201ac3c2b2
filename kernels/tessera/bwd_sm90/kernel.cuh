// Backward on Hopper: dQ, dK, dV from Q, K, V, dO, LSE and delta, as in FlashAttention-3: TMA, wgmma and specialised
// warpgroups.
//
// Grid: one block for each tile of block_n keys and KV head. It loops over the queries of all query heads of the KV
// head, so dK and dV accumulate in registers, whatever the size of the group. dQ accumulates in float32 in global
// memory. Roles: a producer thread, two warpgroups of 64 keys each and one for dQ; deterministic, also threads that add
// dQ; with dropout, also warps that generate the dropout bits (attention/backward/scores.cuh).
//
// Block: 512 threads, one block on a multiprocessor. Details and measurements: docs/reference/kernels/bwd_sm90.md.
//
//   config.hpp       BwdSm90Config, the layout of shared memory; the launch parameters are BwdSm90Params
//   shared.cuh       the offsets of tiles and barriers
//   loads.cuh        the producer: K and V once, and in each step Q, dO, LSE and delta
//   scores.cuh       a score warpgroup: P, dS, and its dK and dV
//   gradients.cuh    ... its dS
//   slopes.cuh       ... of score programs whose slope depends on the score
//   whole_head.cuh   short heads: a form of its own, with a head in a block and without a dQ warpgroup
//   diagonals.cuh    sums of dScore along i - j, for gradients of score programs' tensors
//   dq.cuh           the dQ warpgroup, and deterministic the threads that add dQ
//   kernel.cuh       the roles of a block's warps
//   rows.cuh         the kernels before and after this one: delta, LSE, the order of key tiles, dQ's rounding
//   product_sums.cuh   the kernel after this one where the gradient of a score program's factor is requested
//   group_sums.cuh   a kernel after it: the sums of dK and dV of a split group
#pragma once

#include "tessera/attention/backward/scores.cuh"
#include "tessera/bwd_sm90/diagonals.cuh"
#include "tessera/bwd_sm90/dq.cuh"
#include "tessera/bwd_sm90/gradients.cuh"
#include "tessera/bwd_sm90/loads.cuh"
#include "tessera/bwd_sm90/slopes.cuh"
#include "tessera/bwd_sm90/whole_head.cuh"

namespace tessera {

template <BwdSm90Config kCfg>
TESSERA_DEVICE void bwd_sm90(const BwdSm90Params& p) {
  static_assert(kCfg.block_n == 128, "two score warpgroups of 64 keys");
  static_assert(kCfg.block_m % 64 == 0, "dQ is made by wgmma, 64 queries at once");
  static_assert(!kCfg.score.facts().blocks && !(kCfg.score.facts().reshapes && kCfg.score.adds()), "BwdSm90Config");
  static_assert(!kCfg.block_mask || kCfg.block_m == 64,
                "a step is a list's entry, which says for each score warpgroup whether it is masked");
  static_assert(!(kCfg.block_mask && kCfg.alternate), "a warpgroup skips steps that are hidden from its keys");
  static_assert(kCfg.whole_head || kCfg.ds_stages == kCfg.stages, "a score warpgroup counts them as one");
  static_assert(kCfg.stages >= 2, "a step's tiles are loaded while the last one's are used");
  static_assert(bwd_sm90_layout(kCfg).bytes <= 227 * 1024, "shared memory of a block");
  extern __shared__ __align__(1024) char shared_memory[];
  const BwdSm90Shared<kCfg> shared(shared_memory);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.q_map);
    ptx::prefetch_tensormap(&p.v_map);
    ptx::prefetch_tensormap(&p.d_o_map);
    shared.init();
  }
  auto& block = *reinterpret_cast<KeyBlock*>(shared_memory + bwd_sm90_layout(kCfg).block);
  if constexpr (kCfg.whole_head) {
    run_whole_head(p, shared, &block);
    return;
  }
  if (threadIdx.x == 32) {
    int index = static_cast<int>(blockIdx.x);
    if constexpr (kCfg.deterministic) {  // in the order in which blocks start
      ptx::griddepcontrol_wait();        // the previous kernel cleared the ticket
      index = atomicAdd(p.ticket, 1);
    }
    if constexpr (kCfg.block_mask && !kCfg.deterministic) {
      ptx::griddepcontrol_wait();  // the previous kernels computed the lists and the order
      if constexpr (!kCfg.program_lists()) index = p.order[index];
    }
    block = key_block<kCfg>(p, index);
    if constexpr (kCfg.block_mask) use_lists<kCfg.block_n, kCfg.program_lists()>(p, block);
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();
  constexpr BwdSm90Registers kRegisters = bwd_registers(kCfg.head_dim, kCfg.score.dropout || kCfg.d_diagonal);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kRegisters.producer>();
    if (threadIdx.x == 0) BwdSm90Producer<kCfg>{p, shared, block}.run();
    if constexpr (kCfg.deterministic) {
      const int thread = static_cast<int>(threadIdx.x) / 32 - 1;
      if (threadIdx.x % 32 == 0 && thread >= 0 && thread < DqThread<kCfg>::kThreads) {
        DqThread<kCfg>{p, shared, block, thread}.run();
      }
    }
    if constexpr (kCfg.d_diagonal) {
      const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
      if (warp > 0) DiagonalWarp<kCfg>{p, shared, block, warp - 1}.run();
    }
    if constexpr (kCfg.score.dropout) {
      constexpr int kFirstWarp = 4 - BwdSm90Shared<kCfg>::kDropoutWarps;
      const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
      if (warp >= kFirstWarp) DropoutWarps<BwdSm90Shared<kCfg>, kCfg>{p, shared, block}.run(warp - kFirstWarp);
    }
  } else if (warpgroup == 3) {
    ptx::setmaxnreg_dec<kRegisters.dq>();
    DqWarpgroup<kCfg>{p, shared, block}.run();
  } else {
    ptx::setmaxnreg_inc<kRegisters.scores>();
    ScoreWarpgroup<kCfg>(p, shared, block, warpgroup - 1).run();
  }
}

}  // namespace tessera
