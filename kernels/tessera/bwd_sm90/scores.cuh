// P is computed before dP is issued, because dP reuses the registers of S; dS is stored while the products of dV and dK
// run. Between S and dS a thread keeps P in float16, scaled by 2^15 so that small weights keep their bits. This needs
// 16 registers instead of 32 and is exact enough for dS; bfloat16 is not (relative error of dQ and dK: 2.9e-3 instead
// of 2.35e-3). The P of the product with dO is rounded from it.
#pragma once

#include "tessera/attention/backward/scores.cuh"
#include "tessera/attention/backward/tiles.cuh"
#include "tessera/bwd_sm90/diagonals.cuh"
#include "tessera/bwd_sm90/shared.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

template <BwdSm90Config kCfg>
struct ScoreWarpgroup {
  using Shared = BwdSm90Shared<kCfg>;
  using Keys = typename Shared::Keys;
  using Values = typename Shared::Values;
  using Queries = typename Shared::Queries;
  using OutputGradients = typename Shared::OutputGradients;
  using Gradients = typename Shared::Gradients;
  // The scores of a step are computed in parts of kPartM queries.
  static constexpr int kPartM = kCfg.score_m(), kParts = kCfg.block_m / kPartM;
  static constexpr int kM = kPartM / 8, kD = kCfg.head_dim / 8, kDv = kCfg.head_dim_v() / 8, kSteps = kPartM / 16;
  using ScoreProduct = ptx::Wgmma<kCfg.dtype, kPartM, false>;
  using KeyGradientProduct = ptx::Wgmma<kCfg.dtype, kCfg.head_dim, true>;
  using ValueGradientProduct = ptx::Wgmma<kCfg.dtype, kCfg.head_dim_v(), true>;
  using Coordinates = StepCoordinates<kCfg, ScoreWarpgroup>;
  using Step = ScoreStep<kCfg.score, Coordinates>;
  // The option is a program that only hides scores: blocks that it shows in full cost as without it, and in the others
  // hidden scores are recognised by their weight once dS is known.
  static constexpr bool kOnlyHides = kCfg.score.program && kCfg.score.only_hides && !kCfg.score.facts().hides &&
                                     !kCfg.score.facts().reshapes && !kCfg.score.dropout && !kCfg.d_bias;
  static constexpr bool kHiddenByWeight = Step::kHiddenByWeight && !kOnlyHides;
  // kLseAhead and kDeltaAhead are the groups of eight queries whose LSE and delta are loaded before they are used; none
  // if an option needs the registers.
  static constexpr bool kNoneAhead = kCfg.whole_head || kCfg.score.entries() ||
                                     (kCfg.score.program && !kOnlyHides && !Step::kIsAffine) ||
                                     kCfg.score.facts().reshapes || (kParts > 1 && kCfg.score.scaled());
  static constexpr bool kMaskedAhead = kCfg.whole_head || !kNoneAhead;  // masked() is known before it is needed
  static constexpr int kStats = kNoneAhead ? 0 : kM, kLseAhead = kCfg.d_diagonal ? 8 : kStats,
                       kDeltaAhead = kCfg.d_diagonal                 ? 0
                                     : kCfg.dtype == Dtype::kFloat16 ? kStats / 2
                                                                     : kStats,
                       kDeltaHeld = kCfg.d_diagonal ? kStats / 4 : kStats;

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;
  const int warpgroup;           // 0 or 1
  RingPosition<kCfg.stages> at;  // stage of Q and dO, and of dS
  int part = 0;                  // of the step; a compile-time constant, because the loop over parts is unrolled
  float rdK[1][kD][4], rdV[1][kDv][4];
  float rS[1][kM][4];                    // S, then dP
  uint32 rP[kSteps][4], rdS[kSteps][4];  // A fragments of P^T (first in float16) and of dS^T
  Step score_step;                       // holds the bias and mask fragment of the step's scores
  float2 ahead[kM];                      // LSE, then delta, as far as registers suffice
  float slope_unit;                      // Step::kMakesSlopes: the weights in rdS are to be multiplied by it
  // d_captured: the lane's part of the gradient of the head's element, in units of bwd_lower_late.
  float element_sum = 0.0f;
  int summed_head = 0;
  float2 kept;  // d_diagonal: dScore of the lower key and the eight queries before

