// New keys and values for a cache of 8 bits an element: they are rotated in float32, divided by their scale and rounded
// once. kCodeLanes lanes convert the same columns of kAppendHeads heads of a token, whose loads are in flight while the
// token's place is found, once for these heads. With a computed scale a row's largest finite magnitude becomes the
// format's largest number; a row of several steps is then read twice, the second time from the L1 cache. A lane has the
// scale of one head, which the other lanes get from it, with its reciprocal. Quotients are exact, so the same scales
// give the CPU's codes.
#pragma once

#include "tessera/append/place.cuh"
#include "tessera/tile/codes.cuh"

namespace tessera {

// x / divisor, rounded as IEEE 754 asks.
struct ExactQuotient {
  float divisor, reciprocal;  // reciprocal: 1.0f / divisor

  // Whether no step of a quotient that is not lost in 8 bits underflows, and a quotient of 0 keeps its sign.
  TESSERA_DEVICE bool by_reciprocal() const { return divisor >= 0x1p-64f && divisor <= 0x1p64f; }

  // For by_reciprocal(). `largest` grows to the magnitude of the approximation; NaN does not count.
  TESSERA_DEVICE float approximate(float x, float& largest) const {
    const float approximation = x * reciprocal;
    largest = fmaxf(largest, fabsf(approximation));
    return corrected_quotient(approximation, x, divisor, reciprocal);
  }
  // Of several numbers.
  template <int kN>
  TESSERA_DEVICE void divide(float (&x)[kN]) const {
    float quotients[kN], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kN; ++i) quotients[i] = approximate(x[i], largest);
    const bool exact = by_reciprocal() && largest < __int_as_float(0x7f800000);
    if (!exact) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < kN; ++i) quotients[i] = x[i] / divisor;
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) x[i] = quotients[i];
  }
};

// The rows of kAppendHeads heads of a token, which kCodeLanes lanes convert in steps. In a step a lane has two vectors
// of kWidth columns of each row: two that are rotated together or, of columns that are not rotated, two that are
// kCodeLanes vectors apart.
template <AppendConfig kCfg>
struct CodedRows {
  static constexpr int kWidth = append_code_width(kCfg), kStep = kCodeLanes * 2 * kWidth;
  static constexpr int kLanesARow = kCodeLanes / kAppendHeads;  // that have one row's scale

  const AppendParams& p;
  const AppendWay& way;
  int head, lane;  // the rows are heads head, head + way.groups, ...
  int64 from;      // offset of the token's first head

  // A lane's columns of a step.
  struct Columns {
    RawColumns<kCfg.dtype, kWidth> low[kAppendHeads], high[kAppendHeads];
  };
  struct Place {
    int low, to_high, pair;  // the first column, the distance to the second ones; pair: index of cos and sin, or -1
    bool has_low, has_high;
  };

  TESSERA_DEVICE int rotated() const { return way.rotates ? p.rotary_dim : 0; }
  TESSERA_DEVICE int rotated_steps() const { return (rotated() + kStep - 1) / kStep; }
  TESSERA_DEVICE int steps() const { return rotated_steps() + (way.columns.value - rotated() + kStep - 1) / kStep; }
  TESSERA_DEVICE Place place(int step) const {
    const int others = step - rotated_steps();
    if (others < 0) {
      const int pair = (step * kCodeLanes + lane) * kWidth;
      const bool has = pair < rotated() / 2;
      if (p.interleaved) return {2 * pair, kWidth, pair, has, has};
      return {pair, rotated() / 2, pair, has, has};
    }
    const int low = rotated() + others * kStep + lane * kWidth, to_high = kCodeLanes * kWidth;
    return {low, to_high, -1, low < way.columns.value, low + to_high < way.columns.value};
  }
  TESSERA_DEVICE bool has(int n) const { return head + n * way.groups < way.heads; }

  TESSERA_DEVICE void load(int step, Columns& columns) const {
    const Place at = place(step);
    const int64 begin = from + way.from.head * head + at.low, next = way.from.head * way.groups;
#pragma unroll
    for (int n = 0; n < kAppendHeads; ++n) {
      // Past the last head, loads the first head again: the loads need no branch between them.
      const int64 row = begin + (has(n) ? next * n : 0);
      if (at.has_low) columns.low[n] = load_columns<kCfg.dtype, kWidth>(way.from.data, row);
      columns.high[n] = {};
      if (at.has_high) columns.high[n] = load_columns<kCfg.dtype, kWidth>(way.from.data, row + at.to_high);
    }
  }
  // Calls visit(n, x) for each row, x being the lane's two vectors of it, rotated; a vector that it lacks is 0.
  template <class Visit>
  TESSERA_DEVICE void for_rows(const Place& at, const Columns& columns, int position, const Visit& visit) const {
    if (!at.has_low) return;
    float cosine[kWidth], sine[kWidth];
    const bool rotates = at.pair >= 0;
    if (rotates) {
      load_angles(p, p.cos, p.cos_row * position + at.pair, cosine);
      load_angles(p, p.sin, p.sin_row * position + at.pair, sine);
    }
#pragma unroll
    for (int n = 0; n < kAppendHeads; ++n) {
      if (!has(n)) break;
      float x[2 * kWidth];
      unpack_columns(columns.low[n], x), unpack_columns(columns.high[n], x + kWidth);
      if (rotates) p.interleaved ? rotate_columns<true>(cosine, sine, x) : rotate_columns<false>(cosine, sine, x);
      visit(n, x);
    }
  }

