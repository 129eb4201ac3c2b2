// Appends the new tokens of a step to a KV cache: rotates q and the new keys by rotary position embedding (Su et al.,
// "RoFormer", 2021) and writes keys and values at each sequence's end in the cache, dense or paged. A kernel cannot
// return an error, so a token whose place or position is out of range is not written.
//
// Grid: one block for some tokens of k and v, then blocks for the tokens of q. Shared memory: none. A thread handles
// the same columns of kAppendHeads heads of a token, 16 bytes each if aligned, and neighbouring threads handle
// neighbouring columns. Its 64 or 128 bytes of loads are in flight while it finds the token's length, its page and its
// row of cos and sin, once for all heads. Rotated and copied columns go to different warps as far as possible. The
// kernel is bound by memory bandwidth; with few tokens, by latency.
#pragma once

#include "tessera/append/config.hpp"
#include "tessera/ptx/device.cuh"
#include "tessera/ptx/synchronization.cuh"
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

// One of the block's units, as a thread processes it.
struct AppendUnit {
  const AppendWay& way;
  int token, number;       // number: index among the token's units of this copy
  int head, columns;       // the first head; columns (or pairs of columns) before the unit's
  int64 first, to_second;  // offset of the first columns in a head; pairs: distance to the second columns

  // Unit n of the block, among those of k and v or those of q.
  TESSERA_DEVICE AppendUnit(const AppendParams& p, bool is_key, int width, int n) : way(find_way(p, is_key, n)) {
    const int at = n - way.begin;
    token = at / way.units, number = at - token * way.units.value;
    head = number / way.columns, columns = (number - head * way.columns.value) * width;
    const bool neighbours = way.rotates && p.interleaved;
    first = way.column + (neighbours ? 2 * columns : columns);
    to_second = neighbours ? width : p.rotary_dim / 2;
  }

 private:
  TESSERA_DEVICE static const AppendWay& find_way(const AppendParams& p, bool is_key, int n) {
    int way = is_key ? kRotatedKeys : kRotatedQueries;
    const int last = is_key ? kValues : kCopiedQueries;
    while (way < last && n >= p.ways[way + 1].begin) ++way;
    return p.ways[way];
  }
};

// The unit's columns in registers.
template <AppendConfig kCfg>
struct AppendColumns {
  static constexpr int kWidth = append_width(kCfg);
  using Raw = RawColumns<kCfg.dtype, kWidth>;
  Raw low[kAppendHeads], high[kAppendHeads];

  // row: offset of the token's first head.
  TESSERA_DEVICE void load(const AppendUnit& unit, int64 row) {
    const AppendWay& way = unit.way;
    const int64 begin = row + way.from.head * unit.head + unit.first, step = way.from.head * way.groups;
#pragma unroll
    for (int n = 0; n < kAppendHeads; ++n) {
      // Past the last head, loads the first head again: the loads need no branch between them.
      const int64 at = begin + (unit.head + n * way.groups < way.heads ? step * n : 0);
      low[n] = load_columns<kCfg.dtype, kWidth>(way.from.data, at);
      if (way.rotates) high[n] = load_columns<kCfg.dtype, kWidth>(way.from.data, at + unit.to_second);
    }
  }
  TESSERA_DEVICE void rotate(const AppendParams& p, const AppendUnit& unit, int position) {
    float cosine[kWidth], sine[kWidth];
    load_angles(p, p.cos, p.cos_row * position + unit.columns, cosine);
    load_angles(p, p.sin, p.sin_row * position + unit.columns, sine);
    p.interleaved ? rotate<true>(cosine, sine) : rotate<false>(cosine, sine);
  }
  TESSERA_DEVICE void store(const AppendUnit& unit, int64 row) const {
    const AppendWay& way = unit.way;
    const int64 begin = row + way.to.head * unit.head + unit.first, step = way.to.head * way.groups;
#pragma unroll
    for (int n = 0; n < kAppendHeads; ++n) {
      if (unit.head + n * way.groups >= way.heads) break;
      store_columns<kCfg.dtype, kWidth>(way.to.data, begin + step * n, low[n]);
      if (way.rotates) store_columns<kCfg.dtype, kWidth>(way.to.data, begin + step * n + unit.to_second, high[n]);
    }
  }

 private:
  template <bool kInterleaved>
  TESSERA_DEVICE void rotate(const float (&cosine)[kWidth], const float (&sine)[kWidth]) {
#pragma unroll
    for (int n = 0; n < kAppendHeads; ++n) {
      float x[2 * kWidth];
      unpack_columns(low[n], x), unpack_columns(high[n], x + kWidth);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        float &a = x[kInterleaved ? 2 * i : i], &b = x[kInterleaved ? 2 * i + 1 : kWidth + i];
        const float turned = a * cosine[i] - b * sine[i];
        b = a * sine[i] + b * cosine[i], a = turned;
      }
      pack_columns(x, low[n]), pack_columns(x + kWidth, high[n]);
    }
  }
};

template <AppendConfig kCfg>
TESSERA_DEVICE void append(const AppendParams& p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const bool is_key = static_cast<int>(blockIdx.x) < p.key_blocks;
  const Divisor tokens = is_key ? p.tokens : p.tokens_q;
  const int all = p.cu_seqlens ? tokens.value : p.batch * tokens.value;  // below 2^31: the host has checked it
  const int begin = is_key ? static_cast<int>(blockIdx.x) * p.key_tokens
                           : (static_cast<int>(blockIdx.x) - p.key_blocks) * p.query_tokens;
  const int units = is_key ? p.key_units : p.query_units;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < units; n += kAppendThreads) {
    // 1. Load the unit's columns; they are in flight while the token's place is found.
    const AppendUnit unit(p, is_key, append_width(kCfg), n);
    const AppendWay& way = unit.way;
    if (unit.token >= all - begin) continue;
    AppendedToken at = token_row(p, begin + unit.token, tokens);
    AppendColumns<kCfg> columns;
    columns.load(unit, way.from.batch * at.batch + way.from.row * at.row);

    // 2. Find the token's row of cos and sin, and whether it exists.
    if (!find_key(p, at)) continue;
    const int* positions = is_key ? p.positions_k : p.positions_q;
    int position = at.key;
    if (positions) {
      position = is_key ? positions[p.positions_k_batch * at.batch + p.positions_k_col * at.row]
                        : positions[p.positions_q_batch * at.batch + p.positions_q_col * at.row];
    }
    bool within = p.rotary_dim == 0 || (position >= 0 && position < p.angles);

    // 3. Find a key's place in the cache, and whether it exists.
    int page = at.batch, slot = at.row;
    if (is_key) {
      within = within && at.key >= 0 && at.key < p.room;
      if (within) {
        const int of_sequence = at.key / p.page_size;
        slot = at.key - of_sequence * p.page_size.value;
        if (p.page_table) page = p.page_table[p.page_table_batch * at.batch + p.page_table_col * of_sequence];
      }
      within = within && page >= 0 && page < p.pages;
    }
    if (!within) {
      const bool first_of_token = unit.number == 0 && &way == &p.ways[is_key ? kValues : kRotatedQueries];
      if (p.dropped && first_of_token) atomicAdd(p.dropped, 1);
      continue;
    }

    // 4. Rotate and write.
    if (way.rotates) columns.rotate(p, unit, position);
    columns.store(unit, way.to.batch * page + way.to.row * slot);
  }
}

}  // namespace tessera
