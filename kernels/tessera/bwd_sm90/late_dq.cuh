// The form of bwd_sm90 without a dQ warpgroup: two score warpgroups of 240 registers make dQ too, each a half of a
// step's tile. S of the next step is issued ahead and runs under the last products of this one; dQ is made one step
// late, so no warpgroup waits for the other's dS. dP has registers of its own, so P stays in float32 from its
// exponential to dS, and P's 16-bit operand is made just before its product. At head size 64 V is in registers.
//
// A step of a warpgroup, with what is in flight:
//
//   issue dP            | P = exp2(S - LSE)
//   wait for dP         | dS = P o (dP - delta)
//   issue dV            | dS to shared memory
//   issue dK, wait for dV, release dO
//   issue dQ of the step before, issue S of the next step
//   wait for dK and dQ, release Q and the dS of the step before | add dQ
//   wait for S
#pragma once

#include "tessera/bwd_sm90/dq.cuh"
#include "tessera/bwd_sm90/scores.cuh"

namespace tessera {

template <BwdSm90Config kCfg>
struct LateDqWarpgroup : ScoreWarpgroup<kCfg> {
  using Base = ScoreWarpgroup<kCfg>;
  using Base::at, Base::block, Base::p, Base::shared, Base::warpgroup;
  using Base::kM, Base::kSteps, Base::lane, Base::rdK, Base::rdS, Base::rdV, Base::rP, Base::rS, Base::warp_key;
  using typename Base::Coordinates;
  using typename Base::Gradients;
  using typename Base::KeyGradientProduct;
  using typename Base::Keys;
  using typename Base::OutputGradients;
  using typename Base::Queries;
  using typename Base::ScoreProduct;
  using typename Base::Shared;
  using typename Base::ValueGradientProduct;
  using typename Base::Values;

  static_assert(kCfg.head_dim == 64 || kCfg.head_dim == 128, "a warpgroup makes 64 x 64 of a step's dQ");
  static_assert(kCfg.block_m * kCfg.head_dim == 2 * 64 * 64, "a step's dQ has two parts");
  static_assert(!kCfg.alternate && !kCfg.block_mask && !kCfg.d_bias && !kCfg.score.entries() && !kCfg.score.adds() &&
                    !kCfg.score.dropout && !kCfg.score.facts().reshapes,
                "BwdSm90Config");
  static_assert(kCfg.staged_dq, "dQ is added by bulk copies");
  static_assert(kCfg.stages * kCfg.block_m >= kCfg.block_n, "dK is stored by way of Q's stages");
  static constexpr int kPartCols = 64, kPartsARow = kCfg.head_dim / kPartCols;
  static constexpr int kPartBytes = 16 * kPartCols * 4;  // of a warp's 16 queries
  static constexpr bool kValuesInRegisters = kCfg.head_dim == 64;
  // dV is stored under the last step's products, for which head size 128 has no registers, or under the last dQ's.
  static constexpr bool kStoresEarly = kCfg.head_dim == 64;
  static constexpr bool kHalves = kCfg.block_m == 128;
  using HalfProduct = ptx::Wgmma<kCfg.dtype, kHalves ? 64 : 32, false>;
  static constexpr int kValueSteps = kValuesInRegisters ? kCfg.head_dim / 16 : 1;

  float rdP[1][kM][4];
  // dQ of the step before. At head size 128 it is in rdP: a variable more would be more registers than there are.
  float rdQ[1][kPartCols / 8][4];
  uint32 rV[kValueSteps][4];             // A fragments of this warpgroup's 64 rows of V
  RingPosition<kCfg.stages> before;      // of the step before
  int slot_before;                       // padded index of its query tile
  RingPosition<kBwdDqStages> staged_at;  // deterministic

  using Base::Base;

  TESSERA_DEVICE auto dq() -> float (&)[1][kPartCols / 8][4] {
    if constexpr (kCfg.head_dim == 128) {
      return rdP;
    } else {
      return rdQ;
    }
  }

