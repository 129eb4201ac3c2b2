// Rotary position embedding (Su et al., "RoFormer", 2021) of one token's heads, in float32, and their conversion to the
// 8 bits of a cache.
#pragma once

#include "cpu/nonfinite.hpp"

namespace tessera::cpu {
namespace {

// cos and sin of a position.
struct Angles {
  alignas(64) float cosine[kMaxRowFloats], sine[kMaxRowFloats];

  TESSERA_INLINE Angles(const RotaryParams& p, int64_t position) {
    with_float_elem(p.angle_dtype, [&](auto elem) {
      read_row<decltype(elem)>(cosine, p.cos + position * p.cos_row, p.rotary_dim / 2);
      read_row<decltype(elem)>(sine, p.sin + position * p.sin_row, p.rotary_dim / 2);
    });
  }
  // Columns (x, y) of a pair become (x cos - y sin, x sin + y cos).
  TESSERA_INLINE void rotate(const RotaryParams& p, const float* from, float* to) const {
    const int64_t half = p.rotary_dim / 2;
    for (int64_t j = 0; j < half; ++j) {
      const int64_t x = p.interleaved ? 2 * j : j, y = p.interleaved ? 2 * j + 1 : j + half;
      to[x] = from[x] * cosine[j] - from[y] * sine[j];
      to[y] = from[x] * sine[j] + from[y] * cosine[j];
    }
  }
};

// Columns after the pairs are unchanged. `out` may be `row`.
inline void rotate_token(const RotaryParams& p, const char* row, char* out, int64_t position, int64_t heads,
                         int64_t row_head, int64_t out_head) {
  alignas(64) float from[kMaxRowFloats], to[kMaxRowFloats];
  const Angles angles(p, position);
  const int64_t rotated_bytes = p.rotary_dim * p.elem_bytes, rest_bytes = p.head_dim * p.elem_bytes - rotated_bytes;
  for (int64_t h = 0; h < heads; ++h, row += row_head, out += out_head) {
    with_float_elem(p.dtype, [&](auto elem) { read_row<decltype(elem)>(from, row, p.rotary_dim); });
    angles.rotate(p, from, to);
    with_float_elem(p.dtype, [&](auto elem) { write_row<decltype(elem)>(out, to, p.rotary_dim); });
    if (out != row) __builtin_memcpy(out + rotated_bytes, row + rotated_bytes, static_cast<size_t>(rest_bytes));
  }
}

TESSERA_INLINE float largest_code(int32_t dtype) {
  return dtype == TESSERA_FLOAT8_E4M3 ? 448.0f : dtype == TESSERA_FLOAT8_E5M2 ? 57344.0f : 127.0f;
}

// The scale of a row for which its largest finite magnitude is the dtype's largest number; 1 if that is 0. int8 has no
// NaN: the scale of a row that holds one is NaN.
TESSERA_INLINE float scale_of_row(const QuantizeParams& p, const float* row) {
  float most = 0;
  bool has_nan = false;
  for (int64_t d = 0; d < p.cols; ++d) {
    const float magnitude = __builtin_fabsf(row[d]);
    if (magnitude > most && magnitude < infinity()) most = magnitude;
    has_nan |= magnitude != magnitude;
  }
  if (has_nan && p.dtype == TESSERA_INT8) return __builtin_nanf("");
  const float scale = most / largest_code(p.dtype);
  return scale > 0.0f ? scale : 1.0f;  // also where the quotient vanishes
}

// A row is read in the rotary's dtype, rotated if rotary_dim > 0, and stored in 8 bits as value / scale.
inline void quantize_token(const RotaryParams& rotary, const QuantizeParams& p, const char* row, char* out,
                           int64_t position, int64_t heads, int64_t row_head, int64_t out_head, char* scales,
                           int64_t scale_head) {
  alignas(64) float values[kMaxRowFloats], rotated[kMaxRowFloats];
  const Angles angles(rotary, position);
  for (int64_t h = 0; h < heads; ++h, row += row_head, out += out_head, scales += scale_head) {
    with_float_elem(rotary.dtype, [&](auto elem) { read_row<decltype(elem)>(values, row, p.cols); });
    if (rotary.rotary_dim > 0) {
      angles.rotate(rotary, values, rotated);
      __builtin_memcpy(values, rotated, static_cast<size_t>(rotary.rotary_dim) * sizeof(float));
    }
    float scale = 1.0f;
    if (scales) {
      float* const of_head = reinterpret_cast<float*>(scales);
      if (p.computes) *of_head = scale_of_row(p, values);
      scale = *of_head;
    }
    for (int64_t d = 0; d < p.cols; d += kLanes) store(values + d, load(values + d) / scale);
    with_code_elem(p.dtype, [&](auto elem) { write_row<decltype(elem)>(out, values, p.cols); });
  }
}

}  // namespace
}  // namespace tessera::cpu
