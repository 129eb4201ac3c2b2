// New tokens of a step: q and the new keys are rotated by rotary position embedding (Su et al., "RoFormer", 2021), keys and
// values written at each sequence's end in the cache, dense or in pages. A token whose place or position is out of range, as
// a kernel cannot refuse it, writes nothing.
//
// Grid: one block a token, those of k and v first, then those of q. Shared memory: none. Every block finds its own sequence;
// its threads take the pairs and columns of all heads in order, 16 bytes each where they are aligned, so that neighbours in memory are
// read by neighbours, and what is rotated and what is copied by different warps, as far as there are.
#pragma once

#include "tessera/append/config.hpp"
#include "tessera/ptx/device.cuh"
#include "tessera/ptx/griddepcontrol.cuh"
#include "tessera/tile/element.cuh"

namespace tessera {

inline constexpr int kAppendThreads = 256;  // a power of two: first_load

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
    at.batch = static_cast<int>(index / tokens), at.row = static_cast<int>(index % tokens);
  }
  if (at.counted) at.key = p.seqused_k[at.batch * p.seqused_k_stride] - count + (at.row - begin);
  return at;
}

// kWidth neighbours, from a multiple of 16 bytes on where they are several.
template <Dtype kDtype, int kWidth>
struct alignas(16) RawColumns {
  RawPair<kDtype> pairs[kWidth / 2];
};
template <Dtype kDtype, int kWidth>
TESSERA_DEVICE void load_columns(const void* data, int64 index, float* x) {
  if constexpr (kWidth == 1) {
    x[0] = load_element<kDtype>(data, index);
  } else {
    const auto raw = *reinterpret_cast<const RawColumns<kDtype, kWidth>*>(static_cast<const char*>(data) +
                                                                          index * dtype_bytes(kDtype));
#pragma unroll
    for (int n = 0; n < kWidth; n += 2) {
      const float2 pair = unpack_pair<kDtype>(raw.pairs[n / 2]);
      x[n] = pair.x, x[n + 1] = pair.y;
    }
  }
}
template <Dtype kDtype, int kWidth>
TESSERA_DEVICE void store_columns(void* data, int64 index, const float* x) {
  if constexpr (kWidth == 1) {
    store_element<kDtype>(data, index, x[0]);
  } else {
    RawColumns<kDtype, kWidth> raw;
#pragma unroll
    for (int n = 0; n < kWidth; n += 2) {
      if constexpr (kDtype == Dtype::kFloat32) {
        raw.pairs[n / 2] = make_float2(x[n], x[n + 1]);
      } else {
        raw.pairs[n / 2] = pack_pair<kDtype>(x[n], x[n + 1]);
      }
    }
    *reinterpret_cast<RawColumns<kDtype, kWidth>*>(static_cast<char*>(data) + index * dtype_bytes(kDtype)) = raw;
  }
}

template <int kWidth>
TESSERA_DEVICE void load_angles(const AppendParams& p, const void* angles, int64 index, float (&x)[kWidth]) {
  if (p.angle_dtype == Dtype::kFloat32) {
    load_columns<Dtype::kFloat32, kWidth>(angles, index, x);
  } else if (p.angle_dtype == Dtype::kFloat16) {
    load_columns<Dtype::kFloat16, kWidth>(angles, index, x);
  } else {
    load_columns<Dtype::kBFloat16, kWidth>(angles, index, x);
  }
}

// This thread's first of what a block does after `before` other loads: what is next begins with the threads that had none.
TESSERA_DEVICE int first_load(int before) { return (static_cast<int>(threadIdx.x) - before) & (kAppendThreads - 1); }

