// The online softmax of one warp's rows (Milakov and Gimelshein, 2018; FlashAttention, algorithm 1): a maximum and a
// sum for each row, so that softmax(s) = 2^(s - max) / sum after all keys. The maximum may be stale, from earlier
// tiles: softmax does not depend on it, as long as nothing overflows.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/element.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// If every tile's maximum is computed, a row's maximum is replaced only by one that exceeds it by this much (log2
// units): most tiles then rescale nothing. The maximum cancels at the end; float16 can represent 2^8. If the maxima of
// only few tiles are computed, the threshold is 0.
inline constexpr float kRescaleThreshold_log2 = 8.0f;

// The bound of a lane's part of a tile's sum against a stale max; a tile that exceeds it is recomputed with the rows'
// new maxima. The bound is low, so that a key that outweighs all before it becomes the max itself: its weight is then
// exact in 16 bits. A weight between 1 and 2^14 would be rounded, which made O's error 1.4 times as large with outliers
// (docs/lab/fwd_sm90.md).
inline constexpr float kStaleMaxBound = 0x1p6f;
// The least sum, in one of a row's lanes, of a tile for which the row's stale max was raised: with a smaller one the
// max would be so far above the scores that float16 weights lose bits.
inline constexpr float kLeastRaisedSum = 0x1p-6f;

// The totals of a row that sees a key, after all keys: `sum` is that of 2^(score - max); for a huge row, of exp(score -
// max).
struct RowTotal {
  float max, sum;
  bool huge;

  TESSERA_DEVICE RowTotal(float max, float sum, bool huge) : max(max), sum(sum), huge(huge) {}

  // Adds a sink, a score without a value, to the sum; returns the factor by which the row's O must be multiplied.
  TESSERA_DEVICE float join_sink(const ProblemParams& p, float sink) {
    const float above_log2 = huge ? (sink - max) * kLog2e : fmaf(sink, p.lse_log2e, -max) + sink * p.lse_log2e_low;
    if (!(above_log2 > 0.0f)) {
      sum += ptx::ex2_approx_ftz(above_log2);
      return 1.0f;
    }
    const float scale = ptx::ex2_approx_ftz(-above_log2);
    sum = fmaf(sum, scale, 1.0f);
    max = sink, huge = true;  // exact in natural units, whatever its size
    return scale;
  }
  // From log2(sum), as exact as the caller needs it; `low`: also computes lse_low.
  TESSERA_DEVICE TwoFloats lse(const ProblemParams& p, float sum_log2, bool low) const {
    if (huge) return two_sum(max, sum_log2 * kLn2);
    TwoFloats lse{(max + sum_log2) * p.lse_ln2, 0.0f};
    if (low) {
      const TwoFloats exact = two_sum(max, sum_log2);
      lse.low = fmaf(exact.high, p.lse_ln2, -lse.high) + fmaf(exact.low, p.lse_ln2, exact.high * p.lse_ln2_low);
      lse = two_sum(lse.high, lse.low);
    }
    return lse;
  }
};

// A lane's sums over a tile, for two rows: the even columns and the odd columns separately, because a single chain of
// additions would be the longest dependency chain of the tile.
struct SumParts {
  float part[2][2];
  TESSERA_DEVICE float of(int half) const { return part[half][0] + part[half][1]; }
};

// A lane has kHalves rows of each 16: both, or only the first eight of the tile.
template <int kM, int kHalves = 2>
struct OnlineSoftmax {
  float max[kM][kHalves];  // in log2 units, for a huge row in natural units; -inf before the first visible key
  float sum[kM][kHalves];  // this lane's part
  bool ready;              // every row of the warp has a maximum and is not huge; the same in all lanes
  uint32 huge_rows;        // one bit for each of the lane's rows

  TESSERA_DEVICE OnlineSoftmax() { reset(); }

  TESSERA_DEVICE bool huge(int m, int half) const { return huge_rows >> (2 * m + half) & 1; }
  TESSERA_DEVICE RowTotal total(int m, int half) const { return {max[m][half], sum[m][half], huge(m, half)}; }

