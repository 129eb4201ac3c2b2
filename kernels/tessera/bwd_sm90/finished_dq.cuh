// With a block mask, in any order: dQ of finished heads, while the products of others run. A block of keys waits 3 us for its first dS; its
// dQ warpgroup converts in that time a part of a head's dQ, if all blocks of that head have added theirs, from L2, where it still is. The
// kernel after the products converts the parts that were not finished in time.
//
// A part: of a KV head's tiles of queries, of all heads of its group, as many as the head has tiles of keys. The block at place n of the grid
// looks after part n - p.finish_lag. Counters, which the kernel before the products clears: added [heads], warps whose additions are there;
// converted [heads x key_tiles], warps that have converted their rows of a part.
#pragma once

#include "tessera/bwd_sm90/block.cuh"
#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/tile/element.cuh"

namespace tessera {

inline constexpr int kDqWarps = 4;

// Of a KV head: tiles of queries, and those of a part.
TESSERA_DEVICE int query_tiles_of(const BwdSm90Params& p) { return p.group * p.q_tiles; }
TESSERA_DEVICE int part_tiles(const BwdSm90Params& p) { return (query_tiles_of(p) + p.key_tiles - 1) / p.key_tiles; }

// By the first block of the kernel before, of kThreads threads.
template <int kThreads>
TESSERA_DEVICE void clear_finished(const BwdSm90Params& p) {
  const int words = p.heads * (1 + p.key_tiles);  // `converted` is after `added`
  for (int n = static_cast<int>(threadIdx.x); n < words; n += kThreads) p.added[n] = 0;
}

// By a warp of the dQ warpgroup, once its last addition is on its way.
TESSERA_DEVICE void count_added(const BwdSm90Params& p, const KeyBlock& block) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  ptx::cp_async_bulk_wait_group();
  ptx::fence_proxy_async_global();
  __threadfence();
  ptx::red_release_add_s32(p.added + block.batch * p.heads_kv + block.head_kv, 1);
}

// A warp's 16 queries of a tile of 64, in the accumulators' order.
template <BwdSm90Config kCfg>
TESSERA_DEVICE void convert_rows(const BwdSm90Params& p, int batch, int head, int tile, int warp, int lane) {
  constexpr int kParts = kCfg.head_dim % 64 == 0 ? 8 : 4;  // of 8 columns, under way at once
  const int64 slot = static_cast<int64>(head) * p.q_slots + batch * p.q_tiles + tile;
  const int row0 = tile * kCfg.block_m + warp * 16 + lane / 4;
  const float factor = p.scale * bwd_lower_late(kCfg.dtype);
  const float* gdQ = dq_part<kCfg.head_dim>(p.dq_accum + slot * (kCfg.block_m * kCfg.head_dim), warp, 0);
  float unit[2];  // 0 for a query that sees nothing, whatever its 0s met in the products
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float lse = p.row_lse_log2[slot * kCfg.block_m + warp * 16 + lane / 4 + half * 8];
    unit[half] = lse == infinity() ? 0.0f : factor;
  }
#pragma unroll 1
  for (int first = 0; first < kCfg.head_dim / 8; first += kParts) {
    float4 x[kParts];
#pragma unroll
    for (int n = 0; n < kParts; ++n) x[n] = dq_load(gdQ + (first + n) * 128, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + half * 8;
      if (row >= p.seqlen_q) break;
      char* to = static_cast<char*>(p.d_q.data) +
                 (p.d_q.batch * batch + p.d_q.row * row + p.d_q.head * head + first * 8 + lane % 4 * 2) * 2;
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        if ((first + n) * 8 >= p.head_dim) break;
        const float low = half ? x[n].z : x[n].x, high = half ? x[n].w : x[n].y;
        const uint32 pair = unit[half] == 0.0f ? 0 : pack_pair<kCfg.dtype>(low * factor, high * factor);
        *reinterpret_cast<uint32*>(to + n * 16) = pair;
      }
    }
  }
}

// By a warp of the dQ warpgroup, before its first step.
template <BwdSm90Config kCfg>
TESSERA_DEVICE void convert_finished(const BwdSm90Params& p, int warp, int lane) {
  static_assert(kCfg.block_m == 16 * kDqWarps);
  const int part = static_cast<int>(blockIdx.x) - p.finish_lag;
  if (part < 0 || !p.d_q_aligned) return;
  const int unit = part / p.key_tiles, tiles = part_tiles(p);
  if (ptx::ld_acquire_s32(p.added + unit) < kDqWarps * p.key_tiles) return;
  ptx::fence_proxy_async_global();
  const int begin = (part - unit * p.key_tiles) * tiles, end = min(begin + tiles, query_tiles_of(p));
#pragma unroll 1
  for (int n = begin; n < end; ++n) {
    const int in_group = n / p.q_tiles;
    convert_rows<kCfg>(p, unit / p.heads_kv, unit % p.heads_kv * p.group + in_group, n - in_group * p.q_tiles, warp,
                       lane);
  }
  if (lane == 0) atomicAdd(p.converted + part, 1);
}

// In the kernel after: whether a tile of queries has been converted.
TESSERA_DEVICE bool is_converted(const BwdSm90Params& p, int batch, int head, int tile) {
  const int head_kv = head / p.group, n = (head - head_kv * p.group) * p.q_tiles + tile;
  return p.converted[(batch * p.heads_kv + head_kv) * p.key_tiles + n / part_tiles(p)] == kDqWarps;
}

}  // namespace tessera
