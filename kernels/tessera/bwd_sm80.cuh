// Backward: dQ, dK, dV (and dBias) from Q, K, V, dO, LSE and delta, FlashAttention-2's algorithm 2, by mma.sync and
// cp.async: on every GPU from Ampere on, and with every option there is.
//
//   P = exp(S - LSE)   dV = P^T dO   dP = dO V^T   dS = P o (dP - delta)   dQ = scale dS K   dK = scale dS^T Q
//
// Grid: one block for each tile of block_n keys and KV head, which passes over the queries of all of its query heads,
// so that dK and dV gather in registers; dQ gathers in float32 in global memory. Scores are held transposed, a warp's
// rows being keys: so P^T and dS^T are operands from registers. Where dK and dV of a warp's keys do not fit into its
// registers, several warps have the same keys: each computes the scores of a part of the queries and gathers a part of
// the columns, and P^T goes through shared memory. Where K, V, Q and dO do not fit into shared memory, V takes turns
// with K, and dO with Q. bwd_rows.cuh has what goes before and after.
//
// What is hidden has the weight 0, and in a tile that somebody sees it is multiplied all the same: a NaN or infinity in
// a query's dO reaches dV, and one in a key dQ, of hidden neighbours in the tile. Tiles that nobody sees are not read.
#pragma once

#include "tessera/core/query_slots.cuh"
#include "tessera/core/score_gradient.cuh"
#include "tessera/tile/product_shared.cuh"

namespace tessera {

// How the warps share out a tile's products.
template <BwdConfig kCfg>
struct BwdWarps {
  // Scores, dK, dV: warp w has the keys of group w / kColumnParts ...
  static constexpr int kKeyGroups = kCfg.warps < kCfg.block_n / 16 ? kCfg.warps : kCfg.block_n / 16;
  static constexpr int kM = kCfg.block_n / kKeyGroups / 16;
  // ... and there part w % kColumnParts of dK's and dV's columns, and of the queries, as far as these go.
  static constexpr int kColumnParts = kCfg.warps / kKeyGroups;
  static constexpr int kQueryParts = kColumnParts < kCfg.block_m / 16 ? kColumnParts : kCfg.block_m / 16;
  static constexpr int kQueries = kCfg.block_m / kQueryParts;
  static constexpr bool kExchange = kColumnParts > 1;
  static constexpr bool kTurns = kCfg.stages == 0;  // V takes turns with K, and dO with Q

  TESSERA_HOST_DEVICE static constexpr int tiles(int columns, int parts) {  // of 8 columns, an even number
    return (columns / 16 + parts - 1) / parts * 2;
  }
  static constexpr int kDK = tiles(kCfg.head_dim, kColumnParts), kDV = tiles(kCfg.head_dim_v, kColumnParts);

  // Queries whose scores, P^T and dS^T, a warp holds at once, beside its share of dK and dV.
  TESSERA_HOST_DEVICE static constexpr int slice() {
    // Registers for addresses and fragments, of float32 in halves, and for options.
    constexpr int kElsewhere = kCfg.dtype == Dtype::kFloat32 ? 160 : kCfg.score.any() || kCfg.d_bias ? 128 : 95;
    const int most = 65536 / (kCfg.warps * 32 * kCfg.blocks_per_sm);
    const int accumulators = (most < 255 ? most : 255) - kElsewhere;
    int queries = kQueries;
    while (queries > 16 && kM * (4 * (kDK + kDV) + queries) > accumulators) queries /= 2;
    return queries;
  }
  static constexpr int kSlice = slice();

  // dQ: kQueryGroups x the rest, so that the operands' edges, which are what is read, are short.
  TESSERA_HOST_DEVICE static constexpr int query_groups() {
    int best = 1;
    for (int groups = 2; groups <= kCfg.block_m / 16 && groups <= kCfg.warps; groups *= 2) {
      const int now = kCfg.block_m / groups + 8 * tiles(kCfg.head_dim, kCfg.warps / groups);
      const int before = kCfg.block_m / best + 8 * tiles(kCfg.head_dim, kCfg.warps / best);
      if (now <= before) best = groups;
    }
    return best;
  }
  static constexpr int kQueryGroups = query_groups();
  static constexpr int kQM = kCfg.block_m / kQueryGroups / 16;
  static constexpr int kQParts = kCfg.warps / kQueryGroups;  // of the columns
  static constexpr int kQN = tiles(kCfg.head_dim, kQParts);

