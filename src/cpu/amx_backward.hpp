// Backward with AMX: FlashAttention-2, algorithm 2, for bfloat16; keys outside, queries inside, as in backward.hpp.
//
//   S^T  [keys][queries]   = K Q^T       A: K in place                B: Q, pairs along d
//   dP^T [keys][queries]   = V dO^T      A: V in place                B: dO, pairs along d
//   dV   [keys][d]        += P^T dO      A: P^T, pairs of queries     B: dO, pairs of queries
//   dK   [keys][d]        += dS^T Q      A: dS^T, pairs of queries    B: Q, pairs of queries
//   dQ^T [d][queries]     += K^T dS^T    A: K transposed              B: dS, pairs of keys
//
// S, dP, P and dS have lanes = queries and are computed for 32 keys x 32 queries at a time. Both forms of dS are stored
// from the registers in which it was computed. A super-block of keys keeps dK and dV. Four tiles of 32 queries visit it
// together, so that each time its accumulators are loaded, a product over queries has four steps, and a product over
// the keys of a job has as many.
#pragma once

#include "cpu/amx_backward_rows.hpp"

namespace tessera::cpu {
namespace {

// Adds, for one pair, the products of rows that were packed as zeros: dV += P^T dO, dK += dS^T Q, dQ += dS K, over what
// each lane sees.
TESSERA_COLD_FUNCTION void add_nonfinite_rows(const AmxBackward& f, const StagePair& at) {
  const Params& p = f.p;
  const Tile& tile = f.tiles[at.tile];
  const uint32_t keys = f.nonfinite_k.rows[at.stage], q = f.nonfinite_q[at.tile], d_o = f.nonfinite_do[at.tile];
  if (!(keys | q | d_o)) return;
  const int64_t stage_row = at.stage * kStageKeys, count = min_of(kStageKeys, f.keys - stage_row);
  const int64_t head_kv = tile.head[0] / (p.heads_q / p.heads_kv);
  alignas(64) int32_t visible[kBlockM];
  alignas(64) float row[kMaxRowFloats];
  const auto element = [](const char* tiles, int64_t n, int64_t lane) {  // in two tiles of A, 16 keys x 16 pairs
    const char* bits =
        tiles + n / kTileSide * kTile_bytes + n % kTileSide * kTileRow_bytes + lane % kLanes * 4 + lane / kLanes * 2;
    return float_of_bf16(*reinterpret_cast<const uint16_t*>(bits));
  };
  const auto add_to_key = [&](float* out, int64_t n, float weight, const char* source, int64_t cols) {
    read_row<Bfloat16Elem>(row, source, cols);
    for (int64_t d = 0; d < cols; d += kBlockM) {
      add_scaled(weight, row + d, out + (d / kBlockM * p.block_n + stage_row + n) * kBlockM,
                 min_of<int64_t>(kBlockM, cols - d));
    }
  };
  for (int64_t n = 0; n < count; ++n) {
    const bool key = keys >> n & 1;
    if (!key && !(q | d_o)) continue;
    visible_lanes(visible, p, tile, f.key_begin + stage_row + n);
    for (int64_t lane = 0; lane < tile.count; ++lane) {
      if (!visible[lane]) continue;
      const float ds = element(f.ds_of(at.in_job, at.tile), n, lane);
      if (d_o >> lane & 1) {
        const float probability = element(f.p_of(at.in_job, at.tile), n, lane);
        add_to_key(f.s.sdV, n, probability, row_at(p.d_o, tile, lane), p.head_dim_v);
      }
      if (q >> lane & 1) add_to_key(f.s.sdK, n, ds, row_at(p.q, tile, lane), p.head_dim);
      if (!key) continue;
      const char* k = key_row(p, p.k, *tile.sequence, tile.batch, head_kv, f.key_begin + stage_row + n);
      read_row<Bfloat16Elem>(row, k, p.head_dim);
      float* dq = f.dq_sums[at.tile] + lane;
      for (int64_t d = 0; d < p.head_dim; ++d) dq[d * kBlockM] += ds * row[d];
    }
  }
}

// The tiles of queries against stages first ... first + stages - 1 of the super-block, which form the job.
TESSERA_OWN_FUNCTION void backward_job(AmxBackward& f, int64_t first, int64_t stages) {
  // 1. P and dS of every pair that is not fully masked; the products of the next pair overlap with the vector work of
  // this one.
  StagePair pairs[kJobStages * kAmxBackwardTiles];
  int64_t count = 0;
  // The pairs of a stage are neighbouring tiles, those of a tile neighbouring stages, because positional masks leave
  // every row one range. Entries in this range that a block mask hides have weights of 0.
  bool listed[kJobStages][kAmxBackwardTiles] = {};
  int64_t tile_begin[kJobStages], tile_end[kJobStages], stage_begin[kAmxBackwardTiles], stage_end[kAmxBackwardTiles];
  for (int64_t t = 0; t < f.tile_count; ++t) stage_begin[t] = stage_end[t] = 0;
  for (int64_t n = 0; n < stages; ++n) {
    tile_begin[n] = tile_end[n] = 0;
    const int64_t key = f.key_begin + (first + n) * kStageKeys;
    for (int64_t t = 0; t < f.tile_count; ++t) {
      if (f.tiles[t].some_low >= key + kStageKeys || f.tiles[t].some_high < key) continue;
      if (!shows_stage(f.p, f.tiles[t], key, min_of(kStageKeys, f.key_begin + f.keys - key))) continue;
      listed[n][t] = true;
      if (tile_end[n] == 0) tile_begin[n] = t;
      if (stage_end[t] == 0) stage_begin[t] = n;
      tile_end[n] = t + 1, stage_end[t] = n + 1;
      pairs[count++] = {first + n, n, t};
    }
  }
  if (count == 0) return;
  for (int64_t n = 0; BlockMask::asked(f.p) && n < stages; ++n) {
    for (int64_t t = 0; t < f.tile_count; ++t) {
      const bool within = (t >= tile_begin[n] && t < tile_end[n]) || (n >= stage_begin[t] && n < stage_end[t]);
      if (listed[n][t] || !within) continue;
      __builtin_memset(f.p_of(n, t), 0, kSteps_bytes);
      __builtin_memset(f.ds_of(n, t), 0, kSteps_bytes);
      __builtin_memset(f.ds_pairs_of(n, t), 0, kSteps_bytes);
    }
  }
  score_products(f, pairs[0], f.ring(0), [] {});
  for (int64_t i = 0; i < count; ++i) {
    const StagePair* next = i + 1 < count ? &pairs[i + 1] : nullptr;
    f.ahead.ask();
    gradients(f, {&pairs[i], next, f.ring(i % 2), f.ring((i + 1) % 2)});
  }

  // 2. dV += P^T dO and dK += dS^T Q, over the queries. Columns are the outer loop, stages the inner one: the job's P^T
  // or dS^T and 32 columns of dO or Q stay in the L1 cache.
  const auto none = [] {};
  const auto accumulate_rows = [&](float* out, const auto& a_of, const char* b, int64_t groups) {
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t n = 0; n < stages; ++n) {
        const int64_t from = tile_begin[n], steps = tile_end[n] - from, row = (first + n) * kStageKeys;
        if (steps <= 0) continue;
        f.accumulators.multiply<true, false, Pieces::kTwo>(
            reinterpret_cast<char*>(out + (g * f.p.block_n + row) * kBlockM), f.keys_started[first + n], a_of(n, from),
            kTile_bytes, kSteps_bytes, b + (g * kAmxBackwardTiles + from) * kSteps_bytes, steps, none);
      }
    }
  };
  accumulate_rows(
      f.s.sdV, [&](int64_t n, int64_t tile) { return f.p_of(n, tile); }, f.s.do_rows, f.v_steps);
  accumulate_rows(
      f.s.sdK, [&](int64_t n, int64_t tile) { return f.ds_of(n, tile); }, f.s.q_rows, f.q_steps);
  for (int64_t n = 0; n < stages; ++n) f.keys_started[first + n] |= tile_begin[n] < tile_end[n];

