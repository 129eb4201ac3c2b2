// Products with codes by AVX-512 BF16 and VBMI. Codes are converted a unit of some KiB at a time, in the order in which
// the products read them; those of keys between the products of the unit before, as shuffles and products use different
// ports.
#include "cpu/code_products.hpp"

#include "cpu/product.hpp"
#include "cpu/simd/avx512_vbmi.hpp"

namespace tessera::cpu {
namespace {

static_assert(kCodeKeys == kLanes && kCodeColumns == 4 * kLanes);

TESSERA_INLINE VecU broadcast_pair(const uint16_t* p) { return splat(load_as<uint32_t>(p)); }

// 16 keys and 64 columns: the lanes are keys, and vector n has the columns of pair n of q (code_pair_column).
typedef VecU KeyUnit[kCodeColumns / 2];
// The same as codes; vector n has columns 4 n ... 4 n + 3.
typedef VecU KeyCodes[kCodeColumns / 4];

TESSERA_OWN_FUNCTION void read_keys(KeyCodes& codes, const CodeRows& keys, int64_t head, int64_t first,
                                    int64_t head_dim) {
  alignas(64) char tail[kCodeKeys][kCodeColumns];
  const char* at[kCodeKeys];
  for (int n = 0; n < kCodeKeys; ++n) {
    at[n] = keys.rows[n] + head * keys.head_bytes + first;
    if (head_dim - first >= kCodeColumns) continue;
    store(tail[n], load_first_bytes(at[n], head_dim - first));
    at[n] = tail[n];
  }
  transpose_rows(codes, [&](int r) TESSERA_LAMBDA_INLINE { return at[r]; });
}

template <class Convert>
TESSERA_INLINE void convert_keys(KeyUnit& unit, const KeyCodes& codes, int n, const Convert& convert) {
  convert(codes[n], unit[2 * n], unit[2 * n + 1]);
}

// scores[r][n] (+)= the unit's products. beside(n) is called for each n < kCodeColumns / 4, between products.
template <int R, class Beside>
TESSERA_INLINE void multiply_keys(float* scores, int64_t scores_ld, bool accumulate, const uint32_t* q, int64_t q_ld,
                                  const KeyUnit& unit, const Beside& beside) {
  constexpr int kSums = R < 8 ? 2 : 1;  // of few rows, two at a time: a product's latency
  VecF acc[R][kSums] = {};
  for (int n = 0; n < kCodeColumns / 4; ++n) {
    beside(n);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i, q += q_ld) {
      const VecU k = unit[2 * n + i];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][i % kSums] = dot(acc[r][i % kSums], splat(q[r]), k);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const VecF sum = kSums == 2 ? acc[r][0] + acc[r][kSums - 1] : acc[r][0];
    float* at = scores + r * scores_ld;
    store(at, accumulate ? load(at) + sum : sum);
  }
}

TESSERA_OWN_FUNCTION void multiply_key_rows(float* scores, int64_t scores_ld, bool accumulate, const uint32_t* q,
                                            int64_t q_ld, int64_t rows, const KeyUnit& unit) {
  for_row_groups<8>(0, rows, [&]<int R>(int64_t r) TESSERA_LAMBDA_INLINE {
    multiply_keys<R>(scores + r * scores_ld, scores_ld, accumulate, q + r, q_ld, unit, [](int) {});
  });
}

TESSERA_INLINE void prefetch_columns(const CodeRows& rows, int64_t head, int64_t first) {
  for (const char* row : rows.rows) __builtin_prefetch(row + head * rows.head_bytes + first, 0, 2);
}

void code_scores(int32_t dtype, float* scores, int64_t scores_ld, const uint32_t* q, int64_t rows, int64_t heads,
                 const CodeRows& keys, const CodeRows& ahead, int64_t head_dim) {
  with_codes_to_bf16(dtype, [&](const auto& convert) TESSERA_LAMBDA_INLINE {
    KeyCodes codes;
    KeyUnit unit[2];
    read_keys(codes, keys, 0, 0, head_dim);
    for (int n = 0; n < kCodeColumns / 4; ++n) convert_keys(unit[0], codes, n, convert);
    int64_t head = 0, first = 0;
    for (int now = 0; head < heads; now ^= 1) {
      const int64_t next_first = first + kCodeColumns < head_dim ? first + kCodeColumns : 0;
      const int64_t next_head = next_first == 0 ? head + 1 : head;
      prefetch_columns(ahead, head, first);
      if (next_head < heads) read_keys(codes, keys, next_head, next_first, head_dim);
      const auto convert_next = [&](int n) TESSERA_LAMBDA_INLINE { convert_keys(unit[now ^ 1], codes, n, convert); };
      float* const to = scores + head * rows * scores_ld;
      const int64_t done = rows >= 8 ? 8 : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;  // one group
      for_row_groups<8>(0, done, [&]<int R>(int64_t) TESSERA_LAMBDA_INLINE {
        multiply_keys<R>(to, scores_ld, first != 0, q, rows, unit[now], convert_next);
      });
      if (done < rows) {
        multiply_key_rows(to + done * scores_ld, scores_ld, first != 0, q + done, rows, rows - done, unit[now]);
      }
      head = next_head, first = next_first, q += kCodeColumns / 2 * rows;
    }
  });
}

// Pairs of values and 64 columns, in the order of code_column.
typedef VecU ValueUnit[kCodeValues / 2][4];

// out[r][0 .. 64) += the unit's products.
template <int R>
TESSERA_INLINE void multiply_values(float* out, int64_t out_ld, const uint16_t* weights, int64_t weights_ld,
                                    const ValueUnit& unit) {
  VecF acc[R][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) acc[r][c] = load(out + r * out_ld + c * kLanes);
  for (int64_t n = 0; n < kCodeValues / 2; ++n) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const VecU weight = broadcast_pair(weights + r * weights_ld + 2 * n);
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) acc[r][c] = dot(acc[r][c], weight, unit[n][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) store(out + r * out_ld + c * kLanes, acc[r][c]);
}

TESSERA_OWN_FUNCTION void multiply_value_rows(float* out, int64_t out_ld, const uint16_t* weights, int64_t weights_ld,
                                              int64_t rows, const ValueUnit& unit) {
  for_row_groups<4>(0, rows, [&]<int R>(int64_t r) TESSERA_LAMBDA_INLINE {
    multiply_values<R>(out + r * out_ld, out_ld, weights + r * weights_ld, weights_ld, unit);
  });
}

void code_values(int32_t dtype, float* out, int64_t out_ld, const uint16_t* weights, int64_t weights_ld, int64_t rows,
                 const char* const* values, int64_t head_dim_v) {
  with_codes_to_bf16(dtype, [&](const auto& convert) TESSERA_LAMBDA_INLINE {
    ValueUnit unit;
    for (int64_t first = 0; first < head_dim_v; first += kCodeColumns) {
      for (int64_t n = 0; n < kCodeValues; n += 2) {
        const VecU even = load_first_bytes(values[n] + first, head_dim_v - first);
        const VecU odd = load_first_bytes(values[n + 1] + first, head_dim_v - first);
        VecU(&pair)[4] = unit[n / 2];
        convert(interleave_lower(even, odd), pair[0], pair[1]);
        convert(interleave_upper(even, odd), pair[2], pair[3]);
      }
      multiply_value_rows(out + first, out_ld, weights, weights_ld, rows, unit);
    }
  });
}

}  // namespace

const CodeProducts code_products_avx512_vbmi = {.scores = code_scores, .values = code_values};

}  // namespace tessera::cpu