  static_assert(kM * kKeyGroups * 16 == kCfg.block_n && kKeyGroups * kColumnParts == kCfg.warps, "warps share evenly");
  static_assert(kQueries * kQueryParts == kCfg.block_m && kQueries % 16 == 0, "queries are shared evenly");
  static_assert(kQM * kQueryGroups * 16 == kCfg.block_m, "rows of dQ are shared evenly");
  static_assert(!kTurns || (kExchange && kSlice == kQueries), "scores outlast the tiles that they come from");
  static_assert(kM == 1 || kM % 2 == 0, "a call of Philox decides a group of 32 keys");
};

template <BwdConfig kCfg, bool kTurns>
struct BwdOperands {
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim> sK;    // at the end dK
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v> sV;  // at the end dV
  SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ[kCfg.stages];
  SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v> sdO[kCfg.stages];
};
template <BwdConfig kCfg>
struct BwdOperands<kCfg, true> {
  union {
    SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim> sK;
    SharedTile<kCfg.dtype, kCfg.block_n, kCfg.head_dim_v> sV;
  };
  union {
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim> sQ[1];
    SharedTile<kCfg.dtype, kCfg.block_m, kCfg.head_dim_v> sdO[1];
  };
};

template <BwdConfig kCfg>
struct BwdSharedMemory : BwdOperands<kCfg, BwdWarps<kCfg>::kTurns> {
  static constexpr int kStages = kCfg.stages > 1 ? kCfg.stages : 1;
  SharedTile<kCfg.dtype, kCfg.block_n, kCfg.block_m> sScores[BwdWarps<kCfg>::kExchange ? 2 : 1];  // dS^T, P^T
  alignas(16) float row_lse_log2[kStages][kCfg.block_m];
  alignas(16) float row_delta[kStages][kCfg.block_m];
  int ticket;
};

// Rows first ... of a tensor's head into a tile; from `count` on zero.
template <BwdConfig kCfg, class Tile>
TESSERA_DEVICE void load_rows(Tile& sTile, const RowTensor& tensor, int batch, int head, int64 first, int count,
                              int columns) {
  constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const char* base =
      static_cast<const char*>(tensor.data) + (tensor.batch * batch + tensor.row * first + tensor.head * head) * kBytes;
  const int64 row_stride = tensor.row * kBytes;
  load_tile<kCfg.aligned, kCfg.warps * 32>(sTile, count, columns * kBytes,
                                           [&](int row) { return base + row_stride * row; });
}

// The keys key0 ... of one KV head and sequence.
template <BwdConfig kCfg>
TESSERA_DEVICE void bwd_keys(const BwdParams& p, BwdSharedMemory<kCfg>& shared, const Sequence& s, int batch,
                             int head_kv, int key0) {
  using Warps = BwdWarps<kCfg>;
  constexpr int kBlockM = kCfg.block_m, kBlockN = kCfg.block_n, kBytes = dtype_bytes(kCfg.dtype);
  constexpr int kM = Warps::kM, kN = Warps::kSlice / 8;
  constexpr bool kOptions = kCfg.score.any() || kCfg.d_bias;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_key = warp / Warps::kColumnParts * (kM * 16), part = warp % Warps::kColumnParts;
  const int warp_query = part * Warps::kQueries;
  const bool has_scores = Warps::kQueryParts == Warps::kColumnParts || part < Warps::kQueryParts;

  // 1. The tiles of queries that see some of the keys, of each query head.
  const KeyRange queries = seeing_queries(p, s, key0, min(key0 + kBlockN, s.sk) - 1);
  const int first_tile = queries.low / kBlockM;
  const int tiles = queries.low <= queries.high ? queries.high / kBlockM - first_tile + 1 : 0;
  const int steps = tiles * p.group;
  const int slot0 = query_slot<kBlockM>(p, batch);

  // 2. K and V: global -> shared, with the first tiles of Q and dO.
  const auto load_keys = [&](auto& tile, const RowTensor& tensor, int columns) {
    const int64 row = static_cast<int64>(s.k_begin) + key0;
    load_rows<kCfg>(tile, tensor, batch, head_kv, row, min(s.sk - key0, kBlockN), columns);
  };
  const auto load_queries = [&](auto& tile, const RowTensor& tensor, int step, int columns) {
    const int row0 = (first_tile + step % tiles) * kBlockM;
    load_rows<kCfg>(tile, tensor, batch, head_kv * p.group + step / tiles, static_cast<int64>(s.q_begin) + row0,
                    min(s.sq - row0, kBlockM), columns);
  };
  const auto load_step = [&](int step, int stage) {
    if (step < steps) {
      load_queries(shared.sQ[stage], p.q, step, p.head_dim);
      if constexpr (!Warps::kTurns) load_queries(shared.sdO[stage], p.d_o, step, p.head_dim_v);
      const int head = head_kv * p.group + step / tiles, tile = first_tile + step % tiles;
      const int64 stats = static_cast<int64>(head * p.q_slots + slot0 + tile) * kBlockM;
      const int thread = static_cast<int>(threadIdx.x), at = thread % (kBlockM / 4) * 4;  // 16 bytes a thread
      if (thread < kBlockM / 4) {
        ptx::cp_async_cg_16(shared_address(shared.row_lse_log2[stage] + at), p.row_lse_log2 + stats + at, 16);
      } else if (thread < kBlockM / 2) {
        ptx::cp_async_cg_16(shared_address(shared.row_delta[stage] + at), p.row_delta + stats + at, 16);
      }
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
  if (steps > 0) {
    load_keys(shared.sK, p.k, p.head_dim);
    if constexpr (!Warps::kTurns) load_keys(shared.sV, p.v, p.head_dim_v);
  }
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) load_step(stage, stage);

  // 3. For every one of those tiles.
  float rdK[kM][Warps::kDK][4], rdV[kM][Warps::kDV][4];
  clear(rdK);
  clear(rdV);
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<kAhead - 1>();
    __syncthreads();  // the tile is there for everybody, and everybody is done with the one before
    if constexpr (kCfg.stages > 1) load_step(step + kAhead, stage == 0 ? kAhead : stage - 1);
    const int head = head_kv * p.group + step / tiles, tile = first_tile + step % tiles;
    const int row0 = tile * kBlockM;

    //    S^T = K Q^T, dP^T = V dO^T
    const TileRange visible = visible_keys(p, s, row0, min(row0 + kBlockM, s.sq) - 1);
#pragma unroll 1
    for (int slice = 0; slice < Warps::kQueries; slice += Warps::kSlice) {
      const int col = warp_query + slice;  // of the tile's queries
      const ScoreTile scores{
          batch, head, row0 + col, key0 + warp_key, shared.row_lse_log2[stage] + col, shared.row_delta[stage] + col};
      [[maybe_unused]] float bias_sum[kM][2] = {};
      float rP[kM][kN][4], rdS[kM][kN][4];
      if (has_scores) {
        clear(rP);
        product_abt(rP, shared.sK, warp_key, shared.sQ[stage], col);
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
          differentiate_options<kCfg>(p, s, scores, rP, rdS, bias_sum);
        } else if (key0 >= visible.all.low && key0 + kBlockN - 1 <= visible.all.high && row0 + kBlockM <= s.sq) {
          differentiate_visible(p, scores, rP, rdS);
        } else {
          differentiate_masked(p, s, scores, rP, rdS);
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
    }

    //    dQ += dS K, in global memory; deterministic: one block after the other, in the order of their keys
    const int group = warp % Warps::kQueryGroups, columns = warp / Warps::kQueryGroups;
    float rdQ[Warps::kQM][Warps::kQN][4];
    clear(rdQ);
    product_atb<Warps::kQParts>(rdQ, shared.sScores[0], group * (Warps::kQM * 16), shared.sK,
                                columns * (Warps::kQN * 8));
    const int slot = head * p.q_slots + slot0 + tile;
    if constexpr (kCfg.deterministic) {
      const int turn = key0 / kBlockN - visible.some.low / kBlockN;  // blocks that see this tile before me
      if (threadIdx.x == 0) {
        while (ptx::ld_acquire_s32(p.turn + slot) < turn) {
        }
      }
      __syncthreads();
    }
    float* gdQ = p.acc_dq + static_cast<int64>(slot) * (kBlockM * kCfg.head_dim);
#pragma unroll
    for (int m = 0; m < Warps::kQM; ++m)
#pragma unroll
      for (int n = 0; n < Warps::kQN; ++n) {
        if (beyond<kCfg.head_dim, Warps::kQParts, Warps::kQN>(columns * (Warps::kQN * 8), n)) break;
        float* part_dq = dq_part<kCfg.head_dim>(gdQ, group * Warps::kQM + m, columns * Warps::kQN + n);
        dq_add(part_dq, lane_id(), rdQ[m][n]);
      }
    if constexpr (kCfg.deterministic) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) ptx::red_release_add_s32(p.turn + slot, 1);
    }

    if constexpr (kCfg.stages <= 1) {
      __syncthreads();  // everybody is done with the tile
      load_step(step + 1, 0);
    }
    stage = stage + 1 == shared.kStages ? 0 : stage + 1;
  }

