// The coordinates of the scores of a step in the transposed layout of the score warpgroups: a lane has keys key and key
// + 8, and of every eight queries 2 (lane % 4) and the next. Also the gradients of weights with dropout.
#pragma once

#include "tessera/attention/score/step.cuh"
#include "tessera/bwd_sm90/drawn_bits.cuh"
#include "tessera/bwd_sm90/key_rows.cuh"

namespace tessera {

// Marks the dropped weights of a lane by their sign bit, which no weight has set. The warp's 16 keys are those with
// index `warp` in the step. `bits`: the step's dropout bits in shared memory, from rP's first query on.
template <int kSteps>
TESSERA_DEVICE void mark_dropped(uint32 (&rP)[kSteps][4], uint32 bits, int warp, int lane) {
  const uint32 words = bits + DrawnBits::word_offset(warp / 2, lane / 8, lane % 4);
  const int shift = DrawnBits::bit(warp % 2 * 2, lane / 4 % 2);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint32 word = static_cast<uint32>(ptx::ld_shared_s32(words + step * DrawnBits::kWordStep)) >> shift;
#pragma unroll
    for (int i = 0; i < 4; ++i) rP[step][i] |= DrawnBits::signs(word, i / 2, i % 2);
  }
}

// The coordinates (b, h, i, j) of the scores of a step. `Warpgroup` has p, block, the step's step_row0() and
// step_head(), and the warp's first_key(). Each is read again where it is used, to save registers.
template <auto kCfg, class Warpgroup>
struct StepCoordinates {
  static constexpr bool kTransposed = true, kKeepsProduct = false, kCollects = kCfg.d_bias, kAhead = kCfg.bias_ahead();
  static constexpr int kM = kCfg.score_m() / 8;
  static constexpr float kCollectUnit = bwd_lower_late(kCfg.dtype);

  const Warpgroup& of;
  const BwdSm90Params& p;

  TESSERA_DEVICE explicit StepCoordinates(const Warpgroup& of) : of(of), p(of.p) {}
  TESSERA_DEVICE const Sequence& sequence() const { return of.block.s; }
  TESSERA_DEVICE int batch() const { return of.block.batch; }
  TESSERA_DEVICE int head() const { return of.step_head(); }
  TESSERA_DEVICE int row0() const { return of.step_row0(); }
  TESSERA_DEVICE int key() const { return of.first_key(); }
  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }
  TESSERA_DEVICE bool pairs(int row0) const {
    return p.bias_mask_keys > 1 && of.block.key0 + kCfg.block_n <= of.block.s.sk &&
           row0 + kCfg.score_m() <= of.block.s.sq;
  }
};

// P o (dP - delta), scaled down like delta; dP is 0 for a dropped weight, whose sign bit is set.
template <auto kCfg>
TESSERA_DEVICE float score_gradient(const BwdSm90Params& p, float weight, float d_probability, float delta) {
  if constexpr (kCfg.score.dropout) {
    const float unit = bwd_lowers_early(kCfg.dtype) ? p.dropout_scale * kBwdLower : p.dropout_scale;
    return fabsf(weight) * fmaf(weight < 0.0f ? 0.0f : d_probability, unit, -delta);
  } else {
    return weight * lowered_difference<kCfg.dtype>(d_probability, delta);
  }
}

}  // namespace tessera
