// Merge of partial results over disjoint sets of keys, exact: with m = max_n lse_n,
//   lse = m + log sum_n exp(lse_n - m),   o = sum_n exp(lse_n - lse) o_n,
// in the order of the parts, so that the same parts give the same bits. Parts that saw nothing do not count.
//
// Grid: one warp for each (batch, row, head), kCombineWarps of them a block. Shared memory: 32 weights a warp. Bound by
// the reading of the parts, and where rows are few by the way to them: several parts' columns are under way at once.
#pragma once

#include "tessera/attention/softmax.cuh"
#include "tessera/combine/config.hpp"
#include "tessera/ptx/griddepcontrol.cuh"

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

// The parts of a row: `count` of them, of which those before `own` lie a stride apart.
template <CombineConfig kCfg>
struct RowParts {
  const CombineParams& p;
  const float *gLse, *own_lse;
  int64 gO, own_o;
  int own, count;

  TESSERA_DEVICE RowParts(const CombineParams& p, int batch, int row, int head) : p(p), own_lse(), own_o() {
    // A row of no sequence has no parts: 0 and -inf.
    const int64 of_all = static_cast<int64>(batch) * p.rows + row;
    own = count = p.rows_end && (of_all < *p.rows_begin || of_all >= *p.rows_end) ? 0 : p.parts;
    int part_head = head;
    gLse = p.lse_parts, gO = 0;
    if constexpr (kCfg.chunks) {
      const CombineChunks& chunks = p.chunks;
      part_head = head / chunks.group;
      const int in_group = head - part_head * chunks.group;
      gLse += chunks.lse_in_group * in_group, gO += chunks.o_in_group * in_group;
      own_lse = chunks.own_lse + chunks.own_lse_batch * batch + chunks.own_lse_head * head + chunks.own_lse_row * row;
      own_o = chunks.own_o_batch * batch + chunks.own_o_row * row + chunks.own_o_head * head;
      ++count;
    }
    gLse += p.lse_part_batch * batch + p.lse_part_head * part_head + p.lse_part_row * row;
    gO += p.o_part_batch * batch + p.o_part_row * row + p.o_part_head * part_head;
  }

  TESSERA_DEVICE float lse(int n) const { return kCfg.chunks && n == own ? *own_lse : gLse[p.lse_part * n]; }
  TESSERA_DEVICE float o(int n, int col) const {
    const bool of_own = kCfg.chunks && n == own;
    return load_element<kCfg.part_dtype>(of_own ? p.chunks.own_o : p.o_parts,
                                         of_own ? own_o + col : p.o_part * n + gO + col);
  }
};

// o = sum_n exp(lse_n - lse) o_n, a lane for every 32nd column. The weights of 32 parts at a time are made by a lane each; a
// part that saw nothing is not read.
template <CombineConfig kCfg>
TESSERA_DEVICE void add_parts(const RowParts<kCfg>& of, int parts, float lse, int64 out, float (&weights)[32]) {
  const CombineParams& p = of.p;
  constexpr int kAhead = 8;         // parts whose columns are under way
  constexpr float kUnseen = -1.0f;  // no weight is below 0
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int col0 = lane; col0 - lane < p.head_dim_v; col0 += 32 * kCombineColumns) {
    float o[kCombineColumns] = {};
#pragma unroll 1
    for (int first = 0; first < parts; first += 32) {
      const float mine = first + lane < parts ? of.lse(first + lane) : -infinity();
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
#pragma unroll
          for (int c = 0; c < kCombineColumns; ++c) {
            const int col = col0 + 32 * c;
            x[ahead][c] = counts && col < p.head_dim_v ? of.o(first + n + ahead, col) : 0.0f;
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
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64 index = static_cast<int64>(blockIdx.x) * kCombineWarps + threadIdx.x / 32;
  if (index >= static_cast<int64>(p.batch) * p.rows * p.heads) return;
  const int head = static_cast<int>(index % p.heads), row = static_cast<int>(index / p.heads % p.rows);
  const int batch = static_cast<int>(index / p.heads / p.rows);
  const RowParts<kCfg> of(p, batch, row, head);
  const int parts = of.count;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  // The joint log-sum-exp, a lane for every 32nd part.
  float best = -infinity();
  bool undefined = false;
#pragma unroll 1
  for (int n = lane; n < parts; n += 32) {
    const float part = of.lse(n);
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
    const float part = of.lse(n);
    if (part != -infinity()) sum += expf(part - best);
  }
  sum = warp_sum(sum);
  const float lse = seen ? best + logf(sum) : -infinity();
  if (p.lse.data && lane == 0) {
    p.lse.data[p.lse.batch * batch + p.lse.head * head + p.lse.row * row] = lse;
  }

  const int64 out = p.o.batch * batch + p.o.row * row + p.o.head * head;
  __shared__ float sWeights[kCombineWarps][32];
  add_parts<kCfg>(of, seen ? parts : 0, lse, out, sWeights[threadIdx.x / 32]);
}

}  // namespace tessera