  // 4. dK and dV: registers -> shared -> global. Keys behind seqused_k: 0.
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // nobody reads or fills K and V, whose place they take
  const auto keep_dv = [&] {
    store_accumulator<Warps::kColumnParts>(shared.sV, rdV, warp_key, part * (Warps::kDV * 8),
                                           kCfg.score.dropout ? p.dropout_scale : 1.0f);
  };
  store_accumulator<Warps::kColumnParts>(shared.sK, rdK, warp_key, part * (Warps::kDK * 8), p.scale);
  if constexpr (!Warps::kTurns) keep_dv();
  __syncthreads();
  constexpr int kRows = kBlockN / kCfg.warps;  // that a warp stores
  const int count = min(s.k_rows - key0, kBlockN);
  const auto gRow = [&](const RowTensor& tensor, int row) {
    const int64 key = static_cast<int64>(s.k_begin) + key0 + row;
    return static_cast<char*>(tensor.data) + (tensor.batch * batch + tensor.row * key + tensor.head * head_kv) * kBytes;
  };
  store_rows<kRows>(shared.sK, warp * kRows, count, p.head_dim, p.d_k_aligned,
                    [&](int row) { return gRow(p.d_k, row); });
  if constexpr (Warps::kTurns) {
    __syncthreads();  // dK is read
    keep_dv();
    __syncthreads();
  }
  store_rows<kRows>(shared.sV, warp * kRows, count, p.head_dim_v, p.d_v_aligned,
                    [&](int row) { return gRow(p.d_v, row); });
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
  const int first_head = rest % owners * (kOwns ? p.owned_heads : 1);
  const int first_batch = rest / owners * (kOwns ? p.owned_batches : 1);

  // One pair of both, or, where several share entries of a deterministic dBias, all of them in their order.
  for (int owned = 0; owned < (kOwns ? p.owned_batches * p.owned_heads : 1); ++owned) {
    if (owned > 0) __syncthreads();  // everybody is done with shared memory
    int batch = first_batch + (kOwns ? owned / p.owned_heads : 0), tile = slot;
    if (p.cu_seqlens_k && (!kOwns || p.owned_batches == 1)) {
      batch = find_sequence<kCfg.block_n>(p, p.cu_seqlens_k, p.cu_seqlens_k_stride, p.rows_k, 1, slot);
      tile -= slot_begin<kCfg.block_n>(p, p.cu_seqlens_k, p.cu_seqlens_k_stride, p.rows_k, 1, batch);
    }
    const Sequence s = load_sequence(p, batch);
    const int64 key0 = static_cast<int64>(tile) * kCfg.block_n;
    if (key0 >= s.k_rows) continue;
    bwd_keys<kCfg>(p, shared, s, batch, first_head + (kOwns ? owned % p.owned_heads : 0), static_cast<int>(key0));
  }
}

}  // namespace tessera
