// New tokens of a step: q and the new keys are rotated by rotary position embedding (Su et al., "RoFormer", 2021), keys and
// values written at each sequence's end in the cache, dense or in pages. A token whose place or position is out of range, as
// a kernel cannot refuse it, writes nothing.
//
// Grid: one block a token, those of k and v first, then those of q. Shared memory: none. Every block finds its own sequence;
// its threads take the pairs and columns of all heads in order, 16 bytes each where they are aligned, so that neighbours in memory are
// read by neighbours, and what is rotated and what is copied by different warps, as far as there are. Bound by the reading and writing; where tokens are
// few by the way to a token's length, its page and its angles, which the columns' own way hides.
#pragma once

#include "tessera/append/config.hpp"
#include "tessera/ptx/device.cuh"
#include "tessera/ptx/griddepcontrol.cuh"
#include "tessera/tile/element.cuh"

namespace tessera {

inline constexpr int kAppendThreads = 256;

// Where a token is.
struct AppendedToken {
  int batch;
  int row;       // of the token's own tensor, within its sequence if dense
  int key;       // its place among the sequence's keys; of a query: that of the first new key, and i on
  bool counted;  // it belongs to a sequence
};

// Token `index` of k or q, `tokens` of them a sequence or, packed, of all.
TESSERA_DEVICE AppendedToken find_token(const AppendParams& p, int64 index, int tokens) {
  AppendedToken at{0, 0, 0, true};
  int begin = 0, count = p.tokens;
  if (p.cu_seqlens) {
    // The last sequence that begins at or before the token: empty ones before it begin there, too.
    const auto offset = [&](int b) { return p.cu_seqlens[b * p.cu_seqlens_stride]; };
    int low = 0, high = p.batch;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (offset(middle) <= index ? low : high) = middle;
    }
    at.batch = low, at.row = static_cast<int>(index);
    begin = offset(low), count = offset(low + 1) - begin;
    at.counted = p.batch > 0 && index >= begin && index < static_cast<int64>(begin) + count;
  } else {
    const int of_all = static_cast<int>(index);  // a grid has fewer than 2^31 blocks
    at.batch = of_all / tokens, at.row = of_all - at.batch * tokens;
  }
  if (at.counted) at.key = p.seqused_k[at.batch * p.seqused_k_stride] - count + (at.row - begin);
  return at;
}

template <Dtype kDtype>
struct TypeOf {
  static constexpr Dtype kType = kDtype;
};

// kWidth neighbours, as they lie in memory: from a multiple of 16 bytes on where they are several.
template <Dtype kDtype, int kWidth>
struct alignas(16) RawColumns {
  RawPair<kDtype> pairs[kWidth / 2];
};
template <Dtype kDtype>
struct RawColumns<kDtype, 1> {
  float column;
};
template <Dtype kDtype, int kWidth>
TESSERA_DEVICE RawColumns<kDtype, kWidth> load_columns(const void* data, int64 index) {
  using Raw = RawColumns<kDtype, kWidth>;
  if constexpr (kWidth == 1) {
    return {load_element<kDtype>(data, index)};
  } else {
    return *reinterpret_cast<const Raw*>(static_cast<const char*>(data) + index * dtype_bytes(kDtype));
  }
}
template <Dtype kDtype, int kWidth>
TESSERA_DEVICE void store_columns(void* data, int64 index, const RawColumns<kDtype, kWidth>& raw) {
  if constexpr (kWidth == 1) {
    store_element<kDtype>(data, index, raw.column);
  } else {
    *reinterpret_cast<RawColumns<kDtype, kWidth>*>(static_cast<char*>(data) + index * dtype_bytes(kDtype)) = raw;
  }
}
template <Dtype kDtype, int kWidth>
TESSERA_DEVICE void unpack_columns(const RawColumns<kDtype, kWidth>& raw, float* x) {
  if constexpr (kWidth == 1) {
    x[0] = raw.column;
  } else {
#pragma unroll
    for (int n = 0; n < kWidth; n += 2) {
      const float2 pair = unpack_pair<kDtype>(raw.pairs[n / 2]);
      x[n] = pair.x, x[n + 1] = pair.y;
    }
  }
}
template <Dtype kDtype, int kWidth>
TESSERA_DEVICE void pack_columns(const float* x, RawColumns<kDtype, kWidth>& raw) {
  if constexpr (kWidth == 1) {
    raw.column = x[0];
  } else {
#pragma unroll
    for (int n = 0; n < kWidth; n += 2) {
      if constexpr (kDtype == Dtype::kFloat32) {
        raw.pairs[n / 2] = make_float2(x[n], x[n + 1]);
      } else {
        raw.pairs[n / 2] = pack_pair<kDtype>(x[n], x[n + 1]);
      }
    }
  }
}

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

// A tensor's heads of one token: of each the first `rotated` columns are rotated, of the others those that are written.
struct AppendHeads {
  RowTensor from, to;
  int64 row;  // where the token lies in `from`
  int heads, dim, rotated, copied;
};

// What a thread has at a time: append_width() pairs that are rotated, their columns two vectors, neighbours where pairs are; or a vector that is
// copied.
template <AppendConfig kCfg>
struct AppendUnit {
  static constexpr int kWidth = append_width(kCfg);
  using Raw = RawColumns<kCfg.dtype, kWidth>;
  int64 head;               // where it begins in the token's row of what is written
  int first, second, pair;  // columns; of pairs which ones, else second is -1
  Raw low, high;

