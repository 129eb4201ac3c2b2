// bwd_sm90_d256's key warpgroups: each has 64 of the cluster's keys, and gathers their dV (block 0) or dK (block 1) in
// registers. Scores stand transposed, [keys][queries], so that P^T and dS^T are operands from registers.
//
//   block 0   S^T = K Q^T     P = exp(scale S - LSE) -> block 1     dV += P^T dO
//   block 1   dP^T = V dO^T   dS = P o (dP - delta)  -> block 0     dK += dS^T Q
//
// P travels in float16, raised by 2^15 so that small weights keep their bits too. A thread of block 0 sends what the same
// thread of block 1 wants, to the 16-byte words that this one's warp then overwrites with dS: no other warp reads or
// writes them before dS is whole.
#pragma once

#include "tessera/attention/score/score.cuh"
#include "tessera/bwd_sm90/key_rows.cuh"
#include "tessera/bwd_sm90_d256/shared.cuh"
#include "tessera/tile/element.cuh"

namespace tessera {

template <class BlockShared, BwdSm90D256Config kCfg>
struct KeyWarpgroup {
  using Shared = BlockShared;
  using Keys = typename Shared::Keys;
  using Exchange = typename Shared::Exchange;
  static constexpr int kRank = Shared::kRank;
  // A half of what the keys are multiplied by, and of what gathers into dV or dK: Q's and dO's, in block 1 dO's and Q's.
  static constexpr int kFactorCols = kRank == 0 ? kCfg.half_dim() : kCfg.half_dim_v();
  static constexpr int kGatheredCols = kRank == 0 ? kCfg.half_dim_v() : kCfg.half_dim();
  using Factor = SwizzledTile<kCfg.block_m, kFactorCols>;
  using Gathered = SwizzledTile<kCfg.block_m, kGatheredCols>;
  using Result = SwizzledTile<kCfg.block_n, 2 * kGatheredCols>;
  static constexpr int kM = kCfg.block_m / 8, kSteps = kCfg.block_m / 16, kHalfD = kGatheredCols / 8;
  using ScoreProduct = ptx::Wgmma<kCfg.dtype, kCfg.block_m, false>;
  using GradientProduct = ptx::Wgmma<kCfg.dtype, kGatheredCols, true>;  // with A from registers 256 does not assemble

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  const int warpgroup;  // 0 or 1
  typename Shared::HalfAt at;
  typename Shared::ExchangeAt exchange_at;
  int stage = 0;               // of LSE or delta
  float rdX[2][1][kHalfD][4];  // dV or dK, in halves of columns
  float rS[1][kM][4];          // S or dP
  uint32 rA[kSteps][4];        // A fragments of P^T or dS^T

  TESSERA_DEVICE KeyWarpgroup(const BwdSm90Params& p, const Shared& shared, const KeyBlock& block, int warpgroup)
      : p(p), shared(shared), block(block), warpgroup(warpgroup) {
    clear(rdX[0]);
    clear(rdX[1]);
  }

