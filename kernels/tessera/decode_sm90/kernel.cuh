// Forward with few query rows and many keys (decoding): O = softmax(scale Q K^T + ...) V and LSE in one launch. Its
// time is bound by the reading of K and V or, with few keys, by the latency from the launch to the last store.
//
// Grid: as many blocks as the GPU holds, each with an equal part of all K/V tiles (schedule.cuh), whatever the
// sequences' lengths. Block: `warps` warps that have only the block's rows in common. Each warp processes every
// warps-th K/V tile, with a ring of stages that it fills itself (loads.cuh) and an online softmax of its own; the warps
// meet only at the end of a work tile (merge.cuh). The loads therefore never stop: while warps wait at a barrier or
// merge, K and V of the next work tile are being loaded. Shared memory: DecodeShared. Details and measurements:
// docs/reference/kernels/decode_sm90.md.
#pragma once

#include "tessera/attention/score/step.cuh"
#include "tessera/attention/unowned_rows.cuh"
#include "tessera/decode_sm90/loads.cuh"
#include "tessera/decode_sm90/merge.cuh"
#include "tessera/ptx/griddepcontrol.cuh"

namespace tessera {

// Q of a segment's rows in shared memory, the A operand.
template <DecodeSm90Config kCfg>
struct DecodeQueries {
  SharedTile<kCfg.dtype, kDecodeRows, kCfg.head_dim> sQ;

  // Global -> shared, by all threads, after all of them have finished reading the previous rows. Rows and columns past
  // the end become 0.
  TESSERA_DEVICE void load(const DecodeSm90Params& p, const Segment& segment) {
    constexpr int kBytes = dtype_bytes(kCfg.dtype), kLoads = kCfg.head_dim * kBytes / kLoadBytes;
    const DecodeRows rows(p, segment.head_kv);
    const char* const base = static_cast<const char*>(p.q.data);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kDecodeRows * kLoads; i += kCfg.warps * 32) {
      const int local = i / kLoads, offset = i % kLoads * kLoadBytes, row = segment.row0 + local;
      const int wanted = local < segment.rows ? clamp(p.head_dim * kBytes - offset, 0, kLoadBytes) : 0;
      const char* const from =
          base + offset +
          (p.q.batch * segment.batch + p.q.row * (static_cast<int64>(segment.s.q_begin) + rows.query(p, row)) +
           p.q.head * rows.head(p, row)) *
              kBytes;
      ptx::cp_async_cg_16(sQ.at(local, 0) + offset, wanted > 0 ? from : base, wanted);
    }
    ptx::cp_async_commit_group();
  }
  // rS = Q K^T.
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
  DecodeQueries<kCfg> queries;
  Barrier full[kCfg.bulk ? kCfg.warps * kCfg.stages * 2 : 1];  // barriers of K and of V
  ShareSegments<kCfg> segments;
  Segment parted;  // the range's first segment if other blocks compute parts of its work tile; else it has no rows
  // the last two: whether this block merges the work tile of `parted`, and that of the last segment
  int scan[kCfg.warps + 2];
};

// The coordinates (b, h, i, j) of the scores of a K/V tile.
template <DecodeSm90Config kCfg>
struct DecodeCoordinates {
  static constexpr int kRows = 2, kAheadRows = 2, kN = kCfg.block_n / 8;
  static constexpr bool kLaneOrder = false, kFused = true;

  const DecodeSm90Params& p;
  const Segment& segment;
  DecodeRows rows;
  int key0;

  TESSERA_DEVICE DecodeCoordinates(const DecodeSm90Params& p, const Segment& segment, int key0)
      : p(p), segment(segment), rows(p, segment.head_kv), key0(key0) {}
  TESSERA_DEVICE const Sequence& sequence() const { return segment.s; }
  TESSERA_DEVICE int batch() const { return segment.batch; }
  TESSERA_DEVICE int head(int row) const { return rows.head(p, row); }
  TESSERA_DEVICE int query(int row) const { return rows.query(p, row); }
  TESSERA_DEVICE static int col() { return lane_col(); }
  TESSERA_DEVICE int row(int i) const { return segment.row0 + min(i * 8 + lane_row(), segment.rows - 1); }
};