  TESSERA_DEVICE static int count(const AppendHeads& of) { return of.heads * (of.rotated / 2 + of.copied) / kWidth; }
  // Number n of a token's, pairs before copies: on its way.
  TESSERA_DEVICE void load(const AppendParams& p, const AppendHeads& of, int n) {
    const int pairs = of.rotated / 2 / kWidth, copies = of.copied / kWidth, rotated = of.heads * pairs;
    const bool turns = n < rotated;
    const int at = turns ? n : n - rotated, a_head = turns ? pairs : copies, number = at / a_head;
    const int in_head = (at - number * a_head) * kWidth;
    pair = in_head, first = turns ? (p.interleaved ? 2 * in_head : in_head) : of.rotated + in_head;
    second = !turns ? -1 : p.interleaved ? first + kWidth : first + of.rotated / 2;
    head = of.to.head * number;
    const int64 row = of.row + of.from.head * number;
    low = load_columns<kCfg.dtype, kWidth>(of.from.data, row + first);
    if (turns) high = load_columns<kCfg.dtype, kWidth>(of.from.data, row + second);
  }
  TESSERA_DEVICE void rotate(const AppendParams& p, int position) {
    float x[2 * kWidth], cosine[kWidth], sine[kWidth];
    load_angles(p, p.cos, p.cos_row * position + pair, cosine);
    load_angles(p, p.sin, p.sin_row * position + pair, sine);
    unpack_columns(low, x), unpack_columns(high, x + kWidth);
    const auto turn = [](float& a, float& b, float c, float s) {
      const float turned = a * c - b * s;
      b = a * s + b * c, a = turned;
    };
    if (p.interleaved) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) turn(x[2 * i], x[2 * i + 1], cosine[i], sine[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) turn(x[i], x[kWidth + i], cosine[i], sine[i]);
    }
    pack_columns(x, low), pack_columns(x + kWidth, high);
  }
  TESSERA_DEVICE void store(const RowTensor& to, int64 row) const {
    store_columns<kCfg.dtype, kWidth>(to.data, row + head + first, low);
    if (second >= 0) store_columns<kCfg.dtype, kWidth>(to.data, row + head + second, high);
  }
};

template <AppendConfig kCfg>
TESSERA_DEVICE void append(const AppendParams& p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64 of_keys = p.cu_seqlens ? p.tokens : static_cast<int64>(p.batch) * p.tokens;
  const bool is_key = blockIdx.x < of_keys;
  const int64 index = is_key ? blockIdx.x : blockIdx.x - of_keys;
  const AppendedToken at = find_token(p, index, is_key ? p.tokens : p.tokens_q);
  if (!at.counted) return;

  // 1. This thread's first columns, on their way while the token's place is found: keys, then values; or queries.
  const int copied = p.head_dim - p.rotary_dim;
  AppendHeads heads{}, values{};
  if (is_key) {
    heads = {p.k, p.k_cache, p.k.batch * at.batch + p.k.row * at.row, p.heads_kv, p.head_dim, p.rotary_dim, copied};
    values = {p.v, p.v_cache, p.v.batch * at.batch + p.v.row * at.row, p.heads_kv, p.head_dim_v, 0, p.head_dim_v};
  } else {
    heads = {p.q,        p.q_out,      p.q.batch * at.batch + p.q.row * at.row, p.heads_q,
             p.head_dim, p.rotary_dim, p.q_out.data != p.q.data ? copied : 0};
  }
  AppendUnit<kCfg> unit;
  const int of_heads = unit.count(heads), units = of_heads + unit.count(values);
  const auto load = [&](int n) { n < of_heads ? unit.load(p, heads, n) : unit.load(p, values, n - of_heads); };
  int n = static_cast<int>(threadIdx.x);
  if (n < units) load(n);

  // 2. Which row of cos and sin is its own, and is there one?
  const int* positions = is_key ? p.positions_k : p.positions_q;
  int position = at.key;
  if (positions) {
    position = is_key ? positions[p.positions_k_batch * at.batch + p.positions_k_col * at.row]
                      : positions[p.positions_q_batch * at.batch + p.positions_q_col * at.row];
  }
  bool within = p.rotary_dim == 0 || (position >= 0 && position < p.angles);

  // 3. A key's place in the cache, and is it there?
  int page = at.batch, slot = 0;
  if (is_key) {
    within = within && at.key >= 0 && at.key < p.room;
    if (within) {
      slot = at.key % p.page_size;
      if (p.page_table) page = p.page_table[p.page_table_batch * at.batch + p.page_table_col * (at.key / p.page_size)];
    }
    within = within && page >= 0 && page < p.pages;
  }
  if (!within) {
    if (p.dropped && threadIdx.x == 0) atomicAdd(p.dropped, 1);
    return;
  }

  // 4. Rotated and written.
  const int64 out =
      is_key ? p.k_cache.batch * page + p.k_cache.row * slot : p.q_out.batch * at.batch + p.q_out.row * at.row;
  const int64 out_v = p.v_cache.batch * page + p.v_cache.row * slot;
  while (n < units) {
    const bool of_values = n >= of_heads;
    if (unit.second >= 0) unit.rotate(p, position);
    unit.store(of_values ? values.to : heads.to, of_values ? out_v : out);
    n += kAppendThreads;
    if (n < units) load(n);
  }
}

}  // namespace tessera
