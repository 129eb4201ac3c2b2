// From the warps' sums to O and LSE. The warps of a block are merged first: they processed different keys of the same
// rows. If the keys of a work tile lie in the ranges of several blocks, each block writes its part to the workspace,
// and the last block to arrive merges the parts in the order of their keys. The same parts therefore give the same
// bits.
#pragma once

#include "tessera/attention/arrivals.cuh"
#include "tessera/attention/softmax.cuh"
#include "tessera/decode_sm90/output.cuh"
#include "tessera/decode_sm90/schedule.cuh"
#include "tessera/ptx/synchronization.cuh"

namespace tessera {

// Columns of a row, over some of its keys: softmax is o / sum, both relative to max. If a row is huge, its max is in
// natural units and its sum is negative; otherwise its max is in log2 units.
template <int kCols>
struct DecodePart {
  float max = -infinity(), sum = 0.0f;
  float o[kCols] = {};

  DecodePart() = default;
  TESSERA_DEVICE float2 stats() const { return make_float2(max, sum); }
  // The sum of several parts, added in their order. A part that saw no key has sum 0 and is skipped, because its o may
  // hold NaN from V; a part whose sum is NaN is added.
  template <int kParts>
  TESSERA_DEVICE DecodePart(float2 (&stats)[kParts], const float (&parts)[kParts][kCols]) {
    uint32 signs = 0;
#pragma unroll
    for (int n = 0; n < kParts; ++n) signs |= __float_as_uint(stats[n].y);
    const bool huge = signs >> 31;
    if (huge) [[unlikely]]
      to_natural(stats);
#pragma unroll
    for (int n = 0; n < kParts; ++n) max = stats[n].y == 0.0f ? max : fmaxf(max, stats[n].x);
    const float unit = huge ? kLog2e : 1.0f;
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      const bool counts = stats[n].y != 0.0f;
      const float weight = ptx::ex2_approx_ftz((stats[n].x - max) * unit);
      sum = counts ? fmaf(stats[n].y, weight, sum) : sum;
#pragma unroll
      for (int c = 0; c < kCols; ++c) o[c] = counts ? fmaf(parts[n][c], weight, o[c]) : o[c];
    }
    if (huge) sum = -sum;
  }

 private:
  template <int kParts>
  TESSERA_DEVICE static void to_natural(float2 (&stats)[kParts]) {
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      stats[n] = make_float2(natural_max(stats[n].x, stats[n].y < 0.0f), fabsf(stats[n].y));
    }
  }
};

// Invariant: the sum of the parts so far of a work tile that one block computes. Of each row a thread has four columns,
// and it reads only what it wrote itself.
template <int kHeadDim>
struct alignas(16) DecodeFold {
  float4 o[kHeadDim / 4];
  float2 stats[kHeadDim / 4];

  TESSERA_DEVICE DecodePart<4> get(int col) const {
    DecodePart<4> part;
    part.max = stats[col / 4].x, part.sum = stats[col / 4].y;
    const float4 columns = o[col / 4];
    part.o[0] = columns.x, part.o[1] = columns.y, part.o[2] = columns.z, part.o[3] = columns.w;
    return part;
  }
  TESSERA_DEVICE void put(int col, const DecodePart<4>& part) {
    stats[col / 4] = part.stats(), o[col / 4] = make_float4(part.o[0], part.o[1], part.o[2], part.o[3]);
  }
};

template <DecodeSm90Config kCfg>
struct DecodeMergeBuffers {
  static constexpr int kRows = decode_merge_rows(kCfg.head_dim);
  float partials[kCfg.warps][kRows][kCfg.head_dim + kDecodeMergePad];
  float2 stats[kCfg.warps][kCfg.rows];  // as in DecodePart
  // The sum of each row's current group of parts, then the sum of each row's groups.
  DecodeFold<kCfg.head_dim> folds[kCfg.invariant ? 2 * kCfg.rows : 1];
};

