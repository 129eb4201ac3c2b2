// A block of keys and values of 8 bits: its rows, its scales, and what its products need to know of both.
#pragma once

#include "cpu/decode.hpp"

namespace tessera::cpu {
namespace {

// Rows and scales of a block of at most kKeys keys, for the first of an item's KV heads.
template <int64_t kKeys>
struct CodeBlock {
  static_assert(64 % kKeys == 0 && kKeys % kLanes == 0);

  const char *keys[kKeys], *values[kKeys];
  // In pages: of each token. Otherwise [0] is that of all: a scale is for a multiple of 64 tokens.
  const char *key_scales[kKeys], *value_scales[kKeys];
  int64_t count;

  // One division for all rows; a page's entry is read once. A token's scales are prefetched.
  TESSERA_INLINE void locate(const Params& p, const Sequence& sequence, int64_t batch, int64_t head_begin, int64_t key,
                             int64_t keys_end) {
    count = max_of<int64_t>(0, min_of<int64_t>(kKeys, keys_end - key));
    if (count == 0) return;
    locate_scale(key_scales, p.k_scales, batch, head_begin, key);
    locate_scale(value_scales, p.v_scales, batch, head_begin, key);
    for (int64_t n = 0, page = 0; n < count;) {
      int64_t of = batch, row = sequence.k_begin + key, rows = count;
      if (p.page_table) {
        page = n == 0 ? key / p.page_size : page + 1;
        row = n == 0 ? key % p.page_size : 0;
        rows = min_of(count - n, p.page_size - row);
        of = *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p.page_table) + sequence.page_begin +
                                               p.page_table_col * page);
      }
      locate_rows(keys + n, p.k.data + p.k.batch * of + p.k.row * row + p.k.head * head_begin, p.k.row, rows);
      locate_rows(values + n, p.v.data + p.v.batch * of + p.v.row * row + p.v.head * head_begin, p.v.row, rows);
      const auto in_page = [&](const char** scales, const Scales& s) TESSERA_LAMBDA_INLINE {
        if (s.data && s.in_pages) {
          locate_rows(scales + n, s.data + s.batch * of + s.row * row + s.head * head_begin, s.row, rows);
          for (int64_t i = n; i < n + rows; ++i) __builtin_prefetch(scales[i], 0, 2);
        }
      };
      in_page(key_scales, p.k_scales), in_page(value_scales, p.v_scales);
      n += rows;
    }
  }

  // Row n of `rows`; past the last one, it is repeated.
  TESSERA_INLINE const char* row(const char* const* rows, int64_t n) const { return rows[min_of(n, count - 1)]; }
  // out[h][n] = the scale of key or value n of head h, 1 past the last one.
  TESSERA_INLINE void read_scales(float* out, const char* const* at, const Scales& scales, int64_t heads) const {
    const bool each = scales.data && scales.in_pages;
    for (int64_t h = 0; h < heads; ++h) {
      const bool all = scales.data && !each;
      const float scale = all ? *reinterpret_cast<const float*>(at[0] + scales.head * h) : 1.0f;
      for (int64_t n = 0; n < kKeys; n += kLanes) store(out + h * kKeys + n, splat(scale));
    }
    for (int64_t n = 0; each && n < count; ++n) {
      for (int64_t h = 0; h < heads; ++h) {
        out[h * kKeys + n] = *reinterpret_cast<const float*>(at[n] + scales.head * h);
      }
    }
  }

 private:
  TESSERA_INLINE static void locate_rows(const char** rows, const char* first, int64_t stride, int64_t count) {
    for (int64_t n = 0; n < count; ++n, first += stride) rows[n] = first;
  }
  TESSERA_INLINE static void locate_scale(const char** at, const Scales& scales, int64_t batch, int64_t head_begin,
                                          int64_t key) {
    if (scales.data && !scales.in_pages) {
      at[0] = scales.data + scales.batch * batch + scales.row * (key / scales.tokens) + scales.head * head_begin;
    }
  }
};

// Whether scaled weights, rounded to bfloat16, times codes are as exact as weights times scaled codes: the dot product
// takes numbers below 2^-126 as 0.
TESSERA_INLINE bool may_scale_weights(const float* scales, int64_t count) {
  VecI may = splat(-1);
  for (int64_t n = 0; n < count; n += kLanes) {
    const VecF magnitude = abs(load(scales + n));
    may &= (magnitude >= splat(0x1p-64f)) & (magnitude <= splat(0x1p64f));
  }
  return !any(~may);
}

// Whether the codes of a row are finite.
TESSERA_OWN_FUNCTION bool code_row_is_finite(int32_t dtype, const char* row, int64_t cols) {
  if (dtype == TESSERA_INT8) return true;
  const int first = dtype == TESSERA_FLOAT8_E4M3 ? 0x7f : 0x7c;
  int other = 0;
  for (int64_t d = 0; d < cols; ++d) other |= (row[d] & 0x7f) >= first;
  return !other;
}

}  // namespace
}  // namespace tessera::cpu
