// Appends the new tokens of a step to a KV cache: rotates q and the new keys by rotary position embedding (Su et al.,
// "RoFormer", 2021) and writes keys and values at each sequence's end in the cache, dense or paged. A kernel cannot
// return an error, so a token whose place or position is out of range is not written.
//
// Grid: one block for some tokens of k and v, then blocks for the tokens of q. Shared memory: none. A thread handles
// the same columns of kAppendHeads heads of a token, 16 bytes each if aligned, and neighbouring threads handle
// neighbouring columns. Its 64 or 128 bytes of loads are in flight while it finds the token's length, its page and its
// row of cos and sin, once for all heads. Rotated and copied columns go to different warps as far as possible. The
// kernel is bound by memory bandwidth; with few tokens, by latency. How k and v get into a cache of 8 bits: codes.cuh.
#pragma once

#include "tessera/append/codes.cuh"
#include "tessera/append/place.cuh"
#include "tessera/ptx/synchronization.cuh"

namespace tessera {

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
      rotate_columns<kInterleaved>(cosine, sine, x);
      pack_columns(x, low[n]), pack_columns(x + kWidth, high[n]);
    }
  }
};

template <AppendConfig kCfg>
TESSERA_DEVICE void append(const AppendParams& p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const bool is_key = static_cast<int>(blockIdx.x) < p.key_blocks;
  if constexpr (writes_codes(kCfg)) {
    if (is_key) return append_codes<kCfg>(p);
  }
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

    // 2. Find the token's row of cos and sin and a key's place in the cache, and whether they exist.
    if (!find_key(p, at)) continue;
    AppendPlace place;
    if (!find_place(p, is_key, at, place)) {
      const bool first_of_token = unit.number == 0 && &way == &p.ways[is_key ? kValues : kRotatedQueries];
      if (p.dropped && first_of_token) atomicAdd(p.dropped, 1);
      continue;
    }

    // 3. Rotate and write.
    if (way.rotates) columns.rotate(p, unit, place.position);
    columns.store(unit, way.to.batch * place.page + way.to.row * place.slot);
  }
}

}  // namespace tessera