// Stores columns from col on of one row to o, and by the thread with the first columns LSE. A row that sees nothing
// gets 0 and -inf.
template <DecodeSm90Config kCfg, int kCols>
TESSERA_DEVICE void store_row(const DecodeSm90Params& p, const Segment& segment, int local, int col,
                              DecodePart<kCols> part) {
  const DecodeRows rows(p, segment.head_kv);
  const int query = rows.query(p, segment.row0 + local), head = rows.head(p, segment.row0 + local);
  const bool seen = part.sum != 0.0f;  // NaN counts as seen
  RowTotal total(part.max, fabsf(part.sum), part.sum < 0.0f);
  float scale = 1.0f;
  if (p.sink && seen) scale = total.join_sink(p, p.sink[p.sink_head * head]);
  const int64 row = segment.s.q_begin + query;
  if (col == 0) {
    const float sum_log2 = ptx::lg2_approx_ftz(total.sum);
    store_lse(p, segment.batch, head, row, seen ? total.lse(p, sum_log2, p.lse_low.data) : unseen_lse());
  }
  const float factor = seen ? scale * ptx::rcp_approx_ftz(total.sum) : 0.0f;
  // + 0 makes -0 into +0: otherwise the sign of a zero would depend on how many missing parts were added (add_parts).
  const auto value = [&](int c) { return seen ? fmaf(part.o[c], factor, 0.0f) : 0.0f; };
  const int64 at = p.o.batch * segment.batch + p.o.row * row + p.o.head * head + col;
  if (p.o_aligned && col + kCols <= p.head_dim_v) {
    auto* const words = reinterpret_cast<uint32*>(static_cast<char*>(p.o.data) + at * dtype_bytes(kCfg.dtype));
    uint32 pairs[kCols / 2];
#pragma unroll
    for (int c = 0; c < kCols; c += 2) {
      pairs[c / 2] = pack_pair<kCfg.dtype>(value(c), value(c + 1));
    }
    if constexpr (kCols == 4) {
      *reinterpret_cast<uint2*>(words) = make_uint2(pairs[0], pairs[1]);
    } else {
      *words = pairs[0];
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < kCols; ++c) {
    if (col + c < p.head_dim_v) store_element<kCfg.dtype>(p.o.data, at + c, value(c));
  }
}

// Adds one more part; the order of these additions does not depend on the batch. A sum that is still empty has max
// -inf, so that the weights of a part do not wait for the sum before it.
template <int kCols>
TESSERA_DEVICE DecodePart<kCols> fold(const DecodePart<kCols>& before, const DecodePart<kCols>& part) {
  const bool counts = part.sum != 0.0f, any = before.sum != 0.0f;
  DecodePart<kCols> all;
  const bool huge = (__float_as_uint(before.sum) | __float_as_uint(part.sum)) >> 31;
  float old_max = before.max, new_max = part.max;
  if (huge) [[unlikely]] {
    old_max = natural_max(old_max, before.sum < 0.0f), new_max = natural_max(new_max, part.sum < 0.0f);
  }
  const float unit = huge ? kLog2e : 1.0f;
  all.max = counts ? fmaxf(old_max, new_max) : old_max;
  const float kept = ptx::ex2_approx_ftz((old_max - all.max) * unit);
  const float added = ptx::ex2_approx_ftz((new_max - all.max) * unit);
  const auto add = [&](float old, float more) {
    const float sum = any ? old * kept : 0.0f;
    return counts ? fmaf(more, added, sum) : sum;
  };
  all.sum = add(fabsf(before.sum), fabsf(part.sum));
  if (huge) all.sum = -all.sum;
#pragma unroll
  for (int c = 0; c < kCols; ++c) all.o[c] = add(before.o[c], part.o[c]);
  return all;
}

// Stores columns of a row of a part, or of a sum of parts, to a slot of the workspace.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void store_part(const DecodeSm90Params& p, int slot, int local, int col, const DecodePart<4>& part) {
  const int64 at = static_cast<int64>(slot) * p.part_rows + local;
  *reinterpret_cast<float4*>(p.partial_o + at * kCfg.head_dim + col) =
      make_float4(part.o[0], part.o[1], part.o[2], part.o[3]);
  if (col == 0) reinterpret_cast<float2*>(p.partial_stat)[at] = part.stats();
}

// Adds a part to its group's sum in shared memory, when one block computes the whole group. With the group's last part,
// the group's sum is complete: if the block computes all groups (`alone`), it is added to the sum of all groups, which
// finally becomes o and LSE; otherwise it is stored in the last part's slot.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void fold_part(DecodeMergeBuffers<kCfg>& shared, const DecodeSm90Params& p, const Segment& segment,
                              bool alone, int local, int col, const DecodePart<4>& part) {
  const int index = segment.parts.index, in_group = index % kDecodeGroupParts;
  DecodeFold<kCfg.head_dim>&of_group = shared.folds[local], &of_all = shared.folds[kCfg.rows + local];
  const DecodePart<4> group = fold(in_group > 0 ? of_group.get(col) : DecodePart<4>(), part);
  if (in_group < kDecodeGroupParts - 1 && !segment.last) return of_group.put(col, group);
  if (!alone) return store_part<kCfg>(p, segment.parts.slot(index), local, col, group);
  const DecodePart<4> all = fold(index < kDecodeGroupParts ? DecodePart<4>() : of_all.get(col), group);
  if (segment.last) return store_row<kCfg>(p, segment, local, col, all);
  of_all.put(col, all);
}

