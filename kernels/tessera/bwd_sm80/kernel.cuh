// Backward: dQ, dK, dV (and dBias) from Q, K, V, dO, LSE and delta, FlashAttention-2's algorithm 2, by mma.sync and
// cp.async: on every GPU from Ampere on, and with every option there is.
//
//   P = exp(S - LSE)   dV = P^T dO   dP = dO V^T   dS = P o (dP - delta)   dQ = scale dS K   dK = scale dS^T Q
//
// Grid: one block for each tile of block_n keys and KV head, which passes over the queries of all of its query heads,
// so that dK and dV gather in registers; dQ gathers in float32 in global memory. Scores are held transposed, a warp's
// rows being keys: so P^T and dS^T are operands from registers. Where dK and dV of a warp's keys do not fit into its
// registers, several warps have the same keys: each computes the scores of a part of the queries and gathers a part of
// the columns, and P^T goes through shared memory. Or half of the warps computes S^T and dV and the other half dP^T and
// dK: each warp's part of a product is twice as large then, and shared memory is read less. Where K, V, Q and dO do not
// fit into shared memory, V takes turns with K, and dO with Q. bwd_sm80/rows.cuh has what goes before and after; what was
// measured: docs/reference/kernels/bwd_sm80.md.
//
// What is hidden has the weight 0, and in a tile that somebody sees it is multiplied all the same: a NaN or infinity in
// a query's dO reaches dV, and one in a key dQ, of hidden neighbours in the tile. Tiles that nobody sees are not read.
#pragma once

#include "tessera/bwd_sm80/query_slots.cuh"
#include "tessera/bwd_sm80/score_gradient.cuh"
#include "tessera/bwd_sm80/warps.cuh"
#include "tessera/ptx/barrier.cuh"
#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/tile/product_shared.cuh"

namespace tessera {

// Rows first ... of a tensor's head into a tile; from `count` on zero. By kWarps warps, the whole block or each half.
template <BwdConfig kCfg, int kWarps, bool kOnce = false, class Tile>
TESSERA_DEVICE void load_rows(Tile& sTile, const RowTensor& tensor, int batch, int head, int64 first, int count,
                              int columns) {
  constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const char* rows =
      static_cast<const char*>(tensor.data) + (tensor.batch * batch + tensor.row * first + tensor.head * head) * kBytes;
  const int thread = static_cast<int>(threadIdx.x);
  load_tile_strided<kCfg.aligned, kWarps * 32, kOnce>(sTile, count, columns * kBytes, rows, tensor.row * kBytes,
                                                      kWarps < kCfg.warps ? thread % (kWarps * 32) : thread);
}

// The products of a step with kHalves. The first half of the warps: S^T, P^T, acc = dV += P^T dO. The second: dP^T, dS^T,
// acc = dK += dS^T Q; P^T it has from its partner warps of the first half, rounded as every operand is. Each half calls
// load_next() once its additions to dQ of the step before have left shared memory. At the end dS^T is there for everybody;
// the place of dO is the first half's, that of Q the second's.
template <BwdConfig kCfg, int kM, int kN, class LoadNext>
TESSERA_DEVICE void multiply_halves(float (&acc)[kM][kN][4], const BwdParams& p, const Sequence& s,
                                    const ScoreTile& scores, BwdSharedMemory<kCfg>& shared, int stage, int warp,
                                    bool whole, LoadNext&& load_next) {
  using Warps = BwdWarps<kCfg>;
  constexpr int kHalfThreads = Warps::kSharers * 32;
  const bool second = warp >= Warps::kSharers;
  const int sharer = warp % Warps::kSharers, part = sharer % Warps::kColumnParts;
  const int row = sharer / Warps::kColumnParts * (kM * 16), col = part * Warps::kQueries;
  auto& sP = shared.sScores[1];
  auto& sMine = second ? shared.sScores[0] : sP;

  float rS[kM][Warps::kQueries / 8][4];
  clear(rS);
  product_abt(rS, second ? shared.sV : shared.sK, row, second ? shared.sdO[stage] : shared.sQ[stage], col);
  if (second) {
    ptx::barrier_sync(kPartnerBarrier + sharer, 64);
    const auto probability = [&](int m, int n, int half) {
      return load_pair<kCfg.dtype>(sP.pointer(row + m * 16 + half * 8 + lane_row(), col + n * 8 + lane_col()));
    };
    if (whole || !Warps::kMasksApart) {
      score_gradients<false>(p, s, scores, rS, probability);
    } else {
      score_gradients<true>(p, s, scores, rS, probability);
    }
  } else {
    if (whole || !Warps::kMasksApart) {
      probabilities<false>(p, s, scores, rS);
    } else {
      probabilities<true>(p, s, scores, rS);
    }
  }
  store_accumulator<1>(sMine, rS, row, col, 1.0f);
  if (!whole &&
      !Warps::
          kMasksApart) {  // there: before it is stored, the products' registers are wanted, and the way of whole tiles is slower
    const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32));
    char* mine = sMine.pointer(row + lane / 4, col + lane % 4 * 2);
    for_masked<kM, Warps::kQueries / 8>(p, s, scores, [&](int m, int n, int e) {
      reinterpret_cast<unsigned short*>(mine + (m * 16 + e / 2 * 8) * sMine.kPitchBytes)[n * 8 + e % 2] = 0;
    });
  }
  if (second) {
    ptx::barrier_arrive(kGradientsBarrier, 2 * kHalfThreads);
  } else {
    ptx::barrier_arrive(kPartnerBarrier + sharer, 64);
  }
  if constexpr (kCfg.bulk_dq) {
    if (lane_id() == 0) ptx::cp_async_bulk_wait_group_read();
  }
  ptx::barrier_sync(second ? kSecondHalfBarrier : kFirstHalfBarrier, kHalfThreads);
  load_next();
  product_ab<Warps::kColumnParts>(acc, sMine, row, second ? shared.sQ[stage] : shared.sdO[stage], part * (kN * 8));
  ptx::barrier_sync(second ? kSecondHalfBarrier : kGradientsBarrier, second ? kHalfThreads : 2 * kHalfThreads);
}

