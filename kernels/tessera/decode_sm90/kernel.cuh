// Forward with few query rows and many keys (decoding): O = softmax(scale Q K^T + ...) V and LSE in one launch. Bound by the
// reading of K and V, or, where they are few, by the way from the launch to the last store.
//
// Grid: as many blocks as the GPU holds, each with an equal share of all tiles of keys (schedule.cuh), whatever the sequences'
// lengths. Block: `warps` warps that share nothing but the block's rows: each has every warps-th tile of keys, a ring of its own
// that it fills itself (loads.cuh), and its own online softmax; they meet only where a work ends (merge.cuh). So the reading
// never stops: while warps wait at a barrier or merge, the next work's tiles are under way. Shared memory: DecodeShared. Its
// page, with what was measured: docs/reference/kernels/decode_sm90.md.
#pragma once

#include "tessera/attention/score/fragment.cuh"
#include "tessera/attention/unowned_rows.cuh"
#include "tessera/decode_sm90/loads.cuh"
#include "tessera/decode_sm90/merge.cuh"

namespace tessera {

template <DecodeSm90Config kCfg>
struct DecodeShared {
  DecodeStage<kCfg> stages[kCfg.warps][kCfg.stages];
  DecodeMergeBuffers<kCfg> merge;
  Barrier full[kCfg.bulk ? kCfg.warps * kCfg.stages : 0];
  int scan[kCfg.warps + 4];  // the last: whether this block merges
};

// Q of a segment's rows, as the A operand: global -> registers. Rows and columns that there are not are 0.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void load_query_fragments(uint32 (&rQ)[kCfg.head_dim / 16][4], const DecodeSm90Params& p,
                                         const Segment& segment) {
  constexpr int kBytes = dtype_bytes(kCfg.dtype);
  const DecodeRows rows{segment.head_kv * p.group.value, 0};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int local = half * 8 + lane_row(), row = segment.row0 + local;
    const bool there = local < segment.rows;
    const char* from = static_cast<const char*>(p.q.data);
    if (there) {
      from += (p.q.batch * segment.batch + p.q.row * (static_cast<int64>(segment.s.q_begin) + rows.query(p, row)) +
               p.q.head * rows.head(p, row) + lane_col()) *
              kBytes;
    }
#pragma unroll
    for (int k = 0; k < kCfg.head_dim / 16; ++k)
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int col = k * 16 + part * 8;
        rQ[k][part * 2 + half] =
            there && col + lane_col() < p.head_dim ? *reinterpret_cast<const uint32*>(from + col * kBytes) : 0;
      }
  }
}

// rS = Q K^T.
template <DecodeSm90Config kCfg, class Tile>
TESSERA_DEVICE void score_product(float (&rS)[1][kCfg.block_n / 8][4], const uint32 (&rQ)[kCfg.head_dim / 16][4],
                                  const Tile& sK) {
  constexpr int kPairs = kCfg.block_n / 16, kSteps = kCfg.head_dim / 16;
#pragma unroll
  for (int n = 0; n < kCfg.block_n / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) rS[0][n][e] = 0.0f;
  for_fragments<kSteps * kPairs>([&](int i, uint32(&b)[4]) { load_b_pair(b, sK, i % kPairs * 16, i / kPairs * 16); },
                                 [&](int i, const uint32(&b)[4]) {
                                   const int k = i / kPairs, n = i % kPairs * 2;
                                   mma_16bit<kCfg.dtype>(rS[0][n], rQ[k], b[0], b[1]);
                                   mma_16bit<kCfg.dtype>(rS[0][n + 1], rQ[k], b[2], b[3]);
                                 });
}

