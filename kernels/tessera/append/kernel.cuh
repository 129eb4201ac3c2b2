// New tokens of a step: q and the new keys are rotated by rotary position embedding (Su et al., "RoFormer", 2021), keys and
// values written at each sequence's end in the cache, dense or in pages. A token whose place or position is out of range, as
// a kernel cannot refuse it, writes nothing.
//
// Grid: one block a token, those of k and v first, then those of q. Shared memory: none. Every block finds its own sequence;
// its threads take the pairs and columns of all heads in order, so that neighbours in memory are read by neighbours.
#pragma once

#include "tessera/append/config.hpp"
#include "tessera/ptx/device.cuh"
#include "tessera/ptx/griddepcontrol.cuh"
#include "tessera/tile/element.cuh"

namespace tessera {

inline constexpr int kAppendThreads = 128;

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

TESSERA_DEVICE float load_angle(const AppendParams& p, const void* angles, int64 index) {
  if (p.angle_dtype == Dtype::kFloat32) return load_element<Dtype::kFloat32>(angles, index);
  return p.angle_dtype == Dtype::kFloat16 ? load_element<Dtype::kFloat16>(angles, index)
                                          : load_element<Dtype::kBFloat16>(angles, index);
}

// The heads of one token: its first rotary_dim columns rotated, the others as they are.
template <AppendConfig kCfg>
TESSERA_DEVICE void write_rotated(const AppendParams& p, const RowTensor& from, int64 row, const RowTensor& to,
                                  int64 out, int heads, int position) {
  const int half = p.rotary_dim / 2;
  for (int n = static_cast<int>(threadIdx.x); n < heads * half; n += kAppendThreads) {
    const int head = n / half, j = n % half;
    const int x = p.interleaved ? 2 * j : j, y = p.interleaved ? 2 * j + 1 : j + half;
    const float cosine = load_angle(p, p.cos, p.cos_row * position + j);
    const float sine = load_angle(p, p.sin, p.sin_row * position + j);
    const int64 in_head = row + from.head * head, out_head = out + to.head * head;
    const float a = load_element<kCfg.dtype>(from.data, in_head + x),
                b = load_element<kCfg.dtype>(from.data, in_head + y);
    store_element<kCfg.dtype>(to.data, out_head + x, a * cosine - b * sine);
    store_element<kCfg.dtype>(to.data, out_head + y, a * sine + b * cosine);
  }
}

template <AppendConfig kCfg>
TESSERA_DEVICE void write_columns(const RowTensor& from, int64 row, const RowTensor& to, int64 out, int heads,
                                  int begin, int end) {
  const int columns = end - begin;
  for (int n = static_cast<int>(threadIdx.x); n < heads * columns; n += kAppendThreads) {
    const int head = n / columns, column = begin + n % columns;
    store_element<kCfg.dtype>(to.data, out + to.head * head + column,
                              load_element<kCfg.dtype>(from.data, row + from.head * head + column));
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
  if (!is_key) {
    const int64 row = p.q.batch * at.batch + p.q.row * at.row, out = p.q_out.batch * at.batch + p.q_out.row * at.row;
    write_rotated<kCfg>(p, p.q, row, p.q_out, out, p.heads_q, position);
    if (p.q_out.data != p.q.data) write_columns<kCfg>(p.q, row, p.q_out, out, p.heads_q, p.rotary_dim, p.head_dim);
    return;
  }
  const int64 k = p.k.batch * at.batch + p.k.row * at.row, v = p.v.batch * at.batch + p.v.row * at.row;
  const int64 k_out = p.k_cache.batch * page + p.k_cache.row * slot,
              v_out = p.v_cache.batch * page + p.v_cache.row * slot;
  if (p.rotary_dim > 0) write_rotated<kCfg>(p, p.k, k, p.k_cache, k_out, p.heads_kv, position);
  write_columns<kCfg>(p.k, k, p.k_cache, k_out, p.heads_kv, p.rotary_dim, p.head_dim);
  write_columns<kCfg>(p.v, v, p.v_cache, v_out, p.heads_kv, 0, p.head_dim_v);
}

}  // namespace tessera
