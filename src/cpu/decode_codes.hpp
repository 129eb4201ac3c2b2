// Decoding with bfloat16 queries from keys and values of 8 bits, by the dot product (code_products.hpp). Items are as
// in decode.hpp, and keys and values are read in the same order.
#pragma once

#include "cpu/code_block.hpp"
#include "cpu/code_products.hpp"

namespace tessera::cpu {
namespace {

static_assert(kDecodeBlockKeys % kCodeKeys == 0 && kCodeKeys == kLanes && kCodeColumns == 4 * kLanes);

// The index of column d of O while it accumulates: code_products.cpp.
TESSERA_INLINE int64_t code_column(int64_t d) {
  return d / kCodeColumns * kCodeColumns + (d % 16 / 8 * 2 + d % 2) * kLanes + d % kCodeColumns / 16 * 4 + d % 8 / 2;
}

alignas(64) constexpr char kZeroRow[kMaxRowFloats] = {};

// Weights of a head as bfloat16, times the scales of its values. Returns false if its values must be used one by one:
// then O += P V is done.
TESSERA_INLINE bool round_code_weights(const Params& p, const DecodePart& part,
                                       const CodeBlock<kDecodeBlockKeys>& block, const DecodeRow* rows,
                                       const float* scales, float* scores, float* out, int64_t h, int64_t key,
                                       bool masked) {
  bool finite = may_scale_weights(scales, kDecodeBlockKeys);
  for (int64_t n = 0; masked && n < block.count; ++n) {
    finite &= code_row_is_finite(p.kv_dtype, block.values[n] + h * p.v.head, p.head_dim_v);
  }
  if (!finite) {
    const auto read_value = [&](float* value, int64_t i) {
      read_codes(p.kv_dtype, value, block.values[i] + h * p.v.head, p.head_dim_v, scales[i]);
    };
    const auto weight = [&](int64_t r, int64_t n) { return scores[r * kDecodeBlockKeys + n]; };
    decode_seen(p, part.sequence, part.batch, rows, part.row_count, out, padded_to(p.head_dim_v, kCodeColumns), key, 0,
                block.count, read_value, weight, [](int64_t d) { return code_column(d); });
    return false;
  }
  for (int64_t r = 0; r < part.row_count; ++r, scores += kDecodeBlockKeys) {
    uint16_t* const rounded = reinterpret_cast<uint16_t*>(scores);
    const int64_t padded = padded_to(block.count, kLanes);
    for (int64_t n = 0; n < padded; n += kLanes) {
      store(rounded + n, bf16_from_float(load(scores + n) * load(scales + n)));
    }
    for (int64_t n = padded; n < padded_to(block.count, kCodeValues); n += kLanes) store(rounded + n, VecH{});
  }
  return true;
}

// scores[r][n] *= the scale of key n.
TESSERA_INLINE void scale_code_scores(float* scores, const float* scales, int64_t row_count) {
  for (int64_t r = 0; r < row_count; ++r, scores += kDecodeBlockKeys) {
    for (int64_t n = 0; n < kDecodeBlockKeys; n += kLanes) store(scores + n, load(scores + n) * load(scales + n));
  }
}

// As decode_keys, with q as code_products.hpp reads it.
TESSERA_INLINE void decode_code_keys(const Params& p, const DecodePart& part, const DecodeScratch& s,
                                     const CodeProducts& products, const KeyRange& keys) {
  DecodeRow* const all_rows = reinterpret_cast<DecodeRow*>(s.rows);
  const uint32_t* const q = reinterpret_cast<const uint32_t*>(s.q);
  const int64_t out_ld = padded_to(p.head_dim_v, kCodeColumns);
  const int64_t row_count = part.row_count, scores_ld = kDecodeBlockKeys;
  int64_t all_low = 0, all_high = keys.high + 1;  // keys that every row sees
  for (int64_t row = 0; row < part.heads * row_count; ++row) {
    all_low = max_of(all_low, all_rows[row].low), all_high = min_of(all_high, all_rows[row].full_high);
  }
  using Block = CodeBlock<kDecodeBlockKeys>;
  Block blocks[2];
  blocks[0].locate(p, part.sequence, part.batch, part.head_begin, keys.low, keys.high + 1);
  int now = 0;
  for (int64_t key = keys.low; key <= keys.high; key += kDecodeBlockKeys, now ^= 1) {
    constexpr int64_t kCancelKeys = 1024;
    if (key % kCancelKeys == 0 && p.cancelled && p.cancelled(p.cancel)) return;
    const Block& block = blocks[now];
    blocks[now ^ 1].locate(p, part.sequence, part.batch, part.head_begin, key + kDecodeBlockKeys, keys.high + 1);
    const Block& next = blocks[now ^ 1].count > 0 ? blocks[now ^ 1] : block;
    const int64_t count = block.count;
    const bool masked = key < all_low || key + count - 1 > all_high || may_mask_entries(p);
    // Row n of `rows`, also of the next block's.
    const auto row_ahead = [&](auto rows, int64_t n) TESSERA_LAMBDA_INLINE {
      return n < kDecodeBlockKeys ? block.row(block.*rows, n) : next.row(next.*rows, n - kDecodeBlockKeys);
    };
    for (int64_t n = 0; n < count; n += kCodeKeys) {
      CodeRows group, ahead;
      group.head_bytes = ahead.head_bytes = p.k.head;
      for (int64_t i = 0; i < kCodeKeys; ++i) {
        group.rows[i] = block.row(block.keys, n + i), ahead.rows[i] = row_ahead(&Block::keys, n + kCodeKeys + i);
      }
      products.scores(p.kv_dtype, s.scores + n, scores_ld, q, row_count, part.heads, group, ahead, p.head_dim);
    }
    if (p.k_scales.data) block.read_scales(s.scales, block.key_scales, p.k_scales, part.heads);
    for (int64_t h = 0; h < part.heads; ++h) {
      float* const scores = s.scores + h * row_count * scores_ld;
      if (p.k_scales.data) scale_code_scores(scores, s.scales + h * kDecodeBlockKeys, row_count);
      for (int64_t r = 0; r < row_count; ++r) {
        const int64_t row = h * row_count + r;
        const float rescale = decode_softmax<true>(p, part.sequence, part.batch, all_rows[row], scores + r * scores_ld,
                                                   s.program, key, count);
        if (rescale == 1.0f) continue;
        float* const o = s.o + row * out_ld;
        for (int64_t d = 0; d < out_ld; d += kLanes) store(o + d, load(o + d) * rescale);
      }
    }
    block.read_scales(s.scales, block.value_scales, p.v_scales, part.heads);
    for (int64_t h = 0; h < part.heads; ++h) {
      const int64_t first = h * row_count;
      all_rows[first].rounded = round_code_weights(p, part, block, all_rows + first, s.scales + h * kDecodeBlockKeys,
                                                   s.scores + first * scores_ld, s.o + first * out_ld, h, key, masked);
    }
    for (int64_t n = 0; n < count; n += kCodeValues) {
      for (int64_t h = 0; h < part.heads; ++h) {
        const char* values[kCodeValues];
        for (int64_t i = 0; i < kCodeValues; ++i) {
          values[i] = n + i < count ? block.values[n + i] + h * p.v.head : kZeroRow;
          prefetch_row(row_ahead(&Block::values, n + kCodeValues + i) + h * p.v.head, p.head_dim_v);
        }
        if (!all_rows[h * row_count].rounded) continue;
        const float* const weights = s.scores + h * row_count * scores_ld;
        products.values(p.kv_dtype, s.o + h * row_count * out_ld, out_ld,
                        reinterpret_cast<const uint16_t*>(weights) + n, 2 * scores_ld, row_count, values, p.head_dim_v);
      }
    }
  }
}

inline void decode_codes_item(const Params& p, int64_t item, char* scratch_base) {
  const DecodePart part(p, item);
  const DecodeScratch s = carve_decode(scratch_base, {part.heads, kDecodeRows, p.block_n, p.head_dim, p.head_dim_v,
                                                      kLanes, program_floats(p, 1), sizeof(DecodeRow)});
  const int64_t pairs = padded_to(p.head_dim, kCodeColumns) / 2, out_ld = padded_to(p.head_dim_v, kCodeColumns);
  const int64_t row_total = part.heads * part.row_count;
  DecodeRow* const rows = reinterpret_cast<DecodeRow*>(s.rows);
  const KeyRange keys = init_decode_rows(p, part, rows);
  __builtin_memset(s.q, 0, static_cast<size_t>(row_total * pairs) * sizeof *s.q);
  for (int64_t i = 0; i < row_total; ++i) {
    const char* const q = decode_query(p, part, rows[i]);
    float* const out = s.q + i / part.row_count * pairs * part.row_count + i % part.row_count;
    for (int64_t n = 0; n < pairs; ++n) {
      char* const pair = reinterpret_cast<char*>(out + n * part.row_count);
      const int64_t d = code_pair_column(n);
      if (d < p.head_dim) __builtin_memcpy(pair, q + 2 * d, 2);
      if (d + 2 < p.head_dim) __builtin_memcpy(pair + 2, q + 2 * (d + 2), 2);
    }
  }
  __builtin_memset(s.o, 0, static_cast<size_t>(row_total * out_ld) * sizeof(float));
  decode_code_keys(p, part, s, code_products_avx512_vbmi, keys);
  for (int64_t i = 0; i < row_total; ++i) {
    // No backward pass reads 8 bits: no row's scores need the bits of the tiled kernels.
    rows[i].as_tiled = log_sum_exp(p, rows[i].shift, rows[i].offset, __builtin_log2f(sum_lanes(load(rows[i].sum))));
    write_decode_row(p, part, rows[i], s.o + i * out_ld, code_column);
  }
}

}  // namespace
}  // namespace tessera::cpu