  // 3. dQ^T += K^T dS^T, over the keys.
  for (int64_t t = 0; t < f.tile_count; ++t) {
    const int64_t from = stage_begin[t], steps = stage_end[t] - from;
    if (steps <= 0) continue;
    for (int64_t g = 0; g < f.q_steps; ++g) {
      char* out = reinterpret_cast<char*>(f.dq_sums[t]) + g * 2 * kTwoTiles_bytes;
      const char* a = f.s.k_transposed + (g * (f.p.block_n / kStageKeys) + first + from) * kSteps_bytes;
      const char* b = f.ds_pairs_of(from, t);
      f.accumulators.multiply<true, false, Pieces::kTwo>(out, f.dq_started[t], a, kTile_bytes, kSteps_bytes, b, steps,
                                                         none);
    }
    f.dq_started[t] = true;
  }

  // 4. NaN and infinities are added to the results of what sees them.
  bool nonfinite = f.nonfinite_k.any;
  for (int64_t t = 0; t < f.tile_count; ++t) nonfinite |= (f.nonfinite_q[t] | f.nonfinite_do[t]) != 0;
  if (!nonfinite) return;
  f.accumulators.flush();
  for (int64_t i = 0; i < count; ++i) add_nonfinite_rows(f, pairs[i]);
}

