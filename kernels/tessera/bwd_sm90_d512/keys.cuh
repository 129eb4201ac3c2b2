// bwd_sm90_d512's two key warpgroups: both have all of the cluster's 64 keys and the block's half of the head's columns. Scores
// stand transposed, [keys][queries], so that P^T and dS^T are operands from registers.
//
//   kD512Values   S^T = K Q^T      P = exp(scale S - LSE) -> kD512Keys     dV += P^T dO
//   kD512Keys     dP^T = V dO^T    dS = P o (dP - delta) -> dQ             dK += dS^T Q
//
// S and dP are sums over all columns: each block's share goes to the same thread of the other block. a + b = b + a: from there
// on both blocks have the same bits.
//
// P travels in float16, raised by 2^15 so that small weights keep their bits too. A thread leaves what the same thread of
// the other warpgroup wants in the 16-byte words that that one's warp then overwrites with dS: no other warp reads or
// writes them before dS is whole.
#pragma once

#include "tessera/attention/score/score.cuh"
#include "tessera/bwd_sm90/key_rows.cuh"
#include "tessera/bwd_sm90_d512/shared.cuh"
#include "tessera/tile/element.cuh"

namespace tessera {

inline constexpr int kD512KeysDone = 1;  // a named barrier; 0 is __syncthreads's

template <BwdSm90D512Config kCfg, D512Role kRole>
struct BwdD512KeyWarpgroup {
  using Shared = BwdD512Shared<kCfg>;
  using Keys = typename Shared::Keys;
  using Half = typename Shared::Half;
  using HalfAt = typename Shared::HalfAt;
  using Exchange = typename Shared::Exchange;
  static constexpr bool kValues = kRole == kD512Values;
  static constexpr int kM = kCfg.block_m / 8, kSteps = kCfg.block_m / 16, kHalfD = kCfg.half_dim / 8;
  using ScoreProduct = ptx::Wgmma<kCfg.dtype, kCfg.block_m, false>;
  using GradientProduct = ptx::Wgmma<kCfg.dtype, kCfg.half_dim, true>;  // with A from registers 256 does not assemble

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  uint32 steps = 0;            // done
  float rdX[2][1][kHalfD][4];  // dV or dK, in halves of columns
  float rS[1][kM][4];          // S or dP
  uint32 rA[kSteps][4];        // A fragments of P^T or dS^T

  TESSERA_DEVICE BwdD512KeyWarpgroup(const BwdSm90Params& p, const Shared& shared, const KeyBlock& block)
      : p(p), shared(shared), block(block) {
    clear(rdX[0]);
    clear(rdX[1]);
  }

