// Backward: dQ, dK, dV (and dBias) from Q, K, V, dO, LSE and delta, FlashAttention-2's algorithm 2, by mma.sync and
// cp.async: on every GPU from Ampere on, and with every option.
//
//   P = exp(S - LSE)   dV = P^T dO   dP = dO V^T   dS = P o (dP - delta)   dQ = scale dS K   dK = scale dS^T Q
//
// Grid: one block for each tile of block_n keys and KV head. It loops over the queries of all query heads of the KV
// head, so dK and dV accumulate in registers; dQ accumulates in float32 in global memory. Scores are transposed, a
// warp's rows being keys, so P^T and dS^T are operands from registers. If dK and dV of a warp's keys do not fit into
// its registers, several warps have the same keys: each computes the scores of a part of the queries and accumulates a
// part of the columns, and P^T goes through shared memory. If K, V, Q and dO do not fit into shared memory, V overlays
// K and dO overlays Q: each is loaded again when it is needed.
//
// Details and measurements: docs/reference/kernels/bwd_sm80.md.
//
//   config.hpp       BwdConfig, the launch parameters, the layout of shared memory
//   shared.cuh       how products are divided among a block's warps, and its shared memory
//   key_block.cuh    a block of keys: the queries that see it, its loads and its results
//   scores.cuh       S^T and dP^T -> P^T and dS^T
//   dq.cuh           the additions to dQ
//   kernel.cuh       the loop over a block's queries
//   warp_split.cuh   another kernel: half of the warps compute S, the other half dP
//   rows.cuh         the kernel before and after these: delta, LSE, dQ's rounding
//
// Masked elements have P = 0 and dS = 0, but in a partial tile they still enter the products: a NaN or infinity in dO
// of a query reaches dV of keys in the tile that the query does not see, and one in a key reaches dQ of such queries.
// Tiles that no query sees are not read.
#pragma once

#include "tessera/bwd_sm80/dq.cuh"

namespace tessera {

// Loads V over K, or K over V, and likewise dO over Q or Q over dO: waits until all warps have read the previous tile,
// then for the load.
template <class Load>
TESSERA_DEVICE void load_overlaid(Load&& load) {
  __syncthreads();
  load();
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncthreads();
}

template <BwdConfig kCfg>
TESSERA_DEVICE void bwd_key_block(const KeyBlock<kCfg>& b) {
  using Warps = BwdWarps<kCfg>;
  const BwdParams& p = b.p;
  auto& shared = b.shared;
  constexpr int kBlockM = kCfg.block_m;
  constexpr int kM = Warps::kM, kN = Warps::kSlice / 8;
  constexpr bool kOptions = kCfg.score.any() || kCfg.d_bias;

  // 1. K and V: global -> shared, with the first tiles of Q and dO.
  const auto load_step = [&](int stage, const QueryStep& step) {
    // The two loads are written out: a loop would need registers while the products run.
    if constexpr (Warps::kOverlaid || kCfg.stages > 1) {
      b.load_queries(shared.sQ[stage], p.q, step, p.head_dim);
      if constexpr (!Warps::kOverlaid) b.load_queries(shared.sdO[stage], p.d_o, step, p.head_dim_v);
    } else {
      for_both(shared.sQ[stage], shared.sdO[stage], [&](auto& tile, bool d_o) {
        b.load_queries(tile, d_o ? p.d_o : p.q, step, d_o ? p.head_dim_v : p.head_dim);
      });
    }
    b.load_stats(stage, step);
  };
  using Steps = QuerySteps<kCfg>;
  auto next = Steps::first(b);  // the next step to load
  const auto load_next = [&](int stage) {
    if (b.tiles > 0 && next.head < (b.head_kv + 1) * p.group) {
      load_step(stage, next);
      Steps::advance(b, next);
    }
    ptx::cp_async_commit_group();  // an empty group is committed too, so that the count of groups stays the same
  };
  // Tiles that are being loaded while one is multiplied; with one stage, the number of tiles loaded before the loop.
  constexpr int kAhead = kCfg.stages > 1 ? kCfg.stages - 1 : 1;
  if (b.tiles > 0) {
    if constexpr (Warps::kOverlaid) {
      b.load_keys(shared.sK, p.k, p.head_dim);
    } else {
      for_both(shared.sK, shared.sV,
               [&](auto& tile, bool v) { b.load_keys(tile, v ? p.v : p.k, v ? p.head_dim_v : p.head_dim); });
    }
  }
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) load_next(stage);

