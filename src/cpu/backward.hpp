// Backward: FlashAttention-2, algorithm 2: keys outside, queries inside, P recomputed from the log-sum-exp.
//
//   S^T = K Q^T      P = 2^(scale_log2 S - lse_log2)   lanes = queries
//   dP^T = V dO^T    dS = P o (dP - delta)             lanes = queries
//   dV += P^T dO     dK += dS^T Q     dQ += dS K       lanes = head dimensions
//
// An item is one part of the keys of one KV head (of several, if a broadcast d_bias needs a single writer). The outer
// loop is over super-blocks of keys, whose dK and dV accumulate in scratch. The inner loop visits every visible tile of
// kBlockM queries once and multiplies it with kKeyBlock keys at a time. dQ accumulates in float32, in one buffer for
// each part, and backward_postprocess adds the parts in order, so the order of every sum is independent of the number
// of threads.
#pragma once

#include "cpu/backward_rows.hpp"
#include "cpu/forward.hpp"

namespace tessera::cpu {
namespace {

template <Op kOp>
struct BackwardOperands {
  // The super-block's rows as A, and K once more as B.
  RowBlock keys, values, key_steps;
  // The query tile as B, transposed (lanes = queries), and as rows or pairs of rows (lanes = head dimensions).
  const float *sQ, *sdO;
  RowBlock q_steps, do_steps;
  const float *shift, *lse, *delta;  // [kBlockM]: of row_shift, row_lse, row_delta
  float* dq;                         // the tile's first row
  int64_t dq_ld;
  bool finite;  // K, Q and dO hold neither NaN nor infinity, or no mask hides an entry that these could affect
  int64_t head_kv;
};

// Stores bf16 copies of R rows of P or dS: as rows (pairs along queries, for dV and dK), and as pairs along keys (for
// dQ).
template <int R, int C>
TESSERA_INLINE void store_bf16_rows([[maybe_unused]] float* rows16, [[maybe_unused]] int64_t n,
                                    [[maybe_unused]] VecF (&v)[R][C]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      store(reinterpret_cast<uint16_t*>(rows16) + (n + r) * kBlockM + c * kLanes, bf16_from_float(v[r][c]));
    }
}

// P from S without options and masks; the result is stored straight from the registers.
template <Op kOp, int C>
TESSERA_OWN_FUNCTION void fused_p(const Params& p, const BackwardOperands<kOp>& t, const BackwardScratch& s,
                                  int64_t key_row, int64_t count) {
  constexpr int64_t kStep = kKeysAStep<kOp>;
  for_row_groups<kTileRows>(0, count, [&]<int R>(int64_t n) TESSERA_LAMBDA_INLINE {
    VecF acc[R][C] = {};
    multiply<R, C, kOp, Broadcast::kAlongK>(acc, t.keys.data + (key_row + n) * t.keys.stride_bytes, t.keys.stride_bytes,
                                            t.sQ, kBlockM, (p.head_dim + kStep - 1) / kStep);
    const VecF scale = splat(*opaque(&p.scale_log2));
    const float* lse = opaque(t.lse);
    const Exp2 exponential;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        acc[r][c] = exponential(fma(acc[r][c], scale, -load(lse + c * kLanes)));
        store(s.sP + (n + r) * kBlockM + c * kLanes, acc[r][c]);
      }
    if constexpr (kOp == Op::kDot) store_bf16_rows<R, C>(s.sP16, n, acc);
  });
}

// dS from dP and P, likewise.
template <Op kOp, int C>
TESSERA_OWN_FUNCTION void fused_ds(const Params& p, const BackwardOperands<kOp>& t, const BackwardScratch& s,
                                   int64_t key_row, int64_t count) {
  constexpr int64_t kStep = kKeysAStep<kOp>;
  for_row_groups<kTileRows>(0, count, [&]<int R>(int64_t n) TESSERA_LAMBDA_INLINE {
    VecF acc[R][C] = {};
    multiply<R, C, kOp, Broadcast::kAlongK>(acc, t.values.data + (key_row + n) * t.values.stride_bytes,
                                            t.values.stride_bytes, t.sdO, kBlockM, (p.head_dim_v + kStep - 1) / kStep);
    const VecF scale = splat(*opaque(&p.scale));
    const float* delta = opaque(t.delta);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        acc[r][c] = load(s.sP + (n + r) * kBlockM + c * kLanes) * ((acc[r][c] - load(delta + c * kLanes)) * scale);
      }
    if constexpr (kOp == Op::kDot) store_bf16_rows<R, C>(s.sdS16, n, acc);
    store_p<kOp, R, C>(s.sdS, n, acc);
  });
}