  TESSERA_DEVICE static int warp_key() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)) * 16; }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  TESSERA_DEVICE void run() {
    const int steps = uniform(block.steps);
    if (steps > 0) ptx::mbarrier_wait_parity(shared.barrier(Shared::kKeysFull), 0);
    int tile = uniform(start_tile<kCfg>(p, block));
    const int end = uniform(block.first_tile + block.tiles);
#pragma unroll 1
    for (int left = steps; left > 0; --left) {
      multiply_keys();
      const int word = kCfg.block_mask ? ptx::ld_shared_s32(shared.step(left) + 4) : tile * kCfg.block_m;
      if constexpr (kRank == 0) {
        probabilities(word);
      } else {
        score_gradients(word);
      }
      gather();
      if (++stage == kBwdD256StatStages) stage = 0;
      if (++tile == end) tile = block.first_tile;
      exchange_at.advance();
    }
    store();
  }

  // ---- products ----

  // S^T = K Q^T or dP^T = V dO^T, each half as soon as it is there.
  TESSERA_DEVICE void multiply_keys() {
    TileDescriptor keys = shared.tile_descriptor(Shared::kAt.keys);
    keys.address += warpgroup * (64 * kChunkRowBytes / 16);
    typename Shared::HalfAt second = at;
    second.advance();
    ptx::wgmma_forget(flat(rS));
    shared.wait_half(at);
    ptx::wgmma_fence();
    multiply_half<0>(keys, shared.half_descriptor(at));
    shared.wait_half(second);
    ptx::wgmma_fence();
    multiply_half<kFactorCols>(keys, shared.half_descriptor(second));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rS));
    shared.release_half(at);
    shared.release_half(second);
    second.advance();
    at = second;
  }
  template <int kFirst>
  TESSERA_DEVICE void multiply_half(const TileDescriptor& keys, const TileDescriptor& half) {
#pragma unroll
    for (int d = 0; d < kFactorCols; d += 16) {
      ScoreProduct::ss(flat(rS), inner_major<Keys>(keys, 0, kFirst + d), inner_major<Factor>(half, 0, d),
                       kFirst + d > 0);
    }
  }

  // dV += P^T dO or dK += dS^T Q, a half of the columns after the other.
  TESSERA_DEVICE void gather() {
    typename Shared::HalfAt second = at;
    second.advance();
    shared.wait_half(at);
    ptx::wgmma_fence();
    gather_half(rdX[0], shared.half_descriptor(at));
    shared.wait_half(second);
    ptx::wgmma_fence();
    gather_half(rdX[1], shared.half_descriptor(second));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rdX[0]));
    ptx::wgmma_pin(flat(rdX[1]));
    shared.release_half(at);
    shared.release_half(second);
    second.advance();
    at = second;
  }
  TESSERA_DEVICE void gather_half(float (&acc)[1][kHalfD][4], const TileDescriptor& half) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      GradientProduct::rs(flat(acc), rA[step], outer_major<Gathered>(half, step * 16), 1);
    }
  }

  // ---- P and dS ----

  // Of queries 8 m + 2 c, + 1 of the step, for m = 0: LSE in log2 units, or delta.
  TESSERA_DEVICE uint32 stats() const { return shared.stats(stage) + lane() % 4 * 8; }

  // Of the words of a stage that a warp's dS will fill, the one that carries this lane's fragment `step` of P. Eight lanes
  // of a store have rows of one parity, whose swizzled words are in different banks.
  TESSERA_DEVICE uint32 exchange_word(uint32 tile, int step) const {
    const int l = lane(), row = step * 16 + l / 16 * 8 + l / 2 % 4 * 2 + l / 8 % 2;
    return Exchange::at(tile, row, warpgroup * 64 + warp_key() + l % 2 * 8);
  }

  // A step's word: its first query; with a block mask also, in the lowest bits, from which key warpgroup it hides the queries.
  TESSERA_DEVICE static int row0_of(int word) { return kCfg.block_mask ? word & -kCfg.block_m : word; }
  // Some of the step's queries do not see some of the keys.
  TESSERA_DEVICE bool masked(int word) const {
    const int row0 = row0_of(word);
    if (kCfg.block_mask && list_hides(word, warpgroup)) return true;
    return row0 < block.full_low || row0 + kCfg.block_m - 1 > block.full_high;
  }
  TESSERA_DEVICE SeeingQueries seeing(int word) const {
    if (kCfg.block_mask && list_hides(word, warpgroup)) return {{kCfg.block_m, kCfg.block_m}, {-1, -1}};
    const int first_key = block.key0 + warpgroup * 64 + warp_key() + lane() / 4;
    return SeeingQueries::of<kCfg>(p, block, first_key, row0_of(word) + lane() % 4 * 2);
  }

  // S - LSE -> P, which goes to block 1.
  TESSERA_DEVICE void probabilities(int word) {
    if (masked(word)) {
      exponents<true>(word);
    } else {
      exponents<false>(word);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = ptx::ex2_approx_ftz(rS[0][m][2 * half]), high = ptx::ex2_approx_ftz(rS[0][m][2 * half + 1]);
        rA[m / 2][m % 2 * 2 + half] = ptx::cvt_rn_satfinite_f16x2(low, high);  // an LSE is rounded
      }
    ptx::mbarrier_wait_parity(shared.at_stage(Shared::kFree, exchange_at), exchange_at.parity ^ 1);
    const uint32 to = ptx::mapa(shared.exchange(exchange_at), 1);
    const uint32 full =
        shared.other_barrier(Shared::kPFull) + (warpgroup * kCfg.exchange_stages) * 8 + exchange_at.offset;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::st_async_v4_b32(exchange_word(to, step), rA[step], full);
    if constexpr (kCfg.dtype != Dtype::kFloat16) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const float2 x = unpack_pair<Dtype::kFloat16>(rA[step][t]);
          rA[step][t] = pack_pair<kCfg.dtype>(x.x, x.y);
        }
    }
  }

  // Scores - LSE, -inf of what is not seen. A query after the last has an LSE of +inf.
  template <bool kMasked>
  TESSERA_DEVICE void exponents(int word) {
    SeeingQueries seen{};
    if constexpr (kMasked) seen = seeing(word);
    const uint32 lse = stats();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float2 pair = ptx::ld_shared_f32x2(lse + m * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = rS[0][m][i];
        x = fmaf(x, p.scale_log2, i % 2 ? -pair.y : -pair.x);
        if (kMasked && seen.hides(i / 2, m * 8 + i % 2)) x = -infinity();
      }
    }
  }

  // P arrives, dP -> dS, which stays as an operand, and takes P's place for dQ in both blocks.
  TESSERA_DEVICE void score_gradients(int word) {
    const uint32 p_full = shared.at_stage(Shared::kPFull + warpgroup * kCfg.exchange_stages, exchange_at);
    const uint32 tile = shared.exchange(exchange_at), delta = stats();
    ptx::mbarrier_wait_parity(p_full, exchange_at.parity);
    if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive_expect_tx(p_full, Shared::kWarpgroupBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4 words = ptx::ld_shared_16(exchange_word(tile, step));
      const uint32 rP[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int m = step * 2 + t / 2, half = t % 2;
        const float2 minus = ptx::ld_shared_f32x2(delta + m * 32), x = unpack_pair<Dtype::kFloat16>(rP[t]);
        const float(&d)[4] = rS[0][m];
        rA[step][t] = pack_pair<kCfg.dtype>(x.x * lowered_difference<kCfg.dtype>(d[2 * half], minus.x),
                                            x.y * lowered_difference<kCfg.dtype>(d[2 * half + 1], minus.y));
      }
    }
    if (masked(word)) {
      const SeeingQueries seen = seeing(word);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) seen.clear_hidden(rA[m / 2][m % 2 * 2 + half], half, m * 8);
    }
    __syncwarp();  // the warp has read its P
    hand_on_gradients<Exchange>(tile, warpgroup * 64 + warp_key(), rA);
    Shared::arrive_warp(shared.at_stage(Shared::kDSFull, exchange_at));
  }

  // ---- results ----

  // By way of the ring of halves, once both warpgroups have read its last tiles. Each warp stores its 16 rows; TMA does not
  // write those after the last key.
  TESSERA_DEVICE void store() {
    ptx::barrier_sync(kKeyWarpgroupsDone, 256);
    const uint32 to = shared.base + Shared::kAt.halves;
    const int row = warpgroup * 64 + warp_key();
    const float factor = kRank == 0 ? kBwdLower : p.scale * bwd_lower_late(kCfg.dtype);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stage_accumulators<kCfg.dtype, Result>(to, row, half * kGatheredCols, rdX[half], factor);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane() == 0) {
      const TensorMap* map = kRank == 0 ? &p.d_v_map : &p.d_k_map;
      store_key_rows<Result>(p, block, map, to, row);
      ptx::cp_async_bulk_wait_group_read();  // shared memory is about to be another block's
    }
  }
};

}  // namespace tessera