// Turns the scores of the tile that begins at key key0 into P, in place, and rescales O if the stale max is replaced.
// `full`: all rows see all keys of the tile.
template <DecodeSm90Config kCfg, class Queries, class Tile>
TESSERA_DEVICE void score_stage(float (&rS)[1][kCfg.block_n / 8][4], OnlineSoftmax<1>& softmax,
                                float (&rO)[1][kCfg.head_dim / 8][4], const Queries& queries, const Tile& sK,
                                const DecodeSm90Params& p, const Segment& segment, int key0, bool full) {
  constexpr ScoreConfig kScore = kCfg.score;
  ScoreStep<kScore, DecodeCoordinates<kCfg>> scores;
  const DecodeCoordinates<kCfg> at(p, segment, key0);
  const ScoreUnit unit = score_unit<kScore>(p);
  bool stale_max = kScore.stale_max() && full && softmax.ready;
  for (;; stale_max = false) {
    queries.product(rS, sK);
#pragma unroll
    for (int i = 0; i < at.kRows; ++i) {
      const int row = at.row(i);
      if constexpr (!scores.kPlain) scores.apply_row(rS[0], at, i, scores.row(at, row));
      if (!full) scores.hide_row(rS[0], at, i, row);
    }
    if (!stale_max) break;
    if (softmax.try_stale_max(rS, unit)) return;
  }
  softmax.update(rS, unit, rO, kScore.stale_max() ? 0.0f : kRescaleThreshold_log2);
}

// Waits for the oldest of a warp's tiles of K or V: 2 stages - 1 groups of copies were issued after it.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void wait_for_tile(uint32 barrier, int parity) {
  if constexpr (kCfg.bulk) {
    ptx::mbarrier_wait_parity(barrier, parity);
  } else {
    ptx::cp_async_wait_group<2 * kCfg.stages - 1>();
    __syncwarp();
  }
}

// With cp.async and pages, the tiles of the first segment are issued after Q; those of other segments are issued before
// it.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void wait_for_queries(bool first) {
  if (kCfg.paged && !kCfg.bulk && first) {
    ptx::cp_async_wait_group<2 * kCfg.stages>();
  } else {
    ptx::cp_async_wait_group<0>();
  }
}

template <DecodeSm90Config kCfg>
TESSERA_DEVICE void decode_share(const DecodeSm90Params& p) {
  static_assert(sizeof(DecodeShared<kCfg>) == decode_sm90_layout(kCfg).bytes,
                "shared memory lies where the host has it");
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<DecodeShared<kCfg>*>(shared_memory);
  // Without this the compiler computes fragment addresses for negative numbers too: 180 instructions before the first
  // product.
  __builtin_assume(threadIdx.x < kCfg.warps * 32);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);

  DecodeStage<kCfg>(&stages)[kCfg.stages] = shared.stages[warp];
  const uint32 full = kCfg.bulk ? shared_address(&shared.full[warp * kCfg.stages * 2]) : 0;
  const auto k_full = [full](int stage) { return full + stage * kDecodeStageBarrierBytes; };
  const auto v_full = [full](int stage) { return full + stage * kDecodeStageBarrierBytes + 8; };

  // 1. This block's range. The previous kernel in the stream may run until griddepcontrol_wait; nothing that it may
  // have written is read before. An earlier launch of the same call has waited itself and writes nothing that this one
  // reads.
  ptx::griddepcontrol_launch_dependents();
  if constexpr (kCfg.bulk) {
    if (threadIdx.x == 0) ptx::prefetch_tensormap(&p.k_map), ptx::prefetch_tensormap(&p.v_map);
    if (lane_id() == 0) {
      for (int stage = 0; stage < kCfg.stages; ++stage) {
        ptx::mbarrier_init(k_full(stage), 1);
        ptx::mbarrier_init(v_full(stage), 1);
      }
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }
  if (kCfg.varlen && !p.beside) ptx::griddepcontrol_wait();  // the lengths may have been written by the previous kernel
  ShareSegments<kCfg>& segments = shared.segments;
  find_share<kCfg>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x), shared.scan, segments);
  if constexpr (!kCfg.varlen) ptx::griddepcontrol_wait();

  // 2. Q and the first K/V tiles of the range's first segment: global -> shared.
  DecodeLoader<kCfg> loader(p, segments, stages, full, warp);
  if (segments[0].rows > 0) {
    loader.start();
    if constexpr (kCfg.paged) shared.queries.load(p, segments[0]);  // while the page table entry is loaded
    loader.fill_first();
    if constexpr (!kCfg.paged) shared.queries.load(p, segments[0]);
  }
  int stage = 0, parity = 0, number = 0;
  if (threadIdx.x == 0) shared.parted.rows = 0;
