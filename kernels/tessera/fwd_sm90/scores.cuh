// The scores of a consumer warpgroup of fwd_sm90: S -> P.
#pragma once

#include "tessera/attention/dropout.cuh"
#include "tessera/attention/score/growth.cuh"
#include "tessera/attention/score/step.cuh"
#include "tessera/attention/softmax.cuh"
#include "tessera/fwd_sm90/cursor.cuh"

namespace tessera {

// S = Q K^T is in the consumer's registers: options, mask, online softmax, dropout, and the rounding to 16 bits.

// By how much the max of a work tile's first block is raised if a row may see only few of that block's keys: these say
// little about later keys, and a max that is too low makes a block cost twice. A power of two: the largest weight stays
// exact.
inline constexpr float kFewKeysLead_log2 = 4.0f;

template <FwdSm90Config kCfg>
struct ScoreStage {
  static constexpr int kN = kCfg.block_n / 8, kD = kCfg.head_dim_v / 8, kSteps = kCfg.block_n / 16;
  using Cursor = KvCursor<kCfg>;
  using Q = SwizzledTile<kConsumerRows, kCfg.head_dim>;
  using K = SwizzledTile<kCfg.block_n, kCfg.head_dim>;
  static constexpr bool kOverlaps = kCfg.consumers < 4;  // the softmax also overlaps with this consumer's own products
  // Whether P replaces S: if S, P and O do not fit beside one another into the registers of a consumer's thread, as
  // with the 112 registers of four consumers.
  static constexpr bool kInPlace = !kOverlaps && kN * 4 + kSteps * 4 + kD * 4 > 80;
  // A block's bias and mask fragment is loaded before its products are issued if registers can hold it beside S, P and
  // O; otherwise it is loaded for one row at a time, when it is needed.
  static constexpr int kEntryRegisters = kN * ScoreOptions<kCfg.score>::kEntryBytes;
  static constexpr bool kEntriesAhead =
      kEntryRegisters <= 48 &&
      kN * 4 + kD * 4 + (kInPlace ? 0 : kSteps * 4) + kEntryRegisters <= (kCfg.consumers == 2   ? 192
                                                                          : kCfg.consumers == 3 ? 128
                                                                                                : 96);

  // What a program has of i - j is loaded at the same point or, by consumers whose products do not overlap with their
  // softmax, when it is needed: P's registers are free then.
  static constexpr bool kDiagonalsAhead = kOverlaps && kEntriesAhead;
  static constexpr int kDiagonalRegisters = 40;

  // The coordinates (b, h, i, j) of the scores of a block.
  struct Coordinates {
    static constexpr int kRows = 2, kAheadRows = kEntriesAhead ? 2 : 1, kN = ScoreStage::kN;
    static constexpr bool kLaneOrder = false, kOneHead = true;
    static constexpr int kDiagonalRegisters = ScoreStage::kDiagonalRegisters;
    // Packed addends fill the registers from D = 128 on: fused, they would spill up to 500 bytes.
    static constexpr bool kFused = !ScoreOptions<kCfg.score>::kPackedAddend || kCfg.head_dim_v < 128;

    const Cursor& at;
    const FwdSm90Params& p;
    const WorkTile<kCfg>& tile;
    int key0;

    TESSERA_DEVICE explicit Coordinates(const Cursor& at)
        : at(at), p(at.p), tile(at.tile()), key0(at.bounds.block * kCfg.block_n) {}
    TESSERA_DEVICE const Sequence& sequence() const { return tile.s; }
    TESSERA_DEVICE int batch() const { return tile.batch; }
    TESSERA_DEVICE int head(int) const { return tile.head; }
    TESSERA_DEVICE int query(int row) const { return row; }
    TESSERA_DEVICE static int col() { return warp_lane() % 4 * 2; }
    TESSERA_DEVICE int row(int i) const { return min(at.query(tile, warp_lane(), i), tile.s.sq - 1); }
  };
  using Step = ScoreStep<kCfg.score, Coordinates>;

