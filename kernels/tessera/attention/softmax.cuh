// The online softmax of one warp's rows (Milakov and Gimelshein, 2018; FlashAttention, algorithm 1): a maximum and a sum
// for each row, so that softmax(s) = 2^(s - max) / sum when all keys have passed. The maximum may be a stale one, of tiles
// before: softmax does not depend on it, as long as nothing overflows.
#pragma once

#include "tessera/attention/lse.cuh"
#include "tessera/attention/score/unit.cuh"
#include "tessera/tile/fragment.cuh"
#include "tessera/tile/row_reduction.cuh"

namespace tessera {

// Where every tile's maximum is taken, a row's is replaced only by one that passes it by this much (log2 units): most tiles then rescale
// nothing. The same maximum divides out at the end; float16 holds 2^8. Where few tiles' maxima are taken the threshold is 0.
inline constexpr float kRescaleThreshold_log2 = 8.0f;

// Against a stale max that is too low a lane's share of a tile's sum may reach this before the tile is done again with the rows' new
// maxima. It is low, so that a key that outweighs all before it becomes the max itself: its weight is then exact in 16 bits, where one
// between 1 and 2^14 is rounded, which made O's error 1.4 times as large with outliers (docs/lab/2026-11-26-backward-errors.md).
inline constexpr float kStaleMaxBound = 0x1p6f;

// A row that sees a key, once all keys have passed: `sum` is that of 2^excess_log2 exp(score - max), max being high + low in natural units.
struct RowTotal {
  float high, low, excess_log2, sum;

  TESSERA_DEVICE RowTotal(float max, float sum, ScoreUnit unit) : high(__fmul_rn(max, unit.natural)), sum(sum) {
    const float max_log2 = __fmul_rn(max, unit.log2);
    const bool huge = is_huge(max_log2);
    low = huge ? 0.0f : fmaf(max, unit.natural, -high);
    excess_log2 = huge ? 0.0f : fmaf(max, unit.log2, -max_log2);
  }
  // A sink, a score without a value, joins the sum; the answer is what the row's O is to be multiplied by.
  TESSERA_DEVICE float join_sink(float sink) {
    const float above_log2 = fmaf((sink - high) - low, kLog2e, excess_log2);
    if (!(above_log2 > 0.0f)) {
      sum += ptx::ex2_approx_ftz(above_log2);
      return 1.0f;
    }
    const float scale = ptx::ex2_approx_ftz(-above_log2);
    sum = fmaf(sum, scale, 1.0f);
    high = sink, low = excess_log2 = 0.0f;
    return scale;
  }
  // Of log2(sum), as exact as the caller needs it.
  TESSERA_DEVICE TwoFloats lse(float sum_log2) const { return two_sum(high, fmaf(sum_log2 - excess_log2, kLn2, low)); }
  TESSERA_DEVICE TwoFloats lse() const { return lse(ptx::lg2_approx_ftz(sum)); }
};

// Of two rows, a lane's sums over a tile: of the even columns and of the odd, since a single chain of additions would be the
// longest chain of all.
struct SumParts {
  float part[2][2];
  TESSERA_DEVICE float of(int half) const { return part[half][0] + part[half][1]; }
};

template <int kM>
struct OnlineSoftmax {
  float max[kM][2];    // as scores are held; -inf before the first visible key
  float sum[kM][2];    // this lane's share
  bool ready = false;  // every row of the warp has a maximum, and not a huge one

  TESSERA_DEVICE OnlineSoftmax() { reset(); }

  TESSERA_DEVICE void reset() {
    ready = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) max[m][half] = -infinity(), sum[m][half] = 0.0f;
  }

  // s times `unit` -> P in place, and O rescaled where a maximum was replaced.
  template <int kN, int kD>
  TESSERA_DEVICE void update(float (&s)[kM][kN][4], ScoreUnit unit, float (&o)[kM][kD][4], float threshold_log2) {
    float alpha[kM][2];
    bool fresh = true;  // before a first visible key O is zero
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) fresh &= max[m][half] == -infinity();
    const bool moves = update_max(s, unit, alpha, threshold_log2);
    if (moves && !fresh) rescale(alpha, o);
    exponentiate(s, unit);
  }

  // update() in its three parts, for a caller whose O is not ready at once. The maximum of s replaces a row's where it passes
  // it; alpha is what O is to be rescaled by, and the answer whether any row of the warp is.
  template <int kN>
  TESSERA_DEVICE bool update_max(const float (&s)[kM][kN][4], ScoreUnit unit, float (&alpha)[kM][2],
                                 float threshold_log2 = kRescaleThreshold_log2) {
    float best[kM][2];
    bool moderate = ready;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& most = best[m][half] = -infinity();
#pragma unroll
        for (int n = 0; n < kN; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        most = row_max(most);
        moderate &= __fmul_rn(most, unit.log2) < kHugeScore_log2;
      }
    bool moves = false;
    ready = __all_sync(0xffffffff, moderate);
    if (ready) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float grows_log2 = __fmul_rn(best[m][half], unit.log2) - __fmul_rn(max[m][half], unit.log2);
          moves |= replace_max(m, half, best[m][half], grows_log2, threshold_log2, alpha[m][half]);
        }
    } else {
      moderate = true;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float grows_log2 = -Rescaling(best[m][half], unit).log2_from(max[m][half]);
          moves |= replace_max(m, half, best[m][half], grows_log2, threshold_log2, alpha[m][half]);
          moderate &= !is_huge(__fmul_rn(max[m][half], unit.log2));
        }
      ready = __all_sync(0xffffffff, moderate);
    }
    return __any_sync(0xffffffff, moves);
  }

  // Before the first exponentials: the result is the same, and later scores have more room below the bound.
  TESSERA_DEVICE void raise_max(float by_log2, ScoreUnit unit) {
    const float by = fminf(by_log2 * ptx::rcp_approx_ftz(unit.log2), 0x1p100f);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) max[m][half] += by;
  }

  // P against the maxima as they are. A row without a maximum has scores of -inf alone.
  template <int kN>
  TESSERA_DEVICE void exponentiate(float (&s)[kM][kN][4], ScoreUnit unit) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float minus_max[2], factor[2] = {unit.log2, unit.log2};
