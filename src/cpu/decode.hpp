// Decoding: few query rows against long keys, bound by memory. An item is one split of the keys of a sequence, for all KV
// heads or for one (whichever reads memory in order); lanes are head dimensions for both products, so that keys and values
// are read once, as they lie, whatever their dtype, and the query heads that share a KV head share each vector loaded.
// Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023): partial results are merged exactly by combine.
#pragma once

#include "cpu/forward.hpp"

namespace tessera::cpu {
namespace {

constexpr int kDecodeRows = 16;   // query rows (query heads of a group times queries) at most
constexpr int kDecodeGroup = 4;   // of them at a time
constexpr int kDecodeVecs = 4;    // vectors of O at a time

// In: kLanes vectors. Out: a vector whose lane i is the sum of vector i's lanes.
TESSERA_INLINE VecF sum_each(VecF (&v)[kLanes]) {
  constexpr auto kLaneIndices = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 4
  for (int half = kLanes / 2; half >= 1; half /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i) {
      v[i] = interleave(v[i], v[i + half], false, kLaneIndices) + interleave(v[i], v[i + half], true, kLaneIndices);
    }
  }
  return v[0];
}

// scores[r][n] = q_r . k_n for R rows and n < count <= kLanes. q: float32 [R][q_ld], zero behind the head dimension.
template <class Elem, int R>
TESSERA_INLINE void decode_scores(float* scores, int64_t scores_ld, const float* q, int64_t q_ld, const char* const* keys,
                                  int64_t count, int64_t head_dim) {
  VecF parts[R][kLanes];
  const int64_t whole = head_dim / kLanes * kLanes;
  for (int64_t n = 0; n < kLanes; ++n) {
    const char* key = keys[n < count ? n : count - 1];
    VecF acc[R] = {};
    int64_t d = 0;
#pragma GCC unroll 2
    for (; d < whole; d += kLanes) {
      const VecF k = Elem::read(key + d * Elem::kBytes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r] = fma(load(q + r * q_ld + d), k, acc[r]);
    }
    if (d < head_dim) {
      const VecF k = Elem::read(key + d * Elem::kBytes, head_dim - d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r] = fma(load(q + r * q_ld + d), k, acc[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) parts[r][n] = acc[r];
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) store_first(scores + r * scores_ld, sum_each(parts[r]), count);
}

// out[r][c] += sum_n p[r][n] v_n[c], for R rows and C vectors of columns from `first`; `tail`: columns of the last vector.
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

struct DecodeRow {
  int64_t query, head;
  int64_t low, high;  // visible keys
  float ref, sum, slope;
};

// Scores of one row and one block -> P, and the row's ref and sum. `rescale` is what its O must be multiplied by.
TESSERA_INLINE float decode_softmax(const Params& p, const Sequence& sequence, DecodeRow& row, float* scores, int64_t key,
                                    int64_t count) {
  const VecI lane = iota<VecI>();
  VecF best = splat(-infinity());
  for (int64_t n = 0; n < count; n += kLanes) {
    VecF s = load(scores + n);
    s = p.softcap > 0 ? tanh(s * splat(p.scale / p.softcap)) * splat(p.softcap * kLog2e) : s * splat(p.scale_log2);
    const VecI index = lane + static_cast<int32_t>(key + n);
    if (p.alibi_slopes) {
      s = s - splat(row.slope) * abs(to_float(index - static_cast<int32_t>(row.query + sequence.sk - sequence.sq)));
    }
    const VecI visible = (index >= static_cast<int32_t>(row.low)) & (index <= static_cast<int32_t>(row.high)) &
                         (index < static_cast<int32_t>(key + count));
    s = select(visible, s, splat(-infinity()));
    best = max(best, s);
    store(scores + n, s);
  }
  const float block_best = max_lanes(best);
  float rescale = 1.0f;
  if (block_best > row.ref) {
    rescale = row.ref == -infinity() ? 0.0f : __builtin_exp2f(row.ref - block_best);
    row.ref = block_best;
    row.sum *= rescale;
  }
  const VecF ref = splat(row.ref == -infinity() ? 0.0f : row.ref);
  VecF sum{};
  const Exp2 exponential;
  for (int64_t n = 0; n < count; n += kLanes) {
    const VecF e = exponential(load(scores + n) - ref);
    sum += e;
    store(scores + n, e);
  }
  row.sum += sum_lanes(sum);
  return rescale;
}

template <class Elem>
void decode_block(const Params& p, const Sequence& sequence, DecodeRow* rows, int64_t row_count, const float* q, int64_t q_ld,
                  float* out, int64_t out_ld, float* scores, int64_t scores_ld, const char* const* keys,
                  const char* const* values, int64_t key, int64_t count) {
  for_row_groups<kDecodeGroup>(0, row_count, [&]<int R>(int64_t r0) TESSERA_LAMBDA_INLINE {
    float* tile = scores + r0 * scores_ld;
    for (int64_t n = 0; n < count; n += kLanes) {
      decode_scores<Elem, R>(tile + n, scores_ld, q + r0 * q_ld, q_ld, keys + n, min_of<int64_t>(kLanes, count - n), p.head_dim);
    }
    for (int r = 0; r < R; ++r) {
      const float rescale = decode_softmax(p, sequence, rows[r0 + r], tile + r * scores_ld, key, count);
      if (rescale == 1.0f) continue;
      float* o = out + (r0 + r) * out_ld;
      for (int64_t d = 0; d < out_ld; d += kLanes) store(o + d, load(o + d) * rescale);
    }
    for_vec_groups<kDecodeVecs>(static_cast<int>(out_ld / kLanes), [&]<int C>(int v) TESSERA_LAMBDA_INLINE {
      const int64_t first = v * kLanes;
      decode_values<Elem, R, C>(out + r0 * out_ld, out_ld, tile, scores_ld, values, count, first,
                                min_of<int64_t>(kLanes, p.head_dim_v - first - (C - 1) * kLanes));
    });
  });
}

inline void decode_item(const Params& p, int64_t item, char* scratch_base) {
  const int64_t heads_an_item = p.tiles_per_item;  // all KV heads, or one
  const int64_t group = p.heads_q / p.heads_kv;
  const int64_t split = item % p.num_splits;
  const int64_t batch = item / p.num_splits % p.batch;
  const int64_t head_begin = item / p.num_splits / p.batch * heads_an_item;
  const Sequence& sequence = p.sequences[batch];
  const int64_t row_count = group * sequence.sq;  // of one KV head
  if (row_count == 0) return;
  const int64_t key_begin = split * p.split_keys;
  const int64_t key_end = min_of(sequence.sk, key_begin + p.split_keys);

  const DecodeScratch s = carve_decode(scratch_base, {heads_an_item, kDecodeRows, p.block_n, p.head_dim, p.head_dim_v,
                                                      kLanes, sizeof(DecodeRow)});
  const int64_t q_ld = padded_to(p.head_dim, kLanes), out_ld = padded_to(p.head_dim_v, kLanes);
  DecodeRow* rows = reinterpret_cast<DecodeRow*>(s.rows);
  int64_t low = sequence.sk, high = -1;
  for (int64_t h = 0; h < heads_an_item; ++h) {
    for (int64_t r = 0; r < row_count; ++r) {
      DecodeRow& row = rows[h * row_count + r];
      row.query = r % sequence.sq;
      row.head = (head_begin + h) * group + r / sequence.sq;
      const KeyRange keys = visible_keys(p, sequence, row.query);
      row.low = keys.low, row.high = keys.high;
      if (row.low <= row.high) low = min_of(low, row.low), high = max_of(high, row.high);
      row.ref = -infinity();
      row.sum = row.slope = 0.0f;
      if (p.alibi_slopes) {
        row.slope = kLog2e * *reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.alibi_slopes) +
                                                             p.alibi_batch * batch + p.alibi_head * row.head);
      }
      const char* q = p.q.data + p.q.batch * batch + p.q.row * (sequence.q_begin + row.query) + p.q.head * row.head;
      with_float_elem(p.dtype, [&](auto elem) { read_row<decltype(elem)>(s.q + (h * row_count + r) * q_ld, q, p.head_dim); });
      __builtin_memset(s.o + (h * row_count + r) * out_ld, 0, static_cast<size_t>(out_ld) * sizeof(float));
    }
  }

  const int64_t end = min_of(key_end, high + 1);
  const auto fill = [&](const char** rows_out, const RowTensor& tensor, int64_t head, int64_t key, int64_t count) {
    for (int64_t n = 0; n < count; ++n) rows_out[n] = key_row(p, tensor, sequence, batch, head, key + n);
  };
  for (int64_t key = max_of(key_begin, low / p.block_n * p.block_n); key < end; key += p.block_n) {
    const int64_t count = min_of<int64_t>(p.block_n, end - key);
    const int64_t next = key + p.block_n, next_count = max_of<int64_t>(0, min_of<int64_t>(p.block_n, end - next));
    for (int64_t h = 0; h < heads_an_item; ++h) {
      const int64_t head_kv = head_begin + h;
      prefetch_keys(p, sequence, batch, head_kv, next, next_count, 0, 1);
      fill(s.keys, p.k, head_kv, key, count);
      fill(s.values, p.v, head_kv, key, count);
      with_float_elem(p.dtype, [&](auto elem) {
        decode_block<decltype(elem)>(p, sequence, rows + h * row_count, row_count, s.q + h * row_count * q_ld, q_ld,
                                     s.o + h * row_count * out_ld, out_ld, s.scores, p.block_n, s.keys, s.values, key, count);
      });
    }
  }

  for (int64_t i = 0; i < heads_an_item * row_count; ++i) {
    const DecodeRow& row = rows[i];
    const bool seen = row.sum != 0.0f;
    const int64_t at = (split * p.heads_q + row.head) * p.rows_total + sequence.row_begin + row.query;
    p.partial_lse[at] = seen ? (row.ref + __builtin_log2f(row.sum)) * kLn2 : -infinity();
    const float inverse = seen ? 1.0f / row.sum : 0.0f;
    for (int64_t d = 0; d < p.head_dim_v; ++d) p.partial_o[at * p.head_dim_v + d] = s.o[i * out_ld + d] * inverse;
  }
}

}  // namespace
}  // namespace tessera::cpu
