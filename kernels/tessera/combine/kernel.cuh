// Merges partial results over disjoint sets of keys, exactly. With m = max_n lse_n,
//   lse = m + log sum_n exp(lse_n - m),   o = sum_n exp(lse_n - m) o_n / sum_n exp(lse_n - m),
// summed in the order of the parts, so that equal parts give equal bits. Parts that saw no key are skipped. With
// lse_low_parts, lse_n is the sum of two floats: parts whose scores share a large number are then weighted as exactly
// as others.
//
// Grid: one warp for each (batch, row, head), kCombineWarps warps a block. Shared memory: none. The kernel is bound by
// reading the parts; with few rows, by latency. So a lane loads its columns of the first parts together with their
// log-sum-exps, before it knows which parts saw a key, and each part's weight is computed by one lane and shuffled to
// the others. Many parts of few rows have a block for each row and 128 columns instead of a warp (by_block).
#pragma once

#include "tessera/attention/score/element.cuh"
#include "tessera/combine/config.hpp"
#include "tessera/ptx/synchronization.cuh"
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

// The parts of a row: `count` parts. Those before index `own` are a constant stride apart.
template <CombineConfig kCfg>
struct RowParts {
  static constexpr bool kHasOwn = kCfg.chunks || kCfg.accumulate;
  const CombineParams& p;
  const float *gLse, *gLseLow, *own_lse, *own_lse_low;
  int64 gO, own_o;
  int own, count;

  TESSERA_DEVICE RowParts(const CombineParams& p, int batch, int row, int head)
      : p(p), own_lse(), own_lse_low(), own_o() {
    // A row that belongs to no sequence has no parts: o = 0 and lse = -inf.
    const int64 of_all = static_cast<int64>(batch) * p.rows.value + row;
    own = count = p.rows_end && (of_all < *p.rows_begin || of_all >= *p.rows_end) ? 0 : p.parts;
    int part_head = head;
    int64 lse_in_group = 0;
    gO = 0;
    if constexpr (kCfg.chunks) {
      const CombineChunks& chunks = p.chunks;
      part_head = head / chunks.group;
      const int in_group = head - part_head * chunks.group.value;
      lse_in_group = chunks.lse_in_group * in_group, gO += chunks.o_in_group * in_group;
      own_lse = chunks.own_lse.at(batch, head, row);
      if (chunks.own_lse_low.data) own_lse_low = chunks.own_lse_low.at(batch, head, row);
      own_o = chunks.own_o_batch * batch + chunks.own_o_row * row + chunks.own_o_head * head;
      ++count;
    }
    if constexpr (kCfg.accumulate) {
      own_lse = p.lse.at(batch, head, row), own_lse_low = p.lse_low.at(batch, head, row);
      own_o = p.chunks.own_o_batch * batch + p.chunks.own_o_row * row + p.chunks.own_o_head * head;
      ++count;
    }
    const auto first = [&](const PartStats& of) {
      return of.data + of.batch * batch + of.head * part_head + of.row * row + lse_in_group;
    };
    gLse = first(p.lse_parts), gLseLow = p.lse_low_parts.data ? first(p.lse_low_parts) : nullptr;
    gO += p.o_part_batch * batch + p.o_part_row * row + p.o_part_head * part_head;
  }

  // -inf if part n does not exist or saw no key.
  TESSERA_DEVICE TwoFloats lse(int n) const {
    if (n >= count) return unseen_lse();
    if (kHasOwn && n == own) return {*own_lse, own_lse_low ? *own_lse_low : 0.0f};
    return {gLse[p.lse_parts.part * n], gLseLow ? gLseLow[p.lse_low_parts.part * n] : 0.0f};
  }
  template <class Columns>
  TESSERA_DEVICE Columns o(int n, int col) const {
    const bool of_own = kHasOwn && n == own;
    return Columns::load(of_own ? p.chunks.own_o : p.o_parts, of_own ? own_o + col : p.o_part * n + gO + col,
                         p.head_dim_v - col);
  }
};

// kCombineWidth neighbouring columns of a part, of which `count` exist.
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

