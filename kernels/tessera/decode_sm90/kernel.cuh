// Forward with few query rows and many keys (decoding): O = softmax(scale Q K^T + ...) V and LSE in one launch. Bound by the
// reading of K and V, or, where they are few, by the way from the launch to the last store.
//
// Grid: as many blocks as the GPU holds, each with an equal share of all tiles of keys (schedule.cuh), whatever the sequences'
// lengths. Block: `warps` warps that share nothing but the block's rows: each has every warps-th tile of keys, a ring of its own
// that it fills itself (loads.cuh), and its own online softmax; they meet only where a work tile ends (merge.cuh). So the reading
// never stops: while warps wait at a barrier or merge, the next work tile's K and V are under way. Shared memory: DecodeShared. Its
// page, with what was measured: docs/reference/kernels/decode_sm90.md.
#pragma once

#include "tessera/attention/score/fragment.cuh"
#include "tessera/attention/tree_mask.cuh"
#include "tessera/attention/unowned_rows.cuh"
#include "tessera/decode_sm90/loads.cuh"
#include "tessera/decode_sm90/merge.cuh"
#include "tessera/ptx/griddepcontrol.cuh"

namespace tessera {

// Of Q: a row of a segment. Rows and columns that there are not are 0.
template <DecodeSm90Config kCfg>
struct QueryRow {
  static constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const char* from;  // NULL: there is none

  TESSERA_DEVICE QueryRow(const DecodeSm90Params& p, const Segment& segment, int local) : from(nullptr) {
    if (local >= segment.rows) return;
    const DecodeRows rows(p, segment.head_kv);
    const int row = segment.row0 + local;
    from = static_cast<const char*>(p.q.data) +
           (p.q.batch * segment.batch + p.q.row * (static_cast<int64>(segment.s.q_begin) + rows.query(p, row)) +
            p.q.head * rows.head(p, row)) *
               kBytes;
  }
  // Columns col, an even number, and the next.
  TESSERA_DEVICE uint32 pair(const DecodeSm90Params& p, int col) const {
    if (!from || col >= p.head_dim) return 0;
    const uint32 both = *reinterpret_cast<const uint32*>(from + col * kBytes);
    return col + 1 < p.head_dim ? both : both & 0xffffu;
  }
};

// Q of a segment's rows, the A operand: in registers as it is multiplied, or in shared memory.
template <DecodeSm90Config kCfg, bool kInShared = decode_q_in_shared(kCfg)>
struct DecodeQueries {
  uint32 fragments[kCfg.head_dim / 16][4];

  // Global -> registers.
  TESSERA_DEVICE void load(const DecodeSm90Params& p, const Segment& segment) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryRow<kCfg> row(p, segment, half * 8 + lane_row());
#pragma unroll
      for (int k = 0; k < kCfg.head_dim / 16; ++k)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          fragments[k][part * 2 + half] = row.pair(p, k * 16 + part * 8 + lane_col());
        }
    }
  }

  // rS = Q K^T.
  template <class Tile>
  TESSERA_DEVICE void product(float (&rS)[1][kCfg.block_n / 8][4], const Tile& sK) const {
    constexpr int kPairs = kCfg.block_n / 16, kSteps = kCfg.head_dim / 16;
    clear(rS);
    for_fragments<kSteps * kPairs>([&](int i, uint32(&b)[4]) { load_b_pair(b, sK, i % kPairs * 16, i / kPairs * 16); },
                                   [&](int i, const uint32(&b)[4]) {
                                     const int k = i / kPairs, n = i % kPairs * 2;
                                     mma_16bit<kCfg.dtype>(rS[0][n], fragments[k], b[0], b[1]);
                                     mma_16bit<kCfg.dtype>(rS[0][n + 1], fragments[k], b[2], b[3]);
                                   });
  }
};

template <DecodeSm90Config kCfg>
struct DecodeQueries<kCfg, true> {
  SharedTile<kCfg.dtype, kDecodeRows, kCfg.head_dim> sQ;

  // By all threads, none of which reads what was there before.
  TESSERA_DEVICE void load(const DecodeSm90Params& p, const Segment& segment) {
    constexpr int kPairs = kCfg.head_dim / 2;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < kDecodeRows * kPairs; i += kCfg.warps * 32) {
      const int local = i / kPairs, col = i % kPairs * 2;
      *reinterpret_cast<uint32*>(sQ.pointer(local, col)) = QueryRow<kCfg>(p, segment, local).pair(p, col);
    }
    __syncthreads();
  }
  template <class Tile>
  TESSERA_DEVICE void product(float (&rS)[1][kCfg.block_n / 8][4], const Tile& sK) const {
    clear(rS);
    product_abt(rS, sQ, 0, sK, 0);
  }
};