// Scores of a tile from key key0 on -> P in place, O rescaled where the reference moves. `full`: all rows see all of its keys.
template <DecodeSm90Config kCfg, class Tile>
TESSERA_DEVICE void score_stage(float (&rS)[1][kCfg.block_n / 8][4], OnlineSoftmax<1>& softmax,
                                float (&rO)[1][kCfg.head_dim / 8][4], const uint32 (&rQ)[kCfg.head_dim / 16][4],
                                const Tile& sK, const DecodeSm90Params& p, const Segment& segment, int key0,
                                bool full) {
  constexpr ScoreConfig kScore = kCfg.score;
  const DecodeRows rows{segment.head_kv * p.group.value, 0};
  const float unit = score_unit<kScore>(p);
  // ALiBi may raise the scores from tile to tile, so that each tile would be done twice.
  bool stale_max = full && softmax.ready && !kScore.alibi;
  for (;; stale_max = false) {
    score_product<kCfg>(rS, rQ, sK);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = segment.row0 + min(half * 8 + lane_row(), segment.rows - 1);
      if constexpr (kScore.scaled()) {
        const ScoreRow<kScore> score_row(p, segment.s, segment.batch, rows.head(p, row), rows.query(p, row));
        BiasMaskFragment<kScore, 2, kCfg.block_n / 8, false> none;
        none.apply(rS[0], half, half, p, segment.s, score_row, key0);
      }
      if (!full) {
        const KeyRange keys = visible_keys(p, segment.s, rows.query(p, row));
        mask_outside(rS[0], half, keys.low - key0 - lane_col(), keys.high - key0 - lane_col());
      }
    }
    if (!stale_max) break;
    if (softmax.template try_stale_max<kCfg.dtype>(rS, unit)) return;
  }
  softmax.update(rS, unit, rO);
}

template <DecodeSm90Config kCfg>
TESSERA_DEVICE void decode_sm90(const DecodeSm90Params& p) {
  static_assert(sizeof(DecodeShared<kCfg>) == decode_sm90_layout(kCfg).bytes, "shared memory lies where the host has it");
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<DecodeShared<kCfg>*>(shared_memory);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);

  // 1. Which share is mine.
  ShareWalk<kCfg> walk;
  const Share share = find_share<kCfg>(p, shared.scan, walk);
  const bool idle = walk.at >= walk.end;

  // 2. The first tiles of K and V: global -> shared.
  DecodeStage<kCfg>(&stages)[kCfg.stages] = shared.stages[warp];
  const uint32 full0 = kCfg.bulk ? shared_address(&shared.full[warp * kCfg.stages]) : 0;
  DecodeLoader<kCfg> loader;
  if (!idle) {
    if constexpr (kCfg.bulk) {
      if (lane_id() == 0) {
        for (int stage = 0; stage < kCfg.stages; ++stage) ptx::mbarrier_init(full0 + stage * 8, 1);
        ptx::fence_mbarrier_init();
      }
      __syncwarp();
    }
    loader.init(p, walk, warp);
#pragma unroll 1
    for (int stage = 0; stage < kCfg.stages; ++stage) loader.load(stages[stage], p, full0 + stage * 8, warp);
  }
  if (p.cu_seqlens_q) {
    clear_unowned_outputs<kCfg.dtype>(p, static_cast<int64>(blockIdx.x) * kCfg.warps + warp,
                                      static_cast<int64>(gridDim.x) * kCfg.warps);
  }
  if (idle) return;

  // 3. For every work of the share, and every tile of mine: S = Q K^T, online softmax, O += P V.
  int stage = 0, parity = 0;
  Segment segment;
#pragma unroll 1
  while (walk.next(p, segment)) {
    uint32 rQ[kCfg.head_dim / 16][4];
    load_query_fragments<kCfg>(rQ, p, segment);
    float rO[1][kCfg.head_dim / 8][4];
    clear(rO);
    OnlineSoftmax<1> softmax;
    const TileRange visible = visible_keys(p, segment.s, segment.row0 / p.group,
                                           (segment.row0 + segment.rows - 1) / p.group);
#pragma unroll 1
    for (int tile = segment.begin + warp; tile < segment.end; tile += kCfg.warps) {
      if constexpr (kCfg.bulk) {
        ptx::mbarrier_wait_parity(full0 + stage * 8, parity);
      } else {
        ptx::cp_async_wait_group<kCfg.stages - 1>();
        __syncwarp();
      }
      const int key0 = tile * kCfg.block_n;
      float rS[1][kCfg.block_n / 8][4];
      score_stage<kCfg>(rS, softmax, rO, rQ, stages[stage].sK, p, segment, key0,
                        visible.all.holds(key0, kCfg.block_n));
      product_pb(rO, rS, stages[stage].sV, 0);
      __syncwarp();  // all lanes have read the stage
      loader.load(stages[stage], p, full0 + stage * 8, warp);
      if (++stage == kCfg.stages) stage = 0, parity ^= 1;
    }
    // 4. The warps' sums, and the blocks' -> O and LSE.
    finish_segment<kCfg>(shared.merge, &shared.scan[kCfg.warps + 3], p, segment, share, softmax, rO, warp);
  }
}

}  // namespace tessera
