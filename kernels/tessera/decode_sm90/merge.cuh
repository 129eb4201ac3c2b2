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

  // A part that saw nothing, whose sum is 0, may have met NaN in V and does not count; a NaN in its sum does.
  TESSERA_DEVICE void add(float2 stat, float4 x) {
    if (stat.y == 0.0f) return;
    const float joint = fmaxf(ref, stat.x);
    const float mine = ref == -infinity() ? 0.0f : ptx::ex2_approx_ftz(ref - joint);
    const float other = ptx::ex2_approx_ftz(stat.x - joint);
    ref = joint;
    sum = sum * mine + stat.y * other;
    o.x = o.x * mine + x.x * other, o.y = o.y * mine + x.y * other;
    o.z = o.z * mine + x.z * other, o.w = o.w * mine + x.w * other;
  }
};

// Columns col ... col + 3 of one row -> o, and by the first of them LSE. A row that sees nothing: 0 and -inf.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void store_row(const DecodeSm90Params& p, const Segment& segment, int local, int col, DecodePart part) {
  const DecodeRows rows{segment.head_kv * p.group.value, 0};
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

// Where block `block` keeps its part of a work: it has two at most, of the work that it begins with and of that it ends with.
TESSERA_DEVICE int part_slot(const Segment& segment, const Share& share, int block) {
  return 2 * block + (block * share.size < segment.work_begin ? 1 : 0);
}

// Columns of the rows of a work, four a thread: body(row, col).
template <DecodeSm90Config kCfg, class Body>
TESSERA_DEVICE void for_columns(int first, int rows, Body&& body) {
  constexpr int kGroups = kCfg.head_dim / 4;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows * kGroups; i += kCfg.warps * 32) {
    body(first + i / kGroups, i % kGroups * 4);
  }
}

// The parts of a work, by its last block to arrive.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void merge_parts(const DecodeSm90Params& p, const Segment& segment, const Share& share, int first_block,
                                int parts) {
  constexpr int kAhead = 8;  // parts that are under way at once
  for_columns<kCfg>(0, segment.rows, [&](int row, int col) {
    DecodePart all;
#pragma unroll 1
    for (int first = 0; first < parts; first += kAhead) {
      float2 stat[kAhead];
      float4 o[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        stat[n] = make_float2(-infinity(), 0.0f), o[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + n >= parts) continue;
        const int64 at = static_cast<int64>(part_slot(segment, share, first_block + first + n)) * kDecodeRows + row;
        stat[n] = __ldcg(reinterpret_cast<const float2*>(p.partial_stat) + at);
        o[n] = __ldcg(reinterpret_cast<const float4*>(p.partial_o + at * kCfg.head_dim + col));
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) all.add(stat[n], o[n]);
    }
    store_row<kCfg>(p, segment, row, col, all);
  });
}

// What the block's warps have of a segment -> o and LSE, or its part of them. By all threads; sFlag: one thread's word to all.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void finish_segment(DecodeMergeBuffers<kCfg>& shared, int* sFlag, const DecodeSm90Params& p,
                                   const Segment& segment, const Share& share, OnlineSoftmax<1>& softmax,
                                   const float (&rO)[1][kCfg.head_dim / 8][4], int warp) {
  softmax.finish();
  const int slot = part_slot(segment, share, static_cast<int>(blockIdx.x));
  if (lane_col() == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shared.stats[warp][half * 8 + lane_row()] = make_float2(softmax.ref[0][half], softmax.sum[0][half]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * kDecodeMergeRows >= segment.rows) break;
    float* row = shared.partials[warp][lane_row()] + lane_col();
#pragma unroll
    for (int d = 0; d < kCfg.head_dim / 8; ++d) {
      *reinterpret_cast<float2*>(row + d * 8) = make_float2(rO[0][d][2 * half], rO[0][d][2 * half + 1]);
    }
    __syncthreads();
    for_columns<kCfg>(0, min(segment.rows - half * kDecodeMergeRows, kDecodeMergeRows), [&](int row, int col) {
      const int local = half * kDecodeMergeRows + row;
      DecodePart all;
#pragma unroll
      for (int w = 0; w < kCfg.warps; ++w) {
        all.add(shared.stats[w][local], *reinterpret_cast<const float4*>(&shared.partials[w][row][col]));
      }
      if (segment.whole) return store_row<kCfg>(p, segment, local, col, all);
      const int64 at = static_cast<int64>(slot) * kDecodeRows + local;
      *reinterpret_cast<float4*>(p.partial_o + at * kCfg.head_dim + col) = all.o;
      if (col == 0) reinterpret_cast<float2*>(p.partial_stat)[at] = make_float2(all.ref, all.sum);
    });
    __syncthreads();  // the buffers are read
  }
  if (segment.whole) return;
  const int first_block = segment.work_begin / share.size;
  const int parts = (segment.work_begin + segment.work_tiles - 1) / share.size - first_block + 1;
  if (threadIdx.x == 0) *sFlag = arrive_as_last(p.arrivals + first_block, parts);
  __syncthreads();
  const bool last = *sFlag;
  if (last) merge_parts<kCfg>(p, segment, share, first_block, parts);
}

}  // namespace tessera
