// Forward: FlashAttention-2, algorithm 1, with lanes = queries.
//
// An item is `tiles_per_item` tiles of kBlockM queries of one head, which use every block of keys and values together:
//   S^T = K Q^T        [keys][queries]    K broadcast in place, Q transposed once
//   online softmax     vertical: a query is a lane, so maximum, sum and rescale need no shuffle
//   O^T += V^T P^T     [head_dim_v][queries]
// Tiles of keys outside the mask are never visited.
//
// A block is computed in one of two ways, both exact. The general way computes the block's maximum first. The fast way
// applies to blocks that every lane sees and uses the stale max: it exponentiates relative to the maximum of the
// previous blocks, straight from the product's registers, so no score is stored and no maximum is computed. If a lane's
// partial sum exceeds a bound, the block is computed again in the general way, and so is the tile's next block. The
// softmax does not depend on the number that is subtracted as long as nothing overflows; its rounding does (see
// StaleMax).
#pragma once

#include "cpu/forward_place.hpp"
#include "cpu/kv_block.hpp"
#include "cpu/nonfinite.hpp"
#include "cpu/score/step.hpp"
#include "cpu/scratch.hpp"

namespace tessera::cpu {
namespace {

// The number of keys whose maximum is a tile's first stale max.
constexpr int64_t kStaleMaxKeys = 32;

// How far scores may exceed the stale max before it is replaced. If P stays float32, the limit is the growth of a sum,
// and most blocks need no rescale. In bfloat16, a key whose score equals the stale max has a weight of exactly 1, and
// other weights are rounded, which dominates O's error if one key holds most of a row. So any larger known maximum
// replaces the stale max, and the bounds are low. The weights of 32 keys with normally distributed scores sum to 7
// relative to the maximum of 32 others, and exceed the bounds in 0.1 % of the jobs or blocks
// (tests/protocols/test_rounding_cpu.py; fwd_sm90's bound has the same reason,
// docs/reference/kernels/fwd_sm90.md#numerics).
// reason, docs/reference/kernels/fwd_sm90.md#numerics).
template <bool kRoundedP>
struct StaleMax;
template <>
struct StaleMax<false> {
  static constexpr float kMostSum = 65536.0f;              // of a block's weights
  static constexpr float kRescaleThreshold = 8.0f * kLn2;  // a maximum that exceeds the stale max by this replaces it
};
template <>
struct StaleMax<true> {
  static constexpr float kMostSum = 64.0f;     // of the weights of kStaleMaxKeys keys
  static constexpr float kMostWeight = 32.0f;  // if weights are checked one by one
  static constexpr float kRescaleThreshold = 0.0f;
};

template <Op kOp>
struct ForwardBlock {
  RowBlock keys;      // [count][head_dim]
  RowBlock values;    // [count][head_dim_v], or pairs
  int64_t key_begin;  // index in the sequence
  int64_t count;
  int64_t head_kv;
  mutable int8_t finite_values = -1;  // 1: they hold neither NaN nor infinity; -1: not checked yet
};

// Keys in steps of k for the second product: pairs for the dot product.
template <Op kOp>
constexpr int64_t kKeysAStep = kOp == Op::kDot ? 2 : 1;

// Stores S or P of R keys from row n: kDot stores P as pairs of keys, in row n / 2.
template <Op kOp, int R, int C>
TESSERA_INLINE void store_p(float* sP, int64_t n, VecF (&p)[R][C]) {
#if defined(TESSERA_HAS_DOT)
  if constexpr (kOp == Op::kDot) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r += 2)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c)
        store(sP + (n + r) / 2 * kBlockM + c * kLanes,
              pair_bf16(p[r][c], r + 1 < R ? p[r + 1 < R ? r + 1 : r][c] : VecF{}));
    return;
  }
#endif
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(sP + (n + r) * kBlockM + c * kLanes, p[r][c]);
}