template <Op kOp, int C>
TESSERA_INLINE void fused_scores(const Params& p, const BackwardOperands<kOp>& t, const BackwardScratch& s,
                                 int64_t key_row, int64_t count) {
  fused_p<kOp, C>(p, t, s, key_row, count);
  fused_ds<kOp, C>(p, t, s, key_row, count);
}

// The same with every option and mask; `key` is the block's first key, `count` its number of keys.
template <Op kOp, int C>
TESSERA_INLINE void plain_scores(const Params& p, const Tile& tile, const BackwardOperands<kOp>& t,
                                 const BackwardScratch& s, int64_t key_row, int64_t key, int64_t count) {
  constexpr int64_t kStep = kKeysAStep<kOp>;
  constexpr int64_t kTileFloats = kKeyBlock * kBlockM;
  float* slope = s.options;
  float* factors = s.options + kTileFloats;
  float* rest = s.options + 2 * kTileFloats;
  const ScoreScratch scratch{.loaded = rest,
                             .tile_floats = kTileFloats,
                             .slope = gradient_needs_product(p) ? slope : nullptr,
                             .before = s.before,
                             .registers = s.program};
  product_rows<kTileRows, C, kOp, Broadcast::kAlongK>(s.sP, kBlockM, false, t.keys.data + key_row * t.keys.stride_bytes,
                                                      t.keys.stride_bytes, t.sQ, kBlockM, count,
                                                      (p.head_dim + kStep - 1) / kStep);
  // Dropout's groups are aligned to 32 keys, as the blocks are.
  const QueryLanes lanes{tile, key};
  apply_scores(p, lanes, s.sP, 0, count, scratch);
  product_rows<kTileRows, C, kOp, Broadcast::kAlongK>(
      s.sdS, kBlockM, false, t.values.data + key_row * t.values.stride_bytes, t.values.stride_bytes, t.sdO, kBlockM,
      count, (p.head_dim_v + kStep - 1) / kStep);
  const bool dropout = Dropout::asked(p);
  const VecF hidden = splat(marks_hidden(p) ? -0.0f : 0.0f);
  if (dropout) Dropout::factors(p, lanes, factors, 0, count, p.dropout_scale);
  const Exp2 exponential;
  for (int64_t n = 0; n < count; ++n) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const int64_t at = n * kBlockM + c * kLanes;
      const VecF score = load(s.sP + at);
      const VecF probability =
          exponential(exponent_of(score, {load(t.shift + c * kLanes), load(t.lse + c * kLanes)}, tile.huge));
      VecF dp = load(s.sdS + at), kept = probability;
      if (dropout) {
        const VecF factor = load(factors + at);
        dp *= factor;
        kept *= factor;
      }
      // The LSE, dP and delta of an invisible entry are arbitrary.
      const VecI visible = score != -infinity();
      store(s.sdS + at, select(visible, probability * (dp - load(t.delta + c * kLanes)), VecF{}));
      store(s.sP + at, select(visible, kept, hidden));
    }
  }
  ScoreStep<QueryLanes>::collect(p, lanes, s.sdS, scratch, rest, count);
  for (int64_t n = 0; n < count; n += 2) {
    VecF ds[2][C] = {}, kept[2][C] = {};
#pragma GCC unroll 2
    for (int64_t r = 0; r < 2; ++r) {
      if (n + r >= count) break;
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const int64_t at = (n + r) * kBlockM + c * kLanes;
        kept[r][c] = load(s.sP + at);
        ds[r][c] = ScoreStep<QueryLanes>::gradient(p, load(s.sdS + at), slope + at);
      }
    }
    // sdS has room for one row more than kKeyBlock.
    if constexpr (kOp == Op::kDot) {
      store_bf16_rows<2, C>(s.sP16, n, kept);
      store_bf16_rows<2, C>(s.sdS16, n, ds);
    }
    store_p<kOp, 2, C>(s.sdS, n, ds);
  }
}

