// From a product q . k to a score: scale, softcap, bias, ALiBi, masks, in the order that tessera.h defines.
// One element at a time, so that the forward pass, whose rows are queries, and the backward pass, whose rows are keys,
// have the same text.
#pragma once

#include "tessera/core/online_softmax.cuh"
#include "tessera/core/sequence.cuh"

namespace tessera {

// What the elements of one query share.
template <ScoreConfig kCfg>
struct ScoreRow {
  int query;
  KeyRange keys;  // visible by position
  float slope_log2;
  const char *bias, *mask, *block_mask;  // entry (b, h, query, key 0)

  TESSERA_DEVICE ScoreRow(const ProblemParams& p, const Sequence& s, int batch, int head, int query)
      : query(query), keys(visible_keys(p, s, query)) {
    if constexpr (kCfg.alibi) {
      slope_log2 = p.alibi_slopes[p.alibi_batch * batch + p.alibi_head * head] * kLog2e;
    }
    if constexpr (kCfg.bias) {
      const int64 at = p.bias.batch * batch + p.bias.head * head + p.bias.row * query;
      bias = static_cast<const char*>(p.bias.data) + at * dtype_bytes(kCfg.bias_dtype);
    }
    if constexpr (kCfg.mask) {
      mask = static_cast<const char*>(p.mask.data) + p.mask.batch * batch + p.mask.head * head + p.mask.row * query;
    }
    if constexpr (kCfg.block_mask) {
      block_mask = static_cast<const char*>(p.block_mask.data) + p.block_mask.batch * batch + p.block_mask.head * head +
                   p.block_mask.row * (query / p.mask_block_q);
    }
  }
};

struct Score {
  float value;  // times score_unit in log2 units; -inf where the key is not visible
  float slope;  // d(capped score) / d(score): 1 - tanh^2, for the gradient through the softcap
};

// What bias and masks say of one key.
struct ScoreEntry {
  float bias = 0.0f;
  bool shown = true;
};
template <ScoreConfig kCfg>
TESSERA_DEVICE ScoreEntry load_entry(const ProblemParams& p, const ScoreRow<kCfg>& row, int key) {
  ScoreEntry entry;
  if constexpr (kCfg.bias) entry.bias = load_element<kCfg.bias_dtype>(row.bias, p.bias.col * key);
  if constexpr (kCfg.mask) entry.shown = row.mask[p.mask.col * key];
  if constexpr (kCfg.block_mask) entry.shown &= row.block_mask[p.block_mask.col * (key / p.mask_block_k)] != 0;
  return entry;
}

// What a score is still to be multiplied by.
template <ScoreConfig kCfg>
TESSERA_DEVICE float score_unit(const ProblemParams& p) {
  return kCfg.scaled() ? 1.0f : p.scale_log2;
}

// tanh(x) to 4e-7 of itself, of every lane by the same instructions: a polynomial where 1 - 2 / (1 + e^2x) would lose digits.
TESSERA_DEVICE float tanh_unbranched(float x) {
  const float large = fmaf(-2.0f, ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(x * (2.0f * kLog2e))), 1.0f);
  const float square = x * x;
  float small = fmaf(0x1.0aa1dap-6f, square, -0x1.aecab4p-5f);
  small = fmaf(fmaf(small, square, 0x1.10c820p-3f), square, -0x1.55542cp-2f) * square;
  return fabsf(x) < 0.55f ? fmaf(small, x, x) : large;
}

// Scaled and capped.
template <ScoreConfig kCfg>
TESSERA_DEVICE Score capped_score(const ProblemParams& p, float product) {
  if constexpr (!kCfg.scaled()) return {product, 1.0f};
  if constexpr (!kCfg.softcap) return {product * p.scale_log2, 1.0f};
  const float t = tanh_unbranched(product * (p.scale / p.softcap));
  return {t * (p.softcap * kLog2e), 1.0f - t * t};
}

// Bias, ALiBi and masks of key + offset, which the query sees by position. Of keys with one `key` and offsets that the compiler
// knows, ALiBi is two instructions each.
template <ScoreConfig kCfg>
TESSERA_DEVICE Score visible_score(const Sequence& s, const ScoreRow<kCfg>& row, int key, int offset, Score r,
                                   const ScoreEntry& entry) {
  if constexpr (kCfg.bias) r.value = fmaf(entry.bias, kLog2e, r.value);
  if constexpr (kCfg.alibi) {
    const float from_key = row.slope_log2 * static_cast<float>(row.query + s.sk - s.sq - key);
    r.value -= fabsf(fmaf(-row.slope_log2, static_cast<float>(offset), from_key));
  }
  if constexpr (kCfg.mask || kCfg.block_mask) {
    if (!entry.shown) r.value = -infinity();
  }
  return r;
}

template <ScoreConfig kCfg>
TESSERA_DEVICE Score score(const ProblemParams& p, const Sequence& s, const ScoreRow<kCfg>& row, int key,
                           float product) {
  const Score r = capped_score<kCfg>(p, product);
  const bool visible = key >= row.keys.low && key <= row.keys.high;
  if (!visible) return {-infinity(), r.slope};
  return visible_score(s, row, key, 0, r, load_entry(p, row, key));
}

}  // namespace tessera
