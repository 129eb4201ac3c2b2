// Merge of partial results over disjoint sets of keys, exact: with m = max_n lse_n,
//   lse = m + log sum_n exp(lse_n - m),   o = sum_n exp(lse_n - lse) o_n,
// in the order of the parts, so that the same parts give the same bits. Parts that saw nothing do not count.
//
// Grid: one warp for each (batch, row, head), kCombineWarps of them a block. No shared memory. Bound by the reading of the
// parts.
#pragma once

#include "tessera/core/online_softmax.cuh"

namespace tessera {

inline constexpr int kCombineWarps = 4;

template <CombineConfig kCfg>
TESSERA_DEVICE void combine(const CombineParams& p) {
  const int64 index = static_cast<int64>(blockIdx.x) * kCombineWarps + threadIdx.x / 32;
  if (index >= static_cast<int64>(p.batch) * p.rows * p.heads) return;
  const int head = static_cast<int>(index % p.heads), row = static_cast<int>(index / p.heads % p.rows);
  const int batch = static_cast<int>(index / p.heads / p.rows);
  if (p.rows_end && row >= *p.rows_end) return;
  const float* gLse = p.lse_parts + p.lse_part_batch * batch + p.lse_part_head * head + p.lse_part_row * row;
  const int64 gO = p.o_part_batch * batch + p.o_part_row * row + p.o_part_head * head;

  // 1. The joint log-sum-exp.
  float best = -infinity();
  bool undefined = false;
  for (int n = 0; n < p.parts; ++n) {
    best = fmaxf(best, gLse[p.lse_part * n]);
    undefined |= gLse[p.lse_part * n] != gLse[p.lse_part * n];
  }
  const bool seen = best > -infinity() || undefined;
  const float sink = p.sink && seen ? p.sink[p.sink_head * head] : -infinity();
  best = fmaxf(best, sink);
  float sum = p.sink && seen ? expf(sink - best) : 0.0f;
  for (int n = 0; seen && n < p.parts; ++n) {
    if (gLse[p.lse_part * n] != -infinity()) sum += expf(gLse[p.lse_part * n] - best);
  }
  const float lse = seen ? best + logf(sum) : -infinity();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (p.lse.data && lane == 0) {
    p.lse.data[p.lse.batch * batch + p.lse.head * head + p.lse.row * row] = lse;
  }

  // 2. The weighted sum, a lane for every 32nd column.
  const int64 out = p.o.batch * batch + p.o.row * row + p.o.head * head;
  for (int col = lane; col < p.head_dim_v; col += 32) {
    float o = 0.0f;
    for (int n = 0; seen && n < p.parts; ++n) {
      const float part = gLse[p.lse_part * n];
      if (part == -infinity()) continue;
      o += expf(part - lse) * load_element(static_cast<Dtype>(p.part_dtype), p.o_parts, p.o_part * n + gO + col);
    }
    store_element<kCfg.dtype>(p.o.data, out + col, o);
  }
}

}  // namespace tessera
