// The score warpgroup of bwd_sm90_d512, for the 64 keys of its block's side. Scores are transposed, [keys][queries], so
// that P^T and dS^T are operands from registers.
//
//   kD512Values   S^T = K Q^T      P = exp(scale S - LSE) -> kD512Keys, other side     dV += P^T dO
//   kD512Keys     dP^T = V dO^T    dS = P o (dP - delta) -> all                        dK += dS^T Q
//
// P is sent to kD512Keys in float16, scaled up by 2^15 so that small weights keep their bits. A thread sends P to the
// same thread there, into the 16-byte words that this thread's warp later overwrites with dS: no other warp reads or
// writes these words before dS is complete. P is also sent to the other side's dQ warpgroup, which accumulates dV of
// these keys too, in the type of the operand.
#pragma once

#include "tessera/attention/backward/rows.cuh"
#include "tessera/attention/score/options.cuh"
#include "tessera/bwd_sm90_d512/dk_dv.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

template <class Shared, BwdSm90D512Config kCfg>
struct BwdD512ScoreWarpgroup : BwdD512Accumulator<Shared, kCfg> {
  using Base = BwdD512Accumulator<Shared, kCfg>;
  using Base::block, Base::kSteps, Base::kValues, Base::lane, Base::p, Base::rA, Base::shared, Base::warp;
  using Keys = typename Shared::Keys;
  using Slot = typename Shared::Slot;
  using Exchange = typename Shared::Exchange;
  static constexpr int kM = kCfg.block_m / 8;
  using ScoreProduct = ptx::Wgmma<kCfg.dtype, kCfg.block_m, false>;

  uint32 steps = 0;    // steps that are done
  float rS[1][kM][4];  // S or dP
  float2 rStats[kM];   // LSE or delta

  TESSERA_DEVICE BwdD512ScoreWarpgroup(const BwdSm90Params& p, const Shared& shared, const KeyBlock& block)
      : Base(p, shared, block) {}

  // The first of the warp's 16 keys.
  TESSERA_DEVICE static int warp_key() { return D512Place::side() * kCfg.score_keys + warp() * 16; }

  TESSERA_DEVICE void run() {
    if (uniform(block.steps) > 0) {
      ptx::mbarrier_wait_parity(shared.barrier(Shared::kKeysFull), 0);
      const int first = uniform(block.first_tile), end = first + uniform(block.tiles), all = uniform(block.steps);
      int tile = first;
      step<true>(tile * kCfg.block_m);
#pragma unroll 1
      while (static_cast<int>(steps) < all) {
        if (++tile == end) tile = first;
        step<false>(tile * kCfg.block_m);
      }
      Base::accumulate(steps - 1);
      ptx::wgmma_wait_group<0>();
      Base::accumulated();
    }
    ptx::barrier_arrive(kD512ScoresDone, 256);
    Base::store(D512Place::side());
    if constexpr (kValues) {  // until the last arrivals
#pragma unroll
      for (int ahead = 0; ahead < kCfg.stages; ++ahead) shared.wait_stage(Shared::kFree, steps + ahead, 1);
    }
  }

  // S^T or dP^T of this step is issued together with dV or dK of the step before.
  template <bool kFirst>
  TESSERA_DEVICE void step(int row0) {
    multiply_keys();
    if constexpr (!kFirst) Base::accumulate(steps - 1);
    load_stats();
    const bool some_hidden = masked(row0);
    ptx::wgmma_wait_group<kFirst ? 0 : 1>();
    ptx::wgmma_pin(flat(rS));
    release_factor(Shared::kFactorSlots - 1);
    if constexpr (kValues) {
      exponents(row0, some_hidden);
      // Waits until the destination of P is free. A dQ warp finishes reading P before it finishes reading dS.
      shared.wait_stage(Shared::kFree, steps, 1);
    } else {
      differences(row0, some_hidden);
    }
    if constexpr (!kFirst) {
      ptx::wgmma_wait_group<0>();
      Base::accumulated();
    }
    if constexpr (kValues) {
      send_probabilities();
    } else {
      score_gradients();
    }
    ++steps;
  }

  // S^T = K Q^T or dP^T = V dO^T; each buffer is multiplied as soon as it is loaded. All buffers but the last are
  // released here, so the next step's loads begin before this step's scores are done.
  TESSERA_DEVICE void multiply_keys() {
    const TileDescriptor keys = shared.tile_descriptor(Shared::kAt.keys);
    ptx::wgmma_forget(flat(rS));
#pragma unroll
    for (int slot = 0; slot < Shared::kFactorSlots; ++slot) {
      shared.wait_step(Shared::kFactorFull + slot, steps);
      ptx::wgmma_fence();
      const TileDescriptor factor = shared.tile_descriptor(Shared::kAt.factors + slot * Slot::kBytes);
#pragma unroll
      for (int d = 0; d < kCfg.slot_dim; d += 16) {
        ScoreProduct::ss(flat(rS), inner_major<Keys>(keys, 0, slot * kCfg.slot_dim + d),
                         inner_major<Slot>(factor, 0, d), slot + d > 0);
      }
      ptx::wgmma_commit_group();
      if (slot == 0) continue;
      ptx::wgmma_wait_group<1>();
      release_factor(slot - 1);
    }
  }
  // Releases the buffer of both sides.
  TESSERA_DEVICE void release_factor(int slot) const {
    Shared::arrive_warp(shared.barrier(Shared::kFactorEmpty + slot), kValues ? 0 : 2, 2);
  }
  // LSE or delta of queries 8 m + 2 c and the next of the step; they are loaded with the last buffer.
  TESSERA_DEVICE void load_stats() {
    const uint32 at = shared.stats(steps) + lane() % 4 * 8;
#pragma unroll
    for (int m = 0; m < kM; ++m) rStats[m] = ptx::ld_shared_f32x2(at + m * 32);
  }

