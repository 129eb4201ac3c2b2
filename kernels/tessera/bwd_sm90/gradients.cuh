// Turns dP into dS, in the place of dP: P o (dP - delta) with the gradients of the score's options.
#pragma once

#include "tessera/bwd_sm90/scores.cuh"

namespace tessera {

template <BwdSm90Config kCfg>
template <class Head>
TESSERA_DEVICE void ScoreWarpgroup<kCfg>::score_gradients(const Head& head, bool hides_some) {
  if constexpr (kCfg.d_diagonal) {
    begin_diagonals();
    if (kHiddenByWeight || (kMaskedAhead ? hides_some : masked())) {
      score_gradients<0, kM / 2, true>(head);
      if (step_row0() >= 0) score_gradients<kM / 2, kM / 2, true>(head);  // as below
    } else {
      score_gradients<0, kM / 2>(head);
      if (step_row0() >= 0) score_gradients<kM / 2, kM / 2>(head);
    }
    store_diagonals(diagonals(), kM, kept);
  } else if constexpr (kCfg.score.facts().reshapes && kCfg.dtype != Dtype::kFloat16) {
    // This branch is always taken: without it the compiler would compute all logarithms at once and spill registers.
    score_gradients<0, kM / 2>(head);
    if (step_row0() >= 0) score_gradients<kM / 2, kM / 2>(head);
  } else {
    score_gradients<0, kM>(head);
  }
  if constexpr (kOnlyHides) {
    if (!(kCfg.program_lists() && list_is_full(step_word(), warpgroup)) || (kMaskedAhead ? hides_some : masked())) {
      clear_weightless();
    }
  } else if constexpr (!kHiddenByWeight && !kCfg.d_diagonal) {
    if (kMaskedAhead ? hides_some : masked()) clear_hidden();
  }
}

template <BwdSm90Config kCfg>
template <int kFirst, int kRows, bool kHides, class Head>
TESSERA_DEVICE void ScoreWarpgroup<kCfg>::score_gradients(const Head& head) {
  const uint32 delta = stats(true);
  [[maybe_unused]] uint32 to_diagonals = 0;
  if constexpr (kCfg.d_diagonal) to_diagonals = diagonals();
#pragma unroll
  for (int m = kFirst; m < kFirst + kRows; ++m) {
    float2 minus = m < kDeltaHeld ? ahead[m] : ptx::ld_shared_f32x2(delta + m * 32);
    if constexpr (kCfg.d_factor) minus = make_float2(minus.x * head.in_ds, minus.y * head.in_ds);
    const float(&d)[4] = rS[0][m];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int half = kCfg.d_diagonal ? 1 - n : n;
      uint32& packed = rP[m / 2][m % 2 * 2 + half];
      if constexpr (kCfg.d_captured) {
        const float2 of_element = sloped_gradients(packed, rdS[m / 2][m % 2 * 2 + half], half, d, minus);
        element_sum += of_element.x + of_element.y;
      }
      if constexpr (slope_needs_score<kCfg.score>()) {
        uint32& packed_ds = rdS[m / 2][m % 2 * 2 + half];
        const float2 ds = sloped_gradients(packed, packed_ds, half, d, minus);
        packed_ds = pack_pair<kCfg.dtype>(ds.x, ds.y);
        if constexpr (kCfg.score.dropout) {
          packed = kCfg.dtype == Dtype::kFloat16 ? ptx::max_f16x2(packed, 0) : ptx::max_bf16x2(packed, 0);
        }
      } else if constexpr (kOptionsOfGradients) {
        const float2 ds = score_gradients<kHides>(head, packed, rdS[m / 2][m % 2 * 2 + half], m, half, d, minus);
        if constexpr (kCfg.d_diagonal) {
          if (half == 1) store_diagonals(to_diagonals, m, m == 0 ? ds : make_float2(kept.x + ds.x, kept.y + ds.y));
          if (half == 0) kept = ds;
        }
      } else {
        const float2 x = unpack_pair<Dtype::kFloat16>(packed);
        rdS[m / 2][m % 2 * 2 + half] =
            pack_pair<kCfg.dtype>(x.x * lowered_difference<kCfg.dtype>(d[2 * half], minus.x),
                                  x.y * lowered_difference<kCfg.dtype>(d[2 * half + 1], minus.y));
        if constexpr (kCfg.dtype != Dtype::kFloat16) packed = pack_pair<kCfg.dtype>(x.x, x.y);
      }
    }
  }
}

// The same for queries 8 m + 2 c and the next, and one key. A dropped weight has its sign bit set. Returns dScore.
template <BwdSm90Config kCfg>
template <bool kHides, class Head>
TESSERA_DEVICE float2 ScoreWarpgroup<kCfg>::score_gradients(const Head& head, uint32& packed_p, uint32& packed_ds,
                                                            int m, int half, const float (&d)[4], float2 minus) {
  const float2 x = unpack_pair<Dtype::kFloat16>(packed_p);
  float ds[2] = {score_gradient<kCfg>(p, head, x.x, d[2 * half], minus.x),
                 score_gradient<kCfg>(p, head, x.y, d[2 * half + 1], minus.y)};
  if constexpr (kHides) {  // a hidden score's gradient may be NaN
    if (x.x == 0.0f) ds[0] = 0.0f;
    if (x.y == 0.0f) ds[1] = 0.0f;
  }
  const float2 of_score = make_float2(ds[0], ds[1]);
  Step::gradient(
      Coordinates(*this), head, m, half, x, [this](int m) { return lse(m); }, ds);
  packed_ds = pack_pair<kCfg.dtype>(ds[0], ds[1]);
  if constexpr (kCfg.dtype == Dtype::kFloat16) {
    if constexpr (kCfg.score.dropout) packed_p = ptx::max_f16x2(packed_p, 0);
  } else {
    packed_p = kCfg.score.dropout ? ptx::cvt_rn_relu_bf16x2(x.x, x.y) : pack_pair<kCfg.dtype>(x.x, x.y);
  }
  return of_score;
}

// dS for dK, where it includes only a part of the head's factor.
template <BwdSm90Config kCfg>
TESSERA_DEVICE void ScoreWarpgroup<kCfg>::rescale_gradients(float factor) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 ds = unpack_pair<kCfg.dtype>(rdS[step][i]);
      rdS[step][i] = pack_pair<kCfg.dtype>(ds.x * factor, ds.y * factor);
    }
}

template <BwdSm90Config kCfg>
TESSERA_DEVICE void ScoreWarpgroup<kCfg>::clear_hidden() {
  const SeeingQueries seen = seeing();
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) seen.clear_hidden(rdS[m / 2][m % 2 * 2 + half], half, m * 8);
}

// By weights that were rounded to kCfg.dtype; in float16 they are as they were.
template <BwdSm90Config kCfg>
TESSERA_DEVICE void ScoreWarpgroup<kCfg>::clear_weightless() {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(rP[step][i] & 0x0000ffffu)) rdS[step][i] &= 0xffff0000u;
      if (!(rP[step][i] & 0xffff0000u)) rdS[step][i] &= 0x0000ffffu;
    }
}

}  // namespace tessera
