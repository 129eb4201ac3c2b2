// Where tessera_append's tokens go, and their rotation: what the copies of k, v and q and the conversion to 8 bits
// share.
#pragma once

#include "tessera/append/config.hpp"
#include "tessera/tile/columns.cuh"

namespace tessera {

// The place of a token.
struct AppendedToken {
  int batch;  // packed: set once its sequence is found
  int row;    // in the token's own tensor; dense: within its sequence
  int key;    // position among the sequence's keys; query i of a sequence has that of new key i
};

// Token `index` of k or q. `tokens` is the number of tokens of a sequence or, packed, of the batch.
TESSERA_DEVICE AppendedToken token_row(const AppendParams& p, int index, const Divisor& tokens) {
  const int batch = p.cu_seqlens ? 0 : index / tokens;
  return {batch, index - batch * tokens.value, 0};
}
// Finds the token's sequence and its position among the keys. Returns false if the token belongs to no sequence.
TESSERA_DEVICE bool find_key(const AppendParams& p, AppendedToken& at) {
  int begin = 0, count = p.tokens.value;
  if (p.cu_seqlens) {
    // The last sequence that begins at or before the token. Empty sequences before it have the same offset.
    const auto offset = [&](int b) { return p.cu_seqlens[b * p.cu_seqlens_stride]; };
    int low = 0, high = p.batch;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (offset(middle) <= at.row ? low : high) = middle;
    }
    at.batch = low;
    begin = offset(low), count = offset(low + 1) - begin;
    if (at.row < begin || at.row >= static_cast<int64>(begin) + count) return false;
  }
  at.key = p.seqused_k[at.batch * p.seqused_k_stride] - count + (at.row - begin);
  return true;
}

// A token's row of cos and sin, and a key's place in the cache; a query has none.
struct AppendPlace {
  int position, page, slot;
};
// Returns false if the position or the place is out of range.
TESSERA_DEVICE bool find_place(const AppendParams& p, bool is_key, const AppendedToken& at, AppendPlace& place) {
  const int* positions = is_key ? p.positions_k : p.positions_q;
  place = {at.key, at.batch, at.row};
  if (positions) {
    place.position = is_key ? positions[p.positions_k_batch * at.batch + p.positions_k_col * at.row]
                            : positions[p.positions_q_batch * at.batch + p.positions_q_col * at.row];
  }
  bool within = p.rotary_dim == 0 || (place.position >= 0 && place.position < p.angles);
  if (!is_key) return within;
  within = within && at.key >= 0 && at.key < p.room;
  if (within) {
    const int of_sequence = at.key / p.page_size;
    place.slot = at.key - of_sequence * p.page_size.value;
    if (p.page_table) place.page = p.page_table[p.page_table_batch * at.batch + p.page_table_col * of_sequence];
  }
  return within && place.page >= 0 && place.page < p.pages;
}

template <Dtype kDtype>
struct TypeOf {
  static constexpr Dtype kType = kDtype;
};

template <int kWidth>
TESSERA_DEVICE void load_angles(const AppendParams& p, const void* angles, int64 index, float (&x)[kWidth]) {
  const auto load = [&](auto dtype) { unpack_columns(load_columns<decltype(dtype)::kType, kWidth>(angles, index), x); };
  if (p.angle_dtype == Dtype::kFloat32) {
    load(TypeOf<Dtype::kFloat32>{});
  } else if (p.angle_dtype == Dtype::kFloat16) {
    load(TypeOf<Dtype::kFloat16>{});
  } else {
    load(TypeOf<Dtype::kBFloat16>{});
  }
}

// Pairs of columns (a, b) of x become (a cos - b sin, a sin + b cos). Interleaved, a pair is two neighbouring columns;
// otherwise its second one is kWidth after the first.
template <bool kInterleaved, int kWidth>
TESSERA_DEVICE void rotate_columns(const float (&cosine)[kWidth], const float (&sine)[kWidth], float (&x)[2 * kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float &a = x[kInterleaved ? 2 * i : i], &b = x[kInterleaved ? 2 * i + 1 : kWidth + i];
    const float turned = a * cosine[i] - b * sine[i];
    b = a * sine[i] + b * cosine[i], a = turned;
  }
}

}  // namespace tessera
