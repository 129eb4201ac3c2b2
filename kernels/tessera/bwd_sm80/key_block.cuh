// A block of keys in bwd_sm80: the queries that see it, its warps' parts, its loads and its results.
#pragma once

#include "tessera/attention/backward/rows.cuh"
#include "tessera/attention/backward/sums.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/bwd_sm80/scores.cuh"
#include "tessera/bwd_sm80/shared.cuh"
#include "tessera/tile/shared_tile.cuh"

namespace tessera {

// Loads `count` rows from row `first` of a tensor's head into a tile; the tile's other rows become zero. By kWarps
// warps: the whole block or those of one role.
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

// Calls body(tile, whether it is the second) for both tiles; one copy of the code serves both if their shapes are
// equal.
template <class First, class Second, class Body>
TESSERA_DEVICE void for_both(First& first, Second& second, Body&& body) {
  if constexpr (First::kCols == Second::kCols) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) body(i == 0 ? first : second, i != 0);
  } else {
    body(first, false), body(second, true);
  }
}

// A step of a block: one query tile of one of its query heads; the heads are processed one after another.
struct QueryStep {
  int head, tile;  // tile: index within the sequence

  TESSERA_DEVICE void advance(int first_tile, int tiles) {
    if (++tile == first_tile + tiles) ++head, tile = first_tile;
  }
};

struct SequenceTile {
  int batch, tile;
};

// The keys of a thread block: those from key0 on, of one KV head and sequence.
template <BwdConfig kCfg>
struct KeyBlock {
  using Warps = BwdWarps<kCfg>;
  static constexpr int kBlockM = kCfg.block_m, kBlockN = kCfg.block_n, kBytes = dtype_bytes(kCfg.dtype);

  const BwdParams& p;
  BwdSharedMemory<kCfg>& shared;
  const Sequence& s;
  int batch, head_kv, key0;
  int warp;                   // with the split a uniform value, which needs no register in each lane
  int role_warp;              // index of the warp within its role
  int warp_key, part;         // the warp's first key within the block; which part of the columns it has
  int score_key, warp_query;  // first key of the block and first query of a tile whose scores the warp computes
  bool has_scores;            // whether the warp computes scores: columns may have more parts than queries
  KeyRange seeing_all;        // queries that see all of the keys
  // Query tiles, of each query head, that see some of the keys; slot0: attention/backward/rows.cuh.
  int first_tile, tiles, slot0;

  TESSERA_DEVICE KeyBlock(const BwdParams& p, BwdSharedMemory<kCfg>& shared, const Sequence& s, int batch, int head_kv,
                          int key0)
      : p(p), shared(shared), s(s), batch(batch), head_kv(head_kv), key0(key0) {
    const int thread_warp = static_cast<int>(threadIdx.x) / 32;
    warp = Warps::kSplit ? uniform(thread_warp) : thread_warp;
    role_warp = warp % Warps::kRoleWarps;
    warp_key = role_warp / Warps::kColumnParts * (Warps::kM * 16), part = role_warp % Warps::kColumnParts;
    score_key = warp_key + part / Warps::kQueryParts % Warps::kScoreKeyParts * (Warps::kScoreM * 16);
    warp_query = (Warps::kScoreKeyParts == 1 ? part : part % Warps::kQueryParts) * Warps::kQueries;
    has_scores = Warps::kScoreParts == Warps::kColumnParts || part < Warps::kScoreParts;
    seeing_all = seeing_queries<kCfg.score>(p, s, key0 + kBlockN - 1, key0);
    const KeyRange queries = seeing_queries<kCfg.score>(p, s, key0, min(key0 + kBlockN, s.sk) - 1);
    first_tile = queries.low / kBlockM;
    tiles = queries.low <= queries.high ? queries.high / kBlockM - first_tile + 1 : 0;
    slot0 = query_slot<kBlockM>(p, batch);
  }

