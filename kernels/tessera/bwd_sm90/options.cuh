// Options of a step's scores, in the transposed layout of the score warpgroups: a lane has keys key and key + 8, and of each
// eight queries those at 2 (lane % 4) and the next. Mask is a bit a score: for eight queries m and key `half`, bit 2 m + half is the
// first query's and bit 2 m + half + 16 the second's.
#pragma once

#include "tessera/attention/score/transposed.cuh"
#include "tessera/bwd_sm90/drawn_bits.cuh"
#include "tessera/bwd_sm90/key_rows.cuh"

namespace tessera {

// A lane's weights of its warp's 16 keys, the warp-th of a step's: what is dropped gets the sign that no weight has. `bits`: the step's in
// shared memory, from rP's first query on.
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

// A warpgroup that has such scores says where they are: p, block, step_row0() and step_head() of the step, the warp's first_key(), and
// lse(m), of queries 8 m + 2 (lane % 4) and the next.
template <auto kCfg>
struct StepOptions {
  static constexpr ScoreConfig kScore = kCfg.score;
  static constexpr int kM = kCfg.score_m() / 8;
  static_assert(kM * 4 <= 32 || !kScore.mask, "a bit a score");
  using Raw = RawPair<kScore.bias_dtype>;
  // Biases of 16 bits are loaded under the product that they are added to. Where they have no registers then (bias_ahead), those of half of
  // the queries are loaded after it, and of the other half after these.
  static constexpr bool kBiasAhead = kCfg.bias_ahead();
  static constexpr int kBiasRows = !kScore.bias ? 1 : kBiasAhead ? kM : kM / 2;

  // Whether masked scores are known by P = 0 instead of by position: a mask's must be, and softcap lacks the registers for
  // positions.
  static constexpr bool kHiddenByWeight = kScore.mask || kScore.softcap;

  uint32 hidden;
  Raw bias[kBiasRows][2];  // of two queries

  TESSERA_DEVICE static int lane() { return static_cast<int>(not_hoisted(threadIdx.x % 32)); }

  TESSERA_DEVICE static constexpr uint32 bit(int m, int half, int e) { return 1u << (2 * m + half + 16 * e); }

  // Bias and mask of two neighbouring keys are loaded at once where all of a step's keys and queries are there; a lane then has one
  // query of eight and two keys, and blocks of 8 x 8 are transposed among lanes.
  TESSERA_DEVICE static bool loads_pairs(const BwdSm90Params& p, const KeyBlock& block, int row0) {
    return p.bias_mask_keys > 1 && block.key0 + kCfg.block_n <= block.s.sk && row0 + kCfg.score_m() <= block.s.sq;
  }
  // Entry (query, key) of a tensor of bias or mask.
  template <int kBytes>
  TESSERA_DEVICE static const char* entry_of(const ScoreTensor& tensor, const KeyBlock& block, int head, int query,
                                             int key) {
    return static_cast<const char*>(tensor.data) +
           (tensor.batch * block.batch + tensor.head * head + tensor.row * query + tensor.col * key) * kBytes;
  }

  // Called while the product of S runs.
  template <class Warpgroup>
  TESSERA_DEVICE void load(const Warpgroup& of) {
    if constexpr (kScore.mask || kScore.bias) {
      const int row0 = of.step_row0(), head = of.step_head(), key = of.first_key();
      if constexpr (kScore.mask) load_mask(of.p, of.block, head, row0, key);
      if constexpr (kScore.bias && kBiasAhead) load_bias<0>(of.p, of.block, head, row0, key);
    }
  }