// A warp's share of dQ += dS K by bulk copies, through its part of the tile that its half is done with. alone: no other
// block adds, and there are no zeros to add to.
template <BwdConfig kCfg, int kM, int kN>
TESSERA_DEVICE void add_dq_bulk(float* gdQ, const float (&rdQ)[kM][kN][4], BwdSharedMemory<kCfg>& shared, int stage,
                                int warp, int part_row, int part_col, bool alone) {
  constexpr int kPartElems = 16 * 8, kRunElems = kN * kPartElems;
  const bool second = warp >= BwdWarps<kCfg>::kSharers;
  float* staged = reinterpret_cast<float*>(second ? shared.sQ[stage].data : shared.sdO[stage].data) +
                  warp % BwdWarps<kCfg>::kSharers * (kM * kRunElems);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      *reinterpret_cast<float4*>(staged + m * kRunElems + n * kPartElems + lane_id() * 4) =
          make_float4(rdQ[m][n][0], rdQ[m][n][1], rdQ[m][n][2], rdQ[m][n][3]);
    }
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane_id() == 0) {
    float* to = dq_part<kCfg.head_dim>(gdQ, part_row, part_col);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float* run = dq_part<kCfg.head_dim>(to, m, 0);
      const uint32 from = shared_address(staged + m * kRunElems);
      if (alone) {
        ptx::cp_async_bulk_store(run, from, kRunElems * 4);
      } else {
        ptx::cp_reduce_async_bulk_add_f32(run, from, kRunElems * 4);
      }
    }
    ptx::cp_async_bulk_commit_group();
  }
}

// body(tile, whether it is the second), by the same instructions where both have one shape.
template <class First, class Second, class Body>
TESSERA_DEVICE void for_both(First& first, Second& second, Body&& body) {
  if constexpr (First::kCols == Second::kCols) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) body(i == 0 ? first : second, i != 0);
  } else {
    body(first, false), body(second, true);
  }
}