  // With the split: whether the warp computes dP and dK instead of S and dV.
  TESSERA_DEVICE bool is_dp_warp() const { return warp >= Warps::kRoleWarps; }
  // Whether all queries of the tile see all keys of the block.
  TESSERA_DEVICE bool full(int row0) const { return row0 >= seeing_all.low && row0 + kBlockM - 1 <= seeing_all.high; }

  // The coordinates, LSE and delta of the warp's scores from column `col` of the tile on.
  TESSERA_DEVICE ScoreTile score_tile(const QueryStep& step, int row0, int col, int stage) const {
    const float *lse_log2 = shared.row_lse_log2[stage] + col, *delta = shared.row_delta[stage] + col;
    return {batch, step.head, row0 + col, key0 + score_key, lse_log2, delta};
  }

  // ---- global -> shared ----

  template <class Tile>
  TESSERA_DEVICE void load_keys(Tile& tile, const RowTensor& tensor, int columns) const {
    const int64 row = static_cast<int64>(s.k_begin) + key0;
    const int count = min(s.sk - key0, kBlockN);
    constexpr bool kOnce = !Warps::kOverlaid && !Warps::kMasksApart;  // With kMasksApart, code size is no concern.
    load_rows<kCfg, kCfg.warps, kOnce>(tile, tensor, batch, head_kv, row, count, columns);
  }
  template <class Tile>
  TESSERA_DEVICE void load_queries(Tile& tile, const RowTensor& tensor, const QueryStep& step, int columns) const {
    const int row0 = step.tile * kBlockM;
    load_rows<kCfg, Warps::kRoleWarps>(tile, tensor, batch, step.head, static_cast<int64>(s.q_begin) + row0,
                                       min(s.sq - row0, kBlockM), columns);
  }
  // Loads LSE and delta of a query tile.
  TESSERA_DEVICE void load_stats(int stage, const QueryStep& step) const {
    const int64 stats = static_cast<int64>(step.head * p.q_slots + slot0 + step.tile) * kBlockM;
    const int thread = static_cast<int>(threadIdx.x), at = thread % (kBlockM / 4) * 4;  // 16 bytes for each thread
    if (thread < kBlockM / 4) {
      ptx::cp_async_cg_16(shared_address(shared.row_lse_log2[stage] + at), p.row_lse_log2 + stats + at, 16);
    } else if (thread < kBlockM / 2) {
      ptx::cp_async_cg_16(shared_address(shared.row_delta[stage] + at), p.row_delta + stats + at, 16);
    }
  }

  // ---- shared -> global ----

  // The number of keys whose dK and dV the block writes; past seqused_k they are 0.
  TESSERA_DEVICE int keys_to_store() const { return min(s.k_rows - key0, kBlockN); }
  // Stores dK or dV.
  template <class Tile>
  TESSERA_DEVICE void store_keys(Tile& tile, const RowTensor& tensor, int count, int columns, int aligned) const {
    constexpr int kRows = kBlockN / kCfg.warps;  // rows that a warp stores
    const int64 key = static_cast<int64>(s.k_begin) + key0;
    char* to =
        static_cast<char*>(tensor.data) + (tensor.batch * batch + tensor.row * key + tensor.head * head_kv) * kBytes;
    store_rows<kRows>(tile, warp * kRows, count, columns, aligned,
                      [&](int row) { return to + tensor.row * kBytes * row; });
  }
  // Writes `factor` times a warp's accumulators to the sums of dV (kValues) or dK.
  template <bool kValues, int kM, int kN>
  TESSERA_DEVICE void write_sums(const float (&acc)[kM][kN][4], float factor) const {
    const GradientSum sum{kValues ? p.d_v : p.d_k, kValues ? p.head_dim_v : p.head_dim,
                          kValues ? p.d_v_aligned : p.d_k_aligned, p.accumulate};
    reload_memory();  // the sequence is loaded again: the loop has no registers for what only this needs
    const Sequence keys = load_sequence(p, batch);
    const int first = key0 + warp_key, count = keys.k_rows - first, used = keys.sk - first;
    const GradientRows rows{batch, head_kv, static_cast<int64>(keys.k_begin) + first, part * (kN * 8), count, used};
#pragma unroll
    for (int m = 0; m < kM; ++m) sum.template write<Warps::kLaneOrder>(rows, acc[m], factor, m * 16);
  }
  TESSERA_DEVICE void store_dk_dv() const {
    const int count = keys_to_store();
    for_both(shared.sK, shared.sV, [&](auto& tile, bool v) {
      store_keys(tile, v ? p.d_v : p.d_k, count, v ? p.head_dim_v : p.head_dim, v ? p.d_v_aligned : p.d_k_aligned);
    });
  }
};