// out[rows][cols] += A B for every group of columns.
template <Op kOp, Broadcast kBroadcast>
TESSERA_OWN_FUNCTION void accumulate(float* out, int64_t ld, const void* a, int64_t stride_bytes, const RowBlock& b,
                                     int64_t rows, int64_t k_count, int64_t cols) {
  for_vec_groups<kWideVecs>(static_cast<int>((cols + kLanes - 1) / kLanes), [&]<int C>(int v) TESSERA_LAMBDA_INLINE {
    product_rows<kWideRows, C, kOp, kBroadcast>(out + v * kLanes, ld, true, a, stride_bytes, b.data + v * kLanes * 4,
                                                b.stride_bytes / 4, rows, k_count);
  });
}

// dV += P^T dO, dK += dS^T Q, dQ += dS K, over what each lane sees.
template <Op kOp>
TESSERA_COLD_FUNCTION void accumulate_seen(const Params& p, const Tile& tile, const BackwardOperands<kOp>& t,
                                           const BackwardScratch& s, int64_t key_row, int64_t key, int64_t count) {
  const auto element = [](const float* floats, const float* bf16, int64_t at) TESSERA_LAMBDA_INLINE {
    if constexpr (kOp == Op::kDot) return float_of_bf16(reinterpret_cast<const uint16_t*>(bf16)[at]);
    return floats[at];
  };
  alignas(64) int32_t visible[kBlockM];
  alignas(64) float k[kMaxRowFloats], row[kMaxRowFloats];
  with_float_elem(p.dtype, [&](auto elem) {
    using Elem = decltype(elem);
    for (int64_t n = 0; n < count; ++n) {
      visible_lanes(visible, p, tile, key + n);
      read_row<Elem>(k, cpu::key_row(p, p.k, *tile.sequence, tile.batch, t.head_kv, key + n), p.head_dim);
      for (int64_t lane = 0; lane < tile.count; ++lane) {
        if (!visible[lane]) continue;
        const int64_t at = n * kBlockM + lane;
        const float weight = element(s.sP, s.sP16, at), d_score = element(s.sdS, s.sdS16, at);
        if (marks_hidden(p) && weight == 0.0f && __builtin_signbit(weight)) continue;
        read_row<Elem>(row, row_at(p.d_o, tile, lane), p.head_dim_v);
        add_scaled(weight, row, s.sdV + (key_row + n) * s.dv_ld, p.head_dim_v);
        read_row<Elem>(row, row_at(p.q, tile, lane), p.head_dim);
        add_scaled(d_score, row, s.sdK + (key_row + n) * s.dk_ld, p.head_dim);
        add_scaled(d_score, k, t.dq + lane * t.dq_ld, p.head_dim);
      }
    }
  });
}

// One tile of queries against `count` keys from row `key_row` of the super-block.
template <Op kOp>
__attribute__((noinline)) void backward_block(const Params& p, const Tile& tile, const BackwardOperands<kOp>& t,
                                              const BackwardScratch& s, int64_t key_row, int64_t key, int64_t count,
                                              bool plain) {
  constexpr int64_t kStep = kKeysAStep<kOp>;
  switch (tile.vecs * 2 + plain) {
    case 2:
      fused_scores<kOp, 1>(p, t, s, key_row, count);
      break;
    case 3:
      plain_scores<kOp, 1>(p, tile, t, s, key_row, key, count);
      break;
    case 4:
      fused_scores<kOp, 2>(p, t, s, key_row, count);
      break;
    case 5:
      plain_scores<kOp, 2>(p, tile, t, s, key_row, key, count);
      break;
    case 6:
      fused_scores<kOp, 3>(p, t, s, key_row, count);
      break;
    default:
      plain_scores<kOp, 3>(p, tile, t, s, key_row, key, count);
      break;
  }
  if (plain && !t.finite) return accumulate_seen<kOp>(p, tile, t, s, key_row, key, count);
  const int64_t query_steps = (tile.count + kStep - 1) / kStep;
  const int64_t row_bytes = kBlockM * (kOp == Op::kDot ? 2 : 4);
  const void* p_rows = kOp == Op::kDot ? s.sP16 : s.sP;
  const void* ds_rows = kOp == Op::kDot ? s.sdS16 : s.sdS;
  accumulate<kOp, Broadcast::kAlongK>(s.sdV + key_row * s.dv_ld, s.dv_ld, p_rows, row_bytes, t.do_steps, count,
                                      query_steps, p.head_dim_v);
  accumulate<kOp, Broadcast::kAlongK>(s.sdK + key_row * s.dk_ld, s.dk_ld, ds_rows, row_bytes, t.q_steps, count,
                                      query_steps, p.head_dim);
  const RowBlock steps{t.key_steps.data + key_row / kStep * t.key_steps.stride_bytes, t.key_steps.stride_bytes};
  accumulate<kOp, Broadcast::kAlongRows>(t.dq, t.dq_ld, s.sdS, kBlockM * 4, steps, tile.count,
                                         (count + kStep - 1) / kStep, p.head_dim);
}

