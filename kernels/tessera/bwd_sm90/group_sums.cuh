// Sums the dK and dV of a split group for bwd_sm90. If a call has fewer blocks than the GPU has multiprocessors, the
// query heads of a KV head are divided among several blocks, each of which stores its own dK and dV in float32. This
// kernel adds them in a fixed order and rounds once.
//
// Grid: [.., 2] blocks of kBwdGroupThreads threads, for dK and dV; a thread has four columns of a key.
#pragma once

#include "tessera/bwd_sm90/config.hpp"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

template <BwdSm90GroupConfig kCfg, int kColumns>
TESSERA_DEVICE void sum_parts(const BwdSm90Params& p, const float* parts, const RowTensor& to, int columns,
                              int block_n) {
  constexpr int kWords = kColumns / 4;
  const int64 n = static_cast<int64>(blockIdx.x) * kBwdGroupThreads + threadIdx.x;
  const int row = static_cast<int>(n / kWords), col = static_cast<int>(n % kWords) * 4;
  const int pair = row / p.seqlen_k, key = row - pair * p.seqlen_k, heads_kv = p.heads_kv / p.group_splits;
  if (pair >= p.batch * heads_kv || col >= columns) return;
  const int64 rows = p.key_tiles * block_n;  // of a block's dK or dV
  const float4* from = reinterpret_cast<const float4*>(parts + (rows * pair * p.group_splits + key) * kColumns + col);
  float4 sum = from[0];
  for (int part = 1; part < p.group_splits; ++part) {
    const float4 x = from[part * rows * kWords];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const int64 at = to.batch * (pair / heads_kv) + to.head * (pair % heads_kv) + to.row * key + col;
  if constexpr (kCfg.sums) {
    float* const sums = static_cast<float*>(to.data) + at;
    const float x[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (col + e < columns) sums[e] = (p.accumulate ? sums[e] : 0.0f) + x[e];
    }
    return;
  }
  *reinterpret_cast<uint2*>(static_cast<unsigned short*>(to.data) + at) =
      make_uint2(pack_pair<kCfg.dtype>(sum.x, sum.y), pack_pair<kCfg.dtype>(sum.z, sum.w));
}

template <BwdSm90GroupConfig kCfg>
TESSERA_DEVICE void bwd_sm90_group(const BwdSm90Params& p) {
  ptx::griddepcontrol_wait();
  if (blockIdx.y == 0) {
    sum_parts<kCfg, kCfg.head_dim>(p, p.d_k_parts, p.d_k, p.head_dim, p.block_n);
  } else {
    sum_parts<kCfg, kCfg.head_dim_v>(p, p.d_v_parts, p.d_v, p.head_dim_v, p.block_n);
  }
}

}  // namespace tessera