// Deterministic: the number of blocks that add to a step's tile of dQ before this one, in the order of their keys, if
// all blocks do that the tile sees by position.
template <BwdConfig kCfg>
TESSERA_DEVICE int adders_by_position(const KeyBlock<kCfg>& b, const QueryStep& step) {
  const int first_key = visible_keys<kCfg.score>(b.p, b.s, step.tile * kCfg.block_m).low;
  return b.key0 / kCfg.block_n - first_key / kCfg.block_n;
}

// The steps of a block: all query tiles that see some of its keys by position, for each head of the group.
template <BwdConfig kCfg>
struct QuerySteps {
  using Step = QueryStep;
  TESSERA_DEVICE static int count(const KeyBlock<kCfg>& b) { return b.tiles * b.p.group; }
  TESSERA_DEVICE static Step first(const KeyBlock<kCfg>& b) { return {b.head_kv * b.p.group, b.first_tile}; }
  TESSERA_DEVICE static void advance(const KeyBlock<kCfg>& b, Step& step) { step.advance(b.first_tile, b.tiles); }
  TESSERA_DEVICE static int adders_before(const KeyBlock<kCfg>& b, const Step& step) {
    return adders_by_position(b, step);
  }
};
// With lists of a program's mask: the tiles of each head's list. If there are no lists, or the head's was not made, all
// that see some of the keys by position.
template <BwdConfig kCfg>
requires(kCfg.score.program) struct QuerySteps<kCfg> {
  struct Step : QueryStep {
    int entry;  // of the head's list, or number from the block's first tile on
  };
  TESSERA_DEVICE static int count(const KeyBlock<kCfg>& b) {
    int steps = 0;
    for (int n = 0; n < b.p.group; ++n) steps += count(b, list(b, b.head_kv * b.p.group + n));
    return steps;
  }
  TESSERA_DEVICE static Step first(const KeyBlock<kCfg>& b) {
    Step step{{b.head_kv * b.p.group, 0}, 0};
    find(b, step);
    return step;
  }
  TESSERA_DEVICE static void advance(const KeyBlock<kCfg>& b, Step& step) {
    ++step.entry;
    find(b, step);
  }
  TESSERA_DEVICE static int adders_before(const KeyBlock<kCfg>& b, const Step& step) {
    const ListHead of_head = list(b, step.head);
    if (of_head.count == kListNotMade) return adders_by_position(b, step);
    return of_head.entries[step.entry + static_cast<const BwdSm80Params&>(b.p).dq_order.beside];
  }

 private:
  TESSERA_DEVICE static ListHead list(const KeyBlock<kCfg>& b, int head) {
    const BlockLists& lists = static_cast<const BwdSm80Params&>(b.p).lists;
    if (!lists.words) return {kListNotMade, nullptr};
    return list_head<true>(lists, lists.at(b.batch, head, listed_key_tile<kCfg.block_n>(b.p, b.batch, b.key0)));
  }
  TESSERA_DEVICE static int count(const KeyBlock<kCfg>& b, const ListHead& list) {
    return list.count == kListNotMade ? b.tiles : list.count;
  }
  // Finds the tile of the step's entry or, after a head's last entry, of the next head's first one.
  TESSERA_DEVICE static void find(const KeyBlock<kCfg>& b, Step& step) {
    for (; step.head < (b.head_kv + 1) * b.p.group; ++step.head, step.entry = 0) {
      const ListHead of_head = list(b, step.head);
      if (step.entry >= count(b, of_head)) continue;
      step.tile =
          of_head.count == kListNotMade ? b.first_tile + step.entry : list_block<true>(of_head.entries[step.entry]);
      return;
    }
  }
};