// The keys key0 ... of one KV head and sequence.
template <BwdConfig kCfg>
TESSERA_DEVICE void bwd_keys(const BwdParams& p, BwdSharedMemory<kCfg>& shared, const Sequence& s, int batch,
                             int head_kv, int key0) {
  using Warps = BwdWarps<kCfg>;
  constexpr int kBlockM = kCfg.block_m, kBlockN = kCfg.block_n, kBytes = dtype_bytes(kCfg.dtype);
  constexpr int kM = Warps::kM, kN = Warps::kSlice / 8;
  constexpr bool kOptions = kCfg.score.any() || kCfg.d_bias;
  // Told to be the whole warp's with halves alone, where what depends on it then takes no register of every lane.
  const int thread_warp = static_cast<int>(threadIdx.x) / 32;
  const int warp = Warps::kHalves ? uniform(thread_warp) : thread_warp;
  const int sharer = warp % Warps::kSharers;
  const int warp_key = sharer / Warps::kColumnParts * (kM * 16), part = sharer % Warps::kColumnParts;
  const int warp_query = part * Warps::kQueries;
  const bool has_scores = Warps::kQueryParts == Warps::kColumnParts || part < Warps::kQueryParts;

  // 1. The tiles of queries that see some of the keys, of each query head, and the queries that see all of them.
  const KeyRange seeing_all = seeing_queries(p, s, key0 + kBlockN - 1, key0);
  const KeyRange queries = seeing_queries(p, s, key0, min(key0 + kBlockN, s.sk) - 1);
  const int first_tile = queries.low / kBlockM;
  const int tiles = queries.low <= queries.high ? queries.high / kBlockM - first_tile + 1 : 0;
  const int slot0 = query_slot<kBlockM>(p, batch);

  // 2. K and V: global -> shared, with the first tiles of Q and dO.
  const auto load_keys = [&](auto& tile, const RowTensor& tensor, int columns) {
    const int64 row = static_cast<int64>(s.k_begin) + key0;
    const int count = min(s.sk - key0, kBlockN);
    constexpr bool kOnce = !Warps::kTurns && !Warps::kMasksApart;  // with masks apart few instructions are no aim
    load_rows<kCfg, kCfg.warps, kOnce>(tile, tensor, batch, head_kv, row, count, columns);
  };
  const auto load_queries = [&](auto& tile, const RowTensor& tensor, const QueryStep& step, int columns) {
    const int row0 = step.tile * kBlockM;
    load_rows<kCfg, Warps::kSharers>(tile, tensor, batch, step.head, static_cast<int64>(s.q_begin) + row0,
                                     min(s.sq - row0, kBlockM), columns);
  };
  const auto load_step = [&](int stage, const QueryStep& step) {
    if constexpr (Warps::kHalves) {  // who adds to dQ from the place of a tile loads it
      const bool second = warp >= Warps::kSharers;
      load_queries(second ? shared.sQ[stage] : shared.sdO[stage], second ? p.q : p.d_o, step, p.head_dim);
    } else if constexpr (Warps::kTurns ||
                         kCfg.stages > 1) {  // written out: the loop takes registers of the products beside
      load_queries(shared.sQ[stage], p.q, step, p.head_dim);
      if constexpr (!Warps::kTurns) load_queries(shared.sdO[stage], p.d_o, step, p.head_dim_v);
    } else {
      for_both(shared.sQ[stage], shared.sdO[stage], [&](auto& tile, bool d_o) {
        load_queries(tile, d_o ? p.d_o : p.q, step, d_o ? p.head_dim_v : p.head_dim);
      });
    }
    const int64 stats = static_cast<int64>(step.head * p.q_slots + slot0 + step.tile) * kBlockM;
    const int thread = static_cast<int>(threadIdx.x), at = thread % (kBlockM / 4) * 4;  // 16 bytes a thread
    if (thread < kBlockM / 4) {
      ptx::cp_async_cg_16(shared_address(shared.row_lse_log2[stage] + at), p.row_lse_log2 + stats + at, 16);
    } else if (thread < kBlockM / 2) {
      ptx::cp_async_cg_16(shared_address(shared.row_delta[stage] + at), p.row_delta + stats + at, 16);
    }
  };
  QueryStep next{head_kv * p.group, first_tile};  // to be loaded
  const auto load_next = [&](int stage) {
    if (tiles > 0 && next.head < (head_kv + 1) * p.group) {
      load_step(stage, next);
      next.advance(first_tile, tiles);
    }
    ptx::cp_async_commit_group();  // an empty one keeps the count
  };
  // Other tiles in the place of those that everybody is done with, there for everybody.
  [[maybe_unused]] const auto take_turns = [](auto&& load) {
    __syncthreads();
    load();
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
  };
  constexpr int kAhead = kCfg.stages > 1 ? kCfg.stages - 1 : 1;  // tiles under way while one is multiplied; one: none
  if (tiles > 0) {
    if constexpr (Warps::kTurns) {
      load_keys(shared.sK, p.k, p.head_dim);
    } else {
      for_both(shared.sK, shared.sV,
               [&](auto& tile, bool v) { load_keys(tile, v ? p.v : p.k, v ? p.head_dim_v : p.head_dim); });
    }
  }
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) load_next(stage);

  // 3. For every one of those tiles.
  float rdK[Warps::kHalves ? 1 : kM][Warps::kHalves ? 2 : Warps::kDK][4], rdV[kM][Warps::kDV][4];
  clear(rdK);
  clear(rdV);
  int stage = 0;
  QueryStep step{head_kv * p.group, first_tile};
  if constexpr (Warps::kHalves) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // the first tiles are there
  }
  const auto seen_whole = [&](int row0) { return row0 >= seeing_all.low && row0 + kBlockM - 1 <= seeing_all.high; };
  // Entries of bias and mask, of the next slice of a tile that all of its queries see whole.
  using Entries = BwdBiasMask<kCfg, kM, kN>;
  [[maybe_unused]] Entries entries;
  [[maybe_unused]] const auto load_next_bias_mask = [&](const QueryStep& at, int slice) {
    const int row0 = at.tile * kBlockM;
    if (!has_scores || p.entry_keys == 1 || !seen_whole(row0)) return;
    load_bias_mask<kCfg, kM, kN>(
        entries, p, s, ScoreTile{batch, at.head, row0 + warp_query + slice, key0 + warp_key, nullptr, nullptr});
  };
  if constexpr (Entries::kTaken) {
    if (tiles > 0) load_next_bias_mask(step, 0);
  }
  for (int left = tiles * p.group; left > 0; --left) {
    if constexpr (!Warps::kHalves) {
      ptx::cp_async_wait_group<kAhead - 1>();
      __syncthreads();  // the tile is there for everybody, and everybody is done with the one before
      if constexpr (kCfg.stages > 1) load_next(stage == 0 ? kAhead : stage - 1);
    }
    const int row0 = step.tile * kBlockM;
    const bool whole = seen_whole(row0);
    const auto score_tile = [&](int col) {
      return ScoreTile{batch,
                       step.head,
                       row0 + col,
                       key0 + warp_key,
                       shared.row_lse_log2[stage] + col,
                       shared.row_delta[stage] + col};
    };

    //    S^T = K Q^T, dP^T = V dO^T
    if constexpr (Warps::kHalves) {
      multiply_halves<kCfg>(rdV, p, s, score_tile(warp_query), shared, stage, warp, whole, [&] {
        if (left > 1) {
          QueryStep following = step;
          following.advance(first_tile, tiles);
          load_step(1 - stage, following);
        }
      });
      // The next tiles are waited for here: after its additions to dQ a thread would wait for these too. The first half
      // may then begin the next step while the second is at this one's dQ.
      ptx::cp_async_wait_all();
      if (warp >= Warps::kSharers) ptx::barrier_arrive(kQueriesBarrier, kCfg.warps * 32);
    } else {
#pragma unroll 1
      for (int slice = 0; slice < Warps::kQueries; slice += Warps::kSlice) {
        const int col = warp_query + slice;  // of the tile's queries
        const ScoreTile scores = score_tile(col);
        [[maybe_unused]] float bias_sum[kM][2] = {};
        float rP[kM][kN][4], rdS[kM][kN][4];
        if (has_scores) {
          clear(rP);
          product_abt(rP, shared.sK, warp_key, shared.sQ[stage], col);
          if constexpr (!kOptions) probabilities<false>(p, s, scores, rP);
        }
        if constexpr (Warps::kTurns) {
          take_turns([&] {
            load_keys(shared.sV, p.v, p.head_dim_v);
            load_queries(shared.sdO[stage], p.d_o, step, p.head_dim_v);
          });
        }
        if (has_scores) {
          clear(rdS);
          product_abt(rdS, shared.sV, warp_key, shared.sdO[stage], col);

          //    P^T = exp(S^T - LSE), dS^T = P^T o (dP^T - delta)
          if constexpr (kOptions) {
            if constexpr (!kCfg.score.entries()) {
              differentiate_options<kCfg, true>(p, s, scores, entries, rP, rdS, bias_sum);
            } else if (Entries::kTaken && whole && p.entry_keys > 1) {
              if constexpr (Entries::kTaken) entries.transpose();
              differentiate_options<kCfg, Entries::kTaken>(p, s, scores, entries, rP, rdS, bias_sum);
            } else {
              differentiate_options<kCfg, false>(p, s, scores, entries, rP, rdS, bias_sum);
            }
            if constexpr (Entries::kTaken) {
              if (slice + Warps::kSlice < Warps::kQueries) {
                load_next_bias_mask(step, slice + Warps::kSlice);
              } else if (left > 1) {
                QueryStep following = step;
                following.advance(first_tile, tiles);
                load_next_bias_mask(following, 0);
              }
            }
          } else {
            score_gradients<false>(p, s, scores, rdS, [&](int m, int n, int half) {
              return make_float2(rP[m][n][2 * half], rP[m][n][2 * half + 1]);
            });
          }
          if constexpr (!kCfg.score.entries()) {
            if (!whole) {
              for_masked<kM, kN>(p, s, scores, [&](int m, int n, int e) { rP[m][n][e] = rdS[m][n][e] = 0.0f; });
            }
          }
          store_accumulator<1>(shared.sScores[0], rdS, warp_key, col, 1.0f);
          if constexpr (Warps::kExchange) store_accumulator<1>(shared.sScores[1], rP, warp_key, col, 1.0f);
        }
        if constexpr (kCfg.d_bias) {
          if (p.d_bias.row == 0) add_bias_sums<kCfg, Warps::kQueryParts>(p, s, scores, part, bias_sum);
        }

        //    dV += P^T dO, dK += dS^T Q
        if constexpr (!Warps::kExchange) {
          product_pb(rdV, rP, shared.sdO[stage], col);
          product_pb(rdK, rdS, shared.sQ[stage], col);
        }
      }
      __syncthreads();  // everybody's scores are there
      if constexpr (Warps::kExchange) {
        product_ab<Warps::kColumnParts>(rdV, shared.sScores[1], warp_key, shared.sdO[stage], part * (Warps::kDV * 8));
        if constexpr (Warps::kTurns) {
          take_turns([&] {
            load_keys(shared.sK, p.k, p.head_dim);
            load_queries(shared.sQ[stage], p.q, step, p.head_dim);
          });
        }
        product_ab<Warps::kColumnParts>(rdK, shared.sScores[0], warp_key, shared.sQ[stage], part * (Warps::kDK * 8));
        if constexpr (kCfg.stages <= 1) __syncthreads();  // everybody is done with the tile
      }
    }
    if constexpr (kCfg.stages <= 1) load_next(0);

    //    dQ += dS K, in global memory; deterministic: one block after the other, in the order of their keys
    const int group = warp % Warps::kQueryGroups, columns = warp / Warps::kQueryGroups;
    float rdQ[Warps::kQM][Warps::kQN][4];
    clear(rdQ);
    product_atb<Warps::kQParts>(rdQ, shared.sScores[0], group * (Warps::kQM * 16), shared.sK,
                                columns * (Warps::kQN * 8));
    if constexpr (Warps::kHalves) {
      if (warp < Warps::kSharers) ptx::barrier_arrive(kOutputsBarrier, kCfg.warps * 32);
    }
    const int slot = step.head * p.q_slots + slot0 + step.tile;
    if constexpr (kCfg.deterministic) {
      const int first_key = visible_keys(p, s, row0).low;     // that some of the tile's queries see
      const int turn = key0 / kBlockN - first_key / kBlockN;  // blocks that see this tile before me
      if (threadIdx.x == 0) {
        while (ptx::ld_acquire_s32(p.turn + slot) < turn) {
        }
      }
      __syncthreads();
    }
    float* gdQ = p.acc_dq + static_cast<int64>(slot) * (kBlockM * kCfg.head_dim);
    if constexpr (kCfg.bulk_dq) {
      const bool alone = one_block_adds<kBlockM, kBlockN>(p, s, row0);
      add_dq_bulk<kCfg>(gdQ, rdQ, shared, stage, warp, group * Warps::kQM, columns * Warps::kQN, alone);
    } else {
#pragma unroll
      for (int m = 0; m < Warps::kQM; ++m)
#pragma unroll
        for (int n = 0; n < Warps::kQN; ++n) {
          if (beyond<kCfg.head_dim, Warps::kQParts, Warps::kQN>(columns * (Warps::kQN * 8), n)) break;
          float* part_dq = dq_part<kCfg.head_dim>(gdQ, group * Warps::kQM + m, columns * Warps::kQN + n);
          dq_add(part_dq, lane_id(), rdQ[m][n]);
        }
    }
    if constexpr (kCfg.deterministic) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) ptx::red_release_add_s32(p.turn + slot, 1);
    }

    if constexpr (Warps::kHalves) {
      ptx::barrier_sync(warp < Warps::kSharers ? kQueriesBarrier : kOutputsBarrier, kCfg.warps * 32);
    }

    step.advance(first_tile, tiles);
    stage = stage + 1 == shared.kStages ? 0 : stage + 1;
  }

  // 4. dK and dV: registers -> shared -> global. Keys behind seqused_k: 0.
  ptx::cp_async_wait_group<0>();
  if constexpr (kCfg.bulk_dq) {
    if (lane_id() == 0) ptx::cp_async_bulk_wait_group_read();  // before the block's shared memory is another's
  }
  __syncthreads();  // nobody reads or fills K and V, whose place they take
  const auto keep_dv = [&] {
    store_accumulator<Warps::kColumnParts>(shared.sV, rdV, warp_key, part * (Warps::kDV * 8),
                                           kCfg.score.dropout ? p.dropout_scale : 1.0f);
  };
  if constexpr (Warps::kHalves) {
    const bool second = warp >= Warps::kSharers;
    store_accumulator<Warps::kColumnParts>(second ? shared.sK : shared.sV, rdV, warp_key, part * (Warps::kDV * 8),
                                           second ? p.scale : 1.0f);
  } else {
    store_accumulator<Warps::kColumnParts>(shared.sK, rdK, warp_key, part * (Warps::kDK * 8), p.scale);
    if constexpr (!Warps::kTurns) keep_dv();
  }
  __syncthreads();
  constexpr int kRows = kBlockN / kCfg.warps;  // that a warp stores
  const int count = min(s.k_rows - key0, kBlockN);
  const auto store_keys = [&](auto& tile, const RowTensor& tensor, int columns, int aligned) {
    const int64 key = static_cast<int64>(s.k_begin) + key0;
    char* to =
        static_cast<char*>(tensor.data) + (tensor.batch * batch + tensor.row * key + tensor.head * head_kv) * kBytes;
    store_rows<kRows>(tile, warp * kRows, count, columns, aligned,
                      [&](int row) { return to + tensor.row * kBytes * row; });
  };
  if constexpr (Warps::kTurns) {
    store_keys(shared.sK, p.d_k, p.head_dim, p.d_k_aligned);
    __syncthreads();  // dK is read
    keep_dv();
    __syncthreads();
    store_keys(shared.sV, p.d_v, p.head_dim_v, p.d_v_aligned);
  } else {
    for_both(shared.sK, shared.sV, [&](auto& tile, bool v) {
      store_keys(tile, v ? p.d_v : p.d_k, v ? p.head_dim_v : p.head_dim, v ? p.d_v_aligned : p.d_k_aligned);
    });
  }
}

