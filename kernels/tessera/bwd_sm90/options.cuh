// Mask and bias of a step's scores, in the transposed layout of the score warpgroups: a lane has keys key and key + 8, and of each
// eight queries those at 2 (lane % 4) and the next. Mask is a bit a score: for eight queries m and key `half`, bit 2 m + half is the
// first query's and bit 2 m + half + 16 the second's.
#pragma once

#include "tessera/attention/score/transposed.cuh"
#include "tessera/bwd_sm90/block.cuh"

namespace tessera {

// A softcap's slope, 1 - tanh^2; 0 for a weight of 0, whose tanh cannot be recovered.
TESSERA_DEVICE float softcap_slope(float tanh) { return __saturatef(fmaf(-tanh, tanh, 1.0f)); }

template <BwdSm90Config kCfg>
struct StepOptions {
  static constexpr ScoreConfig kScore = kCfg.score;
  static constexpr int kM = kCfg.score_m() / 8;
  static_assert(kM * 4 <= 32 || !kScore.mask, "a bit a score");
  using Raw = RawPair<kScore.bias_dtype>;
  // Biases of 16 bits are loaded under the product that they are added to. Of 32 bits registers hold those of half of the
  // queries beside dK, dV and S.
  static constexpr bool kBiasAhead = dtype_bytes(kScore.bias_dtype) == 2;
  static constexpr int kBiasRows = !kScore.bias ? 1 : kBiasAhead ? kM : kM / 2;

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
    if constexpr (kBiasAhead) {
      return static_cast<uint32>(*reinterpret_cast<const unsigned short*>(low)) |
             static_cast<uint32>(*reinterpret_cast<const unsigned short*>(high)) << 16;
    } else {
      return make_float2(*reinterpret_cast<const float*>(low), *reinterpret_cast<const float*>(high));
    }
  }
};

}  // namespace tessera