// Above this limit, exp() of a part's low float could overflow by itself.
inline constexpr float kFarLow = 64.0f;

// The log-sum-exp of all parts of a row, by a warp: lane l reads parts l, l + 32, ...; `mine` is that of part l.
struct JointLse {
  float best = -infinity(), best_low = 0.0f, sum = 0.0f, factor;
  bool seen;

  template <CombineConfig kCfg>
  TESSERA_DEVICE JointLse(const CombineParams& p, const RowParts<kCfg>& of, TwoFloats mine, int head) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto for_parts = [&](auto&& body) {
#pragma unroll 1
      for (int n = lane; n < of.count; n += 32) body(n == lane ? mine : of.lse(n));
    };
    bool undefined = false, far = false;  // far: some low part exceeds kFarLow
    for_parts([&](TwoFloats part) {
      best = fmaxf(best, part.high);
      undefined |= part.high != part.high;
      far |= fabsf(part.low) > kFarLow;
    });
    best = warp_max(best);
    seen = best > -infinity() || __any_sync(0xffffffff, undefined);
    const float sink = p.sink && seen ? p.sink[p.sink_head * head] : -infinity();
    best = fmaxf(best, sink);
    if (__any_sync(0xffffffff, far)) [[unlikely]] {
      best_low = sink == best ? 0.0f : -infinity();
      for_parts([&](TwoFloats part) { best_low = part.high == best ? fmaxf(best_low, part.low) : best_low; });
      best_low = warp_max(best_low);
    }
    sum = p.sink && seen && lane == 0 ? weight({sink, 0.0f}) : 0.0f;
    for_parts([&](TwoFloats part) { sum += part.high != -infinity() ? weight(part) : 0.0f; });
    sum = warp_sum(sum);
    factor = 1.0f / sum;
  }
  TESSERA_DEVICE float weight(TwoFloats part) const { return expf((part.high - best) + (part.low - best_low)); }
  TESSERA_DEVICE TwoFloats lse() const { return seen ? two_sum(best, best_low + logf(sum)) : unseen_lse(); }
};

// Adds to a lane's columns of o those of kAhead parts; of_lane: the LSE of the part with the lane's number. The values
// of a part that saw no key are never added: they may be NaN or Inf.
template <int kAhead, class Columns>
TESSERA_DEVICE void add_parts(float (&o)[kCombineWidth], const Columns (&parts)[kAhead], const JointLse& joint,
                              TwoFloats of_lane) {
  constexpr float kUnseen = -1.0f;  // no weight is negative
  const float weight = of_lane.high == -infinity() ? kUnseen : joint.weight(of_lane) * joint.factor;
#pragma unroll
  for (int n = 0; n < kAhead; ++n) {
    const float w = __shfl_sync(0xffffffff, weight, n);
    const bool counts = !(w < 0.0f);  // a NaN weight counts
    float x[kCombineWidth];
    parts[n].unpack(x);
#pragma unroll
    for (int c = 0; c < kCombineWidth; ++c) o[c] = counts ? o[c] + w * x[c] : o[c];
  }
}

template <CombineConfig kCfg, bool kAligned>
TESSERA_DEVICE void store_merged(const CombineParams& p, int64 row_at, int col, const float (&o)[kCombineWidth]) {
  if constexpr (kAligned) {
    RawColumns<kCfg.dtype, kCombineWidth> raw;
    pack_columns<kCfg.dtype>(o, raw);
    if (col < p.head_dim_v) store_columns<kCfg.dtype>(p.o.data, row_at + col, raw);
  } else {
#pragma unroll
    for (int c = 0; c < kCombineWidth; ++c) {
      if (col + c < p.head_dim_v) store_element<kCfg.dtype>(p.o.data, row_at + col + c, o[c]);
    }
  }
}

// Merges a row of o and its LSE, kAhead parts at a time.
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

  const TwoFloats mine = of.lse(lane);
  const JointLse joint(p, of, mine, head);
  if (!kCfg.accumulate && lane == 0) store_lse(p, batch, head, row, joint.lse());

  const int64 out = p.o.batch * batch + p.o.row * row + p.o.head * head;