#pragma unroll
      for (int half = 0; half < 2; ++half) minus_max[half] = -__fmul_rn(max[m][half], unit.log2);
      if (!ready) [[unlikely]] {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool huge = is_huge(minus_max[half]);
          const float rounded = __fmul_rn(max[m][half], unit.natural);
          const float first = huge ? unit.natural : 1.0f, taken = huge && rounded != -infinity() ? rounded : 0.0f;
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) s[m][n][e] = __fmul_rn(s[m][n][e], first) - taken;
          if (huge) factor[half] = kLog2e, minus_max[half] = 0.0f;
        }
      }
      SumParts total;
      make_exponentials<0, kN>(s[m], factor, minus_max, total);
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] += total.of(half);
    }
  }

  template <int kD>
  TESSERA_DEVICE void rescale(const float (&alpha)[kM][2], float (&o)[kM][kD][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[m][d][e] *= alpha[m][e / 2];
  }

  // The same against the stale max, that of the tiles before: no maximum is taken, nothing rescaled, nothing waits for the
  // whole tile. False: a sum passed the bound, nothing was added, and the tile is to be done again by update(), from the
  // products on. Requires `ready` and a full tile.
  template <int kN>
  TESSERA_DEVICE bool try_stale_max(float (&s)[kM][kN][4], ScoreUnit unit) {
    SumParts total[kM];
    exponentiate_stale_max<0, kN>(s, unit, total);
    return accept(total);
  }

  // try_stale_max() in its two parts, for a caller that does something between two shares of the columns: of s[m] the
  // fragments kFrom ... kTo - 1, the first share from 0 on.
  template <int kFrom, int kTo, int kN>
  TESSERA_DEVICE void exponentiate_stale_max(float (&s)[kM][kN][4], ScoreUnit unit, SumParts (&total)[kM]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const float factor[2] = {unit.log2, unit.log2};
      const float minus_max[2] = {-__fmul_rn(max[m][0], unit.log2), -__fmul_rn(max[m][1], unit.log2)};
      make_exponentials<kFrom, kTo>(s[m], factor, minus_max, total[m]);
    }
  }
  TESSERA_DEVICE bool accept(const SumParts (&total)[kM]) {
    bool fits = true;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) fits &= total[m].of(half) < kStaleMaxBound;  // a NaN does not
    if (!__all_sync(0xffffffff, fits)) return false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] += total[m].of(half);
    return true;
  }

  // The whole row's sum, in each of its lanes. Once, at the end.
  TESSERA_DEVICE void finish() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] = row_sum(sum[m][half]);
  }

 private:
  // Where the largest score of a tile passes a row's maximum by more than the threshold, it becomes the maximum.
  TESSERA_DEVICE bool replace_max(int m, int half, float best, float grows_log2, float threshold_log2, float& alpha) {
    const bool passes = grows_log2 > threshold_log2;  // before a first visible key by infinity
    max[m][half] = passes ? best : max[m][half];
    alpha = passes ? ptx::ex2_approx_ftz(-grows_log2) : 1.0f;
    sum[m][half] *= alpha;
    return passes;
  }

  // Of a tile's 16 rows: s -> 2^(s factor + minus_max), which join `total`, or with the first fragment begin it.
  template <int kFrom, int kTo, int kN>
  TESSERA_DEVICE static void make_exponentials(float (&s)[kN][4], const float (&factor)[2], const float (&minus_max)[2],
                                               SumParts& total) {
#pragma unroll
    for (int n = kFrom; n < kTo; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = ptx::ex2_approx_ftz(fmaf(s[n][e], factor[e / 2], minus_max[e / 2]));
        float& part = total.part[e / 2][e % 2];
        part = n == (e % 2 == 0 ? 0 : kFrom) ? s[n][e] : part + s[n][e];
      }
    if constexpr (kTo < kN) {
#pragma unroll
      for (int half = 0; half < 2; ++half) total.part[half][0] = total.of(half);  // the odd columns begin again
    }
  }
};

}  // namespace tessera