// Keys begin ... end - 1 of a block: those that every query sees use the fast path, those that a mask cuts the general
// one.
template <Op kOp>
TESSERA_INLINE void meet_run(const Params& p, const Tile& tile, const BackwardOperands<kOp>& t,
                             const BackwardScratch& s, int64_t key_row, int64_t key, int64_t begin, int64_t end,
                             bool options) {
  const auto part = [&](int64_t from, int64_t to, bool plain) {
    if (from < to) backward_block<kOp>(p, tile, t, s, key_row + from, key + from, to - from, plain);
  };
  constexpr int64_t kWorthAPart = 24;
  const bool seen_by_all = key + begin >= tile.all_low && key + end - 1 <= tile.all_high;
  const int64_t all_begin = seen_by_all ? begin : padded_to(max_of<int64_t>(begin, tile.all_low - key), 8);
  const int64_t all_end = seen_by_all ? end : max_of<int64_t>(0, min_of<int64_t>(end, tile.all_high + 1 - key)) / 8 * 8;
  if (options || (!seen_by_all && all_end - all_begin < kWorthAPart)) return part(begin, end, true);
  part(begin, all_begin, true);
  part(all_begin, all_end, false);
  part(all_end, end, true);
}

// The keys of one block that the tile sees.
template <Op kOp>
TESSERA_INLINE void meet_keys(const Params& p, const Tile& tile, const BackwardOperands<kOp>& t,
                              const BackwardScratch& s, int64_t key_row, int64_t key, int64_t count, bool options) {
  // Parts begin at multiples of 8 (with options 32, for dropout's groups), so that pairs of keys are not divided.
  const int64_t align = options ? 32 : 8;
  int64_t begin = max_of<int64_t>(0, tile.some_low - key) / align * align;
  const int64_t end = min_of<int64_t>(count, tile.some_high + 1 - key);
  while (begin < end) {
    const KeyRun run = ScoreStep<QueryLanes>::range(p, {tile, key}, begin, end);
    const bool plain = run.options || collects_gradients(p) || tile.huge;
    if (run.visible) meet_run<kOp>(p, tile, t, s, key_row, key, begin, run.end, plain);
    begin = run.end;
  }
}

// A tile of rows of Q or dO: transposed, and as steps of k in `copy` (contiguous, since rows a power of two apart share
// cache sets).
template <Op kOp>
TESSERA_INLINE RowBlock load_rows(const Params& p, const RowTensor& tensor, const Tile& tile, int64_t cols,
                                  float* transposed, float* copy) {
  const int64_t padded = padded_to(cols, kLanes);
  const char* rows[kBlockM];
  for (int64_t lane = 0; lane < tile.count; ++lane) rows[lane] = row_at(tensor, tile, lane);
#if defined(TESSERA_HAS_DOT)
  if constexpr (kOp == Op::kDot) {
    pack_transposed_pairs(transposed, rows, tile.count, cols);
    for (int64_t r = 0; r < tile.count; r += 2) {
      pair_rows(reinterpret_cast<uint32_t*>(copy) + r / 2 * padded, rows[r], r + 1 < tile.count ? rows[r + 1] : nullptr,
                cols);
    }
    return {reinterpret_cast<const char*>(copy), padded * 4};
  }
#endif
  with_float_elem(p.dtype, [&](auto elem) {
    using Elem = decltype(elem);
    pack_transposed<Elem>(transposed, rows, tile.count, cols);
    for (int64_t r = 0; r < tile.count; ++r) read_row<Elem>(copy + r * padded, rows[r], cols);
  });
  return {reinterpret_cast<const char*>(copy), padded * 4};
}