  float rS[1][kN][4];
  uint32 rP[kSteps][4];  // A fragments of P V
  OnlineSoftmax<1> softmax;
  Step step;  // holds the bias and mask fragment of the block whose scores are next

  // A program's factor of the head, times the scale: the unit of the scores, unless it is not positive, is nearly 0 or
  // nearly infinite. It is then applied to the scores, so that the largest product is the largest score.
  static constexpr bool kScalesByHead = scales_by_head<kCfg.score>();
  float head_scale;
  TESSERA_DEVICE bool scales_in_unit() const { return head_scale > 0x1p-100f && head_scale < 0x1p100f; }
  TESSERA_DEVICE void find_head_scale([[maybe_unused]] const Cursor& at) {
    if constexpr (kScalesByHead) {
      const Coordinates scores(at);
      head_scale = ProgramOption<kCfg.score>::head_factor(Step::row(scores, scores.row(0))) * at.p.scale;
    }
  }
  TESSERA_DEVICE ScoreUnit unit(const Cursor& at) const {
    if constexpr (kScalesByHead) {
      const float natural = scales_in_unit() ? head_scale : 1.0f;
      return {natural, natural * kLog2e};
    }
    return score_unit<kCfg.score>(at.p);
  }

  // Where the scores' term grows by a known amount from block to block, the stale max is raised by it. Programs that
  // may raise scores otherwise keep it until a block of a work tile does not fit under it, so few come twice; not with
  // lists, whose kernels would take longer to compile, nor by four consumers, which have no registers for it.
  static constexpr bool kGrows = has_known_growth<kCfg.score>() && !kCfg.block_mask,
                        kTriesStaleMax = kCfg.score.program && kOverlaps && !kCfg.block_mask && !kGrows &&
                                         !keeps_stale_max<kCfg.score>() && !kCfg.score.facts().entries,
                        kStaleMax = keeps_stale_max<kCfg.score>() || kGrows || kTriesStaleMax;
  bool outgrown;         // kTriesStaleMax: a block of this work tile did not fit
  float term_of_max[2];  // of a lane's rows: the largest term of the block from which the max is

  // ---- S with every option ----

  // In a block that ends within the sequence, bias and mask are loaded by pairs of keys, visible or not.
  TESSERA_DEVICE bool loads_pairs(const Cursor& at) const {
    return at.p.bias_mask_keys > 1 && (at.bounds.block + 1) * kCfg.block_n <= at.tile().s.sk;
  }
  TESSERA_DEVICE void load_entries(const Cursor& at) {
    if constexpr (kDiagonalsAhead) step.load_diagonals(Coordinates(at));
    if constexpr (Step::kLoads && kEntriesAhead) {
      if (loads_pairs(at)) step.load(Coordinates(at));
    }
  }

