// Rotary position embedding (Su et al., "RoFormer", 2021) of one token's heads, in float32.
#pragma once

#include "cpu/nonfinite.hpp"

namespace tessera::cpu {
namespace {

// Columns (x, y) of a pair become (x cos - y sin, x sin + y cos); columns after the pairs are unchanged. `out` may be
// `row`.
inline void rotate_token(const RotaryParams& p, const char* row, char* out, int64_t position, int64_t heads,
                         int64_t row_head, int64_t out_head) {
  alignas(64) float cosine[kMaxRowFloats], sine[kMaxRowFloats], from[kMaxRowFloats], to[kMaxRowFloats];
  const int64_t half = p.rotary_dim / 2;
  with_float_elem(p.angle_dtype, [&](auto elem) {
    read_row<decltype(elem)>(cosine, p.cos + position * p.cos_row, half);
    read_row<decltype(elem)>(sine, p.sin + position * p.sin_row, half);
  });
  const int64_t rotated_bytes = p.rotary_dim * p.elem_bytes, rest_bytes = p.head_dim * p.elem_bytes - rotated_bytes;
  for (int64_t h = 0; h < heads; ++h, row += row_head, out += out_head) {
    with_float_elem(p.dtype, [&](auto elem) { read_row<decltype(elem)>(from, row, p.rotary_dim); });
    for (int64_t j = 0; j < half; ++j) {
      const int64_t x = p.interleaved ? 2 * j : j, y = p.interleaved ? 2 * j + 1 : j + half;
      to[x] = from[x] * cosine[j] - from[y] * sine[j];
      to[y] = from[x] * sine[j] + from[y] * cosine[j];
    }
    with_float_elem(p.dtype, [&](auto elem) { write_row<decltype(elem)>(out, to, p.rotary_dim); });
    if (out != row) __builtin_memcpy(out + rotated_bytes, row + rotated_bytes, static_cast<size_t>(rest_bytes));
  }
}

}  // namespace
}  // namespace tessera::cpu
