// The coordinates of the scores of a step in the transposed layout of the score warpgroups: a lane has keys key and key
// + 8, and of every eight queries 2 (lane % 4) and the next. Also the gradients of weights with dropout.
#pragma once

#include "tessera/attention/backward/key_block.cuh"
#include "tessera/attention/backward/tiles.cuh"
#include "tessera/attention/dropout.cuh"
#include "tessera/attention/score/transposed_step.cuh"
#include "tessera/ptx/mma.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/tile/pipeline.cuh"

namespace tessera {

// Marks the dropped weights of a lane by their sign bit, which no weight has set. The warp's 16 keys are those with
// index `warp` in the step. `bits`: the step's dropout bits in shared memory, from rP's first query on.
template <int kSteps>
TESSERA_DEVICE void mark_dropped(uint32 (&rP)[kSteps][4], uint32 bits, int warp, int lane) {
  const uint32 words = bits + DropoutBits::word_offset(warp / 2, lane / 8, lane % 4);
  const int shift = DropoutBits::bit(warp % 2 * 2, lane / 4 % 2);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint32 word = static_cast<uint32>(ptx::ld_shared_s32(words + step * DropoutBits::kWordStep)) >> shift;
#pragma unroll
    for (int i = 0; i < 4; ++i) rP[step][i] |= DropoutBits::signs(word, i / 2, i % 2);
  }
}

// Whether the gradient of a score program's tensor is requested.
template <auto kCfg>
TESSERA_DEVICE constexpr bool sums_captured() {
  if constexpr (requires { kCfg.d_captured; }) {
    return kCfg.d_captured;
  } else {
    return false;
  }
}

// Whether it is requested of what is made of dQ.
template <auto kCfg>
TESSERA_DEVICE constexpr bool divides_by_factor() {
  if constexpr (requires { kCfg.d_factor; }) {
    return kCfg.d_factor;
  } else {
    return false;
  }
}

// The coordinates (b, h, i, j) of the scores of a step. `Warpgroup` has p, block, the step's step_row0() and
// step_head(), and the warp's first_key(). Each is read again where it is used, to save registers.
template <auto kCfg, class Warpgroup>
struct StepCoordinates {
  static constexpr bool kTransposed = true, kKeepsProduct = false, kCollects = kCfg.d_bias, kAhead = kCfg.bias_ahead(),
                        kSums = sums_captured<kCfg>(), kDividesByFactor = divides_by_factor<kCfg>();
  static constexpr Dtype kDtype = kCfg.dtype;
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

// P o (dP - delta), scaled down like delta; dP is 0 for a dropped weight, whose sign bit is set. With d_factor it is
// multiplied by the factor that dS includes, and `delta` has been.
template <auto kCfg, class Head>
TESSERA_DEVICE float score_gradient(const BwdSm90Params& p, [[maybe_unused]] const Head& head, float weight,
                                    float d_probability, float delta) {
  constexpr bool kHasFactor = divides_by_factor<kCfg>();
  if constexpr (kCfg.score.dropout || kHasFactor) {
    float unit = bwd_lowers_early(kCfg.dtype) ? kBwdLower : 1.0f;
    if constexpr (kCfg.score.dropout) unit *= p.dropout_scale;
    if constexpr (kHasFactor) unit *= head.in_ds;
    if constexpr (!kCfg.score.dropout) return weight * fmaf(d_probability, unit, -delta);
    return fabsf(weight) * fmaf(weight < 0.0f ? 0.0f : d_probability, unit, -delta);
  } else {
    return weight * lowered_difference<kCfg.dtype>(d_probability, delta);
  }
}

// ---- warps that generate the dropout bits ---------------------------------------------------------------------------
//
// In bwd_sm90, and in block 0 of bwd_sm90_d256: otherwise idle warps of the producer's warpgroup generate the dropout
// bits of a step, each bit once, ahead of the score warpgroups. The score warpgroups spend nothing on it; they could
// not use a whole call of Philox, because some of its keys belong to other threads.

template <class Shared, auto kCfg>
struct DropoutWarps {
  static constexpr int kUnits = Shared::kDropoutUnits;  // of a step: 32 words each, one for each lane

  const BwdSm90Params& p;
  const Shared& shared;
  const KeyBlock& block;

  // warp: index of kDropoutWarps, each of which processes every kDropoutWarps-th unit. What a unit needs is recomputed
  // from its number, because the warps have few registers.
  TESSERA_DEVICE void run(uint32 warp) const {
#pragma unroll 1
    for (uint32 unit = warp; unit < static_cast<uint32>(block.steps) * kUnits; unit += Shared::kDropoutWarps) {
      const uint32 drops = generate(unit);
      const RingPosition<Shared::kDropoutStages> at = place_of(not_hoisted(unit) / kUnits);
      ptx::mbarrier_wait_parity(shared.dropout_empty(at), at.parity ^ 1);
      ptx::st_shared_s32(shared.dropout_bits(at) + word_of(not_hoisted(unit)) * 4, static_cast<int>(drops));
      Shared::arrive_warp(shared.dropout_full(at));
    }
  }
  TESSERA_DEVICE static RingPosition<Shared::kDropoutStages> place_of(uint32 step) {
    RingPosition<Shared::kDropoutStages> at;
    at.offset = static_cast<int>(step % Shared::kDropoutStages) * at.kStep;
    at.parity = static_cast<int>(step / Shared::kDropoutStages % 2);
    return at;
  }
  TESSERA_DEVICE static uint32 word_of(uint32 unit) { return unit % kUnits * 32 + not_hoisted(threadIdx.x % 32); }

  // The producer's query tile number `step`, and its head; tiles are counted from the group's first head on.
  TESSERA_DEVICE int find(int step, int& head) const {
    if constexpr (kCfg.block_mask) {
      while (true) {
        constexpr bool kProgram = kCfg.program_lists();
        const int list = list_of<kCfg.block_n, kProgram>(p, block, head);
        const int count = listed_tiles<kProgram>(p, block, list);
        if (step < count) return list_block<kProgram>(listed_entry<kProgram>(p, block, list, step));
        step -= count, ++head;
      }
    } else {
      for (; step >= block.tiles; ++head) step -= block.tiles;
      const int tile = start_tile<kCfg>(p, block) + step, end = block.first_tile + block.tiles;
      return tile < end ? tile : tile - block.tiles;
    }
  }

  TESSERA_DEVICE uint32 generate(uint32 unit) const {
    int head = block.head_kv * p.group;
    const int row0 = find(static_cast<int>(unit / kUnits), head) * kCfg.block_m;
    return DropoutBits::generate<kCfg.score.dropout_state>(
        p, dropout_head<kCfg.score>(p, block.batch, head), dropout_query<kCfg.score>(p, block.batch, row0),
        dropout_key<kCfg.score>(p, block.batch, block.key0), word_of(unit));
  }
};

}  // namespace tessera
