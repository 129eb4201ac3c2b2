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

// Four columns of a row over some of its parts: O is o / sum, the log-sum-exp is most + log(sum).
struct MergedColumns {
  TwoFloats most = unseen_lse();
  float sum = 0.0f;
  float o[4] = {};

  TESSERA_DEVICE bool seen() const { return sum != 0.0f; }  // NaN counts as seen
  TESSERA_DEVICE TwoFloats lse() const { return seen() ? two_sum(most.high, most.low + logf(sum)) : unseen_lse(); }
  TESSERA_DEVICE float factor() const { return seen() ? 1.0f / sum : 0.0f; }

  // Adds parts in their order. Of a part that saw no key the LSE is -inf, and its O, which may be NaN, is not added.
  template <int kParts>
  TESSERA_DEVICE void add(const TwoFloats (&lse)[kParts], const float4 (&part)[kParts]) {
    const TwoFloats before = most;
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      if (lse[n].high > most.high || (lse[n].high == most.high && lse[n].low > most.low)) most = lse[n];
    }
    const auto weight = [this](TwoFloats of) { return expf((of.high - most.high) + (of.low - most.low)); };
    const float kept = seen() ? weight(before) : 0.0f;
    sum *= kept;
#pragma unroll
    for (int c = 0; c < 4; ++c) o[c] *= kept;
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      const bool counts = lse[n].high != -infinity();
      const float w = weight(lse[n]);
      const float columns[4] = {part[n].x, part[n].y, part[n].z, part[n].w};
      sum = counts ? sum + w : sum;
#pragma unroll
      for (int c = 0; c < 4; ++c) o[c] = counts ? fmaf(w, columns[c], o[c]) : o[c];
    }
  }
  // Adds a sink, a score without a value, to a row that sees a key.
  TESSERA_DEVICE void join_sink(float sink) {
    if (!seen()) return;
    const TwoFloats lse[1] = {{sink, 0.0f}};
    const float4 none[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    add(lse, none);
  }
};

// The rows of its work tile that a block of the cluster merges, by all consumers' threads.
template <FwdSm90Config kCfg>
struct ClusterMerge {
  static constexpr int kBlocks = kCfg.merge_blocks, kThreads = kCfg.consumers * 128, kGroups = kCfg.head_dim_v / 4;
  using Buffers = PartBuffers<kCfg>;

  const FwdSm90Params& p;
  FwdSm90SharedMemory<kCfg>& shared;
  const WorkTile<kCfg>& tile;
  int rank, first, last;  // rows first ... last - 1 of the work tile

  TESSERA_DEVICE ClusterMerge(const FwdSm90Params& p, FwdSm90SharedMemory<kCfg>& shared)
      : p(p), shared(shared), tile(shared.work_tiles[0]), rank(static_cast<int>(ptx::cluster_ctarank())) {
    const int count = max(tile.count, 0), each = (count + kBlocks - 1) / kBlocks;
    first = min(rank * each, count), last = min(first + each, count);
  }

  // Calls body(row, col) for each four columns of these rows.
  template <class Body>
  TESSERA_DEVICE void for_columns(Body&& body) const {
    const int thread = static_cast<int>(threadIdx.x) - 128;
#pragma unroll 1
    for (int item = thread; item < (last - first) * kGroups; item += kThreads) {
      const int col = item % kGroups * 4;
      if (col < p.head_dim_v) body(first + item / kGroups, col);
    }
  }

  // After the barrier of the cluster: adds the parts of its blocks.
  TESSERA_DEVICE void merge_blocks() const {
    const uint32 o = shared_address(Buffers::o(shared)), lse = shared_address(Buffers::lse(shared));
    for_columns([&](int row, int col) {
      TwoFloats lses[kBlocks];
      float4 parts[kBlocks];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float2 of_part = ptx::ld_shared_cluster_f32x2(ptx::mapa(lse + row * sizeof(float2), n));
        lses[n] = {of_part.x, of_part.y};
        parts[n] = ptx::ld_shared_cluster_f32x4(ptx::mapa(o + (row * Buffers::kStride + col) * sizeof(float), n));
      }
      MergedColumns merged;
      merged.add(lses, parts);
      if (p.clusters.value == 1) {
        store_result(row, col, merged);
      } else {
        store_sum(row, col, merged);
      }
    });
  }

  // Of several clusters: the last block to arrive with these rows adds the clusters' sums.
  TESSERA_DEVICE void merge_clusters() const {
    if (p.clusters.value == 1 || first >= last) return;
    int* const is_last = Buffers::flag(shared);
    ptx::barrier_sync(kMergeBarrier, kThreads);  // all sums are stored
    if (threadIdx.x == 128) {
      const int work_tile = static_cast<int>(blockIdx.x) / p.num_splits;
      *is_last = arrive_as_last(p.arrivals + work_tile * kBlocks + rank, p.clusters.value);
    }
    ptx::barrier_sync(kMergeBarrier, kThreads);
    if (!*is_last) return;
    constexpr int kAhead = kCfg.consumers < 4 ? 16 : 8;  // limited by registers
    const int64 part = static_cast<int64>(p.heads_q.value) * p.rows_total;
    const int64 own = (static_cast<int>(blockIdx.x) % p.num_splits) / kBlocks * part;
    for_columns([&](int row, int col) {
      const int64 row0 = partial_row(p, tile, row) - own;
      MergedColumns merged;
#pragma unroll 1
      for (int begin = 0; begin < p.clusters.value; begin += kAhead) {
        TwoFloats lses[kAhead];
        float4 parts[kAhead];
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
          lses[n] = unseen_lse(), parts[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (begin + n < p.clusters.value) {
            const int64 at = row0 + (begin + n) * part;
            lses[n] = {__ldcg(p.partial_lse + at), __ldcg(p.partial_lse_low + at)};
            parts[n] = __ldcg(reinterpret_cast<const float4*>(p.partial_o + at * p.head_dim_v + col));
          }
        }
        merged.add(lses, parts);
      }
      store_result(row, col, merged);
    });
  }

 private:
  TESSERA_DEVICE void store_sum(int row, int col, const MergedColumns& merged) const {
    const int64 at = partial_row(p, tile, row);
    const float l = merged.factor();
    *reinterpret_cast<float4*>(p.partial_o + at * p.head_dim_v + col) =
        make_float4(merged.o[0] * l, merged.o[1] * l, merged.o[2] * l, merged.o[3] * l);
    if (col > 0) return;
    const TwoFloats lse = merged.lse();
    p.partial_lse[at] = lse.high, p.partial_lse_low[at] = lse.low;
  }
  TESSERA_DEVICE void store_result(int row, int col, MergedColumns merged) const {
    const TileRow<kCfg> of(p, tile, row);
    if (p.sink) merged.join_sink(p.sink[p.sink_head * of.head]);
    if (col == 0) store_lse(p, tile.batch, of.head, static_cast<int64>(tile.s.q_begin) + of.query, merged.lse());
    const float l = merged.factor();
    float o[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) o[c] = merged.seen() ? merged.o[c] * l : 0.0f;
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