  TESSERA_DEVICE void run() {
    const int steps = uniform(block.steps);
    if (steps == 0) {
      store_values();
      store_keys();
      ptx::cp_async_bulk_wait_group_read();
      return;
    }
    ptx::griddepcontrol_wait();  // the previous kernel clears dq_accum
    ptx::mbarrier_wait_parity(shared.k_full(), 0);
    if constexpr (kCfg.varlen) {
      ptx::mbarrier_wait_parity(shared.v_full(), 0);
      this->clear_keys();
    }
    const bool hidden = first_queries_are_hidden();
    if (kHalves && hidden) {
      begin<kHalves>();
      step<true, kHalves>(steps == 1);
    } else if (!kHalves && hidden && steps > 1) {
      slot_before = ptx::ld_shared_s32(shared.step(at));
      this->skip_step();
      before = at;
      at.advance();
      begin<false>();
    } else {
      begin<false>();
      step<true>(steps == 1);
    }
#pragma unroll 1
    for (int left = steps - 1; left > 0; --left) step<false>(left == 1);
    // dQ of the last step; dK is stored under its product.
    shared.wait_full(Shared::kDS, before);
    issue_dq();
    if constexpr (!kStoresEarly) store_values();
    store_keys();
    ptx::wgmma_wait_group<0>();
    add_dq();
    ptx::cp_async_bulk_wait_group_read();  // before the next block uses this shared memory
  }

