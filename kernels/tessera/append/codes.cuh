// New keys and values for a cache of 8 bits an element: they are rotated in float32, divided by their scale and rounded
// once. kCodeLanes lanes convert a row (a head of a token), 4 columns each at a time if aligned. With a computed scale
// the row's largest finite magnitude becomes the format's largest number: the row is read twice then, the second time
// from the L1 cache. Divisions are exact, so the same scales give the CPU's codes.
#pragma once

#include "tessera/append/place.cuh"
#include "tessera/tile/codes.cuh"

namespace tessera {

template <AppendConfig kCfg>
struct CodedRow {
  static constexpr int kWidth = append_code_width(kCfg);
  const AppendParams& p;
  const AppendWay& way;
  int64 from, to;  // the row's first element
  int position, lane;

  // Stores the row; `scale` is the address of its scale, or NULL for 1. Called by all lanes of a warp, each with
  // `exists` of its own row.
  TESSERA_DEVICE void convert(float* scale, bool exists) const {
    float divisor = 1.0f;
    if (p.computes_scales) {
      const float largest = exists ? largest_magnitude() : 0.0f;
      divisor = largest_of_row(largest) / largest_code(kCfg.cache);
      if (!(divisor > 0.0f)) divisor = 1.0f;  // of zeros, or the quotient vanishes
      if (exists && lane == 0) *scale = divisor;
    } else if (scale) {
      divisor = *scale;
    }
    if (!exists) return;
    for_columns([&](int column, float* x) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] /= divisor;
      store_codes<kCfg.cache, kWidth>(way.to.data, to + column, x);
    });
  }

 private:
  TESSERA_DEVICE void load(int column, float* x) const {
    unpack_columns(load_columns<kCfg.dtype, kWidth>(way.from.data, from + column), x);
  }
  // Calls visit(column, x) for kWidth neighbouring columns at a time of those that are the lane's, rotated.
  template <class Visit>
  TESSERA_DEVICE void for_columns(const Visit& visit) const {
    const int rotated = way.rotates ? p.rotary_dim : 0, step = kCodeLanes * kWidth;
    for (int n = lane * kWidth; n < rotated / 2; n += step) {
      const int low = p.interleaved ? 2 * n : n, high = p.interleaved ? low + kWidth : low + rotated / 2;
      float x[2 * kWidth], cosine[kWidth], sine[kWidth];
      load(low, x), load(high, x + kWidth);
      load_angles(p, p.cos, p.cos_row * position + n, cosine);
      load_angles(p, p.sin, p.sin_row * position + n, sine);
      p.interleaved ? rotate_columns<true>(cosine, sine, x) : rotate_columns<false>(cosine, sine, x);
      visit(low, x), visit(high, x + kWidth);
    }
    for (int n = rotated + lane * kWidth; n < way.columns.value; n += step) {
      float x[kWidth];
      load(n, x);
      visit(n, x);
    }
  }
  // Of the lane's columns; neither infinities nor NaN count.
  TESSERA_DEVICE float largest_magnitude() const {
    float largest = 0.0f;
    for_columns([&](int, const float* x) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float magnitude = fabsf(x[i]);
        if (magnitude > largest && magnitude < __int_as_float(0x7f800000)) largest = magnitude;
      }
    });
    return largest;
  }
  TESSERA_DEVICE static float largest_of_row(float x) {
#pragma unroll
    for (int distance = kCodeLanes / 2; distance > 0; distance /= 2) {
      x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
    }
    return x;
  }
};

// The block's tokens of k and v.
template <AppendConfig kCfg>
TESSERA_DEVICE void append_codes(const AppendParams& p) {
  constexpr int kRows = kAppendThreads / kCodeLanes;
  const int all = p.cu_seqlens ? p.tokens.value : p.batch * p.tokens.value;
  const int begin = static_cast<int>(blockIdx.x) * p.key_tokens;
  const int row = static_cast<int>(threadIdx.x) / kCodeLanes, lane = static_cast<int>(threadIdx.x) % kCodeLanes;
  // A warp's lanes stay together for the shuffles, also those whose row does not exist.
#pragma unroll 1
  for (int first = 0; first < p.key_units; first += kRows) {
    const int n = first + row;
    const bool is_value = n >= p.ways[kValues].begin;
    const AppendWay& way = p.ways[is_value ? kValues : kRotatedKeys];
    const int token = (n - way.begin) / way.units, head = n - way.begin - token * way.units.value;
    AppendedToken at = token_row(p, begin + token, p.tokens);
    AppendPlace place{};
    const bool is_token = n < p.key_units && begin + token < all && find_key(p, at);
    const bool exists = is_token && find_place(p, true, at, place);
    if (is_token && !exists && p.dropped && is_value && head == 0 && lane == 0) atomicAdd(p.dropped, 1);
    const AppendScales& scales = is_value ? p.v_scales : p.k_scales;
    const int64 of_scale =
        scales.batch * (p.computes_scales ? place.page : at.batch) + scales.row * place.slot + scales.head * head;
    const CodedRow<kCfg> coded{p,
                               way,
                               way.from.batch * at.batch + way.from.row * at.row + way.from.head * head,
                               way.to.batch * place.page + way.to.row * place.slot + way.to.head * head,
                               place.position,
                               lane};
    coded.convert(exists && scales.data ? scales.data + of_scale : nullptr, exists);
  }
}

}  // namespace tessera