// The tile scheduler: the key tile, KV head and sequence of this thread block. Under a causal mask the first keys are
// seen by the most queries and come first. Deterministic: in the order in which thread blocks start, so that a block
// waits only for running ones. A thread block has one pair of KV head and sequence or, if several pairs add to the same
// elements of a deterministic dBias, all of these pairs, in order.
template <BwdConfig kCfg>
struct KeyBlockScheduler {
  static constexpr bool kOwns = kCfg.deterministic && kCfg.d_bias;
  // With kOwns, the order of pairs that the bias prefers does not apply.
  static constexpr ScoreConfig kPairScore = kOwns ? ScoreConfig{} : kCfg.score;
  int slot;
  SequenceHead first;  // the first of the block's pairs

  TESSERA_DEVICE KeyBlockScheduler(const BwdParams& p, BwdSharedMemory<kCfg>& shared) {
    int rest = static_cast<int>(blockIdx.x);
    if constexpr (kCfg.deterministic) {
      if (threadIdx.x == 0) shared.ticket = atomicAdd(p.ticket, 1);
      __syncthreads();
      rest = shared.ticket;
    }
    slot = rest % p.tiles;
    rest /= p.tiles;
    const int owners = kOwns ? p.heads_kv / p.owned_heads : p.heads_kv;
    first = sequence_head<kPairScore>(p, rest, owners);
    if constexpr (kOwns) first = {first.batch * p.owned_batches, first.head * p.owned_heads};
  }
  TESSERA_DEVICE static int pairs(const BwdParams& p) { return kOwns ? p.owned_batches * p.owned_heads : 1; }
  TESSERA_DEVICE int head(const BwdParams& p, int pair) const {
    return first.head + (kOwns ? pair % p.owned_heads : 0);
  }
  // The pair's sequence, and the index of the key tile in it.
  TESSERA_DEVICE SequenceTile sequence(const BwdParams& p, int pair) const {
    SequenceTile at{first.batch + (kOwns ? pair / p.owned_heads : 0), slot};
    if (p.keys.begins && (!kOwns || p.owned_batches == 1)) {
      at.batch = find_sequence<kCfg.block_n>(p, p.keys.begins, p.keys.begins_stride, p.keys_limit, 1, slot);
      at.tile = tile_at_slot<kCfg.block_n>(p, p.keys.begins, p.keys.begins_stride, p.keys_limit, 1, slot, at.batch);
    }
    return at;
  }
};

// Calls multiply(block) for each block of keys of this thread block.
template <BwdConfig kCfg, class Multiply>
TESSERA_DEVICE void for_key_blocks(const BwdParams& p, Multiply&& multiply) {
  static_assert(has_bwd_layout<kCfg>(), "shared memory lies where the host has it");
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<BwdSharedMemory<kCfg>*>(shared_memory);
  const KeyBlockScheduler<kCfg> scheduler(p, shared);
  for (int pair = 0; pair < scheduler.pairs(p); ++pair) {
    if (pair > 0) __syncthreads();  // all warps have finished using shared memory
    const SequenceTile at = scheduler.sequence(p, pair);
    const Sequence s = load_sequence<true, false, kCfg.score>(p, at.batch);
    const int64 key0 = static_cast<int64>(at.tile) * kCfg.block_n;
    if (key0 >= s.k_rows) continue;
    multiply(KeyBlock<kCfg>(p, shared, s, at.batch, scheduler.head(p, pair), static_cast<int>(key0)));
  }
}

}  // namespace tessera
