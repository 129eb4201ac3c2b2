// The rows that AMX's backward pass reads and writes: packing Q, dO, K and V into operands, writing dQ, dK and dV from
// their sums, and prefetching.
#pragma once

#include "cpu/amx_gradients.hpp"

namespace tessera::cpu {
namespace {

// Whether the first, or the last, keys that the tile sees are in the super-block.
TESSERA_INLINE bool begins_here(const AmxBackward& f, const Tile& tile) { return tile.some_low >= f.key_begin; }
TESSERA_INLINE bool ends_here(const AmxBackward& f, const Tile& tile) { return tile.some_high < f.key_begin + f.keys; }

// Loads Q and dO of the tile in both forms, and its LSE and delta. Rows past the last query are 0.
TESSERA_INLINE void load_queries(AmxBackward& f, int64_t t, int64_t head, int64_t row) {
  const Params& p = f.p;
  Tile& tile = f.tiles[t];
  const char *q[kBlockM], *d_o[kBlockM];
  rows_of(q, p.q, tile), rows_of(d_o, p.d_o, tile);
  constexpr int64_t kGroup_bytes = kAmxBackwardTiles * kSteps_bytes;
  pack_column_pairs(f.s.sQ + t * f.q_steps * kTileSide * kBlockM, kBlockM, q, tile.count, kBlockM, p.head_dim);
  pack_column_pairs(f.s.sdO + t * f.v_steps * kTileSide * kBlockM, kBlockM, d_o, tile.count, kBlockM, p.head_dim_v);
  const bool masked = may_mask_entries(p) || tile.all_low > f.key_begin || tile.all_high < f.key_begin + f.keys - 1;
  f.nonfinite_q[t] = masked ? nonfinite_rows(q, tile.count, p.head_dim) : 0;
  f.nonfinite_do[t] = masked ? nonfinite_rows(d_o, tile.count, p.head_dim_v) : 0;
  blank_rows(q, f.nonfinite_q[t]);
  blank_rows(d_o, f.nonfinite_do[t]);
  pack_row_pairs(f.s.q_rows + t * kSteps_bytes, kGroup_bytes, q, tile.count, p.head_dim);
  pack_row_pairs(f.s.do_rows + t * kSteps_bytes, kGroup_bytes, d_o, tile.count, p.head_dim_v);
  if (p.rows_in_items && begins_here(f, tile)) prepare_rows(p, {tile.batch, head, row, tile.count});
  const int64_t at = head * p.rows_total + tile.sequence->row_begin + row;
  tile.huge = Alibi::asked(p) && has_steep_slopes(p, tile);
#pragma GCC unroll 2
  for (int64_t c = 0; c < kBlockM; c += kLanes) {
    const int64_t rows = min_of<int64_t>(kLanes, tile.count - c);
    const VecF lse = rows > 0 ? load_first<VecF>(p.row_lse + at + c, rows) : VecF{};
    const VecF delta = rows > 0 ? load_first<VecF>(p.row_delta + at + c, rows) : VecF{};
    const VecF shift = rows > 0 ? load_first<VecF>(p.row_shift + at + c, rows) : VecF{};
    tile.huge |= any(shift != 0.0f);
    store(f.s.shift + t * kBlockM + c, shift);
    store(f.s.lse + t * kBlockM + c, lse);
    store(f.s.delta + t * kBlockM + c,
          select(delta == delta, delta, splat(__builtin_nanf(""))));  // a NaN with bits that JoinRounded may round
  }
}

// Writes a row of `cols` bfloat16 in whole cache lines, each once. `in`: as many float32, padded to 32.
TESSERA_INLINE void write_line_row(char* out, const float* in, int64_t cols) {
  for (int64_t c = 0; c < cols; c += kTileSteps_elems, in += kTileSteps_elems) {
    const __m256i low = (__m256i)bf16_from_float(load(in)), high = (__m256i)bf16_from_float(load(in + kLanes));
    const __m512i line = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    _mm512_mask_storeu_epi16(out + c * 2, first_elems(cols - c), line);
  }
}

// Whether a tile's dQ is summed in its rows' accumulators, in the layout [head_dim][kBlockM] of the products. This is
// so with rows in items, for a whole tile to which more than one super-block adds.
TESSERA_INLINE bool summed_in_place(const AmxBackward& f, const Tile& tile) {
  return f.p.rows_in_items && !(begins_here(f, tile) && ends_here(f, tile)) && tile.count == kBlockM &&
         f.p.acc_dq_ld == f.q_steps * kTileSteps_elems;
}

// Adds the tile's dQ to its rows' accumulators. With rows in items, the first super-block that the tile sees
// initialises them, and the last one writes them out as rows of d_q.
TESSERA_INLINE void add_dq(const AmxBackward& f, int64_t t, float* dq, int64_t dq_ld) {
  const Tile& tile = f.tiles[t];
  const int64_t padded = f.q_steps * kTileSteps_elems;
  const bool begins = f.p.rows_in_items && begins_here(f, tile), ends = f.p.rows_in_items && ends_here(f, tile);
  const bool in_place = summed_in_place(f, tile);
  if (in_place && !ends) return;
  alignas(64) float ones[kBlockM];
  for (float& one : ones) one = 1.0f;
  char* rows[kBlockM];
  if (in_place || (begins && ends)) {
    rows_of(rows, f.p.d_q, tile);
    return unpack_transposed<Bfloat16Elem>(rows, f.dq_sums[t], ones, tile.count, f.p.head_dim);
  }
  for (int64_t lane = 0; lane < kBlockM; ++lane) rows[lane] = reinterpret_cast<char*>(f.s.dq_rows + lane * padded);
  unpack_transposed<Float32Elem>(rows, f.dq_sums[t], ones, tile.count, padded);
  for (int64_t lane = 0; lane < tile.count; ++lane, dq += dq_ld) {
    float *row = f.s.dq_rows + lane * padded, *sum = ends ? row : dq;
    for (int64_t d = 0; d < f.p.head_dim; d += kLanes) {
      store(sum + d, begins ? load(row + d) : load(dq + d) + load(row + d));
    }
    if (ends) write_line_row(row_at(f.p.d_q, tile, lane), row, f.p.head_dim);
  }
}

// Writes dK or dV of `rows` keys from [cols / 32][block_n][32]; keys that no query sees get 0.
TESSERA_INLINE void write_gradient(const AmxBackward& f, const RowTensor& tensor, const float* in, int64_t batch,
                                   int64_t head_kv, int64_t k_row, int64_t rows, int64_t cols) {
  for (int64_t n = 0; n < rows; ++n) {
    char* out = tensor.data + tensor.batch * batch + tensor.row * (k_row + n) + tensor.head * head_kv;
    if (!f.keys_started[n / kStageKeys]) {
      if (!f.p.accumulate) __builtin_memset(out, 0, static_cast<size_t>(cols * f.p.d_elem_bytes));
      continue;
    }
    for (int64_t c = 0; c < cols; c += kBlockM) {
      if (f.p.d_dtype == TESSERA_FLOAT32) {
        const float* sums = in + (c / kBlockM * f.p.block_n + n) * kBlockM;
        float* to = reinterpret_cast<float*>(out) + c;
        for (int64_t d = 0; d < min_of<int64_t>(kBlockM, cols - c); ++d) {
          to[d] = f.p.accumulate ? to[d] + sums[d] : sums[d];
        }
        continue;
      }
      write_line_row(out + c * 2, in + (c / kBlockM * f.p.block_n + n) * kBlockM, min_of<int64_t>(kBlockM, cols - c));
    }
  }
}

// With rows in items: delta, LSE and dQ of the tiles of a head that see no key at all. If every query has a key on its
// diagonal, there is none.
TESSERA_INLINE void finish_blind_tiles(const Params& p, int64_t batch, int64_t head) {
  const Sequence& sequence = p.sequences[batch];
  if (sequence.diagonal >= 0 && sequence.diagonal + sequence.sq <= sequence.sk) return;
  Tile tile;
  for (int64_t row = 0; row < sequence.sq; row += kBlockM) {
    init_tile(tile, p, batch, head, row, min_of<int64_t>(kBlockM, sequence.sq - row));
    if (tile.some_low <= tile.some_high) continue;
    prepare_rows(p, {batch, head, row, tile.count});
    for (int64_t lane = 0; lane < tile.count; ++lane) {
      __builtin_memset(row_at(p.d_q, tile, lane), 0, static_cast<size_t>(p.head_dim) * 2);
    }
  }
}

// Lists for prefetching the rows of Q, dO and, if the tile's first keys are in the super-block, O, for `count` queries
// from `row`.
TESSERA_INLINE void list_queries_ahead(AmxBackward& f, const Sequence& sequence, int64_t batch, int64_t head,
                                       int64_t row) {
  const Params& p = f.p;
  const int64_t count = min_of(kAmxBackwardTiles * kBlockM, sequence.sq - row);
  if (count <= 0) return;
  const auto add = [&](const RowTensor& tensor, int64_t cols) {
    const char* first = tensor.data + tensor.batch * batch + tensor.row * (sequence.q_begin + row) + tensor.head * head;
    f.ahead.add(first, tensor.row, count, cols * 2, false);
  };
  add(p.q, p.head_dim);
  add(p.d_o, p.head_dim_v);
  if (p.rows_in_items && KeyBand(p, sequence).of(row).low >= f.key_begin) add(p.o, p.head_dim_v);
}

// Lists the rows to prefetch while the tiles from query `row` on process the super-block: those of the next tiles, of
// their dQ, and a part of those of dK and dV.
TESSERA_INLINE void list_ahead(AmxBackward& f, const Sequence& sequence, int64_t batch, int64_t head, int64_t row,
                               int64_t split) {
  const Params& p = f.p;
  f.ahead.clear();
  list_queries_ahead(f, sequence, batch, head, row + kAmxBackwardTiles * kBlockM);
  const Tile& last = f.tiles[f.tile_count - 1];
  const int64_t queries = min_of(kAmxBackwardTiles * kBlockM, sequence.sq - row);
  const bool begins = p.rows_in_items && begins_here(f, f.tiles[0]), ends = p.rows_in_items && ends_here(f, last);
  if (ends) f.ahead.add(row_at(p.d_q, f.tiles[0], 0), p.d_q.row, queries, p.head_dim * 2, true);
  // With sums in place, those of the next tiles are needed by their first products.
  const int64_t sums_row = summed_in_place(f, f.tiles[0]) ? row + kAmxBackwardTiles * kBlockM : row;
  if (!(begins && ends) && sums_row < sequence.sq) {
    const float* sums = dq_row(p, sequence, batch, head, split, sums_row);
    f.ahead.add(reinterpret_cast<const char*>(sums), p.acc_dq_ld * 4,
                min_of(kAmxBackwardTiles * kBlockM, sequence.sq - sums_row), p.acc_dq_ld * 4, true);
  }
  const int64_t group = p.heads_q / p.heads_kv, tiles = padded_to(sequence.sq, kAmxBackwardTiles * kBlockM);
  const int64_t at = head % group * tiles + row, all = group * tiles;
  const int64_t begin = f.keys * at / all, end = f.keys * min_of(all, at + kAmxBackwardTiles * kBlockM) / all;
  const auto add = [&](const RowTensor& tensor, int64_t cols) {
    const char* first = tensor.data + tensor.batch * batch + tensor.head * (head / group);
    f.ahead.add(first + tensor.row * (sequence.k_begin + f.key_begin + begin), tensor.row, end - begin, cols * 2, true);
  };
  add(p.d_k, p.head_dim);
  add(p.d_v, p.head_dim_v);
}

// Loads K and V of the super-block, prefetching their rows two stages ahead, and prefetches the first queries that see
// it.
TESSERA_INLINE void load_keys(AmxBackward& f, const Sequence& sequence, int64_t batch, int64_t head_kv) {
  const Params& p = f.p;
  constexpr int64_t kStagesAhead = 2;
  const auto ask = [&](int64_t n) {
    if (n < f.keys) prefetch_keys(p, sequence, batch, head_kv, f.key_begin + n, min_of(kStageKeys, f.keys - n), 0, 1);
  };
  f.ahead.clear();
  const int64_t row = sequence.causal ? max_of<int64_t>(0, f.key_begin - sequence.diagonal) : 0;
  constexpr int64_t kQueries = kAmxBackwardTiles * kBlockM;
  list_queries_ahead(f, sequence, batch, head_kv * (p.heads_q / p.heads_kv), row / kQueries * kQueries);
  f.ahead.spread_over(padded_to(f.keys, kStageKeys) / kStageKeys);
  f.nonfinite_k = {};
  for (int64_t n = 0; n < kStagesAhead * kStageKeys; n += kStageKeys) ask(n);
  for (int64_t n = 0; n < f.keys; n += kStageKeys) {
    ask(n + kStagesAhead * kStageKeys);
    f.ahead.ask();
    const KeyRows stage{f.key_begin, n, min_of(n + kStageKeys, f.keys)};
    pack_key_rows(f.s.k_tiles, p, p.k, sequence, batch, head_kv, stage, p.head_dim);
    pack_key_columns(f.s.k_transposed, may_hide_keys(p) ? &f.nonfinite_k : nullptr, p, p.k, sequence, batch, head_kv,
                     stage, p.head_dim);
    pack_key_rows(f.s.v_tiles, p, p.v, sequence, batch, head_kv, stage, p.head_dim_v);
  }
}

}  // namespace
}  // namespace tessera::cpu