// P = 2^(scale_log2 * S - offset) for keys begin ... end - 1, without storing S, and its sums. false: a sum exceeded
// the bound.
template <Op kOp, int C>
TESSERA_INLINE bool stale_max_weights(const Params& p, const Tile& tile, const float* sQ, float* sP,
                                      const RowBlock& keys, int64_t begin, int64_t end, VecF (&total)[C]) {
  const int64_t k_count = (p.head_dim + kKeysAStep<kOp> - 1) / kKeysAStep<kOp>;
  alignas(64) float sums[C * kLanes] = {};
  for_row_groups<kTileRows>(begin, end, [&]<int R>(int64_t n) TESSERA_LAMBDA_INLINE {
    VecF acc[R][C] = {};
    multiply<R, C, kOp, Broadcast::kAlongK>(acc, keys.data + n * keys.stride_bytes, keys.stride_bytes, sQ, kBlockM,
                                            k_count);
    const VecF scale = splat(*opaque(&p.scale_log2));
    const float* offset = opaque(tile.offset);
    const Exp2 exponential;
    VecF sum[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[c] = load(sums + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        acc[r][c] = exponential(fma(acc[r][c], scale, -load(offset + c * kLanes)));
        sum[c] += acc[r][c];
      }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(sums + c * kLanes, sum[c]);
    store_p<kOp, R, C>(sP, n, acc);
  });
  VecI fits = splat(-1);
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    const VecF sum = load(sums + c * kLanes);
    fits &= sum <= StaleMax<kOp == Op::kDot>::kMostSum;
    total[c] += sum;
  }
  return !any(~fits);
}

// The same, added to the tile's sums; with P in bfloat16, the sums are checked every kStaleMaxKeys keys.
template <Op kOp, int C>
TESSERA_INLINE bool stale_max_softmax(const Params& p, Tile& tile, const float* sQ, float* sP, const RowBlock& keys,
                                      int64_t begin, int64_t end) {
  VecF total[C] = {};
  if constexpr (kOp == Op::kDot) {
    for (int64_t n = begin; n < end; n += kStaleMaxKeys) {
      if (!stale_max_weights<kOp, C>(p, tile, sQ, sP, keys, n, min_of(end, n + kStaleMaxKeys), total)) return false;
    }
  } else if (!stale_max_weights<kOp, C>(p, tile, sQ, sP, keys, begin, end, total)) {
    return false;
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) store(tile.sum + c * kLanes, load(tile.sum + c * kLanes) + total[c]);
  return true;
}

// If the diagonal crosses a tile, its first vectors of queries see fewer keys than its last: vector v of the tile ends
// before key stops[v]. Calls body.template operator()<V>(begin, end) for every strip of keys that vectors V ... C - 1
// see.
template <int C, int V = 0, class Body>
TESSERA_INLINE void for_strips(const int64_t (&stops)[C], int64_t begin, Body&& body) {
  if (stops[V] > begin) {
    body.template operator()<V>(begin, stops[V]);
    begin = stops[V];
  }
  if constexpr (V + 1 < C) for_strips<C, V + 1>(stops, begin, body);
}