// Prefetches the rows of Q and dO of the next tile.
TESSERA_INLINE void prefetch_next_queries(const Params& p, const Tile& tile) {
  const int64_t count = min_of<int64_t>(kBlockM, tile.sequence->sq - tile.query[0] - kBlockM);
  const char* q = row_at(p.q, tile, 0) + kBlockM * p.q.row;
  const char* d_o = row_at(p.d_o, tile, 0) + kBlockM * p.d_o.row;
  for (int64_t row = 0; row < count; ++row, q += p.q.row, d_o += p.d_o.row) {
    prefetch_row(q, p.head_dim * p.elem_bytes);
    prefetch_row(d_o, p.head_dim_v * p.elem_bytes);
  }
}

// Queries that see key j, which are one range under causal and the window.
TESSERA_INLINE int64_t queries_of_key(const Params& p, const Sequence& sequence, int64_t j) {
  // position of the query on the diagonal at key j
  const int64_t position = j - sequence.diagonal;
  int64_t first = 0, last = sequence.sq - 1;
  if (sequence.causal) first = max_of(first, position);
  if (p.window_right >= 0) first = max_of(first, position - p.window_right);
  if (p.window_left >= 0) last = min_of(last, position + p.window_left);
  return max_of<int64_t>(0, last - first + 1);
}

// The super-blocks of a sequence in order, and the split of each: every split gets about the same area of visible
// scores, regardless of the mask.
class SplitWalk {
 public:
  TESSERA_INLINE SplitWalk(const Params& p, const Sequence& sequence) : p_(p), sequence_(sequence) {
    for (int64_t first = 0; first < sequence.k_rows; first += p.block_n) total_ += area(first);
  }
  // Must be called once for each super-block, in order.
  TESSERA_INLINE int64_t split_of(int64_t first) {
    const int64_t split = min_of<int64_t>(p_.num_splits - 1, static_cast<int64_t>(seen_ * p_.num_splits / total_));
    seen_ += area(first);
    return split;
  }

 private:
  TESSERA_INLINE double area(int64_t first) const {
    const int64_t last = min_of(first + p_.block_n, sequence_.k_rows) - 1;
    const double queries =
        static_cast<double>(queries_of_key(p_, sequence_, first) + queries_of_key(p_, sequence_, last));
    return queries * static_cast<double>(last - first + 1) + 1.0;  // one: blocks that no query sees are work, too
  }

  const Params& p_;
  const Sequence& sequence_;
  double total_ = 0, seen_ = 0;
};