template <DecodeSm90Config kCfg>
struct DecodeShared {
  DecodeStage<kCfg> stages[kCfg.warps][kCfg.stages];
  DecodeMergeBuffers<kCfg> merge;
  alignas(16) char queries[decode_q_in_shared(kCfg) ? padded_bytes(kCfg.dtype, kDecodeRows, kCfg.head_dim) : 16];
  Barrier full[kCfg.bulk ? kCfg.warps * kCfg.stages * 2 : 1];  // of K and of V
  Segment parted[2];         // of work tiles of which other blocks have parts, too: the share's first and last
  int scan[kCfg.warps + 4];  // the last two: whether this block merges these
};

// Scores of a tile from key key0 on -> P in place, O rescaled where the stale max is replaced. `full`: all rows see all of its keys.
template <DecodeSm90Config kCfg, class Queries, class Tile>
TESSERA_DEVICE void score_stage(float (&rS)[1][kCfg.block_n / 8][4], OnlineSoftmax<1>& softmax,
                                float (&rO)[1][kCfg.head_dim / 8][4], const Queries& queries, const Tile& sK,
                                const DecodeSm90Params& p, const Segment& segment, int key0, bool full) {
  constexpr ScoreConfig kScore = kCfg.score;
  const DecodeRows rows(p, segment.head_kv);
  const float unit = score_unit<kScore>(p);
  // ALiBi may raise the scores from tile to tile, so that each tile would be done twice.
  bool stale_max = full && softmax.ready && !kScore.alibi;
  for (;; stale_max = false) {
    queries.product(rS, sK);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = segment.row0 + min(half * 8 + lane_row(), segment.rows - 1);
      if constexpr (kScore.scaled()) {
        const ScoreRow<kScore> score_row(p, segment.s, segment.batch, rows.head(p, row), rows.query(p, row));
        BiasMaskFragment<kScore, 2, kCfg.block_n / 8, false> none;
        none.apply(rS[0], half, half, p, segment.s, score_row, key0);
      }
      if (!full) {
        const KeyRange keys = visible_keys<kScore>(p, segment.s, rows.query(p, row));
        mask_outside(rS[0], half, keys.low - key0 - lane_col(), keys.high - key0 - lane_col());
        if constexpr (kScore.tree_mask) {
          mask_tree<false>(rS[0], half, p, segment.s, segment.batch, rows.query(p, row), key0);
        }
      }
    }
    if (!stale_max) break;
    if (softmax.template try_stale_max<kCfg.dtype>(rS, unit)) return;
  }
  softmax.update(rS, unit, rO);
}

// The oldest of a warp's tiles of K or V: 2 stages - 1 came later.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void wait_for_tile(uint32 barrier, int parity) {
  if constexpr (kCfg.bulk) {
    ptx::mbarrier_wait_parity(barrier, parity);
  } else {
    ptx::cp_async_wait_group<2 * kCfg.stages - 1>();
    __syncwarp();
  }
}

