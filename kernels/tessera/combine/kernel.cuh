// Merge of partial results over disjoint sets of keys, exact: with m = max_n lse_n,
//   lse = m + log sum_n exp(lse_n - m),   o = sum_n exp(lse_n - lse) o_n,
// in the order of the parts, so that the same parts give the same bits. Parts that saw nothing do not count.
//
// Grid: one warp for each (batch, row, head), kCombineWarps of them a block. Shared memory: none. Bound by the reading of the parts, and where
// rows are few by the way to them: so a lane's columns of the first parts are under way beside their log-sum-exps, before it is known which of
// them count, and a part's weight is made once, by the lane with its number.
#pragma once

#include "tessera/attention/softmax.cuh"
#include "tessera/combine/config.hpp"
#include "tessera/ptx/griddepcontrol.cuh"
#include "tessera/tile/columns.cuh"

namespace tessera {

inline constexpr int kCombineWarps = 4;

TESSERA_DEVICE float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}
TESSERA_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

// The parts of a row: `count` of them, of which those before `own` lie a stride apart.
template <CombineConfig kCfg>
struct RowParts {
  const CombineParams& p;
  const float *gLse, *own_lse;
  int64 gO, own_o;
  int own, count;

  TESSERA_DEVICE RowParts(const CombineParams& p, int batch, int row, int head) : p(p), own_lse(), own_o() {
    // A row of no sequence has no parts: 0 and -inf.
    const int64 of_all = static_cast<int64>(batch) * p.rows.value + row;
    own = count = p.rows_end && (of_all < *p.rows_begin || of_all >= *p.rows_end) ? 0 : p.parts;
    int part_head = head;
    gLse = p.lse_parts, gO = 0;
    if constexpr (kCfg.chunks) {
      const CombineChunks& chunks = p.chunks;
      part_head = head / chunks.group;
      const int in_group = head - part_head * chunks.group.value;
      gLse += chunks.lse_in_group * in_group, gO += chunks.o_in_group * in_group;
      own_lse = chunks.own_lse + chunks.own_lse_batch * batch + chunks.own_lse_head * head + chunks.own_lse_row * row;
      own_o = chunks.own_o_batch * batch + chunks.own_o_row * row + chunks.own_o_head * head;
      ++count;
    }
    gLse += p.lse_part_batch * batch + p.lse_part_head * part_head + p.lse_part_row * row;
    gO += p.o_part_batch * batch + p.o_part_row * row + p.o_part_head * part_head;
  }

  // -inf: there is none, or it saw nothing.
  TESSERA_DEVICE float lse(int n) const {
    return n >= count ? -infinity() : kCfg.chunks && n == own ? *own_lse : gLse[p.lse_part * n];
  }
  template <class Columns>
  TESSERA_DEVICE Columns o(int n, int col) const {
    const bool of_own = kCfg.chunks && n == own;
    return Columns::load(of_own ? p.chunks.own_o : p.o_parts, of_own ? own_o + col : p.o_part * n + gO + col,
                         p.head_dim_v - col);
  }
};

// kCombineWidth neighbours of a part, of which `count` are there.
template <Dtype kDtype, bool kAligned>
struct PartColumns {
  RawColumns<kDtype, kCombineWidth> raw;
  TESSERA_DEVICE static PartColumns load(const void* data, int64 index, int) {
    return {load_columns<kDtype, kCombineWidth>(data, index)};
  }
  TESSERA_DEVICE void unpack(float (&x)[kCombineWidth]) const { unpack_columns<kDtype>(raw, x); }
};
template <Dtype kDtype>
struct PartColumns<kDtype, false> {
  float columns[kCombineWidth];
  TESSERA_DEVICE static PartColumns load(const void* data, int64 index, int count) {
    PartColumns of;
#pragma unroll
    for (int c = 0; c < kCombineWidth; ++c) of.columns[c] = c < count ? load_element<kDtype>(data, index + c) : 0.0f;
    return of;
  }
  TESSERA_DEVICE void unpack(float (&x)[kCombineWidth]) const {
#pragma unroll
    for (int c = 0; c < kCombineWidth; ++c) x[c] = columns[c];
  }
};