  // Products -> scores.
  template <class Warpgroup>
  TESSERA_DEVICE void apply(const Warpgroup& of, float (&rS)[kM][4]) {
    if constexpr (kScore.softcap) {
      const bool small = small_inputs(of.p, rS, 0) && small_inputs(of.p, rS, 1);
      if (__all_sync(0xffffffff, small)) {
        apply_rows<true, 0, kM>(of, rS);
      } else {
        apply_rows<false, 0, kM>(of, rS);
      }
    } else if constexpr (!kScore.bias) {
      apply_rows<false, 0, kM>(of, rS);
    } else if constexpr (kBiasAhead) {
      transpose_bias(of.p, of.block, of.step_row0());
      apply_rows<false, 0, kM>(of, rS);
    } else {
      apply_bias<0>(of, rS);
      reload_memory();  // the loads of one half stay after the uses of the other
      apply_bias<kBiasRows>(of, rS);
    }
  }
  template <int kFirst, class Warpgroup>
  TESSERA_DEVICE void apply_bias(const Warpgroup& of, float (&rS)[kM][4]) {
    const int row0 = of.step_row0();
    load_bias<kFirst>(of.p, of.block, of.step_head(), row0, of.first_key());
    transpose_bias(of.p, of.block, row0);
    apply_rows<false, kFirst, kBiasRows>(of, rS);
  }
  // Of the queries from 8 kFirst on. Visibility and ALiBi depend on query - key: a query n later counts as a key n earlier.
  template <bool kSmall, int kFirst, int kRows, class Warpgroup>
  TESSERA_DEVICE void apply_rows(const Warpgroup& of, float (&rS)[kM][4]) {
    const ScoreRow<kScore> row(of.p, of.block.s, of.block.batch, of.step_head(), of.step_row0() + lane() % 4 * 2);
    const int key = of.first_key() + lane() / 4;
#pragma unroll
    for (int m = kFirst; m < kFirst + kRows; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = rS[m][i];
        BiasMaskElement entry;
        if constexpr (kScore.bias) {
          const float2 both = unpack_pair<kScore.bias_dtype>(bias[m - kFirst][i / 2]);
          entry.bias = i % 2 ? both.y : both.x;
        }
        const Score capped = capped_score<kScore, kSmall>(of.p, x);
        x = visible_score(of.p, of.block.s, row, key, i / 2 * 8 - m * 8 - i % 2, capped, entry).value;
      }
  }

  // P o (dP - delta), lowered as delta is; of a dropped weight, whose sign bit is set, dP is 0.
  TESSERA_DEVICE static float gradient(const BwdSm90Params& p, float weight, float d_probability, float delta) {
    if constexpr (kScore.dropout) {
      const float unit = bwd_lowers_early(kCfg.dtype) ? p.dropout_scale * kBwdLower : p.dropout_scale;
      return fabsf(weight) * fmaf(weight < 0.0f ? 0.0f : d_probability, unit, -delta);
    } else {
      return weight * lowered_difference<kCfg.dtype>(d_probability, delta);
    }
  }
  // ds: dS of queries 8 m + 2 c, + 1 and key `half`, whose weights are `weights`, as they leave dP. What is hidden becomes 0 by its weight;
  // dBias gathers dS before the softcap's slope 1 - tanh^2, which is made of P: what was capped is log P + LSE.
  template <class Warpgroup>
  TESSERA_DEVICE static void finish_gradients(const Warpgroup& of, int m, int half, float2 weights, float (&ds)[2]) {
    if constexpr (kHiddenByWeight) {
      if (weights.x == 0.0f) ds[0] = 0.0f;
      if (weights.y == 0.0f) ds[1] = 0.0f;
    }
    if constexpr (kCfg.d_bias) {
      const int query = of.step_row0() + m * 8 + lane() % 4 * 2, key = of.first_key() + lane() / 4 + half * 8;
      gather_bias(of.p, of.block, of.step_head(), query, key, weights, ds);
    }
    if constexpr (kScore.softcap) {
      const float2 lse = of.lse(m);
      const float unit = kLn2 / of.p.softcap;
      ds[0] *= softcap_slope((ptx::lg2_approx_ftz(fabsf(weights.x)) + lse.x) * unit);
      ds[1] *= softcap_slope((ptx::lg2_approx_ftz(fabsf(weights.y)) + lse.y) * unit);
    }
  }