template <DecodeSm90Config kCfg>
TESSERA_DEVICE void decode_sm90(const DecodeSm90Params& p) {
  static_assert(sizeof(DecodeShared<kCfg>) == decode_sm90_layout(kCfg).bytes,
                "shared memory lies where the host has it");
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<DecodeShared<kCfg>*>(shared_memory);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);

  // 1. Which share is this block's. The kernel ahead in the stream may still run until griddepcontrol_wait: before it nothing is read that
  // it may have written.
  ptx::griddepcontrol_launch_dependents();
  if constexpr (kCfg.bulk) {
    if (threadIdx.x == 0) ptx::prefetch_tensormap(&p.k_map), ptx::prefetch_tensormap(&p.v_map);
  }
  if constexpr (kCfg.varlen) ptx::griddepcontrol_wait();  // lengths
  ShareWalk<kCfg> walk;
  const Share share = find_share<kCfg>(p, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x),
                                       static_cast<int>(threadIdx.x), shared.scan, walk);
  const bool idle = walk.at >= walk.end;

  // 2. The first tiles of K and V: global -> shared.
  DecodeStage<kCfg>(&stages)[kCfg.stages] = shared.stages[warp];
  const uint32 full0 = kCfg.bulk ? shared_address(&shared.full[warp * kCfg.stages * 2]) : 0;
  const auto k_full = [full0](int stage) { return full0 + stage * 16; };
  const auto v_full = [full0](int stage) { return full0 + stage * 16 + 8; };
  DecodeLoader<kCfg> loader;
  if (!idle) {
    if constexpr (kCfg.bulk) {
      if (lane_id() == 0) {
        for (int stage = 0; stage < kCfg.stages; ++stage) {
          ptx::mbarrier_init(k_full(stage), 1);
          ptx::mbarrier_init(v_full(stage), 1);
        }
        ptx::fence_mbarrier_init();
      }
      __syncwarp();
    }
    if constexpr (!kCfg.varlen) ptx::griddepcontrol_wait();
    loader.init(p, walk, warp);
#pragma unroll 1
    for (int stage = 0; stage < kCfg.stages; ++stage) {
      loader.load_k(stages[stage], p, k_full(stage));
      loader.load_v(stages[stage], p, v_full(stage), warp);
    }
  }
  if (kCfg.varlen && p.cu_seqlens_q) {
    clear_unowned_outputs<kCfg.dtype>(p, static_cast<int64>(blockIdx.x) * kCfg.warps + warp,
                                      static_cast<int64>(gridDim.x) * kCfg.warps);
  }
  if (idle) return;

  // 3. For every segment of the share, and every K/V tile of this warp: S = Q K^T, online softmax, O += P V.
  int stage = 0, parity = 0;
  bool pending = false, loaded = false;
  Segment segment;
  DecodeQueries<kCfg> in_registers;
  DecodeQueries<kCfg>* const in_shared = reinterpret_cast<DecodeQueries<kCfg>*>(shared.queries);
  DecodeQueries<kCfg>& queries = decode_q_in_shared(kCfg) ? *in_shared : in_registers;
#pragma unroll 1
  while (walk.next(p, segment)) {
    if (!kCfg.invariant || segment.first == 0 || !loaded) queries.load(p, segment);
    loaded = true;
    float rO[1][kCfg.head_dim / 8][4];
    clear(rO);
    OnlineSoftmax<1> softmax;
    const TileRange visible =
        visible_keys<kCfg.score>(p, segment.s, segment.row0 / p.group, (segment.row0 + segment.rows - 1) / p.group);
#pragma unroll 1
    for (int tile = segment.begin + warp; tile < segment.end; tile += kCfg.warps) {
      const int key0 = tile * kCfg.block_n;
      wait_for_tile<kCfg>(k_full(stage), parity);
      float rS[1][kCfg.block_n / 8][4];
      score_stage<kCfg>(rS, softmax, rO, queries, stages[stage].sK, p, segment, key0,
                        visible.all.holds(key0, kCfg.block_n));
      __syncwarp();  // all lanes have read K
      loader.load_k(stages[stage], p, k_full(stage));
      wait_for_tile<kCfg>(v_full(stage), parity);
      if constexpr (kCfg.bulk) clear_rows_from<kCfg>(stages[stage].sV, segment.s.sk - key0);
      product_pb(rO, rS, stages[stage].sV, 0);
      __syncwarp();
      loader.load_v(stages[stage], p, v_full(stage), warp);
      if (++stage == kCfg.stages) stage = 0, parity ^= 1;
    }
    // 4. The warps' sums -> O and LSE, or this block's part of them.
    const TileParts<kCfg> parts(segment, share);
    const int part = parts.index(segment, static_cast<int>(blockIdx.x) / p.team);
    const int slot = PartSlots::of(p, segment, share, parts, walk.member).of_part(part);
    const bool alone = kCfg.invariant && !parts.shared();
    merge_warps<kCfg>(shared.merge, p, segment, slot, alone, softmax, rO, warp);
    if (segment.whole || !segment.last || alone || walk.at >= walk.end) continue;
    if (threadIdx.x == 0) shared.parted[0] = segment;
    pending = true;
  }

  // 5. Work tiles of which other blocks have parts, too, the share's first and last: the last block to arrive merges them. Both
  // counters at once, so that their latency is paid once.
  const bool parted = !segment.whole && TileParts<kCfg>(segment, share).shared();
  if (!pending && !parted) return;
  int* const merges = &shared.scan[kCfg.warps + 2];
  if (threadIdx.x == 0) merges[0] = pending && arrive<kCfg>(p, shared.parted[0], share, walk.member);
  if (threadIdx.x == 32) {
    shared.parted[1] = segment;
    merges[1] = parted && arrive<kCfg>(p, segment, share, walk.member);
  }
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    if (merges[n]) merge_parts<kCfg>(p, shared.parted[n], share, walk.member);
  }
}

}  // namespace tessera