// A row of o and its LSE, kAhead parts at a time.
template <CombineConfig kCfg, bool kAligned, int kAhead>
TESSERA_DEVICE void merge_row(const CombineParams& p, const RowParts<kCfg>& of, int batch, int row, int head) {
  using Columns = PartColumns<kCfg.part_dtype, kAligned>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Columns parts[kAhead];
  const auto load = [&](int first, int col) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (first + n < of.count && col < p.head_dim_v) parts[n] = of.template o<Columns>(first + n, col);
    }
  };
  load(0, lane * kCombineWidth);

  // The joint log-sum-exp, a lane for every 32nd part.
  const float mine = of.lse(lane);
  float best = -infinity();
  bool undefined = false;
#pragma unroll 1
  for (int n = lane; n < of.count; n += 32) {
    const float part = n == lane ? mine : of.lse(n);
    best = fmaxf(best, part);
    undefined |= part != part;
  }
  best = warp_max(best);
  const bool seen = best > -infinity() || __any_sync(0xffffffff, undefined);
  const float sink = p.sink && seen ? p.sink[p.sink_head * head] : -infinity();
  best = fmaxf(best, sink);
  float sum = p.sink && seen && lane == 0 ? expf(sink - best) : 0.0f;
#pragma unroll 1
  for (int n = lane; seen && n < of.count; n += 32) {
    const float part = n == lane ? mine : of.lse(n);
    if (part != -infinity()) sum += expf(part - best);
  }
  sum = warp_sum(sum);
  const float lse = seen ? best + logf(sum) : -infinity();
  if (p.lse.data && lane == 0) {
    p.lse.data[p.lse.batch * batch + p.lse.head * head + p.lse.row * row] = lse;
  }

  // o = sum_n exp(lse_n - lse) o_n. What a part that saw nothing has is not added, since it may be anything.
  const int64 out = p.o.batch * batch + p.o.row * row + p.o.head * head;
#pragma unroll 1
  for (int col = lane * kCombineWidth; col - lane * kCombineWidth < p.head_dim_v; col += 32 * kCombineWidth) {
    float o[kCombineWidth] = {};
#pragma unroll 1
    for (int first = 0; first < of.count; first += kAhead) {
      if (first > 0 || col >= 32 * kCombineWidth) load(first, col);
      const float of_lane = first == 0 ? mine : of.lse(first + lane);
      constexpr float kUnseen = -1.0f;  // no weight is below 0
      const float weight = of_lane == -infinity() ? kUnseen : expf(of_lane - lse);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const float w = __shfl_sync(0xffffffff, weight, n);
        const bool counts = !(w < 0.0f);  // NaN does
        float x[kCombineWidth];
        parts[n].unpack(x);
#pragma unroll
        for (int c = 0; c < kCombineWidth; ++c) o[c] = counts ? o[c] + w * x[c] : o[c];
      }
    }
    if constexpr (kAligned) {
      RawColumns<kCfg.dtype, kCombineWidth> raw;
      pack_columns<kCfg.dtype>(o, raw);
      if (col < p.head_dim_v) store_columns<kCfg.dtype>(p.o.data, out + col, raw);
    } else {
#pragma unroll
      for (int c = 0; c < kCombineWidth; ++c) {
        if (col + c < p.head_dim_v) store_element<kCfg.dtype>(p.o.data, out + col + c, o[c]);
      }
    }
  }
}

template <CombineConfig kCfg>
TESSERA_DEVICE void combine(const CombineParams& p) {
  constexpr int kFew = 4, kMany = kCfg.part_dtype == Dtype::kFloat32 ? 8 : 16;  // so many registers
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const unsigned index = blockIdx.x * kCombineWarps + threadIdx.x / 32;
  if (index >= static_cast<unsigned>(p.batch * p.rows.value * p.heads.value)) return;
  const int of_all = static_cast<int>(index) / p.heads, head = static_cast<int>(index) - of_all * p.heads.value;
  const int batch = of_all / p.rows, row = of_all - batch * p.rows.value;
  const RowParts<kCfg> of(p, batch, row, head);
  if (!p.aligned) return merge_row<kCfg, false, kFew>(p, of, batch, row, head);
  if (of.count <= kFew) return merge_row<kCfg, true, kFew>(p, of, batch, row, head);
  merge_row<kCfg, true, kMany>(p, of, batch, row, head);
}

}  // namespace tessera