  // Which scores the mask hides. `key`: the warp's first.
  TESSERA_DEVICE void load_mask(const BwdSm90Params& p, const KeyBlock& block, int head, int row0, int key) {
    hidden = 0;
    if (loads_pairs(p, block, row0)) {
      const char* from = entry_of<1>(p.mask, block, head, row0 + lane() / 4, key + lane() % 4 * 2);
#pragma unroll 4
      for (int m = 0; m < kM; ++m, from += p.mask.row * 8) {
        const uint32 first = *reinterpret_cast<const unsigned short*>(from);
        const uint32 second = *reinterpret_cast<const unsigned short*>(from + 8);
        const uint32 a = ptx::movmatrix_trans(__byte_perm(first, 0, 0x4140));  // a byte of 16 bits
        const uint32 b = ptx::movmatrix_trans(__byte_perm(second, 0, 0x4140));
        const uint32 bits =
            (a & 0xffff ? 0u : 1u) | (a >> 16 ? 0u : 1u << 16) | (b & 0xffff ? 0u : 2u) | (b >> 16 ? 0u : 2u << 16);
        hidden |= bits << (2 * m);
      }
      return;
    }
#pragma unroll 1
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = min(row0 + m * 8 + lane() % 4 * 2 + i % 2, block.s.sq - 1);
        const int at = min(key + lane() / 4 + i / 2 * 8, block.s.sk - 1);
        if (*entry_of<1>(p.mask, block, head, query, at) == 0) hidden |= bit(0, i / 2, i % 2) << (2 * m);
      }
    }
  }

  // Biases of blocks kFirst ...
  template <int kFirst>
  TESSERA_DEVICE void load_bias(const BwdSm90Params& p, const KeyBlock& block, int head, int row0, int key) {
    constexpr int kBytes = dtype_bytes(kScore.bias_dtype);
    const int query = row0 + kFirst * 8;
    if (loads_pairs(p, block, row0)) {
      const char* from = entry_of<kBytes>(p.bias, block, head, query + lane() / 4, key + lane() % 4 * 2);
#pragma unroll
      for (int m = 0; m < kBiasRows; ++m, from += p.bias.row * (8 * kBytes)) {
        bias[m][0] = *reinterpret_cast<const Raw*>(from);
        bias[m][1] = *reinterpret_cast<const Raw*>(from + 8 * kBytes);
      }
      return;
    }
#pragma unroll
    for (int m = 0; m < kBiasRows; ++m) {
      reload_memory();  // one after the other: few registers
      const int first = min(query + m * 8 + lane() % 4 * 2, block.s.sq - 1), next = min(first + 1, block.s.sq - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = min(key + lane() / 4 + half * 8, block.s.sk - 1);
        const char* from = entry_of<kBytes>(p.bias, block, head, first, at);
        bias[m][half] = joined(from, from + (next - first) * p.bias.row * kBytes);
      }
    }
  }
  // What load_bias loaded in pairs of keys becomes pairs of queries.
  TESSERA_DEVICE void transpose_bias(const BwdSm90Params& p, const KeyBlock& block, int row0) {
    if (!loads_pairs(p, block, row0)) return;
#pragma unroll
    for (int m = 0; m < kBiasRows; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) bias[m][half] = transposed_pair(bias[m][half]);
  }

  // dS of a key and two queries. Masked entries keep the 0 that the preprocess wrote: their dS may be NaN.
  TESSERA_DEVICE static void gather_bias(const BwdSm90Params& p, const KeyBlock& block, int head, int query, int key,
                                         float2 weights, const float (&ds)[2]) {
    if (key >= block.s.sk) return;
    float* to = static_cast<float*>(p.d_bias.data) + p.d_bias.batch * block.batch + p.d_bias.head * head +
                p.d_bias.row * query + p.d_bias.col * key;
    const bool shared_entries = (p.d_bias.batch == 0 && p.batch > 1) || (p.d_bias.head == 0 && p.heads_q > 1);
    constexpr float kUnit = bwd_lower_late(kCfg.dtype);
#pragma unroll
    for (int e = 0; e < 2; ++e, to += p.d_bias.row) {
      if (query + e >= block.s.sq || (e ? weights.y : weights.x) == 0.0f) continue;
      if (shared_entries) {
        ptx::red_add_f32(to, ds[e] * kUnit);
      } else {
        *to = ds[e] * kUnit;
      }
    }
  }

  // 1 - tanh^2; 0 for a weight of 0, whose tanh cannot be recovered.
  TESSERA_DEVICE static float softcap_slope(float tanh) { return __saturatef(fmaf(-tanh, tanh, 1.0f)); }

 private:
  TESSERA_DEVICE static Raw joined(const char* low, const char* high) {
    if constexpr (dtype_bytes(kScore.bias_dtype) == 2) {
      return static_cast<uint32>(*reinterpret_cast<const unsigned short*>(low)) |
             static_cast<uint32>(*reinterpret_cast<const unsigned short*>(high)) << 16;
    } else {
      return make_float2(*reinterpret_cast<const float*>(low), *reinterpret_cast<const float*>(high));
    }
  }
};

}  // namespace tessera