// The same with the block's own maximum and every option of the scores. Entries beyond `stops` are not computed: the
// mask hides them. `shown`: of a program's mask, if it is computed already.
template <Op kOp, int C>
TESSERA_INLINE void plain_softmax(const Params& p, Tile& tile, const float* sQ, float* sO,
                                  const ForwardScratch& scratch, const ForwardBlock<kOp>& block, int64_t begin,
                                  const int64_t (&stops)[C], float* shown = nullptr) {
  const int64_t k_count = (p.head_dim + kKeysAStep<kOp> - 1) / kKeysAStep<kOp>;
  const int64_t end = stops[C - 1];
  float* sS = scratch.sS;
  for_strips<C>(stops, begin, [&]<int V>(int64_t from, int64_t to) TESSERA_LAMBDA_INLINE {
    product_rows<kTileRows, C - V, kOp, Broadcast::kAlongK>(
        sS + from * kBlockM + V * kLanes, kBlockM, false, block.keys.data + from * block.keys.stride_bytes,
        block.keys.stride_bytes, sQ + V * kLanes, kBlockM, to - from, k_count);
  });
  const QueryLanes lanes{tile, block.key_begin};
  apply_scores(
      p, lanes, sS, begin, end,
      {.loaded = scratch.options, .tile_floats = p.block_n * kBlockM, .registers = scratch.program, .shown = shown});

  VecF best[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) best[c] = splat(-infinity());
  for (int64_t n = begin; n < end; ++n)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) best[c] = max(best[c], load(sS + n * kBlockM + c * kLanes));

  // If the maximum exceeds the stale max by the threshold, it replaces it, and what was summed is rescaled.
  VecF alpha[C], sum[C];
  Against to[C];
  VecI rescale = splat(0), unset = splat(0);
  bool huge = false;
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    const VecF old = load(tile.stale_max + c * kLanes);
    // -inf + 8 = -inf, so the first finite maximum replaces it.
    const VecI moves = best[c] > old + StaleMax<kOp == Op::kDot>::kRescaleThreshold;
    const VecF next = select(moves, best[c], old);
    const Against from = against(tile, c);
    to[c] = set_stale_max(p, tile, c, next);
    alpha[c] = select(moves, rescale_of(old, from, to[c]), splat(1.0f));
    rescale |= moves;
    unset |= next == -infinity();
    huge |= is_huge(to[c]);
    sum[c] = load(tile.sum + c * kLanes) * alpha[c];
  }
  tile.has_stale_max = !any(unset) && !huge;
  if (tile.started && any(rescale)) {
    for (int64_t d = 0; d < p.head_dim_v; ++d)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        float* at = sO + d * kBlockM + c * kLanes;
        store(at, load(at) * alpha[c]);
      }
  }

  float* factors = scratch.options;
  const bool dropout = Dropout::asked(p), marks = marks_hidden(p);
  if (dropout) Dropout::factors(p, lanes, factors, begin, end, p.dropout_scale);
  const Exp2 exponential;
  for (int64_t n = begin; n < end; n += 2) {
    VecF rows[2][C] = {};
#pragma GCC unroll 2
    for (int64_t r = 0; r < 2; ++r) {
      if (n + r >= end) break;
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const int64_t at = (n + r) * kBlockM + c * kLanes;
        rows[r][c] = exponential(exponent_of(load(sS + at), to[c], huge));
        sum[c] += rows[r][c];
        if (dropout) rows[r][c] *= load(factors + at);
        if (marks) rows[r][c] = marked_weight(rows[r][c], load(sS + at));
      }
    }
    if (kOp == Op::kDot || n + 1 < end) {
      store_p<kOp, 2, C>(sS, n, rows);
    } else {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) store(sS + n * kBlockM + c * kLanes, rows[0][c]);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) store(tile.sum + c * kLanes, sum[c]);
}

// Whether the block's values hold neither NaN nor infinity. Checked once for all of an item's tiles.
template <Op kOp>
TESSERA_INLINE bool values_are_finite(const Params& p, const Tile& tile, const ForwardBlock<kOp>& block) {
  if (block.finite_values < 0) {
    block.finite_values =
        keys_are_finite(p, p.v, *tile.sequence, tile.batch, block.head_kv, block.key_begin, block.count, p.head_dim_v);
  }
  return block.finite_values;
}