  TESSERA_DEVICE static int warp() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)); }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  TESSERA_DEVICE static uint32 rank() { return not_hoisted(ptx::cluster_ctarank()); }
  // Places in the rings and parities, made from the step's number: registers that are not kept.
  TESSERA_DEVICE int step_parity() const {
    return static_cast<int>(steps % 2);
  }  // in the barriers that have a phase a step
  TESSERA_DEVICE int stage() const { return steps % kBwdD512StatStages; }
  TESSERA_DEVICE typename Shared::ExchangeAt exchange_at() const {
    static_assert(kCfg.stages == 2);
    return ring_position<kCfg.stages>(steps % 2, steps / 2 % 2);
  }
  // Of a step, the n-th half: Q's two, then dO's.
  TESSERA_DEVICE static HalfAt half_at(uint32 step, int n) {
    static_assert(kCfg.half_slots == 8, "two steps");
    return ring_position<kCfg.half_slots>(step % 2 * 4 + n, step / 2 % 2);
  }
  template <int kStages>
  TESSERA_DEVICE static RingPosition<kStages> ring_position(int stage, int parity) {
    RingPosition<kStages> at;
    at.offset = stage * RingPosition<kStages>::kStep, at.parity = parity;
    return at;
  }

  TESSERA_DEVICE void run() {
    if (uniform(block.steps) > 0) {
      ptx::mbarrier_wait_parity(shared.barrier(kValues ? Shared::kKFull : Shared::kVFull), 0);
      int tile = uniform(block.first_tile);
      step<true>(tile * kCfg.block_m);
#pragma unroll 1
      while (steps < static_cast<uint32>(uniform(block.steps))) {
        if (++tile == uniform(block.first_tile) + uniform(block.tiles)) tile = uniform(block.first_tile);
        step<false>(tile * kCfg.block_m);
      }
      gather();
      ptx::wgmma_wait_group<0>();
      gathered();
    }
    store();
  }

  // S^T or dP^T of this step is issued together with dV or dK of the step before, under which the other block's share comes.
  template <bool kFirst>
  TESSERA_DEVICE void step(int row0) {
    multiply_keys();
    if constexpr (!kFirst) gather();
    ptx::wgmma_wait_group<kFirst ? 0 : 1>();
    send_share();
    if constexpr (!kFirst) {
      ptx::wgmma_wait_group<0>();
      gathered();
    }
    add_other_half();
    if constexpr (kValues) {
      probabilities(row0);
    } else {
      shared.wait_half(half_at(steps, 0));  // with which delta comes
      score_gradients(row0);
    }
    ++steps;
  }

  // ---- products ----

  // The halves that S^T or dP^T is made with, Q's or dO's; and of the step before, those that dV or dK is.
  TESSERA_DEVICE HalfAt multiplied(int half) const { return half_at(steps, (kValues ? 0 : 2) + half); }
  TESSERA_DEVICE HalfAt gathered_with(int half) const { return half_at(steps - 1, (kValues ? 2 : 0) + half); }

  // S^T = K Q^T or dP^T = V dO^T over the block's columns, each half as soon as it is there.
  TESSERA_DEVICE void multiply_keys() {
    TileDescriptor keys = shared.tile_descriptor(kValues ? Shared::kAt.k : Shared::kAt.v);
    keys.address = not_hoisted(keys.address);  // kept over the loop it would take registers
    ptx::wgmma_forget(flat(rS));
    shared.wait_half(multiplied(0));
    ptx::wgmma_fence();
    multiply_half<0>(keys, shared.half_descriptor(multiplied(0)));
    shared.wait_half(multiplied(1));
    ptx::wgmma_fence();
    multiply_half<kCfg.half_dim>(keys, shared.half_descriptor(multiplied(1)));
    ptx::wgmma_commit_group();
  }
  template <int kFirst>
  TESSERA_DEVICE void multiply_half(const TileDescriptor& keys, const TileDescriptor& half) {
#pragma unroll
    for (int d = 0; d < kCfg.half_dim; d += 16) {
      ScoreProduct::ss(flat(rS), inner_major<Keys>(keys, 0, kFirst + d), inner_major<Half>(half, 0, d), kFirst + d > 0);
    }
  }

  // dV += P^T dO or dK += dS^T Q of the step before, a half of the columns after the other.
  TESSERA_DEVICE void gather() {
    shared.wait_half(gathered_with(0));
    shared.wait_half(gathered_with(1));
    ptx::wgmma_fence();
    gather_half(rdX[0], shared.half_descriptor(gathered_with(0)));
    gather_half(rdX[1], shared.half_descriptor(gathered_with(1)));
    ptx::wgmma_commit_group();
  }
  TESSERA_DEVICE void gathered() {
    ptx::wgmma_pin(flat(rdX[0]));
    ptx::wgmma_pin(flat(rdX[1]));
    shared.release_half(gathered_with(0));
    shared.release_half(gathered_with(1));
  }
  TESSERA_DEVICE void gather_half(float (&acc)[1][kHalfD][4], const TileDescriptor& half) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      GradientProduct::rs(flat(acc), rA[step], outer_major<Half>(half, step * 16), 1);
    }
  }

  // This block's share goes to the other block, once what was there has been read: of S, dP of the step before; of dP, S.
  TESSERA_DEVICE void send_share() {
    ptx::wgmma_pin(flat(rS));
    shared.release_half(multiplied(0));
    shared.release_half(multiplied(1));
    ptx::mbarrier_wait_parity(partial_barrier(Shared::kPartialFree, kRole),
                              kValues ? step_parity() ^ 1 : step_parity());
    const uint32 to = ptx::mapa(partial(), rank() ^ 1);
    const uint32 full = ptx::mapa(partial_barrier(Shared::kPartialFull, kRole), rank() ^ 1);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float(&x)[4] = rS[0][m];
      const uint32 words[4] = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                               __float_as_uint(x[3])};
      ptx::st_async_v4_b32(to + m * (128 * 16), words, full);
    }
  }
  TESSERA_DEVICE void add_other_half() {
    const uint32 full = partial_barrier(Shared::kPartialFull, kRole), from = partial();
    ptx::mbarrier_wait_parity(full, step_parity());
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const uint4 words = ptx::ld_shared_16(from + m * (128 * 16));
      float(&x)[4] = rS[0][m];
      x[0] += __uint_as_float(words.x), x[1] += __uint_as_float(words.y);
      x[2] += __uint_as_float(words.z), x[3] += __uint_as_float(words.w);
    }
    ptx::wgmma_pin(flat(rS));  // read, not only asked for: what comes next to this place is another block's to decide
    __syncwarp();
    if (lane() == 0) {
      ptx::mbarrier_arrive_expect_tx(full, Shared::kPartialWarpBytes);
      const int next = kValues ? kD512Keys : kD512Values;
      ptx::mbarrier_arrive_shared_cluster(ptx::mapa(partial_barrier(Shared::kPartialFree, next), rank() ^ 1));
    }
  }
  TESSERA_DEVICE uint32 partial() const { return shared.partial(warp() * 32 + lane()); }
  TESSERA_DEVICE uint32 partial_barrier(int first, int role) const { return shared.barrier(first + role * 4 + warp()); }

  // ---- P and dS ----

  // Of the words of a stage that a warp's dS will fill, the one that carries this lane's fragment `step` of P. Eight lanes
  // of a store have rows of one parity, whose swizzled words are in different banks.
  TESSERA_DEVICE uint32 exchange_word(uint32 tile, int step) const {
    const uint32 l = not_hoisted(threadIdx.x % 32);
    const int row = static_cast<int>(step * 16 + l / 16 * 8 + l / 2 % 4 * 2 + l / 8 % 2);
    return Exchange::at(tile, row, warp() * 16 + static_cast<int>(l % 2) * 8);
  }

  // Some of the step's queries do not see some of the keys.
  TESSERA_DEVICE bool masked(int row0) const {
    return row0 < block.full_low || row0 + kCfg.block_m - 1 > block.full_high;
  }
  TESSERA_DEVICE SeeingQueries seeing(int row0) const {
    const int first_key = block.key0 + warp() * 16 + lane() / 4;
    return SeeingQueries::of<kCfg>(p, block, first_key, row0 + lane() % 4 * 2);
  }

  // S - LSE -> P, which goes to the other warpgroup.
  TESSERA_DEVICE void probabilities(int row0) {
    if (masked(row0)) {
      exponents<true>(row0);
    } else {
      exponents<false>(row0);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = ptx::ex2_approx_ftz(rS[0][m][2 * half]), high = ptx::ex2_approx_ftz(rS[0][m][2 * half + 1]);
        rA[m / 2][m % 2 * 2 + half] = ptx::cvt_rn_satfinite_f16x2(low, high);  // an LSE is rounded
      }
    ptx::mbarrier_wait_parity(shared.at_stage(Shared::kFree, exchange_at()), exchange_at().parity ^ 1);
    const uint32 to = shared.exchange(exchange_at());
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::st_shared_f32x4(exchange_word(to, step), __uint_as_float(rA[step][0]), __uint_as_float(rA[step][1]),
                           __uint_as_float(rA[step][2]), __uint_as_float(rA[step][3]));
    }
    Shared::arrive_warp(shared.at_stage(Shared::kPFull + warp() * kCfg.stages, exchange_at()));
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
  TESSERA_DEVICE void exponents(int row0) {
    SeeingQueries seen{};
    if constexpr (kMasked) seen = seeing(row0);
    const uint32 lse = shared.lse(stage()) + lane() % 4 * 8;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float2 pair = ptx::ld_shared_f32x2(lse + m * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = rS[0][m][i];
        x = fmaf(x, p.scale_log2, kBwdRaise_log2 - (i % 2 ? pair.y : pair.x));
        if (kMasked && seen.hides(i / 2, m * 8 + i % 2)) x = -infinity();
      }
    }
  }

  // P arrives, dP -> dS, which stays as an operand, and takes P's place for dQ.
  TESSERA_DEVICE void score_gradients(int row0) {
    const uint32 tile = shared.exchange(exchange_at()), delta = shared.delta(stage()) + lane() % 4 * 8;
    ptx::mbarrier_wait_parity(shared.at_stage(Shared::kPFull + warp() * kCfg.stages, exchange_at()),
                              exchange_at().parity);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4 words = ptx::ld_shared_16(exchange_word(tile, step));
      const uint32 rP[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int m = step * 2 + t / 2, half = t % 2;
        const float2 pair = ptx::ld_shared_f32x2(delta + m * 32), x = unpack_pair<Dtype::kFloat16>(rP[t]);
        const float lower = bwd_lowers_early(kCfg.dtype) ? kBwdLower : 1.0f;
        const float2 minus = make_float2(pair.x * lower, pair.y * lower);
        const float(&d)[4] = rS[0][m];
        rA[step][t] = pack_pair<kCfg.dtype>(x.x * lowered_difference<kCfg.dtype>(d[2 * half], minus.x),
                                            x.y * lowered_difference<kCfg.dtype>(d[2 * half + 1], minus.y));
      }
    }
    if (masked(row0)) {
      const SeeingQueries seen = seeing(row0);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) seen.clear_hidden(rA[m / 2][m % 2 * 2 + half], half, m * 8);
    }
    __syncwarp();  // the warp has read its P
    hand_on_gradients<Exchange>(tile, warp() * 16, rA);
    Shared::arrive_warp(shared.at_stage(Shared::kDSFull, exchange_at()));
  }

  // ---- results ----

  // By way of the ring of halves, once both warpgroups have read its last tiles. Each warp stores its 16 rows; TMA does not
  // write those after the last key.
  TESSERA_DEVICE void store() {
    ptx::barrier_sync(kD512KeysDone, 256);
    const uint32 to = shared.base + Shared::kAt.halves + kRole * Keys::kBytes;
    const float factor = kValues ? kBwdLower : p.scale * bwd_lower_late(kCfg.dtype);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stage_accumulators<kCfg.dtype, Keys>(to, warp() * 16, half * kCfg.half_dim, rdX[half], factor);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane() == 0) {
      const TensorMap* map = kValues ? &p.d_v_map : &p.d_k_map;
      const int col0 = static_cast<int>(rank()) * kCfg.block_dim;
#pragma unroll
      for (int col = 0; col < kCfg.block_dim; col += kChunkCols) {
        ptx::cp_async_bulk_tensor_store_4d(map, Keys::at(to, warp() * 16, col), col0 + col,
                                           block.s.k_begin + block.key0 + warp() * 16, block.head_kv,
                                           p.cu_seqlens_k ? 0 : block.batch);
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read();  // shared memory is about to be another block's
    }
  }
};

}  // namespace tessera