  // 2. For every query tile that sees some of the keys.
  float rdK[kM][Warps::kDK][4], rdV[kM][Warps::kDV][4];
  clear(rdK);
  clear(rdV);
  int stage = 0;
  auto step = Steps::first(b);
  BwdScoreStep<kCfg, kM, kN> score_step;  // holds the bias and mask fragment of the next slice of a full tile
  constexpr bool kLoads = score_step.kLoads;
  [[maybe_unused]] const auto load_next_entries = [&](const QueryStep& at, int slice) {
    const int row0 = at.tile * kBlockM;
    if (!b.has_scores || p.bias_mask_keys == 1 || !b.full(row0)) return;
    const ScoreTile tile{b.batch, at.head, row0 + b.warp_query + slice, b.key0 + b.warp_key, nullptr, nullptr};
    score_step.load({p, b.s, tile});
  };
  if constexpr (kLoads) {
    if (Steps::count(b) > 0) load_next_entries(step, 0);
  }
  for (int left = Steps::count(b); left > 0; --left) {
    ptx::cp_async_wait_group<kAhead - 1>();
    __syncthreads();  // the tile is visible to all warps, and all have finished reading the tile before
    if constexpr (kCfg.stages > 1) load_next(stage == 0 ? kAhead : stage - 1);
    const int row0 = step.tile * kBlockM;
    const bool full = b.full(row0);
    const auto score_tile = [&](int col) { return b.score_tile(step, row0, col, stage); };

    //    S^T = K Q^T, dP^T = V dO^T
#pragma unroll 1
    for (int slice = 0; slice < Warps::kQueries; slice += Warps::kSlice) {
      const int col = b.warp_query + slice;  // column of the tile's first query of the slice
      const ScoreTile scores = score_tile(col);
      [[maybe_unused]] float sums[kM][2] = {};
      float rP[kM][kN][4], rdS[kM][kN][4];
      if (b.has_scores) {
        clear(rP);
        product_abt(rP, shared.sK, b.warp_key, shared.sQ[stage], col);
        if constexpr (!kOptions) probabilities<false>(p, b.s, scores, rP);
      }
      if constexpr (Warps::kOverlaid) {
        load_overlaid([&] {
          b.load_keys(shared.sV, p.v, p.head_dim_v);
          b.load_queries(shared.sdO[stage], p.d_o, step, p.head_dim_v);
        });
      }
      if (b.has_scores) {
        clear(rdS);
        product_abt(rdS, shared.sV, b.warp_key, shared.sdO[stage], col);

        //    P^T = exp(S^T - LSE), dS^T = P^T o (dP^T - delta)
        if constexpr (kOptions) {
          // A pair that a query does not see adds nothing to the gradients of a program's tensors.
          if constexpr (kFarOrPartial<kCfg>) {
            if (full && !is_far(scores)) [[likely]] {
              differentiate_options<kCfg, true, false>(p, b.s, scores, score_step, rP, rdS, sums);
            } else {
              differentiate_options<kCfg, false, true>(p, b.s, scores, score_step, rP, rdS, sums);
            }
          } else if (is_far(scores)) [[unlikely]] {
            if constexpr (kCfg.score.program && !kCfg.d_captured) {
              differentiate_far_program<kCfg>(p, b.s, scores, rP, rdS, sums);
            } else {
              differentiate_options<kCfg, false, true>(p, b.s, scores, score_step, rP, rdS, sums);
            }
          } else if constexpr (kCfg.d_captured && !kCfg.score.entries()) {
            if (full) {
              differentiate_options<kCfg, true, false>(p, b.s, scores, score_step, rP, rdS, sums);
            } else {
              differentiate_options<kCfg, false, false>(p, b.s, scores, score_step, rP, rdS, sums);
            }
          } else if constexpr (!kCfg.score.entries()) {
            differentiate_options<kCfg, true, false>(p, b.s, scores, score_step, rP, rdS, sums);
          } else if (kLoads && full && p.bias_mask_keys > 1) {
            if constexpr (kLoads) score_step.transpose();
            differentiate_options<kCfg, kLoads, false>(p, b.s, scores, score_step, rP, rdS, sums);
          } else {
            differentiate_options<kCfg, false, false>(p, b.s, scores, score_step, rP, rdS, sums);
          }
          if constexpr (kLoads) {
            if (slice + Warps::kSlice < Warps::kQueries) {
              load_next_entries(step, slice + Warps::kSlice);
            } else if (left > 1) {
              auto following = step;
              Steps::advance(b, following);
              load_next_entries(following, 0);
            }
          }
        } else {
          score_gradients<false>(p, b.s, scores, rdS, [&](int m, int n, int half) {
            return make_float2(rP[m][n][2 * half], rP[m][n][2 * half + 1]);
          });
        }
        if constexpr (!kCfg.score.entries()) {
          if (!full) {
            for_masked<kM, kN, kCfg.score>(p, b.s, scores,
                                           [&](int m, int n, int e) { rP[m][n][e] = rdS[m][n][e] = 0.0f; });
          }
        }
        store_accumulator<1>(shared.sScores[0], rdS, b.warp_key, col, 1.0f);
        if constexpr (Warps::kExchange) store_accumulator<1>(shared.sScores[1], rP, b.warp_key, col, 1.0f);
      }
      if constexpr (kCfg.d_bias) {
        if (p.d_bias.row == 0) {
          score_step.template collect_sums<Warps::kQueryParts>({p, b.s, scores}, b.part, sums);
        }
      }

      //    dV += P^T dO, dK += dS^T Q
      if constexpr (!Warps::kExchange) {
        product_pb(rdV, rP, shared.sdO[stage], col);
        product_pb(rdK, rdS, shared.sQ[stage], col);
      }
    }
    __syncthreads();  // the scores of all warps are visible
    if constexpr (Warps::kExchange) {
      product_ab<Warps::kColumnParts>(rdV, shared.sScores[1], b.warp_key, shared.sdO[stage], b.part * (Warps::kDV * 8));
      if constexpr (Warps::kOverlaid) {
        load_overlaid([&] {
          b.load_keys(shared.sK, p.k, p.head_dim);
          b.load_queries(shared.sQ[stage], p.q, step, p.head_dim);
        });
      }
      product_ab<Warps::kColumnParts>(rdK, shared.sScores[0], b.warp_key, shared.sQ[stage], b.part * (Warps::kDK * 8));
      if constexpr (kCfg.stages <= 1) __syncthreads();  // all warps have finished reading the tile
    }
    if constexpr (kCfg.stages <= 1) load_next(0);

    //    dQ += dS K
    const DqPart<kCfg> dq_part_of_warp(b.warp);
    float rdQ[Warps::kQM][Warps::kQN][4];
    dq_part_of_warp.multiply(rdQ, shared);
    add_dq(p, b, step, stage, row0, dq_part_of_warp, rdQ);
    Steps::advance(b, step);
    stage = stage + 1 == shared.kStages ? 0 : stage + 1;
  }

