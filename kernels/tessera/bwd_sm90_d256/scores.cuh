// The key warpgroups of bwd_sm90_d256: each has 64 of the cluster's keys, and accumulates their dV (block 0) or dK
// (block 1) in registers. Scores are transposed, [keys][queries], so that P^T and dS^T are operands from registers.
//
//   block 0   S^T = K Q^T     P = exp(scale S - LSE) -> block 1     dV += P^T dO
//   block 1   dP^T = V dO^T   dS = P o (dP - delta)  -> block 0     dK += dS^T Q
//
// P is sent in float16, scaled up by 2^15 so that small weights keep their bits. A thread of block 0 sends P to the
// same thread of block 1, into the 16-byte words that this thread's warp later overwrites with dS: no other warp reads
// or writes these words before dS is complete.
#pragma once

#include "tessera/attention/backward/scores.cuh"
#include "tessera/attention/backward/tiles.cuh"
#include "tessera/attention/score/options.cuh"
#include "tessera/bwd_sm90_d256/shared.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

template <class BlockShared, BwdSm90D256Config kCfg>
struct KeyWarpgroup {
  using Shared = BlockShared;
  using Keys = typename Shared::Keys;
  using Exchange = typename Shared::Exchange;
  static constexpr int kRank = Shared::kRank;
  // Factor: a half of the operand by which the keys are multiplied (Q in block 0, dO in block 1). Accumulated: a half
  // of the operand from which dV or dK accumulates (dO in block 0, Q in block 1).
  static constexpr int kFactorCols = kRank == 0 ? kCfg.half_dim() : kCfg.half_dim_v();
  static constexpr int kAccumulatedCols = kRank == 0 ? kCfg.half_dim_v() : kCfg.half_dim();
  using Factor = SwizzledTile<kCfg.block_m, kFactorCols>;
  using Accumulated = SwizzledTile<kCfg.block_m, kAccumulatedCols>;
  using Result = SwizzledTile<kCfg.block_n, 2 * kAccumulatedCols>;
  static constexpr int kM = kCfg.block_m / 8, kSteps = kCfg.block_m / 16, kHalfD = kAccumulatedCols / 8;
  using ScoreProduct = ptx::Wgmma<kCfg.dtype, kCfg.block_m, false>;
  // N = 256 with A from registers does not assemble.
  using GradientProduct = ptx::Wgmma<kCfg.dtype, kAccumulatedCols, true>;