  TESSERA_DEVICE ScoreWarpgroup(const BwdSm90Params& p, const Shared& shared, const KeyBlock& block, int warpgroup)
      : p(p), shared(shared), block(block), warpgroup(warpgroup) {
    clear(rdK);
    clear(rdV);
  }

  TESSERA_DEVICE static int warp_key() { return static_cast<int>(not_hoisted(threadIdx.x / 32 % 4)) * 16; }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  TESSERA_DEVICE void run() {
    const int steps = uniform(block.steps);
    if (steps > 0) {
      ptx::mbarrier_wait_parity(shared.k_full(), 0);
      ptx::mbarrier_wait_parity(shared.v_full(), 0);
      if constexpr (kCfg.varlen) clear_keys();
    }
    if (kCfg.alternate && warpgroup == 1 && steps > 0) ptx::barrier_arrive(kFirstMayBegin, 256);
    for (int left = steps; left > 0; --left) {
      shared.wait_full(Shared::kQ, at);
      if (kCfg.block_mask && list_hides(step_word(), warpgroup)) {
        skip_step();
      } else {
        if constexpr (kCfg.varlen) clear_queries<Queries>(Shared::kAt.q);
#pragma unroll
        for (part = 0; part < kParts; ++part) step_part(left);
        part = 0;
      }
      at.advance();
    }
    if constexpr (kCfg.d_captured) add_element_sum();
    store();
  }
  // Skips a step whose queries the block mask hides from this warpgroup's keys, but not from the other's: only dQ's
  // product is computed, with dS = 0.
  TESSERA_DEVICE void skip_step() const {
    if constexpr (kCfg.score.dropout) {
      shared.wait_full(Shared::kDropout, dropout_at());
      Shared::arrive_warp(shared.empty(Shared::kDropout, dropout_at()));
    }
    shared.wait_full(Shared::kDO, at);
    Shared::arrive_warp(shared.empty(Shared::kDO, at));
    Shared::arrive_warp(shared.empty(Shared::kQ, at));
    constexpr uint32 kZeros[kCfg.block_m / 16][4] = {};
    shared.wait_empty(Shared::kDS, at);
    hand_on_gradients<Gradients>(shared.tile(Shared::kAt.d_s, Gradients::kBytes, at), warpgroup * 64 + warp_key(),
                                 kZeros);
    if constexpr (kCfg.d_diagonal) {
      begin_diagonals();
#pragma unroll
      for (int n = 0; n < kBwdDiagonalBlocks; ++n) store_diagonals(diagonals(), n, float2{});
      hand_on_diagonals();
    }
    Shared::arrive_warp(shared.full(Shared::kDS, at));
    ptx::reconverge_warp();  // otherwise the lane that arrives may execute the next step's stmatrix alone
  }
  TESSERA_DEVICE void step_part(int left) {
    if constexpr (kCfg.alternate) {
      if (warpgroup == 0) {
        ptx::barrier_sync(kFirstMayBegin, 256);
      } else {
        ptx::barrier_sync(kSecondMayBegin, 256);
      }
    }
    issue_scores();
    score_step.load(Coordinates(*this));
    const ScoreUnit unit = Step::unit(Coordinates(*this));
    load_stats<0, kLseAhead>(false);
    bool hides_some = kStats > 0 && masked();
    const bool far = is_far(kLseAhead > 0 ? ahead[0].x : lse(0).x);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rS));
    if constexpr (kCfg.d_captured) {
      if (const int head = step_head(); head != summed_head) {
        add_element_sum();
        summed_head = head;
      }
    }
    if constexpr (Step::kMakesSlopes) {
      sloped_weights(far);
    } else {
      probabilities(hides_some, far, unit);
    }
    if (part == 0) {
      shared.wait_full(Shared::kDO, at);
      if constexpr (kCfg.varlen) clear_queries<OutputGradients>(Shared::kAt.d_o);
    }
    issue_probability_gradients();
    if constexpr (kCfg.score.dropout) {
      // The same condition as in score_gradients, to limit registers.
      if (!kCfg.score.facts().reshapes || step_row0() >= 0) mark_dropped();
    }
    if constexpr (kCfg.alternate) {
      if (warpgroup == 0) {
        ptx::barrier_arrive(kSecondMayBegin, 256);
      } else if (left > 1 || part < kParts - 1) {
        ptx::barrier_arrive(kFirstMayBegin, 256);
      }
    }
    load_stats<0, kDeltaAhead>(true);
    [[maybe_unused]] HeadFactor factor{1.0f, 1.0f};
    if constexpr (kCfg.d_factor) factor = Step::gradient_head(Coordinates(*this));
    hides_some = kStats > 0 && masked();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rS));
    load_stats<kDeltaAhead, kDeltaHeld>(true);
    const bool rescales = kCfg.d_factor && factor.after != 1.0f;
    if constexpr (kCfg.d_factor) {
      score_gradients(factor, hides_some);
    } else {
      score_gradients(Step::gradient_head(Coordinates(*this)), hides_some);
    }
    if (rescales) [[unlikely]] {
      hand_on();
      rescale_gradients(factor.after);
    }
    issue_key_gradients();
    if (!rescales) hand_on();
    take_key_gradients();
  }

  // ---- rows past the sequence's end become 0, because 0 times NaN is NaN ----

  // Clears this warpgroup's keys. The dQ warpgroup reads K only after the first dS.
  TESSERA_DEVICE void clear_keys() const {
    if (block.key0 + kCfg.block_n <= block.s.sk) return;
    const int first = warpgroup * 64 + max(0, min(64, block.s.sk - block.key0 - warpgroup * 64));
    clear_rows<Keys>(shared.base + Shared::kAt.k, first, warpgroup * 64 + 64);
    clear_rows<Values>(shared.base + Shared::kAt.v, first, warpgroup * 64 + 64);
    cleared();
  }
  // Clears queries of the step past the sequence's end: TMA fills only rows past the tensor's end with 0.
  template <class Tile>
  TESSERA_DEVICE void clear_queries(int offset) const {
    if (!p.cu_seqlens_q) return;
    const int rows = block.s.sq - step_row0();
    if (rows >= kCfg.block_m) return;
    clear_rows<Tile>(shared.tile(offset, Tile::kBytes, at), rows, kCfg.block_m);
    cleared();
  }
  TESSERA_DEVICE void cleared() const {
    ptx::fence_proxy_async();
    sync_warpgroup();
  }
  TESSERA_DEVICE void sync_warpgroup() const { ptx::barrier_sync(warpgroup == 0 ? kFirstScores : kSecondScores, 128); }

  // ---- products ----

  // S^T = K Q^T.
  TESSERA_DEVICE void issue_scores() {
    const TileDescriptor k = key_rows(shared.keys(Shared::kAt.k));
    const TileDescriptor q = part_of(shared.tile_descriptor(Shared::kAt.q, Queries::kBytes, at));
    ptx::wgmma_forget(flat(rS));
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kCfg.head_dim; d += 16) {
      ScoreProduct::ss(flat(rS), inner_major<Keys>(k, 0, d), inner_major<Queries>(q, 0, d), d > 0);
    }
    ptx::wgmma_commit_group();
  }
  // dP^T = V dO^T.
  TESSERA_DEVICE void issue_probability_gradients() {
    const TileDescriptor v = key_rows(shared.keys(Shared::kAt.v));
    const TileDescriptor d_o = part_of(shared.tile_descriptor(Shared::kAt.d_o, OutputGradients::kBytes, at));
    const int none =
        // In a register: if the compiler sees that no new value is needed, it gives dP the registers of S.
        static_cast<int>(not_hoisted(0));
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kCfg.head_dim_v(); d += 16) {
      ScoreProduct::ss(flat(rS), inner_major<Values>(v, 0, d), inner_major<OutputGradients>(d_o, 0, d),
                       d > 0 ? 1 : none);
    }
    ptx::wgmma_commit_group();
  }
  // dV += P^T dO, dK += dS^T Q.
  TESSERA_DEVICE void issue_key_gradients() {
    const TileDescriptor d_o = part_of(shared.tile_descriptor(Shared::kAt.d_o, OutputGradients::kBytes, at));
    const TileDescriptor q = part_of(shared.tile_descriptor(Shared::kAt.q, Queries::kBytes, at));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ValueGradientProduct::rs(flat(rdV), rP[step], outer_major<OutputGradients>(d_o, step * 16), 1);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      KeyGradientProduct::rs(flat(rdK), rdS[step], outer_major<Queries>(q, step * 16), 1);
    }
    ptx::wgmma_commit_group();
  }
  TESSERA_DEVICE void take_key_gradients() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rdV));
    ptx::wgmma_pin(flat(rdK));
    if (part < kParts - 1) return;
    Shared::arrive_warp(shared.empty(Shared::kDO, at));
    Shared::arrive_warp(shared.empty(Shared::kQ, at));
  }
  TESSERA_DEVICE TileDescriptor part_of(TileDescriptor tile) const {  // the part's queries of Q or dO
    tile.address += part * (kPartM * kChunkRowBytes / 16);
    return tile;
  }
  TESSERA_DEVICE TileDescriptor key_rows(TileDescriptor tile) const {  // this warpgroup's 64 keys of K or V
    tile.address += warpgroup * (64 * kChunkRowBytes / 16);
    if constexpr (kParts > 1)
      // The descriptors of all columns would need too many registers.
      tile.address = uniform(not_hoisted(tile.address));
    return tile;
  }

  // ---- P and dS ----

  // The address of LSE in log2 units, or of delta, of queries 8 m + 2 c and the next of the step.
  TESSERA_DEVICE uint32 stats(bool delta) const {
    return shared.tile(Shared::kAt.stats, 2 * Shared::kStatBytes, at) + (delta ? Shared::kStatBytes : 0) +
           part * (kPartM * 4) + lane() % 4 * 8;
  }
  TESSERA_DEVICE float2 lse(int m) const { return ptx::ld_shared_f32x2(stats(false) + m * 32); }
  // Loads them before they are used, during the product from which they are subtracted: while products read shared
  // memory, a load takes 150 clocks.
  template <int kFirst, int kEnd>
  TESSERA_DEVICE void load_stats(bool delta) {
    const uint32 from = stats(delta);
#pragma unroll
    for (int m = kFirst; m < kEnd; ++m) ahead[m] = ptx::ld_shared_f32x2(from + m * 32);
  }

  // Whether some of the step's queries do not see some of the block's keys.
  TESSERA_DEVICE bool masked() const {
    const int row0 = step_row0();
    return row0 < block.full_low || row0 + kPartM - 1 > block.full_high;
  }
  TESSERA_DEVICE SeeingQueries seeing() const {
    return SeeingQueries::of<kCfg>(p, block, first_key() + lane() / 4, step_row0() + lane() % 4 * 2);
  }
  template <bool kMasked>
  TESSERA_DEVICE bool hides(const SeeingQueries& seeing, int m, int half, int e) const {
    if (score_step.hides(m, half, e)) return true;
    return kMasked && seeing.hides(half, m * 8 + e);
  }

  // Turns S - LSE into P in float16.
  TESSERA_DEVICE void probabilities(bool hides_some, bool far, ScoreUnit unit) {
    if constexpr (kCfg.program_lists()) {
      score_step.apply(Coordinates(*this), rS[0], list_is_full(step_word(), warpgroup));
    } else if constexpr (kCfg.score.has_step()) {
      score_step.apply(Coordinates(*this), rS[0]);
    }
    if (far) [[unlikely]] {
      far_exponents(unit);
    } else if (kHiddenByWeight || (kMaskedAhead ? hides_some : masked())) {
      exponents<true>(unit.log2);
    } else {
      exponents<false>(unit.log2);
    }
    weights();
  }
  // Exponents to P.
  TESSERA_DEVICE void weights() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = ptx::ex2_approx_ftz(rS[0][m][2 * half]), high = ptx::ex2_approx_ftz(rS[0][m][2 * half + 1]);
        rP[m / 2][m % 2 * 2 + half] = ptx::cvt_rn_satfinite_f16x2(low, high);  // saturating, because the LSE is rounded
      }
  }
  // With slopes, or a sum of a head's element: slopes.cuh.
  TESSERA_DEVICE void sloped_weights(bool far);
  template <bool kFar, class Scores>
  TESSERA_DEVICE void weigh(Scores& scores, int m, float (&s)[4], uint32 (&pairs)[2]) const;
  TESSERA_DEVICE float scale_of_weights();
  TESSERA_DEVICE float2 sloped_gradients(uint32 packed_p, uint32 packed_weights, int half, const float (&d)[4],
                                         float2 minus) const;
  TESSERA_DEVICE void add_element_sum();
  // The stage of the step's dropout bits, computed from `at` to save registers.
  TESSERA_DEVICE auto dropout_at() const {
    RingPosition<Shared::kDropoutStages> bits_at;
    static_assert(Shared::kDropoutStages == kCfg.stages || (Shared::kDropoutStages == 1 && kCfg.stages == 2));
    if constexpr (Shared::kDropoutStages == 1) {
      bits_at.parity = at.stage();
    } else {
      bits_at.offset = at.offset, bits_at.parity = at.parity;
    }
    return bits_at;
  }
  // Marks dropped weights by their sign bit, which no weight has set.
  TESSERA_DEVICE void mark_dropped() {
    const auto bits_at = dropout_at();
    if (part == 0) shared.wait_full(Shared::kDropout, bits_at);
    tessera::mark_dropped(rP, shared.dropout_bits(bits_at) + part * (kSteps * DropoutBits::kWordStep),
                          warpgroup * 4 + warp_key() / 16, lane());
    if (part == kParts - 1) Shared::arrive_warp(shared.empty(Shared::kDropout, bits_at));
  }
  // S - LSE; -inf where masked. A query past the last has an LSE of +inf.
  template <bool kMasked>
  TESSERA_DEVICE void exponents(float unit) {
    SeeingQueries seen{};
    if constexpr (kMasked) seen = seeing();
    const uint32 lse = stats(false);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float2 pair = m < kLseAhead ? ahead[m] : ptx::ld_shared_f32x2(lse + m * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = rS[0][m][i];
        x = fmaf(x, unit, i % 2 ? -pair.y : -pair.x);
        if (hides<kMasked>(seen, m, i / 2, i % 2)) x = -infinity();
      }
    }
  }

  // The same for a query tile that is marked as far.
  TESSERA_DEVICE void far_exponents(ScoreUnit unit) {
    far_scores(p, block, step_head(), step_row0() + lane() % 4 * 2, unit, rS[0]);
    const SeeingQueries seen = seeing();
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (hides<true>(seen, m, i / 2, i % 2)) rS[0][m][i] = -infinity();
      }
  }

  // step_word() is the step's first query; with a block mask its lowest bits are the list entry's: from which score
  // warpgroup's keys the queries are hidden, and with whole_head kFirstKeys and kLastKeys (whole_head.cuh). step_row0()
  // is the part's first query.
  TESSERA_DEVICE int step_word() const { return ptx::ld_shared_s32(shared.step(at) + 4); }
  TESSERA_DEVICE int step_row0() const {
    return (kCfg.block_mask || kCfg.whole_head ? step_word() & -kCfg.block_m : step_word()) + part * kPartM;
  }
  TESSERA_DEVICE int step_head() const { return ptx::ld_shared_s32(shared.step(at)) / p.q_slots; }
  TESSERA_DEVICE int first_key() const { return block.key0 + warpgroup * 64 + warp_key(); }  // of the warp's 16

  // Turns dP into dS; P and dS become operands: gradients.cuh.
  static constexpr bool kOptionsOfGradients =
      kCfg.score.dropout || (Step::kHasGradient && !kOnlyHides) || kCfg.d_bias || kCfg.d_diagonal;
  template <class Head>
  TESSERA_DEVICE void score_gradients(const Head& head, bool hides_some);
  template <int kFirst, int kRows, bool kHides = false, class Head>
  TESSERA_DEVICE void score_gradients(const Head& head);
  template <bool kHides, class Head>
  TESSERA_DEVICE float2 score_gradients(const Head& head, uint32& packed_p, uint32& packed_ds, int m, int half,
                                        const float (&d)[4], float2 minus);
  TESSERA_DEVICE void rescale_gradients(float factor);
  TESSERA_DEVICE void clear_hidden();
  TESSERA_DEVICE void clear_weightless();
  // d_diagonal: waits for the place of the step's sums, in which the lane stores its part of each block.
  TESSERA_DEVICE void begin_diagonals() const {
    static_assert(kCfg.stages % 2 == 0, "there is one place, whose parity is that of the stage");
    ptx::mbarrier_wait_parity(shared.diagonals_empty(), at.stage() % 2 ^ 1);
  }
  TESSERA_DEVICE uint32 diagonals() const {  // of the lane's part of the first block
    return shared.base + Shared::kAt.diagonals + (warpgroup * 4 + warp_key() / 16) * (kBwdDiagonalBlocks * 256) +
           diagonal_offset(lane() / 4, lane() % 4 * 2);
  }
  TESSERA_DEVICE static void store_diagonals(uint32 to, int n, float2 sums) {
    ptx::st_shared_s32x2(to + n * 256, __float_as_int(sums.x), __float_as_int(sums.y));
  }
  TESSERA_DEVICE void hand_on_diagonals() const {
    if (warp_key() == 0 && lane() == 0) ptx::st_shared_s32x2(shared.diagonal_step(), step_head(), step_row0());
    Shared::arrive_warp(shared.diagonals_full());
  }
  // Stores dS for the dQ warpgroup.
  TESSERA_DEVICE void hand_on() {
    if (part == 0) shared.wait_empty(Shared::kDS, at);
    const uint32 to = shared.tile(Shared::kAt.d_s, Gradients::kBytes, at) + part * (kPartM * kChunkRowBytes);
    hand_on_gradients<Gradients>(to, warpgroup * 64 + warp_key(), rdS);
    if constexpr (kCfg.d_diagonal) hand_on_diagonals();  // after stmatrix, for which the warp has to be converged
    if (part == kParts - 1) Shared::arrive_warp(shared.full(Shared::kDS, at));
  }

  // ---- results ----

  // dV is staged in V's rows of shared memory, which only this warpgroup reads, and dK in K's rows once the dQ
  // warpgroup has finished reading them.
  TESSERA_DEVICE void store() {
    sync_warpgroup();
    const int row = warpgroup * 64 + warp_key();
    const float unit_v = kBwdLower * (kCfg.score.dropout ? p.dropout_scale : 1.0f);
    const float unit_k = p.scale * bwd_lower_late(kCfg.dtype);
    if constexpr (kCfg.split_group) {
      store_part_rows(p, block, p.d_v_parts, kCfg.block_n, row, rdV, unit_v);
      store_part_rows(p, block, p.d_k_parts, kCfg.block_n, row, rdK, unit_k);
      ptx::barrier_sync(kKeysDone, 384);
      return;
    }
    if constexpr (kCfg.sums) {
      write_key_sums<kCfg, true>(p, block, row, 0, rdV, unit_v);
      write_key_sums<kCfg, false>(p, block, row, 0, rdK, unit_k);
      ptx::barrier_sync(kKeysDone, 384);
      return;
    }
    store_gradient<kCfg, Values>(p, block, shared.base + Shared::kAt.v, row, rdV, unit_v, &p.d_v_map, p.d_v,
                                 p.head_dim_v);
    ptx::barrier_sync(kKeysDone, 384);
    store_gradient<kCfg, Keys>(p, block, shared.base + Shared::kAt.k, row, rdK, unit_k, &p.d_k_map, p.d_k, p.head_dim);
    ptx::cp_async_bulk_wait_group_read();  // before the next block uses this shared memory
  }
};

}  // namespace tessera
