// The dQ warpgroup of bwd_sm90_d512. In each step it computes 128 columns of dS K over the cluster's 128 keys and adds
// them in float32 to global memory, to which other clusters add too. It also accumulates dV or dK of the other side's
// keys; dV together with dQ of the step before, because P is available before dS.
#pragma once

#include "tessera/attention/backward/rows.cuh"
#include "tessera/bwd_sm90_d512/dk_dv.cuh"

namespace tessera {

template <class Shared, BwdSm90D512Config kCfg>
struct BwdD512DqWarpgroup : BwdD512Accumulator<Shared, kCfg> {
  using Base = BwdD512Accumulator<Shared, kCfg>;
  using Base::block, Base::kSteps, Base::kValues, Base::lane, Base::p, Base::rA, Base::shared, Base::warp;
  using KeyPart = typename Shared::KeyPart;
  using Exchange = typename Shared::Exchange;
  using DqProduct = ptx::Wgmma<kCfg.dtype, kCfg.slot_dim, true>;
  static constexpr int kParts = kCfg.slot_dim / 8;
  static_assert(KeyPart::kChunkBytes == Shared::Keys::kChunkBytes, "K's columns are read from either");

  uint32 added = 0, accumulated = 0;  // steps that are done
  int tile = 0, slot;                 // query tile of the next dQ
  float rdQ[1][kParts][4];

  TESSERA_DEVICE BwdD512DqWarpgroup(const BwdSm90Params& p, const Shared& shared, const KeyBlock& block)
      : Base(p, shared, block), slot(block.head_kv * p.group * p.q_slots + block.slot0 + block.first_tile) {}

  TESSERA_DEVICE static int other_side() { return D512Place::side() ^ 1; }

  TESSERA_DEVICE void run() {
    const auto steps = static_cast<uint32>(uniform(block.steps));
    if (steps > 0) {
      if constexpr (kValues) ptx::mbarrier_wait_parity(shared.barrier(Shared::kKeysFull), 0);
      ptx::mbarrier_wait_parity(shared.barrier(Shared::kKPartsFull), 0);
      ptx::griddepcontrol_wait();  // the previous kernel clears dq_accum
      if constexpr (kValues) step<false, true>();
#pragma unroll 1
      while (accumulated < steps) step<true, true>();
      if constexpr (kValues) step<true, false>();
    }
    ptx::barrier_sync(kD512ScoresDone, 256);
    Base::store(other_side());
  }

  template <bool kAdd, bool kAccumulate>
  TESSERA_DEVICE void step() {
    if constexpr (kAdd) multiply();
    if constexpr (kAccumulate) {
      load_operand();
      Base::accumulate(accumulated);
    }
    if constexpr (kAdd) {
      ptx::wgmma_wait_group<kAccumulate ? 1 : 0>();
      ptx::wgmma_pin(flat(rdQ));
      Shared::arrive_warp(shared.at_stage(Shared::kFree, added), 0, 2);
      add<0, kParts / 2>();
    }
    // Between the additions, which take as long as the product: the buffers can then be loaded again.
    if constexpr (kAccumulate) {
      ptx::wgmma_wait_group<0>();
      Base::accumulated();
      ++accumulated;
    }
    if constexpr (kAdd) {
      add<kParts / 2, kParts>();
      ++added, ++slot;
      if (++tile == block.tiles) tile = 0, slot += p.q_slots - block.tiles;
    }
  }

  // dQ = dS K of the block's columns.
  TESSERA_DEVICE void multiply() {
    shared.wait_stage(Shared::kDSFull, added);
    if (threadIdx.x % 128 == 0) {
      ptx::mbarrier_arrive_expect_tx(shared.at_stage(Shared::kDSFull, added), Shared::kDSBytes);
    }
    const TileDescriptor d_s = shared.exchange_descriptor(added);
    const TileDescriptor k[2] = {keys_of(0), keys_of(1)};
    ptx::wgmma_forget(flat(rdQ));
    ptx::wgmma_fence();
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int key = 0; key < kCfg.score_keys; key += 16) {
        DqProduct::ss(flat(rdQ), inner_major<Exchange>(d_s, 0, side * kCfg.score_keys + key),
                      outer_major<KeyPart>(k[side], key), side + key > 0);
      }
    ptx::wgmma_commit_group();
  }
  // The block's columns of K of a side: in k_parts, except those that `keys` holds.
  TESSERA_DEVICE TileDescriptor keys_of(int side) const {
    if constexpr (!kValues) return shared.tile_descriptor(Shared::kAt.k_parts + side * KeyPart::kBytes);
    TileDescriptor k = shared.tile_descriptor(Shared::kAt.k_parts);
    const uint32 own = D512Place::rank() * (KeyPart::kBytes / 16) - (Shared::kAt.k_parts - Shared::kAt.keys) / 16;
    k.address += side == D512Place::side() ? own : 0;
    return k;
  }
  template <int kFirst, int kLast>
  TESSERA_DEVICE void add() const {
    float* gdQ = p.dq_accum + static_cast<int64>(slot) * (kCfg.block_m * kCfg.head_dim);
    float* to = dq_part<kCfg.head_dim>(gdQ, warp(), static_cast<int>(D512Place::rank()) * kParts);
#pragma unroll
    for (int n = kFirst; n < kLast; ++n) dq_add(to + n * 128, lane(), rdQ[0][n]);
  }

  // Loads the other side's P^T or dS^T.
  TESSERA_DEVICE void load_operand() {
    if constexpr (kValues) {
      shared.wait_stage(Shared::kPFull, accumulated);
      if (threadIdx.x % 128 == 0) {
        ptx::mbarrier_arrive_expect_tx(shared.at_stage(Shared::kPFull, accumulated), Shared::kSideBytes);
      }
      const uint32 from = shared.peer_word(accumulated, not_hoisted(threadIdx.x % 128));
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const uint4 words = ptx::ld_shared_16(from + k * (128 * 16));
        rA[k][0] = words.x, rA[k][1] = words.y, rA[k][2] = words.z, rA[k][3] = words.w;
      }
    } else {
      take_gradients<Exchange>(rA, shared.exchange(accumulated), other_side() * kCfg.score_keys + warp() * 16);
    }
  }
};

}  // namespace tessera
