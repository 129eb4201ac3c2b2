// The consumer warpgroups of fwd_sm90_fp8: each has 64 query rows of a work tile.
#pragma once

#include "tessera/fwd_sm90/fp8/shared.cuh"
#include "tessera/fwd_sm90/scores.cuh"
#include "tessera/ptx/wgmma_e4m3.cuh"

namespace tessera {

// P is multiplied by this power of two before it is rounded to e4m3, whose largest number is 448 and whose normal
// numbers begin at 2^-6: weights down to 2^-14 keep all of their bits. Sums count the weights before rounding.
inline constexpr float kWeightShift_log2 = 8.0f, kWeightShift = 256.0f;

// fwd_sm90's for 16-bit outputs, which its cursor calls: stores O = 0 and LSE = -inf for a warp's 16 rows from row0 on,
// which see no key.
template <FwdSm90Config kCfg>
requires(kCfg.dtype == Dtype::kFloat8E4M3) TESSERA_DEVICE
    void store_unseen_rows(const ConsumerGroup<kCfg>& group, const WorkTile<kCfg>& tile, int row0) {
  const FwdSm90Params& p = group.p;
  const int bytes = static_cast<const FwdSm90Fp8Params&>(p).o_bytes, words = p.head_dim_v * bytes / 16;
  const int count = min(tile.count - row0, 16);
  for (int word = lane_id(); word < count * words; word += 32) {
    const int64 row = static_cast<int64>(tile.s.q_begin) + tile.row0 + row0 + word / words;
    const int64 at = p.o.batch * tile.batch + p.o.head * tile.head + p.o.row * row;
    *reinterpret_cast<uint4*>(static_cast<char*>(p.o.data) + at * bytes + word % words * 16) = make_uint4(0, 0, 0, 0);
  }
  if (lane_id() < count) store_row_lse(group, tile, row0 + lane_id(), unseen_lse());
}

template <FwdSm90Fp8Config kCfg>
struct Fp8Consumer {
  static constexpr FwdSm90Config kTiles = kCfg.tiles();
  using Scores = ScoreStage<kTiles>;
  using Q = typename Scores::Q;
  using K = typename Scores::K;
  using V = SwizzledTile<kCfg.head_dim_v, kCfg.block_n / 2>;
  static constexpr int kN = kCfg.block_n / 8, kSteps = kCfg.block_n / 32;
  static constexpr int kGroupN = 2, kGroups = kN / kGroupN;     // of S: see exponentiate()
  static constexpr int kParts = kCfg.head_dim_v / kCfg.o_cols;  // products of one block with columns of V
  static constexpr int kPartD = kCfg.o_cols / 8;
  static constexpr int kSlices = kGroups / kParts;  // of the first part, added to O between the first exponentials
  static constexpr int kInner = 16;                 // pairs of elements that one wgmma multiplies
  using ScoreProduct = ptx::WgmmaE4m3<kCfg.block_n>;
  using OutputProduct = ptx::WgmmaE4m3<kCfg.o_cols>;

  const FwdSm90Fp8Params& p;
  KvCursor<kTiles> at;
  Scores scores;
  uint32 rP[kSteps][4];  // A fragments of P V
  float rO[kParts][kPartD][4];
  float rPart[1][kPartD][4];  // of one product: the tensor cores do not add in float32 (ptx/wgmma_e4m3.cuh)
  float factor[2];            // of O, of the block whose P V is next
  bool not_negative;          // no row of the warp has a negative maximum: one below 0 would not replace it
  float q_scale;              // scale of q, times that of k if it has one for all tokens
  // With block scales:
  float block_scales[2];         // of k and of v, of the block whose scores are next
  float v_scale[2];              // the last one that a lane's two rows have seen: O is unit_of_o() of it times rO
  bool scales_part;              // the one of the block whose P V is next is no unit of O, but multiplies P V
  const float* first_scales[2];  // of k and of v, of the work tile's sequence and head

  TESSERA_DEVICE Fp8Consumer(const FwdSm90Fp8Params& p, FwdSm90SharedMemory<kTiles>& shared, int consumer)
      : p(p), at(p, shared, consumer) {
    // Not forgotten before each product, as S is: the compiler then keeps one set of registers for all of them.
    clear(rPart);
    ptx::wgmma_pin(flat(rPart));
  }