#pragma unroll 1
  for (int col = lane * kCombineWidth; col - lane * kCombineWidth < p.head_dim_v; col += 32 * kCombineWidth) {
    float o[kCombineWidth] = {};
#pragma unroll 1
    for (int first = 0; first < of.count; first += kAhead) {
      if (first > 0 || col >= 32 * kCombineWidth) load(first, col);
      add_parts(o, parts, joint, first == 0 ? mine : of.lse(first + lane));
    }
    store_merged<kCfg, kAligned>(p, out, col, o);
  }
  if constexpr (kCfg.accumulate) {
    __syncwarp();  // all lanes have read the part's lse
    if (lane == 0) store_lse(p, batch, head, row, joint.lse());
  }
}

// The same for 128 columns of a row from col0 on, by a block whose warps each add every kCombineWarps-th kAhead parts:
// with few rows, a warp alone would wait for one load of parts after another.
template <CombineConfig kCfg, bool kAligned, int kAhead>
TESSERA_DEVICE void merge_row_by_block(const CombineParams& p, const RowParts<kCfg>& of, int batch, int row, int head,
                                       int col0) {
  using Columns = PartColumns<kCfg.part_dtype, kAligned>;
  __shared__ float sO[kCombineWarps][32][kCombineWidth];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int col = col0 + lane * kCombineWidth, begin = warp * kAhead;
  Columns parts[kAhead];
  const auto load = [&](int first) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (first + n < of.count && col < p.head_dim_v) parts[n] = of.template o<Columns>(first + n, col);
    }
  };
  load(begin);
  const TwoFloats mine = of.lse(lane), of_begin = of.lse(begin + lane);
  const JointLse joint(p, of, mine, head);
  if (threadIdx.x == 0 && col0 == 0) store_lse(p, batch, head, row, joint.lse());
  float o[kCombineWidth] = {};
#pragma unroll 1
  for (int first = begin; first < of.count; first += kCombineWarps * kAhead) {
    if (first != begin) load(first);
    add_parts(o, parts, joint, first == begin ? of_begin : of.lse(first + lane));
  }
#pragma unroll
  for (int c = 0; c < kCombineWidth; ++c) sO[warp][lane][c] = o[c];
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int n = 1; n < kCombineWarps; ++n) {
#pragma unroll
    for (int c = 0; c < kCombineWidth; ++c) o[c] += sO[n][lane][c];
  }
  store_merged<kCfg, kAligned>(p, p.o.batch * batch + p.o.row * row + p.o.head * head, col, o);
}

template <CombineConfig kCfg>
TESSERA_DEVICE void combine(const CombineParams& p) {
  constexpr int kFew = 4, kMany = kCfg.part_dtype == Dtype::kFloat32 ? 8 : 16;  // parts in flight, limited by registers
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  unsigned index = blockIdx.x * kCombineWarps + threadIdx.x / 32;
  const bool by_block = combines_by_block(kCfg) && p.by_block;
  if (by_block) index = blockIdx.x / combine_row_blocks(p.head_dim_v);
  if (index >= static_cast<unsigned>(p.batch * p.rows.value * p.heads.value)) return;
  const int of_all = static_cast<int>(index) / p.heads, head = static_cast<int>(index) - of_all * p.heads.value;
  const int batch = of_all / p.rows, row = of_all - batch * p.rows.value;
  const RowParts<kCfg> of(p, batch, row, head);
  if (by_block) {
    const int col0 = static_cast<int>(blockIdx.x - index * combine_row_blocks(p.head_dim_v)) * 32 * kCombineWidth;
    if (p.aligned) return merge_row_by_block<kCfg, true, kMany>(p, of, batch, row, head, col0);
    return merge_row_by_block<kCfg, false, kFew>(p, of, batch, row, head, col0);
  }
  if (!p.aligned) return merge_row<kCfg, false, kFew>(p, of, batch, row, head);
  if (of.count <= kFew) return merge_row<kCfg, true, kFew>(p, of, batch, row, head);
  merge_row<kCfg, true, kMany>(p, of, batch, row, head);
}

}  // namespace tessera