  TESSERA_DEVICE void reset() {
    ready = false, huge_rows = 0;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) max[m][half] = -infinity(), sum[m][half] = 0.0f;
  }

  // Turns s times `unit` into P, in place, and rescales O if a maximum was replaced.
  template <int kN, int kD>
  TESSERA_DEVICE void update(float (&s)[kM][kN][4], ScoreUnit unit, float (&o)[kM][kD][4], float threshold_log2) {
    float alpha[kM][kHalves];
    const bool is_zero = fresh();
    const bool moves = update_max(s, unit, alpha, threshold_log2);
    if (moves && !is_zero) rescale(alpha, o);
    exponentiate(s, unit);
  }
  // Before the first visible key of all of the lane's rows, when O is zero.
  TESSERA_DEVICE bool fresh() const {
    bool fresh = true;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) fresh &= max[m][half] == -infinity();
    return fresh;
  }

  // The three parts of update(), for a caller whose O is not ready at once. update_max() replaces a row's maximum by
  // that of s if it exceeds it; alpha is the factor of O, and the result is whether any row of the warp is rescaled.
  template <int kN>
  TESSERA_DEVICE bool update_max(const float (&s)[kM][kN][4], ScoreUnit unit, float (&alpha)[kM][kHalves],
                                 float threshold_log2 = kRescaleThreshold_log2) {
    return update_max_by([&](int m, int half) { return largest(s[m], half); }, unit, alpha, threshold_log2);
  }
  // The lane's largest score of a row.
  template <int kN>
  TESSERA_DEVICE static float largest(const float (&s)[kN][4], int half) {
    float most = -infinity();
#pragma unroll
    for (int n = 0; n < kN; ++n) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    return most;
  }
  // update_max() with another function for largest().
  template <class Largest>
  TESSERA_DEVICE bool update_max_by(const Largest& largest, ScoreUnit unit, float (&alpha)[kM][kHalves],
                                    float threshold_log2) {
    float best[kM][kHalves], old[kM][kHalves];
    bool moves = false, moderate = huge_rows == 0;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        best[m][half] = row_max(largest(m, half));
        const float best_log2 = __fmul_rn(best[m][half], unit.log2);
        old[m][half] = max[m][half];
        const bool passes = best_log2 > old[m][half] + threshold_log2;  // -inf + 8 = -inf: the first finite one passes
        max[m][half] = passes ? best_log2 : old[m][half];
        alpha[m][half] = passes ? ptx::ex2_approx_ftz(old[m][half] - best_log2) : 1.0f;
        moves |= passes;
        moderate &= fabsf(max[m][half]) < kHugeScore_log2;
      }
    ready = __all_sync(0xffffffff, moderate);
    if (!ready) [[unlikely]]
      moves = update_huge(best, old, unit, alpha, threshold_log2);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) sum[m][half] *= alpha[m][half];
    return __any_sync(0xffffffff, moves);
  }

  // To be called before the first exponentials: the result is the same, and later scores have more room below the
  // bound.
  TESSERA_DEVICE void raise_max(float by_log2) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) max[m][half] += huge(m, half) ? 0.0f : by_log2;
  }

  // P against the current maxima. All scores of a row without a maximum are -inf.
  template <int kN>
  TESSERA_DEVICE void exponentiate(float (&s)[kM][kN][4], ScoreUnit unit) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float minus_max[2], factor[2] = {unit.log2, unit.log2};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) minus_max[half] = -max[m][half];
      if (!ready) [[unlikely]] {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const bool none = max[m][half] == -infinity(), huge_row = huge(m, half);
          const float first = huge_row ? unit.natural : 1.0f, taken = huge_row && !none ? max[m][half] : 0.0f;
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) s[m][n][e] = __fmul_rn(s[m][n][e], first) - taken;
          if (huge_row) factor[half] = kLog2e;
          if (huge_row || none) minus_max[half] = 0.0f;
        }
      }
      SumParts total;
      make_exponentials<0, kN>(s[m], factor, minus_max, total);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) sum[m][half] += total.of(half);
    }
  }

  template <int kD>
  TESSERA_DEVICE static void rescale(const float (&alpha)[kM][kHalves], float (&o)[kM][kD][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[m][d][e] *= alpha[m][e / 2];
  }

  // The same against the stale max, that of earlier tiles: no maximum is computed, nothing is rescaled, and nothing
  // waits for the whole tile. Returns false if a sum exceeded the bound; then nothing was added, and the caller must
  // recompute the tile, from the products on, and call update(). Requires `ready` and a full tile.
  template <int kN>
  TESSERA_DEVICE bool try_stale_max(float (&s)[kM][kN][4], ScoreUnit unit) {
    SumParts total[kM];
    exponentiate_stale_max<0, kN>(s, unit, total);
    return accept(total);
  }

  // The two parts of try_stale_max(), for a caller that interleaves other work: fragments kFrom ... kTo - 1 of s[m];
  // the first call begins at 0.
  template <int kFrom, int kTo, int kN>
  TESSERA_DEVICE void exponentiate_stale_max(float (&s)[kM][kN][4], ScoreUnit unit, SumParts (&total)[kM]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float factor[2] = {unit.log2, unit.log2};
      const float minus_max[2] = {-max[m][0], -max[m][1]};
      make_exponentials<kFrom, kTo>(s[m], factor, minus_max, total[m]);
    }
  }
  TESSERA_DEVICE bool accept(const SumParts (&total)[kM]) {
    return accept_below(total, [](int, int) { return kStaleMaxBound; });
  }
  // Of a tile whose scores are known to have grown by the factors `grown` since the maxima were computed.
  TESSERA_DEVICE bool accept_grown(const SumParts (&total)[kM], const float (&grown)[kM][kHalves]) {
    return accept_below(total, [&](int m, int half) { return kStaleMaxBound * grown[m][half]; });
  }
  // Of a tile before which the maxima were raised, by the factors 1 / alpha.
  TESSERA_DEVICE bool accept_raised(const SumParts (&total)[kM], const float (&alpha)[kM][kHalves]) {
    bool fits = true;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const float tile = total[m].of(half);
        uint32 lanes = __ballot_sync(0xffffffff, alpha[m][half] == 1.0f || tile > kLeastRaisedSum);
        lanes |= lanes >> 1, lanes |= lanes >> 2;  // of the four that have a row
        fits = fits && tile < kStaleMaxBound && (lanes & 0x11111111) == 0x11111111;
      }
    if (!__all_sync(0xffffffff, fits)) return false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) sum[m][half] = fmaf(sum[m][half], alpha[m][half], total[m].of(half));
    return true;
  }

  // The whole row's sum, in each of its lanes; called once, at the end.
  TESSERA_DEVICE void finish() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) sum[m][half] = row_sum(sum[m][half]);
  }

 private:
  // Whether a tile's sums are below bound(m, half) in all lanes, which then adds them; a NaN is not.
  template <class Bound>
  TESSERA_DEVICE bool accept_below(const SumParts (&total)[kM], Bound&& bound) {
    bool fits = true;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) fits &= total[m].of(half) < bound(m, half);
    if (!__all_sync(0xffffffff, fits)) return false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) sum[m][half] += total[m].of(half);
    return true;
  }
  // The rest of update_max() if some row of the warp is huge or has no maximum yet, from the tile's maxima, in the
  // units in which scores are held, and the rows' previous maxima.
  TESSERA_DEVICE bool update_huge(const float (&best)[kM][kHalves], const float (&old)[kM][kHalves], ScoreUnit unit,
                                  float (&alpha)[kM][kHalves], float threshold_log2) {
    bool moves = false;
    uint32 bits = 0;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const float best_log2 = __fmul_rn(best[m][half], unit.log2),
                    best_natural = __fmul_rn(best[m][half], unit.natural);
        const bool was_huge = huge(m, half), is_huge_now = best_natural != -infinity() && is_huge(best_log2);
        const float grows_log2 = was_huge || is_huge_now ? (best_natural - natural_max(old[m][half], was_huge)) * kLog2e
                                                         : best_log2 - old[m][half];
        const bool passes = grows_log2 > threshold_log2;
        max[m][half] = !passes ? old[m][half] : is_huge_now ? best_natural : best_log2;
        alpha[m][half] = passes ? ptx::ex2_approx_ftz(-grows_log2) : 1.0f;
        moves |= passes;
        if (passes ? is_huge_now : was_huge) bits |= 1u << (2 * m + half);
      }
    huge_rows = bits;
    return moves;
  }

  // For a tile's 16 rows: s becomes 2^(s factor + minus_max) and is added to `total`, which the first fragment
  // initialises.
  template <int kFrom, int kTo, int kN>
  TESSERA_DEVICE static void make_exponentials(float (&s)[kN][4], const float (&factor)[2], const float (&minus_max)[2],
                                               SumParts& total) {
#pragma unroll
    for (int n = kFrom; n < kTo; ++n)
#pragma unroll
      for (int e = 0; e < 2 * kHalves; ++e) {
        s[n][e] = ptx::ex2_approx_ftz(fmaf(s[n][e], factor[e / 2], minus_max[e / 2]));
        float& part = total.part[e / 2][e % 2];
        part = n == (e % 2 == 0 ? 0 : kFrom) ? s[n][e] : part + s[n][e];
      }
    if constexpr (kTo < kN) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) total.part[half][0] = total.of(half);  // the odd columns begin again
    }
  }
};

}  // namespace tessera