  // Under a causal mask the first 64 queries of a block see none of the second warpgroup's keys. With 64 queries a step,
  // it skips the step; with 128, the products of these queries.
  TESSERA_DEVICE bool first_queries_are_hidden() const {
    shared.wait_full(Shared::kQ, at);
    const int key = block.key0 + warpgroup * 64;
    return key < block.s.sk && seeing_queries(p, block.s, key, key).low >= this->step_row0() + 64;
  }
  // The first S, and V.
  template <bool kHalf>
  TESSERA_DEVICE void begin() {
    issue_next_scores<kHalf>();
    ptx::mbarrier_wait_parity(shared.v_full(), 0);
    load_values();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rS));
  }

  // kFirst: there is no dQ of a step before. kHalf: of the queries, the first half is hidden; masks clear what their
  // registers hold. last: there is no next step.
  template <bool kFirst, bool kHalf = false>
  TESSERA_DEVICE void step(bool last) {
    const int slot = ptx::ld_shared_s32(shared.step(at));
    shared.wait_full(Shared::kDO, at);
    if constexpr (kCfg.varlen) this->template clear_queries<OutputGradients>(Shared::kAt.d_o);
    if constexpr (kCfg.score.scaled()) this->score_step.apply(Coordinates(*this), rS[0]);
    // Before dP's product: its accumulators leave no registers for the rows' statistics.
    const bool far = is_far(this->lse(0).x);
    if (far) [[unlikely]]
      this->far_exponents();
    issue_probability_gradients<kHalf>();
    const bool hides_some = this->masked();
    weights(hides_some, far);
    // Waits for the place of dS here: the compiler moves no exponential past the branch, so they run under dP.
    shared.wait_empty(Shared::kDS, at);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rdP));
    gradients();
    if (hides_some) this->clear_hidden();
    issue_value_gradients<kHalf>();
    hand_on_gradients<Gradients>(shared.tile(Shared::kAt.d_s, Gradients::kBytes, at), warpgroup * 64 + warp_key(), rdS);
    Shared::arrive_warp(shared.full(Shared::kDS, at));
    issue_key_gradients<kHalf>();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(flat(rdV));
    Shared::arrive_warp(shared.empty(Shared::kDO, at));
    if constexpr (!kFirst) {
      shared.wait_full(Shared::kDS, before);
      issue_dq();
    }
    const RingPosition<kCfg.stages> mine = at;
    at.advance();
    if (last) {
      if constexpr (kStoresEarly) store_values();
      ptx::wgmma_wait_group<0>();
      finish<kFirst>(mine);
    } else {
      issue_next_scores<false>();
      ptx::wgmma_wait_group<1>();
      finish<kFirst>(mine);
      ptx::wgmma_wait_group<0>();  // S is not in flight over a branch, which would serialise all products
      ptx::wgmma_pin(flat(rS));
    }
    before = mine, slot_before = slot;
  }
  // dK of the step at `mine` and dQ of the step before are complete.
  template <bool kFirst>
  TESSERA_DEVICE void finish(const RingPosition<kCfg.stages>& mine) {
    ptx::wgmma_pin(flat(rdK));
    Shared::arrive_warp(shared.empty(Shared::kQ, mine));
    if constexpr (!kFirst) add_dq();
  }

  // ---- products ----

  // S of the step at `at`, once its Q is there.
  template <bool kHalf>
  TESSERA_DEVICE void issue_next_scores() {
    shared.wait_full(Shared::kQ, at);
    if constexpr (kCfg.varlen) this->template clear_queries<Queries>(Shared::kAt.q);
    if constexpr (!kHalf) {
      this->issue_scores();
    } else {
      const TileDescriptor k = this->key_rows(shared.keys(Shared::kAt.k));
      const TileDescriptor q = shared.tile_descriptor(Shared::kAt.q, Queries::kBytes, at);
      ptx::wgmma_forget(flat(rS));
      ptx::wgmma_fence();
#pragma unroll
      for (int d = 0; d < kCfg.head_dim; d += 16) {
        HalfProduct::ss(second_half(rS), inner_major<Keys>(k, 0, d), inner_major<Queries>(q, kCfg.block_m / 2, d),
                        d > 0);
      }
      ptx::wgmma_commit_group();
    }
  }
  // The accumulators of a step's second half of the queries.
  TESSERA_DEVICE static auto second_half(float (&acc)[1][kM][4]) -> float (&)[kM * 2] {
    return reinterpret_cast<float(&)[kM * 2]>(acc[0][kM / 2]);
  }
  TESSERA_DEVICE void load_values() {
    if constexpr (!kValuesInRegisters) return;
#pragma unroll
    for (int k = 0; k < kValueSteps; ++k) {
      ptx::ldmatrix_x4(rV[k], Values::at(shared.base + Shared::kAt.v, warpgroup * 64 + warp_key() + lane() % 16,
                                         k * 16 + lane() / 16 * 8));
    }
  }
  // dP^T = V dO^T.
  template <bool kHalf>
  TESSERA_DEVICE void issue_probability_gradients() {
    const TileDescriptor v = this->key_rows(shared.keys(Shared::kAt.v));
    const TileDescriptor d_o = shared.tile_descriptor(Shared::kAt.d_o, OutputGradients::kBytes, at);
    if constexpr (kCfg.head_dim == 64) ptx::wgmma_forget(flat(rdP));
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kCfg.head_dim; d += 16) {
      const unsigned long long b = inner_major<OutputGradients>(d_o, kHalf ? kCfg.block_m / 2 : 0, d);
      if constexpr (kHalf) {
        HalfProduct::rs(second_half(rdP), rV[d / 16], b, d > 0);
      } else if constexpr (kValuesInRegisters) {
        ScoreProduct::rs(flat(rdP), rV[d / 16], b, d > 0);
      } else {
        ScoreProduct::ss(flat(rdP), inner_major<Values>(v, 0, d), b, d > 0);
      }
    }
    ptx::wgmma_commit_group();
  }
  // dV += P^T dO.
  template <bool kHalf>
  TESSERA_DEVICE void issue_value_gradients() {
    const TileDescriptor d_o = shared.tile_descriptor(Shared::kAt.d_o, OutputGradients::kBytes, at);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = kHalf ? kSteps / 2 : 0; step < kSteps; ++step) {
      ValueGradientProduct::rs(flat(rdV), rP[step], outer_major<OutputGradients>(d_o, step * 16), 1);
    }
    ptx::wgmma_commit_group();
  }
  // dK += dS^T Q.
  template <bool kHalf>
  TESSERA_DEVICE void issue_key_gradients() {
    const TileDescriptor q = shared.tile_descriptor(Shared::kAt.q, Queries::kBytes, at);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = kHalf ? kSteps / 2 : 0; step < kSteps; ++step) {
      KeyGradientProduct::rs(flat(rdK), rdS[step], outer_major<Queries>(q, step * 16), 1);
    }
    ptx::wgmma_commit_group();
  }
  // This warpgroup's part of dQ of the step before: 64 queries at head size 64, 64 columns at 128.
  TESSERA_DEVICE void issue_dq() {
    TileDescriptor d_s = shared.tile_descriptor(Shared::kAt.d_s, Gradients::kBytes, before),
                   k = shared.keys(Shared::kAt.k);
    d_s.address += warpgroup / kPartsARow * (64 * kChunkRowBytes / 16);
    k.address += warpgroup % kPartsARow * (Keys::kChunkBytes / 16);
    issue_dq_part<kCfg.dtype, Gradients, Keys>(dq(), d_s, k);
  }

  // ---- P and dS ----

  // Turns scores, or with `far` exponents, into P.
  TESSERA_DEVICE void weights(bool hides_some, bool far) {
    if (!far) {
      if (hides_some) {
        this->template exponents<true>();
      } else {
        this->template exponents<false>();
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) rS[0][m][i] = ptx::ex2_approx_ftz(rS[0][m][i]);
  }
  // Turns P and dP into the operands P and dS.
  TESSERA_DEVICE void gradients() {
    const uint32 delta = this->stats(true);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float2 minus = ptx::ld_shared_f32x2(delta + m * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = rS[0][m][2 * half], high = rS[0][m][2 * half + 1];
        rP[m / 2][m % 2 * 2 + half] = weight_pair(low, high);
        rdS[m / 2][m % 2 * 2 + half] =
            pack_pair<kCfg.dtype>(low * lowered_difference<kCfg.dtype>(rdP[0][m][2 * half], minus.x),
                                  high * lowered_difference<kCfg.dtype>(rdP[0][m][2 * half + 1], minus.y));
      }
    }
  }
  TESSERA_DEVICE static uint32 weight_pair(float low, float high) {
    if constexpr (kCfg.dtype == Dtype::kFloat16) return ptx::cvt_rn_satfinite_f16x2(low, high);
    return pack_pair<kCfg.dtype>(low, high);
  }

  // ---- results ----

  // Adds the part of dQ whose product is complete, and releases its dS.
  TESSERA_DEVICE void add_dq() {
    ptx::wgmma_pin(flat(dq()));
    Shared::arrive_warp(shared.empty(Shared::kDS, before));
    const int warp = warp_key() / 16;
    const int offset =
        dq_part_offset<kCfg.head_dim>(warpgroup / kPartsARow * 4 + warp, warpgroup % kPartsARow * (kPartCols / 8));
    if constexpr (kCfg.deterministic) {  // for the thread that adds it: dq_thread.cuh
      shared.wait_empty(Shared::kDQ, staged_at);
      stage_dq_part(shared.tile(Shared::kAt.dq, Shared::kDqBytes, staged_at) + offset * 4, dq(), lane());
      ptx::fence_proxy_async();
      Shared::arrive_warp(shared.full(Shared::kDQ, staged_at));
      staged_at.advance();
    } else {
      float* to = p.dq_accum + static_cast<int64>(slot_before) * (kCfg.block_m * kCfg.head_dim) + offset;
      if (lane() == 0) ptx::cp_async_bulk_wait_group_read();
      __syncwarp();
      add_staged_dq_part(to, shared.base + Shared::kAt.dq + (warpgroup * 4 + warp) * kPartBytes, dq(), lane());
    }
  }

  // dV is staged in V's rows of shared memory, which only this warpgroup reads.
  TESSERA_DEVICE void store_values() {
    const int row = warpgroup * 64 + warp_key();
    if constexpr (kCfg.split_group) {
      store_part_rows(p, block, p.d_v_parts, kCfg.block_n, row, rdV, kBwdLower);
      return;
    }
    this->sync_warpgroup();
    store_gradient<kCfg, Values>(p, block, shared.base + Shared::kAt.v, row, rdV, kBwdLower, &p.d_v_map, p.d_v,
                                 p.head_dim_v);
  }
  // dK is staged in Q's stages, once both warpgroups have released them.
  TESSERA_DEVICE void store_keys() {
    const int row = warpgroup * 64 + warp_key();
    const float unit = p.scale * bwd_lower_late(kCfg.dtype);
    if constexpr (kCfg.split_group) {
      store_part_rows(p, block, p.d_k_parts, kCfg.block_n, row, rdK, unit);
      return;
    }
#pragma unroll
    for (int stage = 0; stage < kCfg.stages; ++stage) {
      shared.wait_empty(Shared::kQ, at);
      at.advance();
    }
    store_gradient<kCfg, Keys>(p, block, shared.base + Shared::kAt.q, row, rdK, unit, &p.d_k_map, p.d_k, p.head_dim);
  }
};

}  // namespace tessera
