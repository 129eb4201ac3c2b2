// The merge of split keys by clusters: the blocks of a cluster have neighbouring parts of one work tile, a part each.
// When a block has read its last key, its K, V and Q are no longer needed: the consumers write their rows of O to this
// shared memory, and each block of the cluster merges some of the rows, from the shared memory of all. If the cluster
// has all parts of the work tile, that is the result. Otherwise each block stores its rows' sum to the workspace, and
// the last block to arrive of those with the same rows merges the clusters' sums.
//
// So a part's float32 O crosses the GPU once, between neighbouring multiprocessors, and no second launch waits for the
// first. Parts are added in the order of their keys: the same parts give the same bits.
#pragma once

#include "tessera/attention/arrivals.cuh"
#include "tessera/fwd_sm90/epilogue.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/tile/columns.cuh"

namespace tessera {

inline constexpr int kMergeBarrier = 7;  // a named barrier of all consumers

// The weight of a part in its row's sum, by 16 lanes: lane n has part n.
struct PartWeight {
  float weight;   // negative: the part saw no key; its O, which may be NaN, is not added
  TwoFloats lse;  // of all parts and the sink; -inf: no sink, or no part that saw a key

  TESSERA_DEVICE PartWeight(TwoFloats part, float sink) {
    TwoFloats most = part;
#pragma unroll
    for (int step = kMergeParts / 2; step > 0; step /= 2) {
      const TwoFloats other = {__shfl_xor_sync(0xffffffff, most.high, step),
                               __shfl_xor_sync(0xffffffff, most.low, step)};
      if (other.high > most.high || (other.high == most.high && other.low > most.low)) most = other;
    }
    const bool joins = sink > -infinity() && most.high != -infinity();
    if (joins && sink > most.high) most = {sink, 0.0f};
    const auto weight_of = [&](TwoFloats of) { return expf((of.high - most.high) + (of.low - most.low)); };
    const bool counts = part.high != -infinity();
    const float own = counts ? weight_of(part) : 0.0f;
    float sum = own;
#pragma unroll
    for (int step = kMergeParts / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (joins) sum += weight_of({sink, 0.0f});
    weight = counts ? own / sum : -1.0f;
    lse = sum != 0.0f ? two_sum(most.high, most.low + logf(sum)) : unseen_lse();  // NaN counts as seen
  }
};

// Adds four columns of a part. A NaN weight counts.
TESSERA_DEVICE void add_part(float (&o)[4], float weight, float4 part) {
  const bool counts = !(weight < 0.0f);
  o[0] = counts ? fmaf(weight, part.x, o[0]) : o[0], o[1] = counts ? fmaf(weight, part.y, o[1]) : o[1];
  o[2] = counts ? fmaf(weight, part.z, o[2]) : o[2], o[3] = counts ? fmaf(weight, part.w, o[3]) : o[3];
}

// The rows of its work tile that a block of the cluster merges, by all consumers' threads: first each part's weight by
// one lane, then four columns a thread.
template <FwdSm90Config kCfg>
struct ClusterMerge {
  static constexpr int kBlocks = kCfg.merge_blocks, kThreads = kCfg.consumers * 128, kGroups = kCfg.head_dim_v / 4;
  using Buffers = PartBuffers<kCfg>;
  static_assert(kBlocks <= kMergeParts);

  const FwdSm90Params& p;
  FwdSm90SharedMemory<kCfg>& shared;
  const WorkTile<kCfg>& tile;
  int rank, first, last;  // rows first ... last - 1 of the work tile

  TESSERA_DEVICE ClusterMerge(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared)
      : p(p), shared(shared), tile(shared.work_tiles[0]), rank(static_cast<int>(ptx::cluster_ctarank())) {
    const int count = max(tile.count, 0), each = (count + kBlocks - 1) / kBlocks;
    first = min(rank * each, count), last = min(first + each, count);
  }

  // After the barrier of the cluster: adds the parts of its blocks, which are the result if there is one cluster.
  TESSERA_DEVICE void merge_blocks() const {
    const uint32 o = shared_address(Buffers::o(shared)), lse = shared_address(Buffers::lse(shared));
    const bool result = p.clusters.value == 1;
    weigh(kBlocks, result, [&](int row, int part) {
      const float2 of = ptx::ld_shared_cluster_f32x2(ptx::mapa(lse + row * sizeof(float2), part));
      return TwoFloats{of.x, of.y};
    });
    for_columns([&](int row, int col, const float* weights) {
      const uint32 at = o + (row * Buffers::kStride + col) * sizeof(float);
      float4 parts[kBlocks];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) parts[n] = ptx::ld_shared_cluster_f32x4(ptx::mapa(at, n));
      float sum[4] = {};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) add_part(sum, weights[n], parts[n]);
      if (result) {
        store_result(row, col, sum);
      } else {
        *reinterpret_cast<float4*>(p.partial_o + partial_row(p, tile, row) * p.head_dim_v + col) =
            make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
    });
  }