// O += P V over what each lane sees.
template <Op kOp, int C>
TESSERA_COLD_FUNCTION void add_seen_values(const Params& p, const Tile& tile, float* sO, const float* sP,
                                           const ForwardBlock<kOp>& block, int64_t begin, int64_t end) {
  if (!tile.started) __builtin_memset(sO, 0, static_cast<size_t>(p.head_dim_v) * kBlockM * sizeof(float));
  alignas(64) int32_t visible[kBlockM];
  alignas(64) float value[kMaxRowFloats];
  for (int64_t n = begin; n < end; ++n) {
    visible_lanes(visible, p, tile, block.key_begin + n);
    const int64_t key = block.key_begin + n;
    if (p.kv_elem_bytes == 1) {
      read_code_key(value, p, p.v, *tile.sequence, tile.batch, block.head_kv, key, p.head_dim_v);
    } else {
      const char* row = key_row(p, p.v, *tile.sequence, tile.batch, block.head_kv, key);
      with_float_elem(p.kv_dtype, [&](auto elem) { read_row<decltype(elem)>(value, row, p.head_dim_v); });
    }
    for (int c = 0; c < C; ++c) {
      const float* at = sP + n / kKeysAStep<kOp> * kBlockM + c * kLanes;
      VecF weight = load(at);
      if constexpr (kOp == Op::kDot) {
        const VecU pair = load_as<VecU>(at);
        weight = (VecF)(n % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
      }
      VecI sees = load_as<VecI>(visible + c * kLanes);
      if (marks_hidden(p)) sees &= not_marked(weight);
      for (int64_t d = 0; d < p.head_dim_v; ++d) {
        float* o = sO + d * kBlockM + c * kLanes;
        const VecF old = load(o);
        store(o, select(sees, fma(weight, splat(value[d]), old), old));
      }
    }
  }
}

// Keys begin ... end - 1 of the block: S, softmax, O += P V.
template <Op kOp, int C>
TESSERA_INLINE void attend_keys(const Params& p, Tile& tile, float* sQ, float* sO, const ForwardScratch& scratch,
                                const ForwardBlock<kOp>& block, int64_t begin, int64_t end, bool options,
                                float* shown) {
  const bool full = block.key_begin + begin >= tile.all_low && block.key_begin + end - 1 <= tile.all_high;
  int64_t stops[C];
  for (int c = 0; c < C; ++c) {
    const int64_t high = tile.high[min_of((c + 1) * kLanes, tile.count) - 1];  // the vector's last query sees the most
    const bool strips = tile.started && !full && !p.pack_gqa && c + 1 < C;
    stops[c] = strips ? min_of(end, padded_to(max_of<int64_t>(0, high + 1 - block.key_begin), 8)) : end;
  }
  bool done = false;
  if (full && !options && !tile.passed_bound && (tile.has_stale_max || !tile.started)) {
    const int64_t first = tile.started ? begin : min_of(end, begin + kStaleMaxKeys);
    if (!tile.started) {
      int64_t first_stops[C];
      for (int64_t& stop : first_stops) stop = first;
      plain_softmax<kOp, C>(p, tile, sQ, sO, scratch, block, begin, first_stops);
    }
    done = tile.has_stale_max && stale_max_softmax<kOp, C>(p, tile, sQ, scratch.sS, block.keys, first, end);
    tile.passed_bound = !done;  // the next block uses the general way, the one after may try the fast way again
    if (!done && !tile.started) forget_softmax(tile);
  } else {
    tile.passed_bound = false;
  }
  if (!done) plain_softmax<kOp, C>(p, tile, sQ, sO, scratch, block, begin, stops, shown);
  const bool masked = !full || may_mask_entries(p);
  if (masked && !values_are_finite(p, tile, block)) {
    add_seen_values<kOp, C>(p, tile, sO, scratch.sS, block, begin, end);
    tile.started = true;
    return;
  }
  constexpr int64_t kStep = kKeysAStep<kOp>;
  for_strips<C>(stops, begin, [&]<int V>(int64_t from, int64_t to) TESSERA_LAMBDA_INLINE {
    product_rows<kTileRows, C - V, kOp, Broadcast::kAlongRows>(
        sO + V * kLanes, kBlockM, tile.started, block.values.data + from / kStep * block.values.stride_bytes,
        block.values.stride_bytes, scratch.sS + from / kStep * kBlockM + V * kLanes, kBlockM, p.head_dim_v,
        (to - from + kStep - 1) / kStep);
  });
  tile.started = true;
}

// Of the keys begin ... end - 1 of a block, at most kMost: which groups of kCodeRows a program's mask shows to some row
// of the tile. The mask's words are left in scratch.
struct ShownKeys {
  static constexpr int64_t kMost = 1024;

  // The first shown keys from `from` on; hidden ones between them are too few to be worth a division.
  TESSERA_INLINE KeySpan next(int64_t from) const {
    int64_t group = (from - begin) / kCodeRows;
    while (group < count && !shows[group]) ++group;
    int64_t last = group;
    for (int64_t n = group + 1; n < count && n - last <= 2; ++n) last = shows[n] ? n : last;
    return {min_of(end, begin + group * kCodeRows), min_of(end, begin + (last + 1) * kCodeRows)};
  }

  int64_t begin = 0, end = 0, count = 0;
  bool shows[kMost / kCodeRows];
};

TESSERA_OWN_FUNCTION inline void find_shown(ShownKeys& shown, const Params& p, const QueryLanes& at,
                                            const ForwardScratch& scratch, int64_t begin, int64_t end) {
  shown.begin = begin, shown.end = end, shown.count = 0;
  ProgramOption::write_mask(p, at, scratch.shown, begin, end, scratch.program,
                            [&](bool shows) TESSERA_LAMBDA_INLINE { shown.shows[shown.count++] = shows; });
}

template <Op kOp, int C>
TESSERA_OWN_FUNCTION void attend_block(const Params& p, Tile& tile, float* sQ, float* sO, const ForwardScratch& scratch,
                                       const ForwardBlock<kOp>& block, int64_t count) {
  // The keys of the block that this tile sees, from a multiple of 8, so that pairs and dropout's groups are not
  // divided.
  int64_t begin = max_of<int64_t>(0, tile.some_low - block.key_begin) / 8 * 8;
  const int64_t end = min_of<int64_t>(count, tile.some_high + 1 - block.key_begin);
  const QueryLanes lanes{tile, block.key_begin};
  ShownKeys shown;
  while (begin < end) {
    KeyRun run = ScoreStep<QueryLanes>::range(p, lanes, begin, end);
    const bool mask_first = run.visible && run.options && p.program_mask;
    if (mask_first) {
      run.end = min_of(run.end, begin + ShownKeys::kMost);
      find_shown(shown, p, lanes, scratch, begin, run.end);
    }
    while (run.visible && begin < run.end) {
      int64_t stop = run.end;
      if (mask_first) {
        const KeySpan keys = shown.next(begin);
        begin = keys.begin, stop = keys.end;
        if (begin == stop) break;
      } else {
        // If the mask cuts the block, the keys before the cut are worth computing separately with the stale max.
        const int64_t cut = min_of(stop, tile.all_high + 1 - block.key_begin) / 8 * 8;
        const bool two =
            !run.options && cut < stop && cut - begin >= kStaleMaxKeys && block.key_begin + begin >= tile.all_low;
        if (two) stop = cut;
      }
      attend_keys<kOp, C>(p, tile, sQ, sO, scratch, block, begin, stop, run.options,
                          mask_first ? scratch.shown : nullptr);
      begin = stop;
    }
    begin = run.end;
  }
}

// sQ[head_dim][kBlockM] = a tile's queries of 8 bits, at rows[lane], times their scales.
TESSERA_OWN_FUNCTION inline void pack_code_queries(const Params& p, const Tile& tile, const char* const* rows,
                                                   float* sQ) {
  alignas(64) float row[kMaxRowFloats] = {};
  for (int64_t lane = 0; lane < tile.vecs * kLanes; ++lane) {
    if (lane < tile.count) {
      read_codes(p.dtype, row, rows[lane], p.head_dim, query_scale(p, tile.batch, tile.head[lane], tile.query[lane]));
    }
    for (int64_t d = 0; d < p.head_dim; ++d) sQ[d * kBlockM + lane] = lane < tile.count ? row[d] : 0.0f;
  }
}

template <Op kOp>
void forward_item(const Params& p, int64_t item, char* scratch_base) {
  ForwardPlace at;
  if (!place_item(p, item, at)) return;
  const int64_t batch = at.batch, head_kv = at.head_kv, tile_count = at.tile_count;
  const Sequence& sequence = p.sequences[batch];

  const ForwardScratch scratch = carve_forward(
      scratch_base, {kBlockM, p.block_n, p.tiles_per_item, p.head_dim, p.head_dim_v, kLanes,
                     kOp == Op::kDot || p.dtype != TESSERA_FLOAT32 || p.page_table != nullptr || p.rows_collide,
                     has_score_options(p) ? kScoreTiles : 0, program_floats(p, QueryLanes::kVecs), sizeof(Tile)});
  Tile* tiles = reinterpret_cast<Tile*>(scratch.tiles);
  const int64_t q_floats = p.head_dim * kBlockM, o_floats = p.head_dim_v * kBlockM;

  // 1. Decode the tile index; Q: global -> scratch, transposed.
  auto [key, key_end] = init_tiles(p, at, tiles, p.block_n);
  prefetch_keys(p, sequence, batch, head_kv, key, max_of<int64_t>(0, min_of<int64_t>(p.block_n, key_end - key)), 0, 1);
  for (int64_t t = 0; t < tile_count; ++t) {
    const Tile& tile = tiles[t];
    const char* row_pointers[kBlockM];
    for (int64_t lane = 0; lane < tile.count; ++lane) {
      row_pointers[lane] = row_at(p.q, tile, lane);
      prefetch_row(row_pointers[lane], p.head_dim * p.elem_bytes);
    }
    float* sQ = scratch.sQ + t * q_floats;
#if defined(TESSERA_HAS_DOT)
    if constexpr (kOp == Op::kDot) pack_transposed_pairs(sQ, row_pointers, tile.count, p.head_dim);
#endif
    if constexpr (kOp == Op::kFma) {
      if (p.elem_bytes == 1) {
        pack_code_queries(p, tile, row_pointers, sQ);
      } else {
        with_float_elem(p.dtype,
                        [&](auto elem) { pack_transposed<decltype(elem)>(sQ, row_pointers, tile.count, p.head_dim); });
      }
    }
  }

  // 2. For every visible block of keys: S, softmax, O += P V for each tile.
  for (; key < key_end; key += p.block_n) {
    if (p.cancelled && p.cancelled(p.cancel)) return;
    const int64_t count = min_of<int64_t>(p.block_n, key_end - key);
    ForwardBlock<kOp> block;
    block.key_begin = key, block.count = count, block.head_kv = head_kv;
    block.keys = rows_block<kOp>(p, p.k, sequence, batch, head_kv, key, count, p.head_dim, scratch.sK);
    block.values = steps_block<kOp>(p, p.v, sequence, batch, head_kv, key, count, p.head_dim_v, scratch.sV);
    const int64_t next = key + p.block_n, next_count = max_of<int64_t>(0, min_of<int64_t>(p.block_n, key_end - next));
    for (int64_t t = 0; t < tile_count; ++t) {
      prefetch_keys(p, sequence, batch, head_kv, next, next_count, t, tile_count);
      float *sQ = scratch.sQ + t * q_floats, *sO = scratch.sO + t * o_floats;
      switch (tiles[t].vecs) {
        case 1:
          attend_block<kOp, 1>(p, tiles[t], sQ, sO, scratch, block, count);
          break;
        case 2:
          attend_block<kOp, 2>(p, tiles[t], sQ, sO, scratch, block, count);
          break;
        default:
          attend_block<kOp, 3>(p, tiles[t], sQ, sO, scratch, block, count);
          break;
      }
    }
  }

  // 3. O / l and LSE: scratch -> global.
  finish_tiles(p, tiles, tile_count, scratch.sO, o_floats, at.split, 1.0f);
}

}  // namespace
}  // namespace tessera::cpu