template <BwdConfig kCfg>
TESSERA_DEVICE void bwd_sm80(const BwdParams& p) {
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<BwdSharedMemory<kCfg>*>(shared_memory);

  // Block -> tile of keys, KV head, sequence. Under a causal mask the first keys are seen by the most queries and come
  // first. Deterministic: in the order in which blocks start, so that whoever is waited for is running.
  constexpr bool kOwns = kCfg.deterministic && kCfg.d_bias;
  int rest = static_cast<int>(blockIdx.x);
  if constexpr (kCfg.deterministic) {
    if (threadIdx.x == 0) shared.ticket = atomicAdd(p.ticket, 1);
    __syncthreads();
    rest = shared.ticket;
  }
  const int slot = rest % p.tiles;
  rest /= p.tiles;
  const int owners = kOwns ? p.heads_kv / p.owned_heads : p.heads_kv;
  SequenceHead first = sequence_head < kOwns ? ScoreConfig{} : kCfg.score > (p, rest, owners);
  if constexpr (kOwns) first = {first.batch * p.owned_batches, first.head * p.owned_heads};

  // One pair of both, or, where several share entries of a deterministic dBias, all of them in their order.
  for (int owned = 0; owned < (kOwns ? p.owned_batches * p.owned_heads : 1); ++owned) {
    if (owned > 0) __syncthreads();  // everybody is done with shared memory
    int batch = first.batch + (kOwns ? owned / p.owned_heads : 0), tile = slot;
    if (p.cu_seqlens_k && (!kOwns || p.owned_batches == 1)) {
      batch = find_sequence<kCfg.block_n>(p, p.cu_seqlens_k, p.cu_seqlens_k_stride, p.rows_k, 1, slot);
      tile = tile_at_slot<kCfg.block_n>(p, p.cu_seqlens_k, p.cu_seqlens_k_stride, p.rows_k, 1, slot, batch);
    }
    const Sequence s = load_sequence(p, batch);
    const int64 key0 = static_cast<int64>(tile) * kCfg.block_n;
    if (key0 >= s.k_rows) continue;
    bwd_keys<kCfg>(p, shared, s, batch, first.head + (kOwns ? owned % p.owned_heads : 0), static_cast<int>(key0));
  }
}

}  // namespace tessera