  // 3. dK and dV: registers -> shared -> global, or sums: registers -> global.
  ptx::cp_async_wait_group<0>();
  const float unit_v = kCfg.score.dropout ? p.dropout_scale : 1.0f;
  if constexpr (kCfg.sums) {
    b.template write_sums<false>(rdK, p.scale);
    b.template write_sums<true>(rdV, unit_v);
    return;
  }
  __syncthreads();  // no warp reads or loads K and V any more, which dK and dV overlay
  const auto keep_dv = [&] {
    store_accumulator<Warps::kColumnParts>(shared.sV, rdV, b.warp_key, b.part * (Warps::kDV * 8), unit_v);
  };
  store_accumulator<Warps::kColumnParts>(shared.sK, rdK, b.warp_key, b.part * (Warps::kDK * 8), p.scale);
  if constexpr (!Warps::kOverlaid) keep_dv();
  __syncthreads();
  if constexpr (Warps::kOverlaid) {
    const int count = b.keys_to_store();
    b.store_keys(shared.sK, p.d_k, count, p.head_dim, p.d_k_aligned);
    __syncthreads();  // all warps have read dK
    keep_dv();
    __syncthreads();
    b.store_keys(shared.sV, p.d_v, count, p.head_dim_v, p.d_v_aligned);
  } else {
    b.store_dk_dv();
  }
}

template <BwdConfig kCfg>
TESSERA_DEVICE void bwd_sm80(const BwdSm80Params& p) {
  static_assert(!kCfg.s_dp_split, "that is bwd_sm80_split");
  for_key_blocks<kCfg>(p, [](const KeyBlock<kCfg>& block) { bwd_key_block(block); });
}

}  // namespace tessera