  // Of row lane / kLanesARow, over all lanes; neither infinities nor NaN count. `columns` holds the first step's; if
  // there are more, it is overwritten.
  TESSERA_DEVICE float largest_magnitude(Columns& columns, bool exists, int position) const {
    const float infinity = __int_as_float(0x7f800000);
    float largest[kAppendHeads] = {};
#pragma unroll 1
    for (int step = 0; exists && step < steps(); ++step) {
      if (step > 0) load(step, columns);
      for_rows(place(step), columns, position, [&](int n, const float* x) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * kWidth; ++i) most = fmaxf(most, fabsf(x[i]));
        if (most == infinity) [[unlikely]] {
          most = 0.0f;
#pragma unroll
          for (int i = 0; i < 2 * kWidth; ++i) most = fabsf(x[i]) < infinity ? fmaxf(most, fabsf(x[i])) : most;
        }
        largest[n] = fmaxf(largest[n], most);
      });
    }
    int distance = kCodeLanes / 2;
    // Half of the lanes go on with half of the rows, until each has one.
#pragma unroll
    for (int rows = kAppendHeads / 2; rows > 0; rows /= 2, distance /= 2) {
      const bool upper = lane & distance;
#pragma unroll
      for (int n = 0; n < rows; ++n) {
        const float kept = upper ? largest[n + rows] : largest[n], given = upper ? largest[n] : largest[n + rows];
        largest[n] = fmaxf(kept, __shfl_xor_sync(0xffffffff, given, distance));
      }
    }
#pragma unroll
    for (; distance > 0; distance /= 2) {
      largest[0] = fmaxf(largest[0], __shfl_xor_sync(0xffffffff, largest[0], distance));
    }
    return largest[0];
  }

  // Stores the rows. `to`: offset of the token's first head in the cache; `columns` as of largest_magnitude(), before
  // and after it.
  TESSERA_DEVICE void store(Columns& columns, int position, const ExactQuotient (&quotients)[kAppendHeads],
                            int64 to) const {
    const int64 begin = to + way.to.head * head, next = way.to.head * way.groups;
#pragma unroll 1
    for (int step = 0; step < steps(); ++step) {
      if (step > 0 || (p.computes_scales && steps() > 1)) load(step, columns);
      const Place at = place(step);
      for_rows(at, columns, position, [&](int n, float(&x)[2 * kWidth]) {
        quotients[n].divide(x);
        const int64 row = begin + next * n + at.low;
        store_codes<kCfg.cache, kWidth>(way.to.data, row, x);
        if (at.has_high) store_codes<kCfg.cache, kWidth>(way.to.data, row + at.to_high, x + kWidth);
      });
    }
  }
};

// The block's tokens of k and v.
template <AppendConfig kCfg>
TESSERA_DEVICE void append_codes(const AppendParams& p) {
  constexpr int kUnits = kAppendThreads / kCodeLanes;
  const int all = p.cu_seqlens ? p.tokens.value : p.batch * p.tokens.value;
  const int begin = static_cast<int>(blockIdx.x) * p.key_tokens;
  const int unit = static_cast<int>(threadIdx.x) / kCodeLanes, lane = static_cast<int>(threadIdx.x) % kCodeLanes;
  // A warp's lanes stay together for the shuffles, also those whose rows do not exist.
#pragma unroll 1
  for (int first = 0; first < p.key_units; first += kUnits) {
    // 1. Load the unit's columns; they are in flight while the token's place is found.
    const int n = first + unit;
    const bool is_value = n >= p.ways[kValues].begin;
    const AppendWay& way = p.ways[is_value ? kValues : kRotatedKeys];
    const int token = (n - way.begin) / way.units, head = n - way.begin - token * way.units.value;
    AppendedToken at = token_row(p, begin + token, p.tokens);
    const CodedRows<kCfg> rows{p, way, head, lane, way.from.batch * at.batch + way.from.row * at.row};
    typename CodedRows<kCfg>::Columns columns;
    const bool is_token = n < p.key_units && begin + token < all;
    if (is_token) rows.load(0, columns);

    // 2. Find its place, whether it exists, and its scales.
    AppendPlace place{};
    const bool has_key = is_token && find_key(p, at), exists = has_key && find_place(p, true, at, place);
    if (has_key && !exists && p.dropped && is_value && head == 0 && lane == 0) atomicAdd(p.dropped, 1);
    const AppendScales& of = is_value ? p.v_scales : p.k_scales;
    float* const scale = of.data + of.batch * (p.computes_scales ? place.page : at.batch) + of.row * place.slot;
    const int own = lane / rows.kLanesARow;  // the row whose scale the lane has
    float* const own_scale = scale + of.head * (head + own * way.groups);
    float of_row = 1.0f;
    if (p.computes_scales) {
      of_row = rows.largest_magnitude(columns, exists, place.position) / largest_code(kCfg.cache);
      if (!(of_row > 0.0f)) of_row = 1.0f;  // of zeros, or the quotient vanishes
      if (exists && lane % rows.kLanesARow == 0 && rows.has(own)) *own_scale = of_row;
    } else if (exists && of.data && rows.has(own)) {
      of_row = *own_scale;
    }
    const float reciprocal = 1.0f / of_row;
    ExactQuotient quotients[kAppendHeads];
#pragma unroll
    for (int i = 0; i < kAppendHeads; ++i) {
      const int from = static_cast<int>(threadIdx.x) % 32 - lane + i * rows.kLanesARow;
      quotients[i] = {__shfl_sync(0xffffffff, of_row, from), __shfl_sync(0xffffffff, reciprocal, from)};
    }

    // 3. Rotate, divide and write.
    if (exists) rows.store(columns, place.position, quotients, way.to.batch * place.page + way.to.row * place.slot);
  }
}

}  // namespace tessera