// All queries of one KV head's group against the keys of one split.
template <Op kOp>
void backward_head(const Params& p, const BackwardScratch& s, int64_t batch, int64_t head_kv, int64_t split) {
  const Sequence& sequence = p.sequences[batch];
  const int64_t group = p.heads_q / p.heads_kv;
  const int64_t dq_ld = p.acc_dq ? p.acc_dq_ld : p.d_q.row / static_cast<int64_t>(sizeof(float));
  const int64_t dq_cols = p.acc_dq ? p.acc_dq_ld : p.head_dim;
  for (int64_t h = head_kv * group; h < (head_kv + 1) * group; ++h) {
    for (int64_t i = 0; i < sequence.sq; ++i) {
      __builtin_memset(dq_row(p, sequence, batch, h, split, i), 0, static_cast<size_t>(dq_cols) * sizeof(float));
    }
  }
  const bool options = has_score_options(p) || collects_gradients(p);
  Tile& tile = *reinterpret_cast<Tile*>(s.tile);

  SplitWalk walk(p, sequence);
  for (int64_t first = 0; first < sequence.k_rows; first += p.block_n) {
    if (walk.split_of(first) != split) continue;
    const int64_t rows = min_of<int64_t>(p.block_n, sequence.k_rows - first);
    const int64_t keys = max_of<int64_t>(0, min_of(rows, sequence.sk - first));  // keys after them get gradients 0
    __builtin_memset(s.sdK, 0, static_cast<size_t>(rows * s.dk_ld) * sizeof(float));
    __builtin_memset(s.sdV, 0, static_cast<size_t>(rows * s.dv_ld) * sizeof(float));
    BackwardOperands<kOp> t;
    t.head_kv = head_kv;
    int finite_keys = -1;  // whether K holds neither NaN nor infinity; -1: not checked yet
    if (keys > 0) {
      t.values = rows_block<kOp>(p, p.v, sequence, batch, head_kv, first, keys, p.head_dim_v, s.sV, true);
      t.keys = rows_block<kOp>(p, p.k, sequence, batch, head_kv, first, keys, p.head_dim, s.sK, true);
      if constexpr (kOp == Op::kDot) {
        t.key_steps = steps_block<kOp>(p, p.k, sequence, batch, head_kv, first, keys, p.head_dim, s.sK_steps);
      } else {
        t.key_steps = t.keys;
      }
    }
    for (int64_t h = head_kv * group; h < (head_kv + 1) * group && keys > 0; ++h) {
      for (int64_t row = 0; row < sequence.sq; row += kBlockM) {
        init_tile(tile, p, batch, h, row, min_of<int64_t>(kBlockM, sequence.sq - row));
        if (tile.some_low >= first + keys || tile.some_high < first || tile.some_low > tile.some_high) continue;
        const KeyRun run = ScoreStep<QueryLanes>::range(p, {tile, first}, 0, keys);
        if (!run.visible && run.end == keys) continue;
        if (p.cancelled && p.cancelled(p.cancel)) return;
        prefetch_next_queries(p, tile);
        t.sQ = s.sQ, t.sdO = s.sdO;
        t.q_steps = load_rows<kOp>(p, p.q, tile, p.head_dim, s.sQ, s.q_rows);
        t.do_steps = load_rows<kOp>(p, p.d_o, tile, p.head_dim_v, s.sdO, s.do_rows);
        const bool masked = options || tile.all_low > first || tile.all_high < first + keys - 1;
        if (masked && finite_keys < 0) {
          finite_keys = keys_are_finite(p, p.k, sequence, batch, head_kv, first, keys, p.head_dim);
        }
        t.finite = !masked || (finite_keys && queries_are_finite(p, p.q, tile, p.head_dim) &&
                               queries_are_finite(p, p.d_o, tile, p.head_dim_v));
        const int64_t at = h * p.rows_total + sequence.row_begin + row;
        for (int64_t lane = 0; lane < kBlockM; ++lane) {
          s.shift[lane] = lane < tile.count ? p.row_shift[at + lane] : 0.0f;
          s.lse[lane] = lane < tile.count ? p.row_lse[at + lane] : infinity();
          tile.huge |= s.shift[lane] != 0.0f;
          s.delta[lane] = lane < tile.count ? p.row_delta[at + lane] : 0.0f;
        }
        t.shift = s.shift, t.lse = s.lse, t.delta = s.delta;
        t.dq = dq_row(p, sequence, batch, h, split, row);
        t.dq_ld = dq_ld;
        for (int64_t key_row = 0; key_row < keys; key_row += kKeyBlock) {
          meet_keys<kOp>(p, tile, t, s, key_row, first + key_row, min_of<int64_t>(kKeyBlock, keys - key_row), options);
        }
      }
    }
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t k_row = sequence.k_begin + first + n;
      write_gradient_row(p, p.d_k.data + p.d_k.batch * batch + p.d_k.row * k_row + p.d_k.head * head_kv,
                         s.sdK + n * s.dk_ld, p.head_dim);
      write_gradient_row(p, p.d_v.data + p.d_v.batch * batch + p.d_v.row * k_row + p.d_v.head * head_kv,
                         s.sdV + n * s.dv_ld, p.head_dim_v);
    }
  }
}

template <Op kOp>
void backward_item(const Params& p, int64_t item, char* scratch_base) {
  const BackwardScratch s =
      carve_backward(scratch_base, {kBlockM, p.block_n, p.head_dim, p.head_dim_v, kLanes, kOp == Op::kDot,
                                    has_score_options(p) || collects_gradients(p) ? kScoreTiles + 2 : 0,
                                    program_floats(p, QueryLanes::kVecs), sizeof(Tile)});
  const int64_t split = item % p.num_splits;
  const int64_t owner = item / p.num_splits;
  const int64_t owners_head = p.heads_kv / p.groups_head;
  for (int64_t b = 0; b < p.groups_batch; ++b) {
    for (int64_t h = 0; h < p.groups_head; ++h) {
      backward_head<kOp>(p, s, owner / owners_head * p.groups_batch + b, owner % owners_head * p.groups_head + h,
                         split);
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
