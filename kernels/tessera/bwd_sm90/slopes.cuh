// Score programs whose slope, d(score) / d(product x scale), depends on the score: dS is made of P times the slope,
// which is kept in float16 where dS will be, so that dS is as exact as without a slope and no register is added. A
// slope may have any size, so each lane scales its weights by a power of two. P is kept as the operand of the product
// with dO. The gradient of an element that all pairs of a head share is summed in the same way.
#pragma once

#include "tessera/bwd_sm90/scores.cuh"

namespace tessera {

// The word of a fragment that has queries 8 m + 2 c and the next.
template <int kSteps>
TESSERA_DEVICE uint32& word_of(uint32 (&words)[kSteps][4], int m, int half) {
  return words[m / 2][m % 2 * 2 + half];
}

// Turns S into P, the operand of the product with dO, and in rdS P times the slopes, in float16 over slope_unit.
template <BwdSm90Config kCfg>
TESSERA_DEVICE void ScoreWarpgroup<kCfg>::sloped_weights(bool far) {
  const Coordinates coordinates(*this);
  typename Step::template SlopedScores<> scores(coordinates);
  if (far) [[unlikely]] {
#pragma unroll 1
    for (int m = 0; m < kM; ++m) {  // in the place of the first eight queries: the code of eight
      float eight[4] = {rS[0][0][0], rS[0][0][1], rS[0][0][2], rS[0][0][3]};
      uint32 pair[2];
      weigh<true>(scores, m, eight, pair);
#pragma unroll
      for (int n = 0; n < kM; ++n) {
        const bool last = n == kM - 1;
#pragma unroll
        for (int i = 0; i < 4; ++i) rS[0][n][i] = last ? eight[i] : rS[0][n + !last][i];
#pragma unroll
        for (int half = 0; half < 2; ++half) word_of(rP, n, half) = last ? pair[half] : word_of(rP, n + !last, half);
      }
    }
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32 pair[2];
      // Later loads stay after it, to save registers; after __syncwarp the assembler repeats the rest for a warp that
      // has diverged.
      if (m > 0 && m % 2 == 0) reload_memory();
      weigh<false>(scores, m, rS[0][m], pair);
      word_of(rP, m, 0) = pair[0], word_of(rP, m, 1) = pair[1];
    }
  }
  const auto hide = [&](auto&& hides) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!hides(m, i / 2, i % 2)) continue;
        rS[0][m][i] = 0.0f;
        word_of(rP, m, i / 2) &= i % 2 ? 0x0000ffffu : 0xffff0000u;
      }
  };
  if (masked()) {
    const SeeingQueries seen = seeing();
    hide([&](int m, int half, int e) { return seen.hides(half, m * 8 + e); });
  }
  const uint32 shown = scores.shown(kCfg.program_lists() && list_is_full(step_word(), warpgroup));
  if (shown != ~0u) hide([shown](int m, int half, int e) { return !(shown >> (4 * m + 2 * half + e) & 1); });
  const float unit = scale_of_weights();
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      word_of(rdS, m, half) = ptx::cvt_rn_f16x2(rS[0][m][2 * half] * unit, rS[0][m][2 * half + 1] * unit);
    }
}

// Turns the products of queries 8 m + 2 c and the next into weights times slopes, and packs the weights.
template <BwdSm90Config kCfg>
template <bool kFar, class Scores>
TESSERA_DEVICE void ScoreWarpgroup<kCfg>::weigh(Scores& scores, int m, float (&s)[4], uint32 (&pairs)[2]) const {
  float slopes[4];
  scores.make(m, s, slopes);
  const ScoreUnit score_units = score_unit<kCfg.score>(p);
  float weights[4];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if constexpr (kFar) {
      const FarRow row(p, block.s, block.batch, step_head(), step_row0() + lane() % 4 * 2 + m * 8 + e, score_units);
      weights[e] = row.log2_weight(s[e]) + kBwdRaise_log2, weights[2 + e] = row.log2_weight(s[2 + e]) + kBwdRaise_log2;
    } else {
      const float2 pair = lse(m);
      const float minus = e ? -pair.y : -pair.x;
      weights[e] = fmaf(s[e], score_units.log2, minus), weights[2 + e] = fmaf(s[2 + e], score_units.log2, minus);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    weights[i] = ptx::ex2_approx_ftz(weights[i]);
    s[i] = weights[i] == 0.0f ? 0.0f : weights[i] * slopes[i];  // the slope of a score of -inf may be NaN
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float low = weights[2 * half], high = weights[2 * half + 1];
    constexpr bool kHalf = kCfg.dtype == Dtype::kFloat16 || kCfg.d_captured;  // dS is made of it
    pairs[half] = kHalf ? ptx::cvt_rn_satfinite_f16x2(low, high)              // because the LSE is rounded
                        : pack_pair<kCfg.dtype>(low, high);
  }
}

// Chooses slope_unit, a power of two by whose inverse, which is returned, the lane's largest finite weight in rS
// becomes almost 2^15.
template <BwdSm90Config kCfg>
TESSERA_DEVICE float ScoreWarpgroup<kCfg>::scale_of_weights() {
  float most = 0.0f;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(rS[0][m][i]));  // ignores NaN
  if (most == infinity()) [[unlikely]] {
    most = 0.0f;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float size = fabsf(rS[0][m][i]);
        if (size < infinity()) most = fmaxf(most, size);
      }
  }
  // 2^(e - 14) for the exponent e of `most`, or of the least number for which this and its inverse are normal.
  constexpr uint32 kExponent = 0x7f800000u, kOne = 127u << 23, kPlaces = 14u << 23;
  const uint32 exponent = max(__float_as_uint(most) & kExponent, kPlaces + (1u << 23));
  slope_unit = __uint_as_float(exponent - kPlaces);
  return __uint_as_float(2 * kOne + kPlaces - exponent);
}

// Weights that are P times slopes, times dP - delta.
template <BwdSm90Config kCfg>
TESSERA_DEVICE float2 ScoreWarpgroup<kCfg>::sloped_gradients(uint32 packed_p, uint32 packed_weights, int half,
                                                             const float (&d)[4], float2 minus) const {
  const float2 weights = unpack_pair<Dtype::kFloat16>(packed_weights);
  float d_low = d[2 * half], d_high = d[2 * half + 1];
  float unit = bwd_lowers_early(kCfg.dtype) ? slope_unit * kBwdLower : slope_unit;
  if constexpr (kCfg.score.dropout) {
    if (packed_p & 0x8000u) d_low = 0.0f;
    if (packed_p >> 31) d_high = 0.0f;
    unit *= p.dropout_scale;
  }
  const float low = weights.x * fmaf(d_low, unit, -(minus.x * slope_unit));
  const float high = weights.y * fmaf(d_high, unit, -(minus.y * slope_unit));
  // A hidden score's gradient may be NaN.
  return make_float2(weights.x == 0.0f ? 0.0f : low, weights.y == 0.0f ? 0.0f : high);
}

// Adds the gradient of the head's element that was summed so far.
template <BwdSm90Config kCfg>
TESSERA_DEVICE void ScoreWarpgroup<kCfg>::add_element_sum() {
  ProgramGradients<kCfg.score, kCfg.deterministic, 1> sums(p);
  sums.of_head[0] = element_sum * bwd_lower_late(kCfg.dtype);
  element_sum = 0.0f;
  const typename Step::Options::Row row(p, block.s, block.batch, summed_head, 0);
  sums.end(row, [this](int) { return block.key0; });
}

}  // namespace tessera
