// Merge of partial results over disjoint sets of keys, exact: with m = max_n lse_n,
//   lse = m + log sum_n exp(lse_n - m),   o = sum_n exp(lse_n - lse) o_n,
// in the order of the parts, so that the same parts give the same bits. Parts that saw nothing do not count.
//
// Grid: one warp for each (batch, row, head), kCombineWarps of them a block. Shared memory: 32 weights a warp. Bound by
// the reading of the parts, and where rows are few by the way to them: several parts' columns are under way at once.
#pragma once

#include "tessera/attention/softmax.cuh"
#include "tessera/combine/config.hpp"

namespace tessera {

inline constexpr int kCombineWarps = 4;
inline constexpr int kCombineColumns = 4;  // of a lane at a time, 32 apart

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

// o = sum_n exp(lse_n - lse) o_n, a lane for every 32nd column. The weights of 32 parts at a time are made by a lane each; a
// part that saw nothing is not read.
template <CombineConfig kCfg>
TESSERA_DEVICE void add_parts(const CombineParams& p, const float* gLse, int64 gO, int parts, float lse, int64 out,
                              float (&weights)[32]) {
  constexpr int kAhead = 8;         // parts whose columns are under way
  constexpr float kUnseen = -1.0f;  // no weight is below 0
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int col0 = lane; col0 - lane < p.head_dim_v; col0 += 32 * kCombineColumns) {
    float o[kCombineColumns] = {};
#pragma unroll 1
    for (int first = 0; first < parts; first += 32) {
      const float mine = first + lane < parts ? gLse[p.lse_part * (first + lane)] : -infinity();
      __syncwarp();  // the weights before are read
      weights[lane] = mine == -infinity() ? kUnseen : expf(mine - lse);
      __syncwarp();
#pragma unroll 1
      for (int n = 0; n < min(32, parts - first); n += kAhead) {
        float w[kAhead], x[kAhead][kCombineColumns];
#pragma unroll
        for (int ahead = 0; ahead < kAhead; ++ahead) {
          w[ahead] = weights[n + ahead];
          const bool counts = !(w[ahead] < 0.0f);  // NaN does
          const int64 part = p.o_part * (first + n + ahead) + gO + col0;
#pragma unroll
          for (int c = 0; c < kCombineColumns; ++c) {
            x[ahead][c] =
                counts && col0 + 32 * c < p.head_dim_v ? load_element<kCfg.part_dtype>(p.o_parts, part + 32 * c) : 0.0f;
          }
        }
#pragma unroll
        for (int ahead = 0; ahead < kAhead; ++ahead)
#pragma unroll
          for (int c = 0; c < kCombineColumns; ++c) o[c] += w[ahead] * x[ahead][c];
      }
    }
#pragma unroll
    for (int c = 0; c < kCombineColumns; ++c) {
      if (col0 + 32 * c < p.head_dim_v) store_element<kCfg.dtype>(p.o.data, out + col0 + 32 * c, o[c]);
    }
  }
}

template <CombineConfig kCfg>
TESSERA_DEVICE void combine(const CombineParams& p) {
  const int64 index = static_cast<int64>(blockIdx.x) * kCombineWarps + threadIdx.x / 32;
  if (index >= static_cast<int64>(p.batch) * p.rows * p.heads) return;
  const int head = static_cast<int>(index % p.heads), row = static_cast<int>(index / p.heads % p.rows);
  const int batch = static_cast<int>(index / p.heads / p.rows);
  // A row of no sequence has no parts: 0 and -inf.
  const int parts = p.rows_end && (row < *p.rows_begin || row >= *p.rows_end) ? 0 : p.parts;
  const float* gLse = p.lse_parts + p.lse_part_batch * batch + p.lse_part_head * head + p.lse_part_row * row;
  const int64 gO = p.o_part_batch * batch + p.o_part_row * row + p.o_part_head * head;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  // The joint log-sum-exp, a lane for every 32nd part.
  float best = -infinity();
  bool undefined = false;
#pragma unroll 1
  for (int n = lane; n < parts; n += 32) {
    const float part = gLse[p.lse_part * n];
    best = fmaxf(best, part);
    undefined |= part != part;
  }
  best = warp_max(best);
  const bool seen = best > -infinity() || __any_sync(0xffffffff, undefined);
  const float sink = p.sink && seen ? p.sink[p.sink_head * head] : -infinity();
  best = fmaxf(best, sink);
  float sum = p.sink && seen && lane == 0 ? expf(sink - best) : 0.0f;
#pragma unroll 1
  for (int n = lane; seen && n < parts; n += 32) {
    const float part = gLse[p.lse_part * n];
    if (part != -infinity()) sum += expf(part - best);
  }
  sum = warp_sum(sum);
  const float lse = seen ? best + logf(sum) : -infinity();
  if (p.lse.data && lane == 0) {
    p.lse.data[p.lse.batch * batch + p.lse.head * head + p.lse.row * row] = lse;
  }

  const int64 out = p.o.batch * batch + p.o.row * row + p.o.head * head;
  __shared__ float sWeights[kCombineWarps][32];
  add_parts<kCfg>(p, gLse, gO, seen ? parts : 0, lse, out, sWeights[threadIdx.x / 32]);
}

}  // namespace tessera