// All queries of one KV head's group against the keys of one split.
inline void amx_backward_head(AmxBackward& f, int64_t batch, int64_t head_kv, int64_t split) {
  const Params& p = f.p;
  const AmxBackwardScratch& s = f.s;
  const Sequence& sequence = p.sequences[batch];
  const int64_t group = p.heads_q / p.heads_kv;
  for (int64_t h = head_kv * group; h < (head_kv + 1) * group; ++h) {
    if (p.rows_in_items) {
      finish_blind_tiles(p, batch, h);
      continue;
    }
    for (int64_t i = 0; i < sequence.sq; ++i) {
      __builtin_memset(dq_row(p, sequence, batch, h, split, i), 0, static_cast<size_t>(p.acc_dq_ld) * sizeof(float));
    }
  }
  SplitWalk walk(p, sequence);
  for (int64_t first = 0; first < sequence.k_rows; first += p.block_n) {
    if (walk.split_of(first) != split) continue;
    const int64_t rows = min_of<int64_t>(p.block_n, sequence.k_rows - first);
    f.key_begin = first;
    f.keys = max_of<int64_t>(0, min_of(rows, sequence.sk - first));  // keys after them get gradients 0
    __builtin_memset(f.keys_started, 0, sizeof f.keys_started);
    if (f.keys > 0) load_keys(f, sequence, batch, head_kv);
    const int64_t stages = padded_to(f.keys, kStageKeys) / kStageKeys;
    for (int64_t h = head_kv * group; h < (head_kv + 1) * group && f.keys > 0; ++h) {
      for (int64_t row = 0; row < sequence.sq; row += kAmxBackwardTiles * kBlockM) {
        f.tile_count = 0;
        bool any_seen = false;
        for (int64_t r = row; r < min_of(sequence.sq, row + kAmxBackwardTiles * kBlockM); r += kBlockM) {
          Tile& tile = f.tiles[f.tile_count];
          init_tile(tile, p, batch, h, r, min_of<int64_t>(kBlockM, sequence.sq - r));
          any_seen |= tile.some_low <= tile.some_high && tile.some_low < first + f.keys && tile.some_high >= first;
          const bool in_place = summed_in_place(f, tile);
          f.dq_sums[f.tile_count] = in_place ? dq_row(p, sequence, batch, h, split, r)
                                             : s.sdQ + f.tile_count * f.q_steps * kTileSteps_elems * kBlockM;
          f.dq_started[f.tile_count++] = in_place && !begins_here(f, tile);
        }
        if (!any_seen) continue;
        if (p.cancelled && p.cancelled(p.cancel)) return;
        for (int64_t t = 0; t < f.tile_count; ++t) load_queries(f, t, h, row + t * kBlockM);
        list_ahead(f, sequence, batch, h, row, split);
        f.ahead.spread_over(stages * f.tile_count);
        for (int64_t stage = 0; stage < stages; stage += kJobStages) {
          backward_job(f, stage, min_of(kJobStages, stages - stage));
        }
        f.accumulators.flush();
        for (int64_t t = 0; t < f.tile_count; ++t) {
          const Tile& tile = f.tiles[t];
          if (tile.some_low >= first + f.keys || tile.some_high < first) continue;
          if (!f.dq_started[t]) {  // a block mask hides the whole super-block
            __builtin_memset(f.dq_sums[t], 0,
                             static_cast<size_t>(f.q_steps * kTileSteps_elems * kBlockM) * sizeof(float));
          }
          add_dq(f, t, dq_row(p, sequence, batch, h, split, row + t * kBlockM), p.acc_dq_ld);
        }
      }
    }
    // dV was summed over the entries that dropout keeps, without their scale.
    for (int64_t i = 0; Dropout::asked(p) && i < f.v_steps * p.block_n; ++i) {
      if (!f.keys_started[i % p.block_n / kStageKeys]) continue;
#pragma GCC unroll 2
      for (int64_t c = i * kBlockM; c < (i + 1) * kBlockM; c += kLanes)
        store(s.sdV + c, load(s.sdV + c) * p.dropout_scale);
    }
    const int64_t k_row = sequence.k_begin + first;
    write_gradient(f, p.d_k, s.sdK, batch, head_kv, k_row, rows, p.head_dim);
    write_gradient(f, p.d_v, s.sdV, batch, head_kv, k_row, rows, p.head_dim_v);
  }
}

inline void amx_backward_item(const Params& p, int64_t item, char* scratch_base) {
  const bool options = has_score_options(p) || collects_gradients(p);
  const AmxBackwardScratch s = carve_amx_backward(
      scratch_base, {p.block_n, p.head_dim, p.head_dim_v, options ? kScoreTiles + 2 : 0, sizeof(Tile)});
  AmxBackward f{p,
                s,
                reinterpret_cast<Tile*>(s.tiles),
                padded_to(p.head_dim, kTileSteps_elems) / kTileSteps_elems,
                padded_to(p.head_dim_v, kTileSteps_elems) / kTileSteps_elems,
                {},
                options,
                0,
                0,
                0,
                {},
                {},
                {},
                {},
                {},
                {},
                {}};
  const int64_t split = item % p.num_splits;
  const int64_t owner = item / p.num_splits;
  const int64_t owners_head = p.heads_kv / p.groups_head;
  tiles_configure();
  for (int64_t b = 0; b < p.groups_batch; ++b) {
    for (int64_t h = 0; h < p.groups_head; ++h) {
      amx_backward_head(f, owner / owners_head * p.groups_batch + b, owner % owners_head * p.groups_head + h, split);
    }
  }
  tiles_release();
}

}  // namespace
}  // namespace tessera::cpu