// The four columns of a row of the buffers that a thread merges; row >= kRows: none.
template <DecodeSm90Config kCfg>
struct MergeItem {
  static constexpr int kGroups = kCfg.head_dim / 4;
  static_assert(DecodeMergeBuffers<kCfg>::kRows * kGroups <= kCfg.warps * 32, "a thread has one");
  int row = static_cast<int>(threadIdx.x) / kGroups, col = static_cast<int>(threadIdx.x) % kGroups * 4;
};

// Adds to `all` what the buffers of the first `count` warps hold of an item; `local`: the row within the segment. This
// is a loop, because in a short range only few warps have computed anything.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void merge_buffers(DecodePart<4>& all, const DecodeMergeBuffers<kCfg>& shared,
                                  const MergeItem<kCfg>& item, int local, int count) {
  constexpr int kAtOnce = 4;
  static_assert(kCfg.warps % kAtOnce == 0);
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    float2 stats[kAtOnce + 1];
    float parts[kAtOnce + 1][4];
    stats[0] = all.stats();
#pragma unroll
    for (int c = 0; c < 4; ++c) parts[0][c] = all.o[c];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      stats[n + 1] = shared.stats[first + n][local];
      const float4 part = *reinterpret_cast<const float4*>(&shared.partials[first + n][item.row][item.col]);
      parts[n + 1][0] = part.x, parts[n + 1][1] = part.y, parts[n + 1][2] = part.z, parts[n + 1][3] = part.w;
    }
    all = DecodePart<4>(stats, parts);
  }
}

// Merges the block's warps' results of a segment. They become o and LSE, or a part in its slot, or, if the block
// computes the work tile's other parts too (`alone`), they are added to these. Called by all threads.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void merge_warps(DecodeMergeBuffers<kCfg>& shared, const DecodeSm90Params& p, const Segment& segment,
                                bool alone, DecodeSoftmax<kCfg>& softmax, const DecodeOutput<kCfg>& output, int warp) {
  softmax.finish();
  if (lane_col() == 0) {
#pragma unroll
    for (int m = 0; m < kCfg.row_tiles(); ++m)
#pragma unroll
      for (int half = 0; half < kCfg.row_halves(); ++half) {
        const float sum = softmax.sum[m][half];
        shared.stats[warp][m * 16 + half * 8 + lane_row()] =
            make_float2(softmax.max[m][half], softmax.huge(m, half) ? -sum : sum);
      }
  }
  const MergeItem<kCfg> item;
  const int with_tiles = min(segment.end - segment.begin, kCfg.warps);
#pragma unroll 1
  for (int first = 0; first < segment.rows; first += shared.kRows) {
    output.put(first, shared.partials[warp]);
    __syncthreads();
    const int local = first + item.row;
    if (item.row < shared.kRows && local < segment.rows) {
      DecodePart<4> all;
      merge_buffers<kCfg>(all, shared, item, local, with_tiles);
      if (segment.whole) {
        store_row<kCfg>(p, segment, local, item.col, all);
      } else if (kCfg.invariant && segment.whole_group) {
        fold_part<kCfg>(shared, p, segment, alone, local, item.col, all);
      } else {
        store_part<kCfg>(p, segment.parts.slot(segment.parts.index), local, item.col, all);
      }
    }
    __syncthreads();  // all threads have read the buffers
  }
}