#pragma unroll 1
  for (; segments[number].rows > 0; ++number) {
    const Segment& segment = segments[number];
    const int known = number + segments.kAhead;
    if (threadIdx.x == (kCfg.warps - 1) * 32) segments.walk_over(p, number == 0 ? 1 : known, known + 1);
    if (threadIdx.x == 0) segments.set_parts(p, number);

    // 3. Every K/V tile of this warp: S = Q K^T, online softmax, O += P V.
    float rO[1][kCfg.head_dim / 8][4];
    clear(rO);
    OnlineSoftmax<1> softmax;
    const int tiles_end = segment.end, keys = segment.s.sk;
    const KeyRange all_see = ScoreOptions<kCfg.score>::range(p, segment.s, segment.row0 / p.group,
                                                             (segment.row0 + segment.rows - 1) / p.group)
                                 .all;
    wait_for_queries<kCfg>(number == 0);
    __syncthreads();  // Q, the segment's parts and the next segments are visible
    const Segment& next = segments[number + 1];
    if (next.rows > 0) loader.look_ahead(known);
#pragma unroll 1
    for (int tile = segment.begin + warp; tile < tiles_end; tile += kCfg.warps) {
      const int key0 = tile * kCfg.block_n;
      wait_for_tile<kCfg>(k_full(stage), parity);
      float rS[1][kCfg.block_n / 8][4];
      score_stage<kCfg>(rS, softmax, rO, shared.queries, stages[stage].sK, p, segment, key0,
                        all_see.holds(key0, kCfg.block_n));
      __syncwarp();  // all lanes have read K
      loader.refill_k(stage);
      wait_for_tile<kCfg>(v_full(stage), parity);
      clear_rows_from<kCfg>(stages[stage].sV, keys - key0);
      product_pb(rO, rS, stages[stage].sV, 0);
      __syncwarp();
      loader.refill_v(stage, known);
      if (++stage == kCfg.stages) stage = 0, parity ^= 1;
    }
    // 4. The warps' sums -> O and LSE, or this block's part of them.
    const bool alone = kCfg.invariant && !segment.whole && !segment.parts.shared();
    const bool shared_first = !segment.whole && segment.last && !alone && next.rows > 0;
    if (shared_first && threadIdx.x == 0) shared.parted = segment;
    merge_warps<kCfg>(shared.merge, p, segment, alone, softmax, rO, warp);
    if (next.rows == 0) continue;
    loader.fill(stage, known);
    if (!kCfg.invariant || next.first == 0) shared.queries.load(p, next);
  }
  if (kCfg.varlen && p.cu_seqlens_q) {
    clear_unowned_outputs<kCfg.dtype>(p, static_cast<int64>(blockIdx.x) * kCfg.warps + warp,
                                      static_cast<int64>(gridDim.x) * kCfg.warps);
  }
  if (number == 0) return;

  // 5. Work tiles of which other blocks compute parts too: the range's first and last. The last block to arrive merges
  // them, many parts in two levels (PartsMerge). Both counters are incremented together, so that their latency is paid
  // once.
  const Segment& last = segments[number - 1];
  int pending = shared.parted.rows > 0, parted = !last.whole && last.parts.shared();
  int* const merges = &shared.scan[kCfg.warps];
  const auto merge_of = [&](const Segment& segment, int level) {
    return PartsMerge(p, segment.parts, level, static_cast<int>(gridDim.x));
  };
#pragma unroll 1
  for (int level = 0; pending || parted; ++level) {
    if (threadIdx.x == 0) merges[0] = pending && arrive(p, merge_of(shared.parted, level).parts);
    if (threadIdx.x == 32) merges[1] = parted && arrive(p, merge_of(last, level).parts);
    __syncthreads();
    pending = merges[0], parted = merges[1];
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      if (!(n == 0 ? pending : parted)) continue;
      const Segment& segment = n == 0 ? shared.parted : last;
      const PartsMerge merge = merge_of(segment, level);
      merge_parts<kCfg>(p, segments, segment, merge);
      const bool again = merge.to_slot >= 0;
      if (n == 0) {
        pending = again;
      } else {
        parted = again;
      }
    }
    if (pending || parted) __syncthreads();  // the sums are stored
  }
}

template <DecodeSm90Config kCfg>
TESSERA_DEVICE void decode_sm90(const DecodeSm90Params& p) {
  decode_share<kCfg>(p);
  if (kCfg.varlen && p.beside) ptx::griddepcontrol_wait();  // kernels after this launch wait only for this one
}

}  // namespace tessera
