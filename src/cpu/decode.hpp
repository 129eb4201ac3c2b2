// Decoding: few query rows against long keys, limited by memory. An item is one part of the keys of a sequence, for all
// KV heads or for one (whichever reads memory in order). Lanes are head dimensions in both products, so that keys and
// values are read once and in place, whatever their dtype, and the query heads of a KV head use each loaded vector
// together. Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023): partial results are merged exactly by combine.
#pragma once

#include <type_traits>

#include "cpu/decode_rows.hpp"
#include "cpu/forward.hpp"

namespace tessera::cpu {
namespace {

constexpr int kDecodeRows = 16;  // the most query rows (query heads of a group times queries)
constexpr int kDecodeBlockKeys = 64;
constexpr int kDecodeGroup = 4;   // rows at a time
constexpr int kDecodeVecs = 4;    // vectors of O at a time
constexpr int kDecodeKeys = 4;    // keys whose scores are computed at a time
constexpr int kDecodeValues = 8;  // values that are added to O at a time
// Accumulators of a loop, which leave registers for operands.
#if defined(TESSERA_AVX512) || defined(TESSERA_NEON)
constexpr int kDecodeAccumulators = 16;
#else
constexpr int kDecodeAccumulators = 8;
#endif

// A query row as decode reads it: float32, or bf16 for the dot product; zero past the head dimension.
template <Op kOp>
constexpr int64_t kLaneElems = kOp == Op::kDot ? 2 : 1;  // elements of q and k in a lane

// scores[r][n] = q_r . k_n for R rows and kDecodeKeys keys. A vector of q is loaded once for all of the keys, and the
// sums over lanes are computed for as many (row, key) pairs at a time as a vector has lanes.
template <Op kOp, class Elem, int R>
TESSERA_INLINE void decode_scores(float* scores, int64_t scores_ld, const float* q, int64_t q_ld,
                                  const char* const* keys, int64_t head_dim) {
  constexpr int64_t kStep = kLanes * kLaneElems<kOp>;
  constexpr int kKeys = min_of(kDecodeKeys, kDecodeAccumulators / R);  // at a time
  VecF acc[R][kDecodeKeys] = {};
#pragma GCC unroll 4
  for (int first = 0; first < kDecodeKeys; first += kKeys) {
    for (int64_t d = 0; d < head_dim; d += kStep) {
      const int64_t left = head_dim - d;
      VecF k[kKeys];
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) {
        if constexpr (kOp == Op::kDot) {
          const uint16_t* at = reinterpret_cast<const uint16_t*>(keys[first + i]) + d;
          k[i] = left >= kStep ? load_as<VecF>(at) : load_first<VecF>(at, left);
        } else {
          const char* at = keys[first + i] + d * Elem::kBytes;
          k[i] = left >= kStep ? Elem::read(at) : Elem::read(at, left);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const VecF rq = load(q + r * q_ld + d / kLaneElems<kOp>);
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) acc[r][first + i] = multiply_add<kOp>(rq, k[i], acc[r][first + i]);
      }
    }
  }
  alignas(64) float sums[R * kDecodeKeys + kLanes];
#pragma GCC unroll 4
  for (int first = 0; first < R * kDecodeKeys; first += kLanes) {
    VecF part[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const int at = first + i;
      part[i] = at < R * kDecodeKeys ? acc[at / kDecodeKeys % R][at % kDecodeKeys] : VecF{};
    }
    store(sums + first, sum_each(part));
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
    __builtin_memcpy(scores + r * scores_ld, sums + r * kDecodeKeys, kDecodeKeys * sizeof(float));
}

// out[r][c] += sum_n p[r][n] v_n[c], for R rows and C vectors of columns from `first`; `tail`: columns of the last
// vector.
template <class Elem, int R, int C>
TESSERA_INLINE void decode_values(float* out, int64_t out_ld, const float* p, int64_t p_ld, const char* const* values,
                                  int64_t count, int64_t first, int64_t tail) {
  VecF acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = load(out + r * out_ld + first + c * kLanes);
  for (int64_t n = 0; n < count; ++n) {
    const char* value = values[n] + first * Elem::kBytes;
    VecF v[C];
#pragma GCC unroll 4
    for (int c = 0; c + 1 < C; ++c) v[c] = Elem::read(value + c * kLanes * Elem::kBytes);
    const char* last = value + (C - 1) * kLanes * Elem::kBytes;
    v[C - 1] = tail == kLanes ? Elem::read(last) : Elem::read(last, tail);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r][c] = fma(splat(p[r * p_ld + n]), v[c], acc[r][c]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store(out + r * out_ld + first + c * kLanes, acc[r][c]);
}

#if defined(TESSERA_HAS_DOT)
// The same for bf16, by pairs of keys: two rows are interleaved in registers, two vectors of columns at a time, and one
// product uses both. Interleaving works within 128 bits, and O keeps its columns in that order (dot_column) until the
// end. C groups of 2 kLanes columns from `first`; `tail`: columns of the last group.
template <int R, int C>
TESSERA_INLINE void decode_values_dot(float* out, int64_t out_ld, const float* p, int64_t p_ld,
                                      const char* const* values, int64_t count, int64_t first, int64_t tail) {
  constexpr int64_t kColumns = 2 * kLanes;
  VecF acc[R][2 * C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < 2 * C; ++c) acc[r][c] = load(out + r * out_ld + first + c * kLanes);
  for (int64_t n = 0; n < count; n += 2) {
    const auto read = [&](int64_t key, int c) TESSERA_LAMBDA_INLINE {
      const uint16_t* row = reinterpret_cast<const uint16_t*>(values[key]) + first + c * kColumns;
      return c + 1 < C || tail == kColumns ? load_as<VecU>(row) : load_first<VecU>(row, tail);
    };
    VecU v[2 * C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      const VecU even = read(n, c), odd = n + 1 < count ? read(n + 1, c) : VecU{};
      v[2 * c] = interleave_lower(even, odd);
      v[2 * c + 1] = interleave_upper(even, odd);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const VecU pair = broadcast_element(reinterpret_cast<const char*>(p + r * p_ld) + n * 2);
#pragma GCC unroll 4
      for (int c = 0; c < 2 * C; ++c) acc[r][c] = dot(acc[r][c], pair, v[c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < 2 * C; ++c) store(out + r * out_ld + first + c * kLanes, acc[r][c]);
}
#endif

// The index of column d of O while it accumulates.
template <Op kOp>
TESSERA_INLINE int64_t dot_column(int64_t d) {
  if constexpr (kOp == Op::kFma) return d;
  // Of 32 columns the low vector has 0-3, 8-11, 16-19, 24-27, the high vector the others.
  constexpr int64_t kColumns = 2 * kLanes;
  return d / kColumns * kColumns + d % 8 / 4 * kLanes + d % kColumns / 8 * 4 + d % 4;
}

#if defined(TESSERA_HAS_DOT)
// Converts count floats to packed bf16 in place, up to the next multiple of kLanes.
TESSERA_INLINE void round_to_bf16(float* row, int64_t count) {
  for (int64_t n = 0; n < count; n += kLanes)
    store(reinterpret_cast<uint16_t*>(row) + n, bf16_from_float(load(row + n)));
}
#endif

// Scores of one row and one block -> P, and the row's stale_max and sum. Returns the factor by which its O must be
// multiplied. Past the last key, P is 0 up to the next multiple of kLanes. kRoundedP: the result is rounded to
// bfloat16.
template <bool kRoundedP>
TESSERA_INLINE float decode_softmax(const Params& p, const Sequence& sequence, int64_t batch, DecodeRow& row,
                                    float* scores, float* registers, int64_t key, int64_t count) {
  VecF best = splat(-infinity());
  const KeyLanes at{sequence, batch, row, key, count};
  ScoreStep<KeyLanes>(p, at, {.registers = registers})
      .apply(scores, 0, count, [&](VecF score, int64_t, int) TESSERA_LAMBDA_INLINE { best = max(best, score); });
  // As in the tiled kernel, the stale max is replaced only if a score exceeds it by the threshold.
  float rescale = 1.0f;
  if (any(best > row.stale_max + StaleMax<kRoundedP>::kRescaleThreshold)) {
    const float next = max_lanes(best);
    const Against to = against(p, splat(next));
    rescale = rescale_of(splat(row.stale_max), {splat(row.shift), splat(row.offset)}, to)[0];
    row.stale_max = next, row.shift = to.shift[0], row.offset = to.offset[0];
    store(row.sum, load(row.sum) * rescale);
  }
  const Against number{splat(row.shift), splat(row.offset)};
  const bool huge = row.shift != 0.0f, marks = marks_hidden(p);
  VecF sum = load(row.sum);
  const Exp2 exponential;
  for (int64_t n = 0; n < count; n += kLanes) {
    const VecF e = exponential(exponent_of(load(scores + n), number, huge));
    sum += e;
    store(scores + n, marks ? marked_weight(e, load(scores + n)) : e);
  }
  store(row.sum, sum);
  return rescale;
}

// O += P V of `count` keys, for the rows of one KV head.
template <Op kOp, class Elem>
TESSERA_INLINE void decode_output(const Params& p, int64_t row_count, float* out, int64_t out_ld, const float* scores,
                                  int64_t scores_ld, const char* const* values, int64_t count) {
  for_row_groups<kDecodeGroup>(0, row_count, [&]<int R>(int64_t r0) TESSERA_LAMBDA_INLINE {
#if defined(TESSERA_HAS_DOT)
    if constexpr (kOp == Op::kDot) {
      for_vec_groups<2>(static_cast<int>(out_ld / (2 * kLanes)), [&]<int C>(int group) TESSERA_LAMBDA_INLINE {
        const int64_t first = group * 2 * kLanes;
        decode_values_dot<R, C>(out + r0 * out_ld, out_ld, scores + r0 * scores_ld, scores_ld, values, count, first,
                                min_of<int64_t>(2 * kLanes, p.head_dim_v - first - (C - 1) * 2 * kLanes));
      });
      return;
    }
#endif
    for_vec_groups<min_of(kDecodeVecs, kDecodeAccumulators / R)>(
        static_cast<int>((p.head_dim_v + kLanes - 1) / kLanes), [&]<int C>(int v) TESSERA_LAMBDA_INLINE {
          const int64_t first = v * kLanes;
          decode_values<Elem, R, C>(out + r0 * out_ld, out_ld, scores + r0 * scores_ld, scores_ld, values, count, first,
                                    min_of<int64_t>(kLanes, p.head_dim_v - first - (C - 1) * kLanes));
        });
  });
}

// The same, over what each row sees: keys key + first ..., with weights from index `first` on. read_value(out, i):
// value i, scaled; weight(row, n); column(d): the index of column d of O while it accumulates.
template <class ReadValue, class Weight, class Column>
TESSERA_COLD_FUNCTION void decode_seen(const Params& p, const Sequence& sequence, int64_t batch, const DecodeRow* rows,
                                       int64_t row_count, float* out, int64_t out_ld, int64_t key, int64_t first,
                                       int64_t count, const ReadValue& read_value, const Weight& weight,
                                       const Column& column) {
  alignas(64) float value[kMaxRowFloats];
  for (int64_t i = 0; i < count; ++i) {
    read_value(value, i);
    const int64_t n = first + i;
    for (int64_t r = 0; r < row_count; ++r) {
      if (key + n < rows[r].low || key + n > rows[r].high) continue;
      if (!sees_entry(p, {sequence, batch, rows[r].head, rows[r].query, key + n})) continue;
      const float w = weight(r, n);
      if (marks_hidden(p) && w == 0.0f && __builtin_signbit(w)) continue;
      for (int64_t d = 0; d < p.head_dim_v; ++d) out[r * out_ld + column(d)] += w * value[d];
    }
  }
}

// kKeys neighbouring rows of K or V, one head after another, and prefetching of the rows that follow.
template <int kKeys>
struct KeyGroup {
  const char* rows[kKeys];  // past `count`, the last one is repeated
  int64_t count;

  // Rows from `key`; those before `block_end` are used now, and none from `key_end` on is ever used.
  TESSERA_INLINE KeyGroup(const Params& p, const RowTensor& tensor, const Sequence& sequence, int64_t batch,
                          int64_t head_kv, int64_t key, int64_t block_end, int64_t key_end, int64_t cols)
      : count(min_of<int64_t>(kKeys, block_end - key)), head_bytes_(tensor.head), row_bytes_(cols * p.kv_elem_bytes) {
    const auto locate = [&](const char** at, int64_t first, int64_t end) TESSERA_LAMBDA_INLINE {
      const int64_t here = min_of<int64_t>(kKeys, end - first);
      key_rows(at, p, tensor, sequence, batch, head_kv, first, here);
      for (int64_t i = here; i < kKeys; ++i) at[i] = at[here - 1];
    };
    locate(rows, key, block_end);
    locate(ahead_, min_of(key + kKeys, key_end - 1), key_end);
    prefetch();
  }

  TESSERA_INLINE void next_head() {
#pragma GCC unroll 8
    for (int64_t i = 0; i < kKeys; ++i) rows[i] += head_bytes_, ahead_[i] += head_bytes_;
    prefetch();
  }

 private:
  TESSERA_INLINE void prefetch() const {
#pragma GCC unroll 8
    for (int64_t i = 0; i < kKeys; ++i) prefetch_row(ahead_[i], row_bytes_);
  }

  const char* ahead_[kKeys];
  int64_t head_bytes_, row_bytes_;
};

// Whether decoding reads rows of 8 bits as Elem: float8 as float16, which holds its numbers and becomes float32 by the
// instruction that loads it; int8 as float32.
template <class Elem>
constexpr bool kHoldsCodes = std::is_same_v<Elem, Float16Elem> || std::is_same_v<Elem, Float32Elem>;

// Times what DecodedRows holds is a code's number.
TESSERA_INLINE float decoded_factor(int32_t dtype) { return dtype == TESSERA_FLOAT8_E4M3 ? kHalfOfE4m3 : 1.0f; }

// Rows of 8 bits as Elem, neither scaled nor multiplied by decoded_factor.
template <class Elem>
struct DecodedRows {
  alignas(64) char elements[kDecodeValues][kMaxRowFloats * Elem::kBytes];
  const char* rows[kDecodeValues];

  template <int kKeys>
  TESSERA_INLINE const char* const* read(const Params& p, const KeyGroup<kKeys>& group, int64_t cols) {
    for (int64_t i = 0; i < kKeys; ++i) rows[i] = elements[min_of(i, group.count - 1)];
    decode(p.kv_dtype, group.rows, group.count, cols);
    return rows;
  }

 private:
  TESSERA_OWN_FUNCTION void decode(int32_t dtype, const char* const* from, int64_t count, int64_t cols) {
    if constexpr (Elem::kBytes == 4) {
      each(from, 0, count, cols, [](const char* codes, char* out) TESSERA_LAMBDA_INLINE {
        VecF v[2];
        floats_from_i8(codes, v);
        __builtin_memcpy(out, v, sizeof v);
      });
    } else if (dtype == TESSERA_FLOAT8_E4M3) {
      // A row with a NaN is rare, and found by less than what NaN costs a conversion.
      each(from, 0, count, cols,
           [](const char* codes, char* out) TESSERA_LAMBDA_INLINE { store(out, halves_from_finite_e4m3(codes)); });
      for (int64_t i = 0; i < count; ++i) {
        if (holds_nan_of_e4m3(from[i], cols)) decode_with_nan(from, i, cols);
      }
    } else {
      each(from, 0, count, cols,
           [](const char* codes, char* out) TESSERA_LAMBDA_INLINE { store(out, halves_from_e5m2(codes)); });
    }
  }
  TESSERA_COLD_FUNCTION void decode_with_nan(const char* const* from, int64_t i, int64_t cols) {
    each(from, i, i + 1, cols,
         [](const char* codes, char* out) TESSERA_LAMBDA_INLINE { store(out, halves_from_e4m3(codes)); });
  }
  // convert(codes, out): kStep codes.
  template <class Convert>
  TESSERA_INLINE void each(const char* const* from, int64_t begin, int64_t end, int64_t cols, const Convert& convert) {
    constexpr int64_t kStep = 2 * kLanes;
    static_assert((kMaxRowFloats - kLanes) % kStep == 0);  // the largest head size
    for (int64_t i = begin; i < end; ++i) {
      const char* const row = from[i];
      char* const out = elements[i];
      int64_t c = 0;
      for (; c + kStep <= cols; c += kStep) convert(row + c, out + c * Elem::kBytes);
      if (c == cols) continue;
      char tail[kStep] = {};
      __builtin_memcpy(tail, row + c, static_cast<size_t>(cols - c));
      convert(tail, out + c * Elem::kBytes);
    }
  }
};

struct NoRows {};  // instead: of 16 bits

// scales[h][n] = `factor` times those of keys or values key ... key + count - 1 of `heads` KV heads. Divisions are done
// once for a page or for the tokens that share a scale. Scales of the next tokens, up to key_end, are prefetched.
TESSERA_INLINE void decode_scales(float* scales, const Params& p, const Scales& of, float factor,
                                  const Sequence& sequence, int64_t batch, int64_t head_begin, int64_t heads,
                                  int64_t key, int64_t count, int64_t key_end) {
  static constexpr float kOne = 1.0f;
  const int64_t alike = !of.data ? count : of.in_pages ? p.page_size : of.tokens;
  const int64_t head_bytes = of.data ? of.head : 0, token_bytes = of.data && of.in_pages ? of.row : 0;
  for (int64_t n = 0; n < count;) {
    const char* at = reinterpret_cast<const char*>(&kOne);
    if (of.data) at = scale_address(p, of, sequence, batch, key + n) + of.head * head_begin;
    for (int64_t until = min_of(count, n + alike - (of.data ? (key + n) % alike : 0)); n < until; ++n) {
      for (int64_t h = 0; h < heads; ++h) {
        scales[h * kDecodeBlockKeys + n] = *reinterpret_cast<const float*>(at + head_bytes * h) * factor;
      }
      at += token_bytes;
    }
  }
  if (token_bytes == 0) return;
  for (int64_t j = key + count; j < min_of(key + 2 * count, key_end);) {
    const char* at = scale_address(p, of, sequence, batch, j) + of.head * head_begin;
    for (int64_t until = j - j % alike + alike; j < until; ++j, at += token_bytes) __builtin_prefetch(at, 0, 2);
  }
}

// weights[r][n] *= scales[n]
TESSERA_INLINE void scale_weights(float* weights, int64_t ld, int64_t rows, const float* scales, int64_t count) {
  for (int64_t r = 0; r < rows; ++r, weights += ld) {
    for (int64_t n = 0; n < count; ++n) weights[n] *= scales[n];
  }
}

// The keys of one part, a block at a time. Within a block, keys are the outer loop and heads the inner one: if a key's
// heads are neighbours, memory is read in order and the hardware's prefetchers keep up. Software prefetches would wait
// in the L1 cache's few miss buffers; they are used only for the next few rows, whose pages the hardware does not
// predict.
// Keys and values of 8 bits are converted a group at a time, and are Elem then.
template <Op kOp, class Elem>
void decode_keys(const Params& p, const Sequence& sequence, int64_t batch, int64_t head_begin, int64_t heads,
                 int64_t row_count, const DecodeScratch& s, int64_t key_begin, int64_t key_end) {
  DecodeRow* rows = reinterpret_cast<DecodeRow*>(s.rows);
  const int64_t q_ld = padded_to(p.head_dim, 2 * kLanes), out_ld = padded_to(p.head_dim_v, 2 * kLanes);
  static constexpr float kOnes[kDecodeValues] = {1, 1, 1, 1, 1, 1, 1, 1};
  const int64_t scores_ld = p.block_n;
  constexpr bool kMayDecode = kHoldsCodes<Elem>;
  const bool decodes = kMayDecode && p.kv_elem_bytes == 1;
  const float factor = decoded_factor(p.kv_dtype);
  const bool k_scaled = p.k_scales.data || factor != 1.0f, v_scaled = p.v_scales.data || factor != 1.0f;
  std::conditional_t<kMayDecode, DecodedRows<Elem>, NoRows> decoded;
  const auto elements = [&](const auto& group, int64_t cols) TESSERA_LAMBDA_INLINE -> const char* const* {
    if constexpr (kMayDecode) {
      if (decodes) return decoded.read(p, group, cols);
    }
    return group.rows;
  };
  int64_t all_low = 0, all_high = key_end;  // keys that every row sees
  for (int64_t row = 0; row < heads * row_count; ++row) {
    all_low = max_of(all_low, rows[row].low), all_high = min_of(all_high, rows[row].full_high);
  }
  for (int64_t key = key_begin; key < key_end; key += p.block_n) {
    constexpr int64_t kCancelKeys = 1024;
    if (key % kCancelKeys == 0 && p.cancelled && p.cancelled(p.cancel)) return;
    const int64_t count = min_of<int64_t>(p.block_n, key_end - key);
    const bool masked = key < all_low || key + count - 1 > all_high || may_mask_entries(p);
    for (int64_t n = 0; n < count; n += kDecodeKeys) {
      KeyGroup<kDecodeKeys> group(p, p.k, sequence, batch, head_begin, key + n, key + count, key_end, p.head_dim);
      for (int64_t h = 0; h < heads; ++h, group.next_head()) {
        const char* const* keys = elements(group, p.head_dim);
        for_row_groups<kDecodeGroup>(0, row_count, [&]<int R>(int64_t r0) TESSERA_LAMBDA_INLINE {
          const int64_t row = h * row_count + r0;
          decode_scores<kOp, Elem, R>(s.scores + row * scores_ld + n, scores_ld, s.q + row * q_ld, q_ld, keys,
                                      p.head_dim);
        });
      }
    }
    if constexpr (kMayDecode) {
      if (k_scaled) {
        decode_scales(s.scales, p, p.k_scales, factor, sequence, batch, head_begin, heads, key, count, key_end);
        for (int64_t h = 0; h < heads; ++h) {
          scale_weights(s.scores + h * row_count * scores_ld, scores_ld, row_count, s.scales + h * kDecodeBlockKeys,
                        count);
        }
      }
      if (v_scaled)
        decode_scales(s.scales, p, p.v_scales, factor, sequence, batch, head_begin, heads, key, count, key_end);
    }
    for (int64_t row = 0; row < heads * row_count; ++row) {
      float* scores = s.scores + row * scores_ld;
      const float rescale =
          decode_softmax<kOp == Op::kDot>(p, sequence, batch, rows[row], scores, s.program, key, count);
#if defined(TESSERA_HAS_DOT)
      if constexpr (kOp == Op::kDot) round_to_bf16(scores, count);
#endif
      if (rescale == 1.0f) continue;
      float* o = s.o + row * out_ld;
      for (int64_t d = 0; d < out_ld; d += kLanes) store(o + d, load(o + d) * rescale);
    }
    for (int64_t n = 0; n < count; n += kDecodeValues) {
      KeyGroup<kDecodeValues> group(p, p.v, sequence, batch, head_begin, key + n, key + count, key_end, p.head_dim_v);
      for (int64_t h = 0; h < heads; ++h, group.next_head()) {
        float* const weights = s.scores + h * row_count * scores_ld;
        const float* const scales = v_scaled ? s.scales + h * kDecodeBlockKeys + n : kOnes;
        const char* const* values = elements(group, p.head_dim_v);
        bool finite = true;
        if (masked) {
          finite = elements_are_finite<Elem>(group.count, p.head_dim_v, [&](int64_t i) { return values[i]; });
          for (int64_t i = 0; v_scaled && i < group.count; ++i) finite &= scales[i] - scales[i] == 0.0f;
        }
        if (!finite) {
          const auto read_value = [&p, values, scales](float* out, int64_t i) {
            read_row<Elem>(out, values[i], p.head_dim_v);
            for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] *= scales[i];
          };
          const auto weight = [weights, scores_ld](int64_t r, int64_t at) {
            const float* row = weights + r * scores_ld;
            if constexpr (kOp == Op::kDot) return float_of_bf16(reinterpret_cast<const uint16_t*>(row)[at]);
            return row[at];
          };
          decode_seen(p, sequence, batch, rows + h * row_count, row_count, s.o + h * row_count * out_ld, out_ld, key, n,
                      group.count, read_value, weight, [](int64_t d) { return dot_column<kOp>(d); });
          continue;
        }
        if (kMayDecode && v_scaled) scale_weights(weights + n, scores_ld, row_count, scales, group.count);
        decode_output<kOp, Elem>(p, row_count, s.o + h * row_count * out_ld, out_ld, weights + n / kLaneElems<kOp>,
                                 scores_ld, values, group.count);
      }
    }
  }
}

// An item: one part of the keys of a sequence, for `heads` KV heads from head_begin on, each with row_count query rows.
struct DecodePart {
  const Sequence& sequence;
  int64_t batch, index;  // index of the part among all
  int64_t head_begin, heads, row_count;
  int64_t key_begin, key_end;

  TESSERA_INLINE DecodePart(const Params& p, int64_t item) : DecodePart(p, item, p.sequences[p.batch].item_begin) {}

 private:
  TESSERA_INLINE DecodePart(const Params& p, int64_t item, int64_t all_parts)
      : DecodePart(p, item, all_parts, find_sequence(p, &Sequence::item_begin, item % all_parts)) {}
  TESSERA_INLINE DecodePart(const Params& p, int64_t item, int64_t all_parts, int64_t of_batch)
      : sequence(p.sequences[of_batch]), batch(of_batch), index(item % all_parts) {
    heads = p.tiles_per_item;  // all KV heads, or one
    head_begin = item / all_parts * heads;
    row_count = p.heads_q / p.heads_kv * sequence.sq;
    const int64_t parts = p.sequences[batch + 1].item_begin - sequence.item_begin;
    const int64_t part_keys = padded_to((sequence.sk + parts - 1) / parts, p.block_n);
    key_begin = (index - sequence.item_begin) * part_keys;
    key_end = min_of(sequence.sk, key_begin + part_keys);
  }
};

// Address of row r of KV head head_begin + h in q.
TESSERA_INLINE const char* decode_query(const Params& p, const DecodePart& part, const DecodeRow& row) {
  return p.q.data + p.q.batch * part.batch + p.q.row * (part.sequence.q_begin + row.query) + p.q.head * row.head;
}

// rows[heads][row_count]. Returns the keys that some row sees, from a multiple of block_n on.
inline KeyRange init_decode_rows(const Params& p, const DecodePart& part, DecodeRow* rows) {
  int64_t low = part.sequence.sk, high = -1;
  for (int64_t h = 0; h < part.heads; ++h) {
    for (int64_t r = 0; r < part.row_count; ++r) {
      DecodeRow& row = rows[h * part.row_count + r];
      row.query = r % part.sequence.sq;
      row.head = (part.head_begin + h) * (p.heads_q / p.heads_kv) + r / part.sequence.sq;
      const KeyRange keys = KeyBand(p, part.sequence).of(row.query);
      row.low = keys.low, row.high = keys.high;
      row.full_high = last_full_key(p, part.sequence, keys.high);
      if (row.low <= row.high) low = min_of(low, row.low), high = max_of(high, row.high);
      row.stale_max = -infinity();
      row.shift = row.offset = 0.0f;
      store(row.sum, VecF{});
    }
  }
  return {max_of(part.key_begin, low / p.block_n * p.block_n), min_of(part.key_end, high + 1) - 1};
}

// LSEs of up to kLanes rows of one KV head, from scores with the same bits as in the tiled kernels. The backward pass
// recomputes those, and if scores are huge, a different order of a product's sum would change weights by powers of two.
// Lanes are rows, and products are summed in the tiled kernels' order. sQ: [steps of the head dimension][kLanes].
template <Op kOp>
TESSERA_COLD_FUNCTION void sum_as_tiled(const Params& p, const DecodePart& part, DecodeRow* rows, int64_t count,
                                        int64_t head_kv, const float* sQ, const KeyRange& keys, float* registers) {
  alignas(64) float copy[kTileRows * kMaxRowFloats], scores[kTileRows * kLanes];
  VecF most = splat(-infinity()), sum{};
  Against number{};
  for (int64_t key = keys.low; key <= keys.high; key += kTileRows) {
    const int64_t block = min_of<int64_t>(kTileRows, keys.high + 1 - key);
    const RowBlock k = rows_block<kOp>(p, p.k, part.sequence, part.batch, head_kv, key, block, p.head_dim, copy, true);
    product_rows<kTileRows, 1, kOp, Broadcast::kAlongK>(scores, kLanes, false, k.data, k.stride_bytes, sQ, kLanes,
                                                        block, (p.head_dim + kKeysAStep<kOp> - 1) / kKeysAStep<kOp>);
    const RowLanes at{part.sequence, part.batch, rows, count, key};
    const auto add = [&](VecF s, int64_t, int) TESSERA_LAMBDA_INLINE {
      const VecF next = max(s, most);
      const Against to = against(p, next);
      sum = sum * select(next > most, rescale_of(most, number, to), splat(1.0f)) + exp2(exponent_of(s, to, true));
      most = next, number = to;
    };
    ScoreStep<RowLanes>(p, at, {.registers = registers}).apply(scores, 0, block, add);
  }
  alignas(64) float sums_log2[kLanes];
  store(sums_log2, log2(sum));
  for (int64_t lane = 0; lane < count; ++lane) {
    rows[lane].as_tiled = log_sum_exp(p, number.shift[lane], number.offset[lane], sums_log2[lane]);
  }
}
// The same for an item's rows. q: [heads][row_count][q_ld].
template <Op kOp>
TESSERA_COLD_FUNCTION void sum_all_as_tiled(const Params& p, const DecodePart& part, DecodeRow* rows, const float* q,
                                            int64_t q_ld, const KeyRange& keys, float* registers) {
  alignas(64) float sQ[kMaxRowFloats * kLanes];
  for (int64_t h = 0; h < part.heads; ++h) {
    for (int64_t r = 0; r < part.row_count; r += kLanes) {
      const int64_t first = h * part.row_count + r, count = min_of<int64_t>(kLanes, part.row_count - r);
      for (int64_t step = 0; step < q_ld / kLaneElems<kOp>; ++step) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          sQ[step * kLanes + lane] = q[(first + min_of(lane, count - 1)) * q_ld + step];
        }
      }
      sum_as_tiled<kOp>(p, part, rows + first, count, part.head_begin + h, sQ, keys, registers);
    }
  }
}
// Whether some of the rows must be summed this way.
TESSERA_INLINE bool has_huge_rows(const Params& p, const DecodeRow* rows, int64_t count) {
  bool huge = false;
  for (int64_t r = 0; p.lse_low && r < count; ++r) huge |= rows[r].shift != 0.0f;
  return huge;
}

// O / l and LSE of a row -> partial results. `column`: the index of a column of O while it accumulates.
template <class Column>
TESSERA_INLINE void write_decode_row(const Params& p, const DecodePart& part, const DecodeRow& row, const float* o,
                                     const Column& column) {
  const float sum = sum_lanes(load(row.sum));
  const bool seen = sum != 0.0f;
  const int64_t at = (part.index * p.heads_q + row.head) * p.rows_total + row.query;
  const bool as_tiled = p.lse_low && row.shift != 0.0f;
  const LogSumExp lse = as_tiled ? row.as_tiled : log_sum_exp(p, row.shift, row.offset, __builtin_log2f(sum));
  p.partial_lse[at] = seen ? lse.high : -infinity();
  p.partial_lse_low[at] = seen ? lse.low : 0.0f;
  const float inverse = seen ? 1.0f / sum : 0.0f;
  for (int64_t d = 0; d < p.head_dim_v; ++d) p.partial_o[at * p.head_dim_v + d] = o[column(d)] * inverse;
}

template <Op kOp>
void decode_item(const Params& p, int64_t item, char* scratch_base) {
  const DecodePart part(p, item);
  const DecodeScratch s = carve_decode(scratch_base, {part.heads, kDecodeRows, p.block_n, p.head_dim, p.head_dim_v,
                                                      kLanes, program_floats(p, 1), sizeof(DecodeRow)});
  const int64_t q_ld = padded_to(p.head_dim, 2 * kLanes), out_ld = padded_to(p.head_dim_v, 2 * kLanes);
  const int64_t row_total = part.heads * part.row_count;
  DecodeRow* rows = reinterpret_cast<DecodeRow*>(s.rows);
  const KeyRange keys = init_decode_rows(p, part, rows);
  for (int64_t i = 0; i < row_total; ++i) {
    const char* q = decode_query(p, part, rows[i]);
    float* q_row = s.q + i * q_ld;
    if constexpr (kOp == Op::kDot) {
      __builtin_memset(q_row, 0, static_cast<size_t>(q_ld) * sizeof(float));
      __builtin_memcpy(q_row, q, static_cast<size_t>(p.head_dim) * 2);
    } else {
      if (p.elem_bytes == 1) {
        read_codes(p.dtype, q_row, q, p.head_dim, query_scale(p, part.batch, rows[i].head, rows[i].query));
      } else {
        with_float_elem(p.dtype, [&](auto elem) { read_row<decltype(elem)>(q_row, q, p.head_dim); });
      }
    }
  }
  __builtin_memset(s.o, 0, static_cast<size_t>(row_total * out_ld) * sizeof(float));

  const auto attend = [&](auto elem) {
    decode_keys<kOp, decltype(elem)>(p, part.sequence, part.batch, part.head_begin, part.heads, part.row_count, s,
                                     keys.low, keys.high + 1);
  };
  if constexpr (kOp == Op::kDot) {
    attend(Bfloat16Elem{});
  } else {
    const bool as_f16 = p.kv_dtype == TESSERA_FLOAT8_E4M3 || p.kv_dtype == TESSERA_FLOAT8_E5M2;
    with_float_elem(as_f16 ? TESSERA_FLOAT16 : p.kv_dtype, attend);  // int8: as float32
  }
  if (has_huge_rows(p, rows, row_total)) sum_all_as_tiled<kOp>(p, part, rows, s.q, q_ld, keys, s.program);
  for (int64_t i = 0; i < row_total; ++i) {
    write_decode_row(p, part, rows[i], s.o + i * out_ld, [](int64_t d) { return dot_column<kOp>(d); });
  }
}

}  // namespace
}  // namespace tessera::cpu