  using Coordinates = StepCoordinates<kCfg, KeyWarpgroup>;
  using Step = ScoreStep<kCfg.score, Coordinates>;

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  const int warpgroup;  // 0 or 1
  int left = 0;         // remaining steps, with this one
  typename Shared::HalfAt at;
  typename Shared::ExchangeAt exchange_at;
  int stage = 0;               // of LSE or delta
  float rdX[2][1][kHalfD][4];  // dV or dK, in halves of columns
  float rS[1][kM][4];          // S or dP
  uint32 rA[kSteps][4];        // A fragments of P^T or dS^T
  Step score_step;             // block 0: holds the bias and mask fragment of the step's scores
  bool far = false;            // block 0: the step's query tile is marked as far

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
    for (left = steps; left > 0; --left) {
      multiply_keys(tile);
      const int word = step_word(tile);
      if constexpr (kRank == 0) {
        probabilities(word);
      } else {
        score_gradients(word);
      }
      gather(tile);
      if (++stage == kBwdD256StatStages) stage = 0;
      if (++tile == end) tile = block.first_tile;
      exchange_at.advance();
    }
    store();
  }

  // ---- products ----

  // S^T = K Q^T or dP^T = V dO^T; each half is multiplied as soon as it is loaded.
  TESSERA_DEVICE void multiply_keys(int query_tile) {
    TileDescriptor keys = shared.tile_descriptor(Shared::kAt.keys);
    keys.address += warpgroup * (64 * kChunkRowBytes / 16);
    typename Shared::HalfAt second = at;
    second.advance();
    ptx::wgmma_forget(flat(rS));
    wait_half<Factor>(at, query_tile);
    ptx::wgmma_fence();
    multiply_half<0>(keys, shared.half_descriptor(at));
    wait_half<Factor>(second, query_tile);
    ptx::wgmma_fence();
    multiply_half<kFactorCols>(keys, shared.half_descriptor(second));
    ptx::wgmma_commit_group();
    if constexpr (kRank == 0) {
      score_step.load(Coordinates(*this));
      far = is_far(ptx::ld_shared_f32x2(stats()).x);
    }
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

  // dV += P^T dO or dK += dS^T Q, one half of the columns after the other.
  TESSERA_DEVICE void gather(int query_tile) {
    typename Shared::HalfAt second = at;
    second.advance();
    wait_half<Accumulated>(at, query_tile);
    ptx::wgmma_fence();
    gather_half(rdX[0], shared.half_descriptor(at));
    wait_half<Accumulated>(second, query_tile);
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
      GradientProduct::rs(flat(acc), rA[step], outer_major<Accumulated>(half, step * 16), 1);
    }
  }

  // Waits for a half of a step's Q or dO. If packed, TMA fills rows past the end with the next sequence's queries;
  // these become 0, because NaN times 0 is NaN. Both warpgroups write the same zeros, so neither waits for the other.
  template <class Half>
  TESSERA_DEVICE void wait_half(const typename Shared::HalfAt& half, int query_tile) const {
    shared.wait_half(half);
    if constexpr (kCfg.varlen) {
      const int rows = block.s.sq - row0_of(step_word(query_tile));
      if (!p.cu_seqlens_q || rows >= kCfg.block_m) return;
      clear_rows<Half>(shared.half(half), rows, kCfg.block_m);
      ptx::fence_proxy_async();
      ptx::barrier_sync(warpgroup == 0 ? kFirstKeyWarpgroup : kSecondKeyWarpgroup, 128);
    }
  }

  // ---- P and dS ----

  // The address of LSE in log2 units, or of delta, of queries 8 m + 2 c and the next of the step, for m = 0.
  TESSERA_DEVICE uint32 stats() const { return shared.stats(stage) + lane() % 4 * 8; }

  // The word of a stage that carries this lane's fragment `step` of P; it is among the words that the warp's dS later
  // fills. In a store, each set of eight lanes has rows of one parity, whose swizzled words are in different banks.
  TESSERA_DEVICE uint32 exchange_word(uint32 tile, int step) const {
    const int l = lane(), row = step * 16 + l / 16 * 8 + l / 2 % 4 * 2 + l / 8 % 2;
    return Exchange::at(tile, row, warpgroup * 64 + warp_key() + l % 2 * 8);
  }

  // A step's word: its first query; with a block mask, its lowest bits say from which key warpgroup the queries are
  // hidden. Valid once the step's first half is loaded.
  TESSERA_DEVICE int step_word([[maybe_unused]] int query_tile) const {
    return kCfg.has_steps() ? ptx::ld_shared_s32(shared.step(left) + 4) : query_tile * kCfg.block_m;
  }
  TESSERA_DEVICE static int row0_of(int word) { return kCfg.block_mask ? word & -kCfg.block_m : word; }
  // Whether some of the step's queries do not see some of the keys.
  TESSERA_DEVICE bool masked(int word) const {
    const int row0 = row0_of(word);
    if (kCfg.block_mask && list_hides(word, warpgroup)) return true;
    return row0 < block.full_low || row0 + kCfg.block_m - 1 > block.full_high;
  }
  TESSERA_DEVICE SeeingQueries seeing(int word) const {
    if (kCfg.block_mask && list_hides(word, warpgroup)) return {{kCfg.block_m, kCfg.block_m}, {-1, -1}};
    return SeeingQueries::of<kCfg>(p, block, first_key() + lane() / 4, row0_of(word) + lane() % 4 * 2);
  }
  // The coordinates of the step's scores, for options.
  TESSERA_DEVICE int step_row0() const { return row0_of(step_word(0)); }
  TESSERA_DEVICE int step_head() const { return ptx::ld_shared_s32(shared.step(left)) / p.q_slots; }
  TESSERA_DEVICE int first_key() const { return block.key0 + warpgroup * 64 + warp_key(); }  // of the warp's 16
  TESSERA_DEVICE float2 lse(int m) const {                                                   // block 1
    return ptx::ld_shared_f32x2(stats() + Shared::kStatBytes + m * 32);
  }

  // Turns S - LSE into P and sends it to block 1.
  TESSERA_DEVICE void probabilities(int word) {
    if constexpr (kCfg.program_lists()) {
      score_step.apply(Coordinates(*this), rS[0], list_is_full(word, warpgroup));
    } else if constexpr (kCfg.score.has_step()) {
      score_step.apply(Coordinates(*this), rS[0]);
    }
    if (far) [[unlikely]] {
      far_exponents(word);
    } else if (Step::kHiddenByWeight || masked(word)) {
      exponents<true>(word);
    } else {
      exponents<false>(word);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = ptx::ex2_approx_ftz(rS[0][m][2 * half]), high = ptx::ex2_approx_ftz(rS[0][m][2 * half + 1]);
        rA[m / 2][m % 2 * 2 + half] = ptx::cvt_rn_satfinite_f16x2(low, high);  // saturating, because the LSE is rounded
      }
    if constexpr (kCfg.score.dropout) mark_dropped();
    ptx::mbarrier_wait_parity(shared.at_stage(Shared::kFree, exchange_at), exchange_at.parity ^ 1);
    const uint32 to = ptx::mapa(shared.exchange(exchange_at), 1);
    const uint32 full =
        shared.other_barrier(Shared::kPFull) + (warpgroup * kCfg.exchange_stages) * 8 + exchange_at.offset;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::st_async_v4_b32(exchange_word(to, step), rA[step], full);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int t = 0; t < 4; ++t) rA[step][t] = operand_of(rA[step][t]);
  }
  // Converts a pair of P into the operand of dV; dropped elements become 0.
  TESSERA_DEVICE static uint32 operand_of(uint32 pair) {
    if constexpr (kCfg.dtype == Dtype::kFloat16) return kCfg.score.dropout ? ptx::max_f16x2(pair, 0) : pair;
    const float2 x = unpack_pair<Dtype::kFloat16>(pair);
    return kCfg.score.dropout ? ptx::cvt_rn_relu_bf16x2(x.x, x.y) : pack_pair<kCfg.dtype>(x.x, x.y);
  }
  TESSERA_DEVICE void mark_dropped() {
    static_assert(kCfg.exchange_stages == 2 && Shared::kDropoutStages == 1,
                  "a step's parity is the other ring's stage");
    typename Shared::DropoutAt bits_at;
    bits_at.parity = exchange_at.stage();
    ptx::mbarrier_wait_parity(shared.dropout_full(bits_at), bits_at.parity);
    tessera::mark_dropped(rA, shared.dropout_bits(bits_at), warpgroup * 4 + warp_key() / 16, lane());
    Shared::arrive_warp(shared.dropout_empty(bits_at));
  }

  // Scores - LSE; -inf where masked. A query past the last has an LSE of +inf.
  template <bool kMasked>
  TESSERA_DEVICE void exponents(int word) {
    SeeingQueries seen{};
    if constexpr (kMasked) seen = seeing(word);
    const uint32 lse = stats();
    const float unit = Step::unit(Coordinates(*this)).log2;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float2 pair = ptx::ld_shared_f32x2(lse + m * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = rS[0][m][i];
        x = fmaf(x, unit, i % 2 ? -pair.y : -pair.x);
        bool hides = kMasked && seen.hides(i / 2, m * 8 + i % 2);
        hides |= score_step.hides(m, i / 2, i % 2);
        if (hides) x = -infinity();
      }
    }
  }

  // The same for a query tile that is marked as far.
  TESSERA_DEVICE void far_exponents(int word) {
    const int head = kCfg.has_steps() ? step_head() : block.head_kv * p.group + (block.steps - left) / block.tiles;
    far_scores(p, block, head, row0_of(word) + lane() % 4 * 2, Step::unit(Coordinates(*this)), rS[0]);
    const SeeingQueries seen = seeing(word);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bool hides = seen.hides(i / 2, m * 8 + i % 2);
        hides |= score_step.hides(m, i / 2, i % 2);
        if (hides) rS[0][m][i] = -infinity();
      }
  }

  // Waits for P and turns dP into dS, which stays in registers as an operand and overwrites P, for dQ in both blocks.
  TESSERA_DEVICE void score_gradients(int word) {
    const uint32 p_full = shared.at_stage(Shared::kPFull + warpgroup * kCfg.exchange_stages, exchange_at);
    const uint32 tile = shared.exchange(exchange_at), delta = stats();
    const auto head = Step::gradient_head(Coordinates(*this));
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
        float ds[2] = {score_gradient<kCfg>(p, head, x.x, d[2 * half], minus.x),
                       score_gradient<kCfg>(p, head, x.y, d[2 * half + 1], minus.y)};
        Step::gradient(
            Coordinates(*this), head, m, half, x, [this](int m) { return lse(m); }, ds);
        rA[step][t] = pack_pair<kCfg.dtype>(ds[0], ds[1]);
      }
    }
    if (!Step::kHiddenByWeight && masked(word)) {
      const SeeingQueries seen = seeing(word);
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) seen.clear_hidden(rA[m / 2][m % 2 * 2 + half], half, m * 8);
    }
    __syncwarp();  // all lanes of the warp have read their P
    hand_on_gradients<Exchange>(tile, warpgroup * 64 + warp_key(), rA);
    Shared::arrive_warp(shared.at_stage(Shared::kDSFull, exchange_at));
  }

  // ---- results ----

  // Stores through the ring of halves, once both warpgroups have read its last tiles. Each warp stores its 16 rows.
  TESSERA_DEVICE void store() {
    ptx::barrier_sync(kKeyWarpgroupsDone, 256);
    const uint32 to = shared.base + Shared::kAt.halves;
    const int row = warpgroup * 64 + warp_key();
    const float factor =
        kRank == 0 ? kBwdLower * (kCfg.score.dropout ? p.dropout_scale : 1.0f) : p.scale * bwd_lower_late(kCfg.dtype);
    if constexpr (kCfg.sums) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        write_key_sums<kCfg, kRank == 0>(p, block, row, half * kAccumulatedCols, rdX[half], factor);
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stage_accumulators<kCfg.dtype, Result>(to, row, half * kAccumulatedCols, rdX[half], factor,
                                             used_rows<kCfg>(block, row));
    }
    store_staged_rows<kCfg, Result>(p, block, to, row, kRank == 0 ? &p.d_v_map : &p.d_k_map, kRank == 0 ? p.d_v : p.d_k,
                                    kRank == 0 ? p.head_dim_v : p.head_dim);
    ptx::cp_async_bulk_wait_group_read();  // before another block uses this shared memory
  }
};

}  // namespace tessera
