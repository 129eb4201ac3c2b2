// From the warps' sums to O and LSE. First within the block: its warps have had different keys of the same rows. Then, where a
// work's keys lie in the shares of several blocks, over these: each writes its part to the workspace, and the last one to arrive
// merges them in the order of their keys, so that the same parts give the same bits.
#pragma once

#include "tessera/attention/softmax.cuh"
#include "tessera/decode_sm90/arrivals.cuh"
#include "tessera/decode_sm90/schedule.cuh"

namespace tessera {

template <DecodeSm90Config kCfg>
struct DecodeMergeBuffers {
  float partials[kCfg.warps][kDecodeMergeRows][kCfg.head_dim + kDecodeMergePad];
  float2 stats[kCfg.warps][kDecodeRows];  // reference in log2 units, and sum
};

// Four columns of a row, over some of its keys: softmax is o / sum, against `ref`.
struct DecodePart {
  float ref = -infinity(), sum = 0.0f;
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  DecodePart() = default;
  // Of several parts, in their order. One that saw nothing, whose sum is 0, may have met NaN in V and does not count; a NaN in
  // its sum does.
  template <int kParts>
  TESSERA_DEVICE DecodePart(const float2 (&stats)[kParts], const float4 (&parts)[kParts]) {
#pragma unroll
    for (int n = 0; n < kParts; ++n) ref = stats[n].y == 0.0f ? ref : fmaxf(ref, stats[n].x);
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      const bool counts = stats[n].y != 0.0f;
      const float weight = ptx::ex2_approx_ftz(stats[n].x - ref);
      sum = counts ? fmaf(stats[n].y, weight, sum) : sum;
      o.x = counts ? fmaf(parts[n].x, weight, o.x) : o.x, o.y = counts ? fmaf(parts[n].y, weight, o.y) : o.y;
      o.z = counts ? fmaf(parts[n].z, weight, o.z) : o.z, o.w = counts ? fmaf(parts[n].w, weight, o.w) : o.w;
    }
  }
};

// Columns col ... col + 3 of one row -> o, and by the first of them LSE. A row that sees nothing: 0 and -inf.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void store_row(const DecodeSm90Params& p, const Segment& segment, int local, int col, DecodePart part) {
  const DecodeRows rows(p, segment.head_kv);
  const int query = rows.query(p, segment.row0 + local), head = rows.head(p, segment.row0 + local);
  const bool seen = part.sum != 0.0f;  // NaN counts as seen
  float scale = 1.0f;
  if (p.sink && seen) scale = join_sink(p.sink[p.sink_head * head] * kLog2e, part.ref, part.sum);
  const int64 row = segment.s.q_begin + query;
  if (col == 0 && p.lse.data) {
    p.lse.data[p.lse.batch * segment.batch + p.lse.head * head + p.lse.row * row] =
        seen ? (part.ref + ptx::lg2_approx_ftz(part.sum)) * kLn2 : -infinity();
  }
  const float factor = seen ? scale * ptx::rcp_approx_ftz(part.sum) : 0.0f;
  const float o[4] = {part.o.x, part.o.y, part.o.z, part.o.w};
  const int64 at = p.o.batch * segment.batch + p.o.row * row + p.o.head * head + col;
  if (p.o_aligned && col + 4 <= p.head_dim_v) {
    uint2 words = make_uint2(0, 0);
    if (seen) {
      words = make_uint2(pack_pair<kCfg.dtype>(o[0] * factor, o[1] * factor),
                         pack_pair<kCfg.dtype>(o[2] * factor, o[3] * factor));
    }
    *reinterpret_cast<uint2*>(static_cast<char*>(p.o.data) + at * dtype_bytes(kCfg.dtype)) = words;
    return;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (col + c < p.head_dim_v) store_element<kCfg.dtype>(p.o.data, at + c, seen ? o[c] * factor : 0.0f);
  }
}

// Columns of the rows of a work, four a thread: body(row, col).
template <DecodeSm90Config kCfg, class Body>
TESSERA_DEVICE void for_columns(int rows, Body&& body) {
  constexpr int kGroups = kCfg.head_dim / 4;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows * kGroups; i += kCfg.warps * 32) {
    body(i / kGroups, i % kGroups * 4);
  }
}

