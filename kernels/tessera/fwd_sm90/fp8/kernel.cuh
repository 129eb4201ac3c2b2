// Forward on Hopper with q, k and v of e4m3: O = softmax(scale Q K^T) V and LSE, by wgmma of 8-bit elements.
//
// Work tiles, their scheduler, the loads of Q and K, masks and sums are fwd_sm90's. What differs:
//   - V is transposed in shared memory, by a producer warpgroup of its own (loads.cuh).
//   - The maxima of every block are computed, P is rounded to e4m3 after a factor of 2^8 (scores.cuh).
//   - The tensor cores add 8-bit products with about 14 bits. Each block's P V, at most 128 keys in four instructions,
//     therefore has accumulators of its own and is added to O in float32, in parts of its columns for which there are
//     registers. Q K^T takes head_dim / 32 instructions, at most 8.
//   - The scales of q and k are factors in the softmax's exponent, that of v one at the end; v's scale of 128 keys is
//     the unit of O while their P V is added, and so part of O's factor.
//
// Block: (consumers + 2) x 128 threads, one block on a multiprocessor; setmaxnreg moves registers from the producers to
// the consumers. Details: docs/reference/kernels/fwd_sm90.md.
//
//   config.hpp  FwdSm90Fp8Config, FwdSm90Fp8Params, the layout of shared memory
//   shared.cuh  a block's shared memory
//   loads.cuh   the transpose of V
//   scores.cuh  a consumer: S -> P, the products, O
//   kernel.cuh  the roles
#pragma once

#include "tessera/attention/unowned_rows.cuh"
#include "tessera/fwd_sm90/fp8/loads.cuh"
#include "tessera/fwd_sm90/fp8/scores.cuh"
#include "tessera/ptx/synchronization.cuh"

namespace tessera {

template <FwdSm90Fp8Config kCfg>
TESSERA_DEVICE void fwd_sm90_fp8(const FwdSm90Fp8Params& p) {
  constexpr FwdSm90Config kTiles = kCfg.tiles();
  static_assert(has_fwd_sm90_fp8_layout<kCfg>(), "shared memory lies where the host has it");
  static_assert(sizeof(WorkTile<kTiles>) == kWorkTileBytes);
  static_assert(whole_q_stages(kCfg.consumers, kCfg.q_stages), "a stage is one consumer's");
  static_assert(kv_rings_cannot_deadlock(kCfg.consumers, kCfg.block_n, kCfg.k_stages, kCfg.v_stages));
  static_assert(kCfg.consumers >= 2 && kCfg.consumers <= 4, "setmaxnreg has numbers for these");
  static_assert(kCfg.block_n <= 128, "the products of a block are added by the tensor cores");
  static_assert(!kCfg.block_scales || kScaleTokens % kCfg.block_n == 0, "one scale a block");
  static_assert(!kCfg.score.entries() && !kCfg.score.dropout, "options that the family refuses");
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<Fp8SharedMemory<kCfg>*>(shared_memory);

  // 1. Barriers. The tile ring is released by three threads that load, and by every transposing and consumer warp.
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&p.q_map);
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.v_map);
    shared.tile_ring.init(3 + kTransposingWarps + kCfg.consumers * 4);
    shared.q_ring.init(4);
    shared.k_ring.init(kCfg.consumers * 4);
    shared.v_ring.init(kCfg.consumers * 4, kTransposingWarps);
    shared.raw_ring.init(kTransposingWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  // 2. Roles. setmaxnreg moves registers within what the launch gave: of 65536, 128 a thread of four warpgroups, 96 of
  // five, 80 of six.
  constexpr int kWarpgroups = kCfg.consumers + kFp8ProducerWarpgroups;
  constexpr bool kFew = kCfg.consumers == 2 && kCfg.head_dim_v <= 128;
  constexpr int kProducerRegisters = kFew ? 40 : 24;
  constexpr int kConsumerRegisters = kFew ? 216 : kCfg.consumers == 2 ? 232 : kCfg.consumers == 3 ? 144 : 104;
  static_assert(kFp8ProducerWarpgroups * kProducerRegisters + kCfg.consumers * kConsumerRegisters <=
                    65536 / (kWarpgroups * 128) / 8 * 8 * kWarpgroups,
                "setmaxnreg would wait for ever");
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) load_q<kTiles>(p, shared);
    if (threadIdx.x == 32) load_kv<kTiles, true>(p, shared, shared.k_ring, shared.sK, &p.k_map);
    if (threadIdx.x == 64) load_kv<kTiles, false>(p, shared, shared.raw_ring, shared.sRawV, &p.v_map);
    if (threadIdx.x == 96) schedule_tiles<kTiles>(p, shared);
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    transpose_blocks<kCfg>(shared, uniform(static_cast<int>(threadIdx.x) / 32 % kTransposingWarps));
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    if (kCfg.varlen && p.cu_seqlens_q) {  // clear rows of no sequence while the first tiles are loaded
      constexpr int kWarps = kCfg.consumers * 4;
      const int64 warp =
          static_cast<int64>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32 - kFp8ProducerWarpgroups * 4;
      clear_unowned_outputs<kCfg.dtype_o>(p, warp, static_cast<int64>(gridDim.x) * kWarps);
    }
    Fp8Consumer<kCfg> consumer(p, shared, warpgroup - kFp8ProducerWarpgroups);
    consumer.attend_tiles();
  }
}

}  // namespace tessera