// Adds up to kAhead partial results of a work tile at a time to each of `all`, four columns of a row (place: row times
// head_dim / 4, plus column / 4); their loads overlap. Missing parts have sum 0 and add nothing, so the loop needs no
// branch and the weights of all additions are computed side by side. in_memory: one bit for each part
// (RangeSegments::parts_in_memory).
template <DecodeSm90Config kCfg, int kAhead, int kItems>
TESSERA_DEVICE void add_parts(DecodePart<4> (&all)[kItems], const DecodeSm90Params& p, const TileParts& tile_parts,
                              uint32 in_memory, const int (&place)[kItems]) {
  constexpr int kGroups = kCfg.head_dim / 4;
  static_assert(kAhead % kDecodeGroupParts == 0);
#pragma unroll 1
  for (int first = 0; first < tile_parts.count; first += kAhead) {
    float2 stats[kItems][kAhead + 1];
    float parts[kItems][kAhead + 1][4];
#pragma unroll
    for (int item = 0; item < kItems; ++item)
#pragma unroll
      for (int n = 1; n <= kAhead; ++n) {
        stats[item][n] = make_float2(-infinity(), 0.0f);
        float4 part = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (kCfg.invariant ? in_memory >> (first + n - 1) & 1 : first + n <= tile_parts.count) {
          const int64 at = static_cast<int64>(tile_parts.slot(first + n - 1)) * p.part_rows + place[item] / kGroups;
          stats[item][n] = __ldcg(reinterpret_cast<const float2*>(p.partial_stat) + at);
          part = __ldcg(reinterpret_cast<const float4*>(p.partial_o + at * kCfg.head_dim + place[item] % kGroups * 4));
        }
        float(&to)[4] = parts[item][n];
        to[0] = part.x, to[1] = part.y, to[2] = part.z, to[3] = part.w;
      }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if constexpr (kCfg.invariant) {
        DecodePart<4> group;
#pragma unroll
        for (int n = 1; n <= kAhead; ++n) {
          DecodePart<4> part;
          part.max = stats[item][n].x, part.sum = stats[item][n].y;
#pragma unroll
          for (int c = 0; c < 4; ++c) part.o[c] = parts[item][n][c];
          group = fold(group, part);
          if (n % kDecodeGroupParts != 0) continue;
          all[item] = fold(all[item], group);
          group = DecodePart<4>();
        }
      } else {
        stats[item][0] = all[item].stats();
#pragma unroll
        for (int c = 0; c < 4; ++c) parts[item][0][c] = all[item].o[c];
        all[item] = DecodePart<4>(stats[item], parts[item]);
      }
    }
  }
}

// Merges parts of a work tile into o and LSE, or into their sum. Called by all threads of a block to which the writes
// of all blocks are visible. A small number of parts goes through less code: a single sequence has four with 32 heads
// and sixteen with 8 heads; with `invariant`, 2048 keys have eight. Where a thread has columns of four rows and more,
// up to eight parts of two rows are under way at once, because the latency of their loads is most of the time: 16
// sequences of two KV heads have five or six parts of 16 rows of 256 columns each.
template <DecodeSm90Config kCfg>
TESSERA_DEVICE void merge_parts(const DecodeSm90Params& p, const RangeSegments<kCfg>& segments, const Segment& segment,
                                const PartsMerge& merge) {
  constexpr int kFew = 4, kSome = 8, kMany = 16, kThreads = kCfg.warps * 32, kGroups = kCfg.head_dim / 4;
  constexpr int kItems = kCfg.rows * kGroups >= 4 * kThreads ? 2 : 1;
  const TileParts parts = merge.parts;
  const uint32 in_memory = kCfg.invariant ? segments.parts_in_memory(segment) : 0;
  const int end = segment.rows * kGroups, items = kItems > 1 && parts.count <= kSome ? kItems : 1;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < end; first += items * kThreads) {
    DecodePart<4> all[kItems], one[1];
    int place[kItems];  // row * kGroups + columns / 4; past the end, the last one again
#pragma unroll
    for (int item = 0; item < kItems; ++item) place[item] = min(first + item * kThreads, end - 1);
    if (kItems > 1 && items > 1) {
      add_parts<kCfg, kSome>(all, p, parts, in_memory, place);
    } else {
      const int at[1] = {first};
      if (parts.count <= kFew) {
        add_parts<kCfg, kFew>(one, p, parts, in_memory, at);
      } else if (kCfg.invariant && parts.count <= kSome) {
        add_parts<kCfg, kSome>(one, p, parts, in_memory, at);
      } else {
        add_parts<kCfg, kMany>(one, p, parts, in_memory, at);
      }
      all[0] = one[0];
    }
#pragma unroll 1
    for (int item = 0; item < items; ++item) {
      const int at = first + item * kThreads;
      if (at >= end) break;
      const DecodePart<4> part = kItems > 1 && item > 0 ? all[kItems - 1] : all[0];
      if (merge.to_slot < 0) {
        store_row<kCfg>(p, segment, at / kGroups, at % kGroups * 4, part);
      } else {
        store_part<kCfg>(p, merge.to_slot, at / kGroups, at % kGroups * 4, part);
      }
      if constexpr (kItems == 1) break;
    }
  }
}

// Whether this block is the last to arrive of those that compute some of the parts. Called by one thread, after a
// barrier of the block. Each counter serves one work tile at most: of the work tiles that begin in a range, at most one
// ends in another; and a group's counter is that of its first part's block, whose range lies within the work tile from
// where this begins.
TESSERA_DEVICE bool arrive(const DecodeSm90Params& p, const TileParts& parts) {
  return arrive_as_last(p.arrivals + parts.counter, parts.block_groups);
}

}  // namespace tessera