// The heads of one token: its first rotary_dim columns rotated, append_width() pairs at once. Their columns are two vectors, neighbours
// where pairs are.
template <AppendConfig kCfg>
TESSERA_DEVICE void write_rotated(const AppendParams& p, const RowTensor& from, int64 row, const RowTensor& to,
                                  int64 out, int heads, int position) {
  constexpr int kWidth = append_width(kCfg);
  const int half = p.rotary_dim / 2, a_head = half / kWidth;
  for (int n = first_load(0); n < heads * a_head; n += kAppendThreads) {
    const int head = n / a_head, pair = n % a_head * kWidth;
    const int first = p.interleaved ? 2 * pair : pair, second = p.interleaved ? first + kWidth : pair + half;
    const int64 in_head = row + from.head * head, out_head = out + to.head * head;
    float x[2 * kWidth], cosine[kWidth], sine[kWidth];
    load_columns<kCfg.dtype, kWidth>(from.data, in_head + first, x);
    load_columns<kCfg.dtype, kWidth>(from.data, in_head + second, x + kWidth);
    load_angles(p, p.cos, p.cos_row * position + pair, cosine);
    load_angles(p, p.sin, p.sin_row * position + pair, sine);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float a = p.interleaved ? x[2 * i] : x[i], b = p.interleaved ? x[2 * i + 1] : x[kWidth + i];
      (p.interleaved ? x[2 * i] : x[i]) = a * cosine[i] - b * sine[i];
      (p.interleaved ? x[2 * i + 1] : x[kWidth + i]) = a * sine[i] + b * cosine[i];
    }
    store_columns<kCfg.dtype, kWidth>(to.data, out_head + first, x);
    store_columns<kCfg.dtype, kWidth>(to.data, out_head + second, x + kWidth);
  }
}

// Columns begin ... end - 1 of a token's heads, as they are. before: loads of the block before these.
template <AppendConfig kCfg>
TESSERA_DEVICE void write_columns(const RowTensor& from, int64 row, const RowTensor& to, int64 out, int heads,
                                  int begin, int end, int before) {
  constexpr int kWidth = append_width(kCfg);
  const int a_head = (end - begin) / kWidth;
  for (int n = first_load(before); n < heads * a_head; n += kAppendThreads) {
    const int head = n / a_head, column = begin + n % a_head * kWidth;
    float x[kWidth];
    load_columns<kCfg.dtype, kWidth>(from.data, row + from.head * head + column, x);
    store_columns<kCfg.dtype, kWidth>(to.data, out + to.head * head + column, x);
  }
}

template <AppendConfig kCfg>
TESSERA_DEVICE void append(const AppendParams& p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64 of_keys = p.cu_seqlens ? p.tokens : static_cast<int64>(p.batch) * p.tokens;
  const bool is_key = blockIdx.x < of_keys;
  const int64 index = is_key ? blockIdx.x : blockIdx.x - of_keys;
  const AppendedToken at = find_token(p, index, is_key ? p.tokens : p.tokens_q);
  if (!at.counted) return;

  // 1. Which row of cos and sin is its own, and is there one?
  const int* positions = is_key ? p.positions_k : p.positions_q;
  int position = at.key;
  if (positions) {
    position = is_key ? positions[p.positions_k_batch * at.batch + p.positions_k_col * at.row]
                      : positions[p.positions_q_batch * at.batch + p.positions_q_col * at.row];
  }
  bool within = p.rotary_dim == 0 || (position >= 0 && position < p.angles);

  // 2. A key's place in the cache, and is it there?
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

  // 3. Rotated and written: from global to global.
  constexpr int kWidth = append_width(kCfg);
  const int rotated = p.rotary_dim / 2 / kWidth;  // loads of a head
  if (!is_key) {
    const int64 row = p.q.batch * at.batch + p.q.row * at.row, out = p.q_out.batch * at.batch + p.q_out.row * at.row;
    write_rotated<kCfg>(p, p.q, row, p.q_out, out, p.heads_q, position);
    if (p.q_out.data != p.q.data)
      write_columns<kCfg>(p.q, row, p.q_out, out, p.heads_q, p.rotary_dim, p.head_dim, p.heads_q * rotated);
    return;
  }
  const int64 k = p.k.batch * at.batch + p.k.row * at.row, v = p.v.batch * at.batch + p.v.row * at.row;
  const int64 k_out = p.k_cache.batch * page + p.k_cache.row * slot,
              v_out = p.v_cache.batch * page + p.v_cache.row * slot;
  const int copied = (p.head_dim - p.rotary_dim) / kWidth;
  if (p.rotary_dim > 0) write_rotated<kCfg>(p, p.k, k, p.k_cache, k_out, p.heads_kv, position);
  write_columns<kCfg>(p.k, k, p.k_cache, k_out, p.heads_kv, p.rotary_dim, p.head_dim, p.heads_kv * rotated);
  write_columns<kCfg>(p.v, v, p.v_cache, v_out, p.heads_kv, 0, p.head_dim_v, p.heads_kv * (rotated + copied));
}

}  // namespace tessera