  // What turns a score into the logarithm of its weight.
  struct Exponents {
    float log2, above[2];
    TESSERA_DEVICE Exponents(const Fp8Consumer& of, float unit) : log2(of.unit_of(unit).log2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) above[half] = kWeightShift_log2 - of.scores.softmax.max[0][half];
    }
  };

  TESSERA_DEVICE void attend_tiles() {
    at.open_turns();
    while (uniform(at.next_tile(false))) {
      load_tile_scales();
      load_block_scales();
      at.begin_turn();
      issue_scores();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(flat(scores.rS));
      scores.softmax.reset();
      not_negative = false;
      const float unit = finish_scores();
      update_max(unit, factor);
      at.end_turn();
      note_scores();
      exponentiate_all(unit);
      pack();
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int d = 0; d < kPartD; ++d)
#pragma unroll
          for (int e = 0; e < 4; ++e) rO[part][d][e] = 0.0f;
      v_scale[0] = v_scale[1] = 1.0f;
      take_value_scale();
      while (at.before_last_block()) attend_block();
      at.wait_v();
      add_parts<0>();
      at.release_v();
      store();
      for (; at.bounds.end - 1 > at.bounds.last; --at.bounds.end) at.skip_k(), at.skip_v();
      at.release_tile();
    }
  }

  // S = Q K^T of the next block, together with O += P V of this one, one part of the columns after another.
  TESSERA_DEVICE void attend_block() {
    at.next_block();
    load_block_scales();
    at.begin_turn();
    issue_scores();
    at.wait_v();
    issue_output<0>();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_pin(flat(scores.rS));
    const float unit = finish_scores();
    float next_factor[2];
    update_max(unit, next_factor);
    at.end_turn();
    note_scores();
    SumParts total;
    const bool ready = scores.softmax.ready;
    wait_output();  // of the first part, which is done by now
    if (!ready) [[unlikely]] {
      exponentiate_all(unit);
      if constexpr (kSlices > 0) add_part<0>();
    }
    const Exponents exponents(*this, unit);
    if (not_hoisted(ready)) make_exponents<0>(exponents);
    exponentiate_and_multiply<0>(exponents, ready, total);
    if (ready) {
      add_group<kGroups - 1>(total);
#pragma unroll
      for (int half = 0; half < 2; ++half) scores.softmax.sum[0][half] += total.of(half);
    }
    at.release_v();
    factor[0] = next_factor[0], factor[1] = next_factor[1];
    pack();
    take_value_scale();
  }
  // Part `kPart` of the exponentials during part `kPart` of the products, and so on. `ready` is tested for each part,
  // so that the products exist once in the code: a second copy would spill.
  template <int kPart>
  TESSERA_DEVICE void exponentiate_and_multiply(const Exponents& exponents, bool ready, SumParts& total) {
    exponentiate<kGroups * kPart / kParts, kGroups*(kPart + 1) / kParts>(exponents, ready, total);
    if constexpr (kPart > 0) wait_output();
    if constexpr (kPart > 0 || kSlices == 0) add_part<kPart>();
    if constexpr (kPart + 1 < kParts) {
      issue_output<kPart + 1>();
      exponentiate_and_multiply<kPart + 1>(exponents, ready, total);
    }
  }
  template <int kPart>
  TESSERA_DEVICE void add_parts() {
    issue_output<kPart>();
    wait_output();
    add_part<kPart>();
    if constexpr (kPart + 1 < kParts) add_parts<kPart + 1>();
  }

  // ---- scales ----

  TESSERA_DEVICE int kv_head() const { return uniform(at.tile().head) / p.group; }
  TESSERA_DEVICE float scale_of(const ScaleTensor& scales, int token) const {
    return scales.at(uniform(at.tile().batch), token / kScaleTokens, kv_head());
  }
  TESSERA_DEVICE void load_tile_scales() {
    q_scale = scale_of(p.q_scales, at.tile().row0 + at.consumer * kConsumerRows);
    if constexpr (!kCfg.block_scales) {
      q_scale *= scale_of(p.k_scales, 0);
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const ScaleTensor& of = n == 0 ? p.k_scales : p.v_scales;
        first_scales[n] = of.data ? of.data + of.batch * uniform(at.tile().batch) + of.head * kv_head() : nullptr;
      }
    }
  }
  // Issues the loads of the scales of the block whose scores are next: its product hides their latency.
  TESSERA_DEVICE void load_block_scales() {
    if constexpr (kCfg.block_scales) {
      const int tokens = at.bounds.block * kCfg.block_n / kScaleTokens;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int64 row = n == 0 ? p.k_scales.row : p.v_scales.row;
        block_scales[n] = first_scales[n] ? first_scales[n][row * tokens] : 1.0f;
      }
    }
  }
  // O is kept in units of the scale of v, so that its factor has it for nothing, unless it is 0, not finite or so large
  // or small that O could overflow.
  TESSERA_DEVICE static float unit_of_o(float scale) {
    constexpr float kLeast = 0x1p-40f, kMost = 0x1p40f;
    return fabsf(scale) >= kLeast && fabsf(scale) <= kMost ? scale : 1.0f;
  }
  // Of the block whose P V is next. It does not reach rows that see none of the block's keys.
  TESSERA_DEVICE void take_value_scale() {
    if constexpr (kCfg.block_scales) {
      const float scale = block_scales[1], unit = unit_of_o(scale), per_unit = ptx::rcp_approx_ftz(unit);
      scales_part = unit != scale;
      const bool partial = at.bounds.cuts_low() || at.bounds.cuts_high();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = unit_of_o(v_scale[half]);
        v_scale[half] = old;
        if (partial) [[unlikely]] {
          const int key0 = at.bounds.block * kCfg.block_n;
          const WorkTile<kTiles>& tile = at.tile();
          const KeyRange keys = visible_keys<kCfg.score>(p, tile.s, at.query(tile, warp_lane(), half));
          if (keys.low >= key0 + kCfg.block_n || keys.high < key0) continue;
        }
        factor[half] *= unit == old ? 1.0f : old * per_unit;
        v_scale[half] = scale;
      }
    }
  }

  // ---- products ----

  template <class Tile, int kStages>
  TESSERA_DEVICE TileDescriptor descriptor(const Tile* tiles, const RingPosition<kStages>& of, uint32 high) const {
    const auto first = reinterpret_cast<const char*>(tiles) - reinterpret_cast<const char*>(&at.shared);
    constexpr int kStep = static_cast<int>(sizeof(Tile) / 16) / RingPosition<kStages>::kStep;
    return {at.shared_descriptor + static_cast<int>(first) / 16 + of.offset * kStep, high};
  }
  TESSERA_DEVICE void issue_scores() {
    const TileDescriptor q = descriptor(at.shared.sQ, at.q, p.q_descriptor_high);
    const TileDescriptor k = descriptor(at.shared.sK, at.k, p.kv_descriptor_high);
    ptx::wgmma_forget(flat(scores.rS));
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kTiles.head_dim; d += kInner) {
      ScoreProduct::ss(flat(scores.rS), inner_major<Q>(q, 0, d), inner_major<K>(k, 0, d), d > 0);
    }
    ptx::wgmma_commit_group();
  }
  template <int kPart>
  TESSERA_DEVICE void issue_output() {
    const TileDescriptor v = descriptor(at.shared.sV, at.v, p.kv_descriptor_high);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      OutputProduct::rs(flat(rPart), rP[step], inner_major<V>(v, kPart * kCfg.o_cols, step * kInner), step > 0);
    }
    ptx::wgmma_commit_group();
  }
  TESSERA_DEVICE void wait_output() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(rPart));
    if constexpr (kCfg.block_scales) {
      if (not_hoisted(scales_part)) [[unlikely]] {
#pragma unroll
        for (int d = 0; d < kPartD; ++d)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float scale = v_scale[e / 2];
            if (unit_of_o(scale) != scale) rPart[0][d][e] *= scale;
          }
      }
    }
  }
  // Adds the last product, of part kPart, to O, or some of its fragments.
  template <int kPart, int kFrom = 0, int kTo = kPartD>
  TESSERA_DEVICE void add_part() {
#pragma unroll
    for (int d = kFrom; d < kTo; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& o = rO[kPart][d][e];
        o = fmaf(o, factor[e / 2], rPart[0][d][e]);
      }
  }

  // ---- S to P ----

  // Options and masks, on products that are not multiplied by the scales of q and k yet; returns the factor of the
  // scores that remains, which the softmax's exponent has for nothing. A scale that is not positive, or a product of
  // two that is lost, is applied at once: the largest product must be the largest score, and -inf * 0 is NaN.
  TESSERA_DEVICE float finish_scores() {
    float unit = q_scale;
    if constexpr (kCfg.block_scales) unit *= block_scales[0];
    constexpr float kLeast = 0x1p-100f;
    if (!Scores::Step::kPlain || !(unit > kLeast)) {
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores.rS[0][n][e] *= unit;
      unit = 1.0f;
    }
    scores.apply_options_and_mask(at);
    at.release_k();
    if (at.at_last_block()) at.release_q();
    return unit;
  }
  TESSERA_DEVICE ScoreUnit unit_of(float unit) const {
    const ScoreUnit all = score_unit<kCfg.score>(p);
    return {all.natural * unit, all.log2 * unit};
  }
  // The maximum never lags: a weight above 1 could exceed what e4m3 holds, and would be cut off while the sum counts
  // all of it.
  TESSERA_DEVICE void update_max(float unit, float (&of_o)[2]) {
    float largest[2], alpha[1][2];
    if (not_hoisted(not_negative)) {
      largest_by_bits(largest);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = scores.softmax.largest(scores.rS[0], half);
      }
    }
    scores.softmax.update_max_by([&](int, int half) { return largest[half]; }, unit_of(unit), alpha, 0.0f);
    of_o[0] = alpha[0][0], of_o[1] = alpha[0][1];
  }
  // The largest of the lane's scores of each row; of negative ones, some number below 0. Numbers that are not negative
  // are ordered as their bits are as integers, of which one instruction compares three, not two.
  TESSERA_DEVICE void largest_by_bits(float (&largest)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto bits = [&](int n, int e) { return __float_as_int(scores.rS[0][n][2 * half + e]); };
      int most[2] = {max(bits(0, 0), bits(0, 1)), max(bits(1, 0), bits(1, 1))};  // two chains
#pragma unroll
      for (int n = 2; n < kN; ++n) most[n % 2] = max(max(most[n % 2], bits(n, 0)), bits(n, 1));
      largest[half] = __int_as_float(max(most[0], most[1]));
    }
  }
  // After update_max(), once another consumer may have its turn.
  TESSERA_DEVICE void note_scores() {
    const auto& max = scores.softmax.max[0];
    not_negative = __all_sync(0xffffffff, max[0] >= 0.0f && max[1] >= 0.0f);
  }
  // Groups kFrom ... kTo - 1 of the scores become weights, while the exponents of the next group are made and the group
  // before is added to the sums. `ready` is tested for each: ptxas moves no instruction across the branch, and so fills
  // the time between two MUFU with exponents and sums, which it otherwise puts before and after all MUFU.
  template <int kFrom, int kTo>
  TESSERA_DEVICE void exponentiate(const Exponents& exponents, bool ready, SumParts& total) {
    if constexpr (kFrom < kTo) {
      if (not_hoisted(ready)) {
        make_weights<kFrom>();
        if constexpr (kFrom + 1 < kGroups) make_exponents<kFrom + 1>(exponents);
        if constexpr (kFrom > 0) add_group<kFrom - 1>(total);
        if constexpr (kFrom < kSlices) add_part<0, kPartD * kFrom / kSlices, kPartD*(kFrom + 1) / kSlices>();
      }
      exponentiate<kFrom + 1, kTo>(exponents, ready, total);
    }
  }
  template <int kGroup, class Apply>
  TESSERA_DEVICE void each_of_group(Apply&& apply) {
#pragma unroll
    for (int n = kGroup * kGroupN; n < (kGroup + 1) * kGroupN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) apply(n, e, scores.rS[0][n][e]);
  }
  template <int kGroup>
  TESSERA_DEVICE void make_exponents(const Exponents& of) {
    each_of_group<kGroup>([&](int, int e, float& s) { s = fmaf(s, of.log2, of.above[e / 2]); });
  }
  template <int kGroup>
  TESSERA_DEVICE void make_weights() {
    each_of_group<kGroup>([](int, int, float& s) { s = ptx::ex2_approx_ftz(s); });
  }
  template <int kGroup>
  TESSERA_DEVICE void add_group(SumParts& total) {
    each_of_group<kGroup>([&](int n, int e, const float& s) {
      float& part = total.part[e / 2][e % 2];
      part = n == 0 ? s : part + s;
    });
  }
  TESSERA_DEVICE void exponentiate_all(float unit) {
    auto& softmax = scores.softmax;
    if (softmax.ready) {
      SumParts total;
      const Exponents exponents(*this, unit);
      make_exponents<0>(exponents);
      exponentiate<0, kGroups>(exponents, true, total);
      add_group<kGroups - 1>(total);
#pragma unroll
      for (int half = 0; half < 2; ++half) softmax.sum[0][half] += total.of(half);
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) softmax.sum[0][half] *= 1 / kWeightShift;
    softmax.exponentiate(scores.rS, unit_of(unit));
#pragma unroll
    for (int half = 0; half < 2; ++half) softmax.sum[0][half] *= kWeightShift;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores.rS[0][n][e] *= kWeightShift;
  }
  // Packs P as A fragments, in the order of keys that loads.cuh explains.
  TESSERA_DEVICE void pack() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& s = scores.rS[0] + step * 4 + i / 2 * 2;
        const int e = i % 2 * 2;
        rP[step][i] = ptx::cvt_rn_satfinite_e4m3x2(s[0][e], s[0][e + 1]) |
                      static_cast<uint32>(ptx::cvt_rn_satfinite_e4m3x2(s[1][e], s[1][e + 1])) << 16;
      }
  }

  // ---- O ----

  // O / l: registers -> global memory. Four lanes have 16 columns of a row, 32 bytes or 64.
  TESSERA_DEVICE void store() {
    const WorkTile<kTiles>& tile = at.tile();
    auto& softmax = scores.softmax;
#pragma unroll
    for (int half = 0; half < 2; ++half) softmax.sum[0][half] *= 1 / kWeightShift;
    Epilogue<kTiles> epilogue;
    epilogue.finish_sums(tile, softmax, at);
    const float scale = kCfg.block_scales ? 1.0f : scale_of(p.v_scales, 0);
    const int lane = warp_lane();
    constexpr int kBytes = dtype_bytes(kCfg.dtype_o);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.consumer * kConsumerRows + warp_row() + half * 8 + lane / 4;
      if (row >= tile.count) continue;
      const bool seen = epilogue.factor[half] >= 0.0f || epilogue.factor[half] != epilogue.factor[half];
      const float of_row =
          epilogue.factor[half] * (kCfg.block_scales ? unit_of_o(v_scale[half]) : scale) * (1 / kWeightShift);
      const int64 query = static_cast<int64>(tile.s.q_begin) + tile.row0 + row;
      const int64 first = p.o.batch * tile.batch + p.o.head * tile.head + p.o.row * query + lane % 4 * 4;
      char* const to = static_cast<char*>(p.o.data) + first * kBytes;
#pragma unroll
      for (int col = 0; col < kCfg.head_dim_v; col += 16) {
        if (col >= p.head_dim_v) break;
        const auto& fragments = rO[col / kCfg.o_cols];
        float x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float o = fragments[col % kCfg.o_cols / 8 + n % 2][2 * half + n / 2];
          x[n] = seen ? o * of_row : 0.0f;
        }
        if constexpr (kCfg.dtype_o == Dtype::kFloat32) {
          *reinterpret_cast<float4*>(to + col * kBytes) = make_float4(x[0], x[1], x[2], x[3]);
        } else {
          *reinterpret_cast<uint2*>(to + col * kBytes) =
              make_uint2(pack_pair<kCfg.dtype_o>(x[0], x[1]), pack_pair<kCfg.dtype_o>(x[2], x[3]));
        }
      }
    }
  }
};

}  // namespace tessera
