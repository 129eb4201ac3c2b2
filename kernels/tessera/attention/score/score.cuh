// From a product q . k to a score: scale, softcap, bias, ALiBi, masks, in the order that tessera.h defines.
// One element at a time, so that the forward pass, whose rows are queries, and the backward pass, whose rows are keys,
// have the same text.
#pragma once

#include "tessera/attention/mask.cuh"
#include "tessera/attention/score/config.hpp"
#include "tessera/attention/score/softcap.cuh"
#include "tessera/attention/score/unit.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/tile/element.cuh"
#include "tessera/tile/numbers.cuh"

namespace tessera {

// What the elements of one query share.
template <ScoreConfig kCfg>
struct ScoreRow {
  int query;
  KeyRange keys;                         // visible by position
  float slope;                           // of ALiBi
  const char *bias, *mask, *block_mask;  // of (b, h, query, key 0)

  TESSERA_DEVICE ScoreRow(const ProblemParams& p, const Sequence& s, int batch, int head, int query)
      : query(query), keys(visible_keys<kCfg>(p, s, query)) {
    if constexpr (kCfg.alibi) {
      slope = p.alibi_slopes[p.alibi_batch * batch + p.alibi_head * head];
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
  float value;  // of visible_score in score_unit, -inf where the key is not visible; before it what it multiplies
  float slope;  // d(capped score) / d(score): 1 - tanh^2, for the gradient through the softcap
};

// What bias and masks say of one key.
struct BiasMaskElement {
  float bias = 0.0f;
  bool visible = true;
};
template <ScoreConfig kCfg>
TESSERA_DEVICE BiasMaskElement load_bias_mask_at(const ProblemParams& p, const ScoreRow<kCfg>& row, int key) {
  BiasMaskElement element;
  if constexpr (kCfg.bias) element.bias = load_element<kCfg.bias_dtype>(row.bias, p.bias.col * key);
  if constexpr (kCfg.mask) element.visible = row.mask[p.mask.col * key];
  if constexpr (kCfg.block_mask) element.visible &= row.block_mask[p.block_mask.col * (key / p.mask_block_k)] != 0;
  return element;
}

// What a score is still to be multiplied by. Where nothing is added to a score, that is all of the scale, or what is multiplied to a
// tanh; where something is, log2(e) alone, so that a finite bias makes a finite score.
template <ScoreConfig kCfg>
TESSERA_DEVICE ScoreUnit score_unit(const ProblemParams& p) {
  if constexpr (kCfg.adds()) return {1.0f, kLog2e};
  if constexpr (kCfg.softcap) return {capped_unit(p), capped_unit(p) * kLog2e};
  if constexpr (kCfg.scale_first) return {1.0f, kLog2e};
  return {p.scale, p.scale_log2};
}

// Capped, and scaled where nothing is added that the same instruction could add.
template <ScoreConfig kCfg, bool kSmall = false>
TESSERA_DEVICE Score capped_score(const ProblemParams& p, float product) {
  if constexpr (kCfg.softcap) {
    const float t = quadruple_tanh<kSmall>(softcap_input(p, product));
    return {t, fmaf(t, -0.0625f * t, 1.0f)};
  }
  return {kCfg.scale_first && !kCfg.adds() ? product * p.scale : product, 1.0f};
}

// Bias, ALiBi and masks of key + offset, which the query sees by position. Of keys with one `key` and offsets that the compiler
// knows, ALiBi is two instructions each. kFused: a bias is added by the instruction that scales the product; its number is then made ready
// ahead of the product, and not every kernel has registers for that.
template <ScoreConfig kCfg, bool kFused = true>
TESSERA_DEVICE Score visible_score(const ProblemParams& p, const Sequence& s, const ScoreRow<kCfg>& row, int key,
                                   int offset, Score r, const BiasMaskElement& element) {
  [[maybe_unused]] const float unit = kCfg.softcap ? capped_unit(p) : p.scale;
  if constexpr (kCfg.bias) {
    r.value = kFused ? fmaf(r.value, unit, element.bias) : __fmul_rn(r.value, unit) + element.bias;
  }
  if constexpr (kCfg.alibi) {
    const float from_key = row.slope * static_cast<float>(row.query + s.sk - s.sq - key);
    const float slopes = -fabsf(fmaf(-row.slope, static_cast<float>(offset), from_key));
    r.value = kCfg.bias ? r.value + slopes : fmaf(r.value, unit, slopes);
  }
  if constexpr (kCfg.mask || kCfg.block_mask) {
    if (!element.visible) r.value = -infinity();
  }
  return r;
}

template <ScoreConfig kCfg, bool kFused = true>
TESSERA_DEVICE Score score(const ProblemParams& p, const Sequence& s, const ScoreRow<kCfg>& row, int key,
                           float product) {
  const Score r = capped_score<kCfg>(p, product);
  const bool visible = key >= row.keys.low && key <= row.keys.high;
  if (!visible) return {-infinity(), r.slope};
  return visible_score<kCfg, kFused>(p, s, row, key, 0, r, load_bias_mask_at(p, row, key));
}

}  // namespace tessera