  TESSERA_DEVICE void apply_options_and_mask(const Cursor& at) {
    if constexpr (Step::kByKeys) {
      bool shows_all = false;
      if constexpr (kCfg.program_lists()) shows_all = at.shows_block();
      if constexpr (kScalesByHead) {
        if (!scales_in_unit()) [[unlikely]] {
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) rS[0][n][e] *= head_scale;
        }
        Step::apply_mask_by_keys(rS, Coordinates(at), shows_all);
      } else {
        if constexpr (!kDiagonalsAhead) step.load_diagonals(Coordinates(at));
        step.apply_by_keys(rS, Coordinates(at), shows_all);
      }
    } else if constexpr (Alibi<kCfg.score>::kAlone && !kCfg.score.entries()) {
      const Coordinates scores(at);
      Alibi<kCfg.score>::apply_rows(rS[0], Step::Options::product_unit(at.p), at.tile().s,
                                    Step::row(scores, scores.row(0)), scores.key0 + scores.col());
    } else if constexpr (kCfg.score.any()) {
      const Coordinates scores(at);
      const bool pairs = !Step::kLoads || loads_pairs(at);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const typename Step::Row row = Step::row(scores, scores.row(half));
        if (pairs) {
          if constexpr (Step::kLoads && !kEntriesAhead) {
            reload_memory();  // the loads of one row stay after the uses of the other
            step.load_row(scores, half, row);
          }
          step.apply_row(rS[0], scores, half, row);
        } else {
          Step::apply_each_row(rS[0], scores, half, row);
        }
      }
    }
    apply_mask(at);
  }

  // Sets scores to -inf for keys that a row does not see by position, in partial blocks.
  TESSERA_DEVICE void apply_mask(const Cursor& at) {
    const WorkTile<kCfg>& tile = at.tile();
    const bool low = at.bounds.cuts_low();
    const bool hidden = at.hides_block(), high = at.bounds.cuts_high() || hidden;
    if (!low && !high) return;
    const int lane = warp_lane();
    const int key0 = at.bounds.block * kCfg.block_n + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange keys = visible_keys<kCfg.score>(at.p, tile.s, at.query(tile, lane, half));
      if (low) mask_outside(rS[0], half, keys.low - key0, kCfg.block_n);
      if (high) mask_outside(rS[0], half, 0, hidden ? -1 : keys.high - key0);
      if constexpr (Step::Options::kHidesByPosition) {
        const Coordinates scores(at);
        if (high) Step::hide_by_options(rS[0], scores, half, scores.row(half));
      }
    }
  }

  // ---- S to exponentials, in place ----

  // Whether a row may see only few keys of the block, whose K is not released yet, and its max is to serve later ones.
  TESSERA_DEVICE bool may_see_few_keys(const Cursor& at) const {
    if constexpr (!kStaleMax) {
      return false;
    } else if constexpr (kCfg.program_lists()) {
      return at.bounds.cuts_low() || !at.shows_block();
    } else if constexpr (kCfg.score.program) {
      return ProgramTypes<kCfg.score.program>::Program::kHasMask || at.bounds.cuts_low();
    } else {
      return at.bounds.cuts_low();
    }
  }

  // Processes a work tile's first block: the rows' maxima are computed.
  TESSERA_DEVICE void first_block(Cursor& at) {
    find_head_scale(at);
    apply_options_and_mask(at);
    const bool few_keys = may_see_few_keys(at);
    at.release_k();
    if (!kCfg.block_mask && at.at_last_block()) at.release_q();
    softmax.reset();
    const ScoreUnit unit = this->unit(at);
    float alpha[1][2];
    softmax.update_max(rS, unit, alpha, 0.0f);
    if (few_keys) softmax.raise_max(kFewKeysLead_log2);
    softmax.exponentiate(rS, unit);
    if constexpr (kGrows) {
      term_of_max[0] = term_of_max[1] = -infinity();
      find_term_of_max(at);
    }
  }

  // ---- terms that grow ----

  TESSERA_DEVICE void largest_terms(const Cursor& at, float (&terms)[2]) const {
    const Coordinates scores(at);
    const int last = scores.key0 + kCfg.block_n - 1;
    tessera::largest_terms<kCfg.score>(terms, at.tile().s, Step::row(scores, scores.row(0)), scores.key0, last);
  }
  // After maxima were computed in this block.
  TESSERA_DEVICE void find_term_of_max(const Cursor& at) {
    float terms[2];
    largest_terms(at, terms);
    term_of_max[0] = fmaxf(term_of_max[0], terms[0]), term_of_max[1] = fmaxf(term_of_max[1], terms[1]);
  }
  // Raises the stale max if a row of the warp has grown by more than kMostGrowth_log2. Returns 1 if it does, with the
  // factors of earlier weights, 0 if not, with the factors of the growth, and -1 if a max would be too large.
  TESSERA_DEVICE int raise_max(const Cursor& at, ScoreUnit unit, float (&factors)[1][2], float (&terms)[2]) {
    float growth_log2[2];
    largest_terms(at, terms);
    bool moderate = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      growth_log2[half] = fmaxf((terms[half] - term_of_max[half]) * unit.log2, 0.0f);
      moderate = moderate && fabsf(softmax.max[0][half] + growth_log2[half]) < kHugeScore_log2;
    }
    const bool raises = __any_sync(0xffffffff, fmaxf(growth_log2[0], growth_log2[1]) > kMostGrowth_log2<kCfg.dtype>);
    if (raises && !__all_sync(0xffffffff, moderate)) return -1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (raises) softmax.max[0][half] += growth_log2[half];
      factors[0][half] = ptx::ex2_approx_ftz(raises ? -growth_log2[half] : growth_log2[half]);
    }
    return raises;
  }

  // Processes a later block against the stale max: no maximum is computed and nothing is rescaled. Half of the
  // exponentials run during O += P V of the previous block, which is mostly done by then; after wait_output() the other
  // half is interleaved with the rounding to P, whose registers are then free. A warp without a max, or whose sums
  // exceed the bound, recomputes the block's scores with mma.sync and computes the maxima: in either case all warps of
  // the warpgroup issue the same wgmma.
  template <class WaitOutput>
  TESSERA_DEVICE void next_block(Cursor& at, float (&rO)[1][kD][4], WaitOutput&& wait_output) {
    constexpr int kEarly = kSteps / 2 * 2;
    const ScoreUnit unit = this->unit(at);
    apply_options_and_mask(at);
    if constexpr (!kStaleMax) {
      at.release_k();
      float alpha[1][2];
      const bool moves = softmax.update_max(rS, unit, alpha);
      softmax.exponentiate(rS, unit);
      wait_output();
      if (moves) softmax.rescale(alpha, rO);
      pack(at);
      return;
    }
    bool stale_max = softmax.ready, raised = false;
    float alpha[1][2];
    [[maybe_unused]] float terms[2];
    [[maybe_unused]] const float max_before[2] = {softmax.max[0][0], softmax.max[0][1]};
    if constexpr (kGrows) {
      // A partial block's largest term may be a hidden key's.
      if (at.bounds.cuts_low() || at.bounds.cuts_high()) stale_max = false;
      if (stale_max) {
        const int raises = raise_max(at, unit, alpha, terms);
        raised = raises > 0, stale_max = raises >= 0;
      }
    }
    SumParts total[1];
    if constexpr (kCfg.varlen) total[0] = {};  // saves the one register that D = 96 lacked
    if (stale_max) softmax.template exponentiate_stale_max<0, kEarly>(rS, unit, total);
    wait_output();
    bool fits = false;
    if (stale_max) {
      softmax.template exponentiate_stale_max<kEarly, kN>(rS, unit, total);
      pack(at);
      if constexpr (kGrows) {
        fits = raised ? softmax.accept_raised(total, alpha) : softmax.accept_grown(total, alpha);
        if (raised && fits) {
          softmax.rescale(alpha, rO);
          term_of_max[0] = fmaxf(term_of_max[0], terms[0]), term_of_max[1] = fmaxf(term_of_max[1], terms[1]);
        }
      } else {
        fits = softmax.accept(total);
      }
    }
    if (!fits) [[unlikely]] {
      // No product is in progress here, and P's registers are free.
      if (stale_max) {
        warp_product_abt<kCfg.dtype, Q, K>(rS, shared_address(at.shared.sQ[at.q.stage()].data), warp_row(),
                                           shared_address(at.shared.sK[at.k.stage()].data));
        apply_options_and_mask(at);
      }
      if constexpr (kGrows) {
        softmax.max[0][0] = max_before[0], softmax.max[0][1] = max_before[1];
        find_term_of_max(at);
      }
      const bool moves = softmax.update_max(rS, unit, alpha, 0.0f);
      softmax.exponentiate(rS, unit);
      if (moves) softmax.rescale(alpha, rO);
      pack(at);
    }
    at.release_k();
  }

  // first_block(), next_block() and pack() in one, so that a program's text is compiled once. begins: the block is its
  // work tile's first. found: there is a block; in either case finish_output(false) is called once, while O += P V of
  // the previous block is in progress. A block that does not fit under the stale max comes again, with
  // finish_output(true), which only waits.
  template <class FinishOutput>
  TESSERA_DEVICE void block(Cursor& at, float (&rO)[1][kD][4], bool begins, bool found, FinishOutput&& finish_output) {
    constexpr int kEarly = kSteps / 2 * 2;
    if (begins && found) {
      find_head_scale(at);
      softmax.reset();
      term_of_max[0] = term_of_max[1] = -infinity();
      outgrown = false;
    }
    const ScoreUnit unit = this->unit(at);
    bool stale_max = kStaleMax && softmax.ready && !(kTriesStaleMax && outgrown), again = false;
    do {
      float alpha[1][2];
      SumParts total[1];
      bool moves = false;
      [[maybe_unused]] bool raised = false;
      [[maybe_unused]] float terms[2];
      [[maybe_unused]] const float max_before[2] = {softmax.max[0][0], softmax.max[0][1]};
      if (found) {
        apply_options_and_mask(at);
        if constexpr (kGrows) {
          // A partial block's largest term may be a hidden key's.
          if (at.bounds.cuts_low() || at.bounds.cuts_high()) stale_max = false;
          if (stale_max) {
            const int raises = raise_max(at, unit, alpha, terms);
            raised = raises > 0, stale_max = raises >= 0;
          }
        }
        if (stale_max) {
          softmax.template exponentiate_stale_max<0, kEarly>(rS, unit, total);
        } else {
          const bool few_keys = begins && may_see_few_keys(at);
          at.release_k();
          if constexpr (kGrows) find_term_of_max(at);
          constexpr bool kFewMaxima = kStaleMax && !kTriesStaleMax;
          moves = softmax.update_max(rS, unit, alpha, kFewMaxima ? 0.0f : kRescaleThreshold_log2);
          if (few_keys) softmax.raise_max(kFewKeysLead_log2);
          softmax.exponentiate(rS, unit);
        }
      }
      finish_output(again);
      if (!found) return;
      again = false;
      if (stale_max) {
        softmax.template exponentiate_stale_max<kEarly, kN>(rS, unit, total);
        if constexpr (kGrows) {
          again = !(raised ? softmax.accept_raised(total, alpha) : softmax.accept_grown(total, alpha));
          moves = raised && !again;
          if (moves) {
            term_of_max[0] = fmaxf(term_of_max[0], terms[0]), term_of_max[1] = fmaxf(term_of_max[1], terms[1]);
          }
        } else {
          again = !softmax.accept(total);
        }
      }
      if ((!kStaleMax || kGrows || !stale_max) && moves && !begins) softmax.rescale(alpha, rO);
      if (again) [[unlikely]] {
        // No product is in progress here, and P's registers are free.
        warp_product_abt<kCfg.dtype, Q, K>(rS, shared_address(at.shared.sQ[at.q.stage()].data), warp_row(),
                                           shared_address(at.shared.sK[at.k.stage()].data));
        if constexpr (kGrows) softmax.max[0][0] = max_before[0], softmax.max[0][1] = max_before[1];
        if constexpr (kTriesStaleMax && kDiagonalsAhead) step.load_diagonals(Coordinates(at));  // not kept so long
        stale_max = false, outgrown = true;
      } else {
        pack(at);
        if (stale_max) at.release_k();
      }
    } while (again);
  }

  // Packs P as A fragments. The sums are computed before: the LSE is that without dropout.
  TESSERA_DEVICE void pack(const Cursor& at) {
    if constexpr (kCfg.score.dropout) {
      const WorkTile<kCfg>& tile = at.tile();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        drop<kCfg.score.dropout_state>(rS[0], half, at.p, dropout_head<kCfg.score>(at.p, tile.batch, tile.head),
                                       dropout_query<kCfg.score>(at.p, tile.batch, at.query(tile, warp_lane(), half)),
                                       dropout_key<kCfg.score>(at.p, tile.batch, at.bounds.block * kCfg.block_n));
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) pack_a<kCfg.dtype>(rP[step], rS[0], step);
  }
};

}  // namespace tessera
