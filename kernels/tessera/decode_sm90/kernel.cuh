// Forward with few query rows and many keys (decoding): O = softmax(scale Q K^T + ...) V and LSE in one launch. Its
// time is bound by the reading of K and V or, with few keys, by the latency from the launch to the last store.
//
// Grid: as many blocks as the GPU holds, each with an equal part of all K/V tiles, whatever the sequences' lengths.
// Block: `warps` warps that have only the block's rows in common. Each warp processes every warps-th K/V tile, with a
// ring of stages that it fills itself and an online softmax of its own; the warps meet only at the end of a work tile.
// The loads therefore never stop: while warps wait at a barrier or merge, K and V of the next work tile are being
// loaded. Details and measurements: docs/reference/kernels/decode_sm90.md.
//
//   config.hpp     DecodeSm90Config, the launch parameters, the layout of shared memory
//   schedule.cuh   which keys a block has, as segments of work tiles
//   loads.cuh      a warp's ring of K and V tiles, pages included
//   output.cuh     what a warp accumulates: softmax and O
//   shared.cuh     Q of a segment, and a block's shared memory
//   codes.cuh      K and V of 8 bits: Q for them, and their scales
//   scores.cuh     S -> P: options, mask, online softmax
//   epilogue.cuh   the merge of a block's warps, and of a work tile's blocks
//   kernel.cuh     the loop over a block's segments
#pragma once

#include "tessera/attention/unowned_rows.cuh"
#include "tessera/decode_sm90/codes.cuh"
#include "tessera/decode_sm90/epilogue.cuh"
#include "tessera/decode_sm90/loads.cuh"
#include "tessera/decode_sm90/scores.cuh"
#include "tessera/decode_sm90/shared.cuh"
#include "tessera/ptx/synchronization.cuh"

namespace tessera {

// Waits for the oldest of a warp's tiles of K or V: 2 stages - 1 groups of copies were issued after it, by TMA
// stages - 1 groups of scales after K's.
template <DecodeSm90Config kCfg, bool kKeys>
TESSERA_DEVICE void wait_for_tile(uint32 barrier, int parity) {
  if constexpr (kCfg.bulk) {
    ptx::mbarrier_wait_parity(barrier, parity);
    if constexpr (kKeys && kCfg.key_scales) {
      ptx::cp_async_wait_group<kCfg.stages - 1>();
      __syncwarp();
    }
  } else {
    ptx::cp_async_wait_group<2 * kCfg.stages - 1>();
    __syncwarp();
  }
}

// With cp.async and pages, the tiles of the first segment are issued after Q, with TMA their scales; those of other
// segments are issued before it.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void wait_for_queries(bool first) {
  constexpr int kGroups = kCfg.bulk ? kCfg.key_scales ? kCfg.stages : 0 : 2 * kCfg.stages;  // of the first tiles
  if ((kCfg.paged || kCfg.bulk) && kGroups > 0 && first) {
    ptx::cp_async_wait_group<kGroups>();
  } else {
    ptx::cp_async_wait_group<0>();
  }
}

template <DecodeSm90Config kCfg>
TESSERA_DEVICE void decode_range(const DecodeSm90Params& p) {
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
  RangeSegments<kCfg>& segments = shared.segments;
  find_range<kCfg>(p, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x), shared.scan, segments);
  if constexpr (!kCfg.varlen) ptx::griddepcontrol_wait();

  // 2. Q and the first K/V tiles of the range's first segment: global -> shared.
  DecodeLoader<kCfg> loader(p, segments, stages, full, shared.tile_scales(warp), warp);
  if (segments[0].rows > 0) {
    loader.start();
    if constexpr (kCfg.paged) shared.queries.load(p, segments[0]);  // while the page table entry is loaded
    loader.fill_first();
    if constexpr (!kCfg.paged) shared.queries.load(p, segments[0]);
    loader.fill_first_scales();
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
    DecodeOutput<kCfg> output;
    DecodeSoftmax<kCfg> softmax;
    const int tiles_end = segment.end, keys = segment.s.sk;
    const TileRange visible = ScoreOptions<kCfg.score>::range(p, segment.s, segment.row0 / p.group,
                                                              (segment.row0 + segment.rows - 1) / p.group);
    DecodeScales<kCfg> scales;
    scales.load(p, segment);
    wait_for_queries<kCfg>(number == 0);
    if constexpr (kCfg.codes()) {
      if (!kCfg.invariant || number == 0 || segment.first == 0) {
        __syncthreads();  // the copies of all threads are complete
        shared.queries.convert();
      }
    }
    __syncthreads();  // Q, the segment's parts and the next segments are visible
    scales.begin(shared.queries);
    const DecodeQueryFragments<kCfg> queries(shared.queries);
    const Segment& next = segments[number + 1];
    if (next.rows > 0) loader.look_ahead(known);
#pragma unroll 1
    for (int tile = segment.begin + warp; tile < tiles_end; tile += kCfg.warps) {
      const int key0 = tile * kCfg.block_n;
      wait_for_tile<kCfg, true>(k_full(stage), parity);
      DecodeScoreTile<kCfg> rP;
      scales.take(loader, stage, visible.some, key0);
      score_stage<kCfg>(rP, softmax, output, queries, stages[stage].sK, scales, p, segment, key0,
                        visible.all.holds(key0, kCfg.block_n));
      scales.scale_weights(rP);
      __syncwarp();  // all lanes have read K and the scales
      loader.refill_k(stage);
      wait_for_tile<kCfg, false>(v_full(stage), parity);
      clear_rows_from<kCfg>(stages[stage].sV, keys - key0);
      output.add(rP, stages[stage].sV);
      __syncwarp();
      loader.refill_v(stage, known);
      if (++stage == kCfg.stages) stage = 0, parity ^= 1;
    }
    scales.finish(output);
    // 4. The warps' sums -> O and LSE, or this block's part of them.
    const bool alone = kCfg.invariant && !segment.whole && !segment.parts.shared();
    const bool shared_first = !segment.whole && segment.last && !alone && next.rows > 0;
    if (shared_first && threadIdx.x == 0) shared.parted = segment;
    merge_warps<kCfg>(shared.merge, p, segment, alone, softmax, output, warp);
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
  decode_range<kCfg>(p);
  if (kCfg.varlen && p.beside) ptx::griddepcontrol_wait();  // kernels after this launch wait only for this one
}

}  // namespace tessera