  // ---- P and dS ----

  // The word of a stage that carries this lane's fragment k of P; it is among the words that the warp's dS later fills.
  // In a store, each set of eight lanes has rows of one parity, whose swizzled words are in different banks.
  TESSERA_DEVICE uint32 exchange_word(uint32 tile, int k) const {
    const uint32 l = not_hoisted(threadIdx.x % 32);
    const int row = static_cast<int>(k * 16 + l / 16 * 8 + l / 2 % 4 * 2 + l / 8 % 2);
    return Exchange::at(tile, row, warp_key() + static_cast<int>(l % 2) * 8);
  }

  // Whether some of the step's queries do not see some of the keys.
  TESSERA_DEVICE bool masked(int row0) const {
    return row0 < block.full_low || row0 + kCfg.block_m - 1 > block.full_high;
  }
  TESSERA_DEVICE SeeingQueries seeing(int row0) const {
    const int first_key = block.key0 + warp_key() + lane() / 4;
    return SeeingQueries::of<kCfg>(p, block, first_key, row0 + lane() % 4 * 2);
  }

  // Sets scores that a query does not see to `x`.
  TESSERA_DEVICE void hide(int row0, float x) {
    const SeeingQueries seen = seeing(row0);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (seen.hides(i / 2, m * 8 + i % 2)) rS[0][m][i] = x;
      }
  }

  // Turns scores into P. A query after the last has an LSE of +inf.
  TESSERA_DEVICE void exponents(int row0, bool some_hidden) {
    if (is_far(rStats[0].x)) [[unlikely]] {
      const int head = block.head_kv * p.group + static_cast<int>(steps) / block.tiles;
      far_scores(p, block, head, row0 + lane() % 4 * 2, {p.scale, p.scale_log2}, rS[0]);
    } else {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          rS[0][m][i] = fmaf(rS[0][m][i], p.scale_log2, kBwdRaise_log2 - (i % 2 ? rStats[m].y : rStats[m].x));
        }
    }
    if (some_hidden) hide(row0, -infinity());
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) rS[0][m][i] = ptx::ex2_approx_ftz(rS[0][m][i]);
  }
  TESSERA_DEVICE void send_probabilities() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = rS[0][m][2 * half], high = rS[0][m][2 * half + 1];
        rA[m / 2][m % 2 * 2 + half] = ptx::cvt_rn_satfinite_f16x2(low, high);  // saturating, because the LSE is rounded
      }
    {
      const uint32 to = ptx::mapa(shared.exchange(steps), D512Place::other_role());
      const uint32 full = ptx::mapa(shared.at_stage(Shared::kPFull, steps), D512Place::other_role());
#pragma unroll
      for (int k = 0; k < kSteps; ++k) ptx::st_async_v4_b32(exchange_word(to, k), rA[k], full);
    }
    if constexpr (kCfg.dtype != Dtype::kFloat16) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const float2 x = unpack_pair<Dtype::kFloat16>(rA[k][t]);
          rA[k][t] = pack_pair<kCfg.dtype>(x.x, x.y);
        }
    }
    const uint32 to = ptx::mapa(shared.peer_word(steps, not_hoisted(threadIdx.x % 128)), D512Place::other_side());
    const uint32 full = ptx::mapa(shared.at_stage(Shared::kPFull, steps), D512Place::other_side());
#pragma unroll
    for (int k = 0; k < kSteps; ++k) ptx::st_async_v4_b32(to + k * (128 * 16), rA[k], full);
  }

  // Waits for P and computes P o (dP - delta).
  TESSERA_DEVICE void differences(int row0, bool some_hidden) {
    shared.wait_stage(Shared::kPFull, steps);
    if (threadIdx.x % 128 == 0) {
      ptx::mbarrier_arrive_expect_tx(shared.at_stage(Shared::kPFull, steps), Shared::kSideBytes);
    }
    const uint32 tile = shared.exchange(steps);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint4 words = ptx::ld_shared_16(exchange_word(tile, k));
      const uint32 rP[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int m = k * 2 + t / 2, half = t % 2;
        const float2 x = unpack_pair<Dtype::kFloat16>(rP[t]);
        const float lower = bwd_lowers_early(kCfg.dtype) ? kBwdLower : 1.0f;
        float& low = rS[0][m][2 * half];
        float& high = rS[0][m][2 * half + 1];
        low = x.x * lowered_difference<kCfg.dtype>(low, rStats[m].x * lower);
        high = x.y * lowered_difference<kCfg.dtype>(high, rStats[m].y * lower);
      }
    }
    if (some_hidden) hide(row0, 0.0f);
  }
  // Converts it to dS, which stays in registers as an operand and overwrites P, for dQ in all blocks.
  TESSERA_DEVICE void score_gradients() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rA[m / 2][m % 2 * 2 + half] = pack_pair<kCfg.dtype>(rS[0][m][2 * half], rS[0][m][2 * half + 1]);
      }
    __syncwarp();  // all lanes of the warp have read their P
    hand_on_gradients<Exchange>(shared.exchange(steps), warp_key(), rA);
    Shared::arrive_warp(shared.at_stage(Shared::kDSWritten, steps));
    Shared::arrive_warp(shared.at_stage(Shared::kDSFull, steps));
  }
};

}  // namespace tessera