// The first eight of a warp's rows, or the others, each at its lane's place.
template <int kHalf, int kD>
TESSERA_DEVICE void put_rows(float* to, const float (&rO)[1][kD][4]) {
#pragma unroll
  for (int d = 0; d < kD; ++d) {
    *reinterpret_cast<float2*>(to + d * 8) = make_float2(rO[0][d][2 * kHalf], rO[0][d][2 * kHalf + 1]);
  }
}

// What the block's warps have of a segment -> o and LSE, or its part of them. By all threads.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void merge_warps(DecodeMergeBuffers<kCfg>& shared, const DecodeSm90Params& p, const Segment& segment,
                                int slot, OnlineSoftmax<1>& softmax, const float (&rO)[1][kCfg.head_dim / 8][4],
                                int warp) {
  softmax.finish();
  if (lane_col() == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shared.stats[warp][half * 8 + lane_row()] = make_float2(softmax.max_log2[0][half], softmax.sum[0][half]);
    }
  }
  // A loop, since the code of a short call comes from memory, too.
#pragma unroll 1
  for (int first = 0; first < segment.rows; first += kDecodeMergeRows) {
    const int row = lane_row() + (first < 8 ? 0 : 8) - first;
    if (row >= 0 && row < kDecodeMergeRows) {
      float* to = shared.partials[warp][row] + lane_col();
      if (first < 8) {
        put_rows<0>(to, rO);
      } else {
        put_rows<1>(to, rO);
      }
    }
    __syncthreads();
    for_columns<kCfg>(min(segment.rows - first, kDecodeMergeRows), [&](int pass_row, int col) {
      const int local = first + pass_row;
      float2 stats[kCfg.warps];
      float4 parts[kCfg.warps];
#pragma unroll
      for (int w = 0; w < kCfg.warps; ++w) {
        stats[w] = shared.stats[w][local];
        parts[w] = *reinterpret_cast<const float4*>(&shared.partials[w][pass_row][col]);
      }
      const DecodePart all(stats, parts);
      if (segment.whole) return store_row<kCfg>(p, segment, local, col, all);
      const int64 at = static_cast<int64>(slot) * p.part_rows + local;
      *reinterpret_cast<float4*>(p.partial_o + at * kCfg.head_dim + col) = all.o;
      if (col == 0) reinterpret_cast<float2*>(p.partial_stat)[at] = make_float2(all.ref, all.sum);
    });
    __syncthreads();  // the buffers are read
  }
}

// The parts of a work -> o and LSE. By all threads of a block that sees what all have written.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void merge_parts(const DecodeSm90Params& p, const Segment& segment, const Share& share, int member) {
  constexpr int kAhead = 16;  // parts that are under way at once
  const WorkParts<kCfg> work(segment, share);
  const PartSlots slots = PartSlots::of(p, segment, share, work, member);
  for_columns<kCfg>(segment.rows, [&](int row, int col) {
    DecodePart all;
#pragma unroll 1
    for (int first = 0; first < work.count; first += kAhead) {
      float2 stats[kAhead + 1];
      float4 parts[kAhead + 1];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        stats[n + 1] = make_float2(-infinity(), 0.0f), parts[n + 1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + n >= work.count) continue;
        const int64 at = static_cast<int64>(slots.of_part(first + n)) * p.part_rows + row;
        stats[n + 1] = __ldcg(reinterpret_cast<const float2*>(p.partial_stat) + at);
        parts[n + 1] = __ldcg(reinterpret_cast<const float4*>(p.partial_o + at * kCfg.head_dim + col));
      }
      stats[0] = make_float2(all.ref, all.sum), parts[0] = all.o;
      all = DecodePart(stats, parts);
    }
    store_row<kCfg>(p, segment, row, col, all);
  });
}

// Whether this block is the last of those that have a part of a segment's work. By one thread, after a barrier of the block. Of
// the works that begin in a team's share one at most ends in another's.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE bool arrive(const DecodeSm90Params& p, const Segment& segment, const Share& share, int member) {
  const WorkParts<kCfg> work(segment, share);
  return arrive_as_last(p.arrivals + work.first_team * p.team.value + member, work.teams(segment, share));
}

}  // namespace tessera