  // Of several clusters: the last block to arrive with these rows adds the clusters' sums.
  TESSERA_DEVICE void merge_clusters() const {
    const int clusters = p.clusters.value;
    if (clusters == 1 || first >= last) return;
    int* const is_last = Buffers::flag(shared);
    ptx::barrier_sync(kMergeBarrier, kThreads);  // all sums are stored
    if (threadIdx.x == 128) {
      const int work_tile = static_cast<int>(blockIdx.x) / p.num_splits;
      *is_last = arrive_as_last(p.arrivals + work_tile * kBlocks + rank, clusters);
    }
    ptx::barrier_sync(kMergeBarrier, kThreads);
    if (!*is_last) return;
    constexpr int kAhead = 8;
    const int64 stride = static_cast<int64>(p.heads_q.value) * p.rows_total;  // from a cluster's rows to the next one's
    const int64 own = static_cast<int>(blockIdx.x) % p.num_splits / kBlocks * stride;
    weigh(clusters, true, [&](int row, int part) {
      const int64 at = partial_row(p, tile, row) - own + part * stride;
      return TwoFloats{__ldcg(p.partial_lse + at), __ldcg(p.partial_lse_low + at)};
    });
    for_columns([&](int row, int col, const float* weights) {
      const float* from = p.partial_o + (partial_row(p, tile, row) - own) * p.head_dim_v + col;
      float sum[4] = {};
#pragma unroll 1
      for (int begin = 0; begin < clusters; begin += kAhead) {
        float4 parts[kAhead];
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
          if (begin + n < clusters) parts[n] = __ldcg(reinterpret_cast<const float4*>(from));
          from += stride * p.head_dim_v;
        }
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
          if (begin + n < clusters) add_part(sum, weights[begin + n], parts[n]);
        }
      }
      store_result(row, col, sum);
    });
  }

 private:
  TESSERA_DEVICE static int thread() { return static_cast<int>(threadIdx.x) - 128; }

  // Computes the weights of the rows' parts, and stores the rows' LSEs: the call's, with the sink, or the cluster's.
  template <class Load>
  TESSERA_DEVICE void weigh(int parts, bool result, Load&& load) const {
    constexpr int kRowsAWarp = 32 / kMergeParts;
    const int part = lane_id() % kMergeParts, in_warp = lane_id() / kMergeParts;
#pragma unroll 1
    for (int row0 = first + thread() / 32 * kRowsAWarp; row0 < last; row0 += kThreads / 32 * kRowsAWarp) {
      const int row = min(row0 + in_warp, last - 1);  // two halves of a warp may write the same
      const TileRow<kCfg> of(p, tile, row);
      const float sink = result && p.sink ? p.sink[p.sink_head * of.head] : -infinity();
      const PartWeight all(part < parts ? load(row, part) : unseen_lse(), sink);
      Buffers::weights(shared, row - first)[part] = all.weight;
      if (part > 0) continue;
      if (result) {
        store_lse(p, tile.batch, of.head, static_cast<int64>(tile.s.q_begin) + of.query, all.lse);
      } else {
        const int64 at = partial_row(p, tile, row);
        p.partial_lse[at] = all.lse.high, p.partial_lse_low[at] = all.lse.low;
      }
    }
    ptx::barrier_sync(kMergeBarrier, kThreads);
  }

  // Calls body(row, col, weights of the row's parts) for each four columns of these rows.
  template <class Body>
  TESSERA_DEVICE void for_columns(Body&& body) const {
#pragma unroll 1
    for (int item = thread(); item < (last - first) * kGroups; item += kThreads) {
      const int local = item / kGroups, col = item % kGroups * 4;
      if (col < p.head_dim_v) body(first + local, col, Buffers::weights(shared, local));
    }
  }

  TESSERA_DEVICE void store_result(int row, int col, const float (&o)[4]) const {
    RawColumns<kCfg.dtype, 4> raw;
    pack_columns<kCfg.dtype>(o, raw);
    store_columns<kCfg.dtype>(output_at(p, tile, row), col, raw);
  }
};

// By all consumers, after they have written the block's part.
template <FwdSm90Config kCfg>
TESSERA_DEVICE void merge_parts(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared) {
  ptx::fence_release_shared_cluster();
  __syncwarp();
  ptx::barrier_cluster_arrive_relaxed();
  ptx::barrier_cluster_wait();  // the parts of all blocks are visible
  const ClusterMerge<kCfg> merge(p, shared);
  merge.merge_blocks();
  __syncwarp();
  ptx::barrier_cluster_arrive_relaxed();  // these threads have used what they read from the other blocks
  merge.merge_clusters();
  __syncwarp();
  ptx::barrier_cluster_wait();
}

// By all other threads: the barriers of merge_parts.
TESSERA_DEVICE void pass_merge_barriers() {
  __syncwarp();
  for (int n = 0; n < 2; ++n) {
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait();
  }
}

}  // namespace tessera
