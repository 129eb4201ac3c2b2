// Splits sequences that share a prefix into two problems of packed sequences (a cascade of one level): the queries of
// every group against the keys that are read once, and the queries of every sequence against its other keys. This
// kernel writes the index tensors of both; other kernels compute attention and merge the results.
//
// The keys that are read once are those before the first query of every causal member, in whole pages, read through the
// first member that has queries. Lengths and offsets out of range are clamped; a group's offset below an earlier one
// counts as the earlier one.
//
// Grid: one warp for each group, one for the sequences before the first group and one for those after the last. Bound
// by the latency of reading the lengths, in two passes over a group's. With chunks of the prefixes' keys, the blocks
// after these copy the queries.
#pragma once

#include "tessera/attention/sequence.cuh"
#include "tessera/ptx/synchronization.cuh"
#include "tessera/shared_prefix/chunks.cuh"
#include "tessera/shared_prefix/config.hpp"

namespace tessera {

TESSERA_DEVICE int warp_min(int x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = min(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

// The first sequence of a group; for group == groups, the sequence after the last group. Called by the whole warp.
TESSERA_DEVICE int first_of_group(const PrefixIndicesParams& p, int group, int lane) {
  int before = 0;  // minus the largest offset up to this group's
  for (int g = lane; g <= group; g += 32) before = min(before, -max(p.prefix_groups[g * p.prefix_groups_stride], 0));
  return clamp(-warp_min(before), 0, p.batch);
}

TESSERA_DEVICE bool hides_keys(const PrefixIndicesParams& p, int b) {
  return p.hides_keys || (p.causal_seqs && p.causal_seqs[b * p.causal_seqs_stride]);
}

// The first query of sequence b among all queries of the batch, and the entry of its first key; for b == batch, their
// ends.
TESSERA_DEVICE int first_query(const PrefixIndicesParams& p, int b) {
  if (!p.cu_seqlens_q) return static_cast<int>(static_cast<int64>(b) * p.seqlen_q);
  return clamp(p.cu_seqlens_q[b * p.cu_seqlens_q_stride], 0, p.rows_q);
}
TESSERA_DEVICE int first_entry(const PrefixIndicesParams& p, int b) {
  if (p.keys.begins) return clamp(p.keys.begins[b * p.keys.begins_stride], 0, p.keys_limit);
  return b == p.batch ? p.entries : static_cast<int>(b * p.a_sequence);
}

template <PrefixIndicesConfig kCfg>
TESSERA_DEVICE void prefix_indices(const PrefixIndicesParams& p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int block = static_cast<int>(blockIdx.x), index_blocks = prefix_index_blocks(p.groups);
  if (block >= index_blocks) {
    constexpr int kThreads = kPrefixIndicesWarps * 32;
    copy_queries(p, static_cast<int64>(block - index_blocks) * kThreads + threadIdx.x,
                 static_cast<int64>(gridDim.x - index_blocks) * kThreads);
    return;
  }
  const int warp = block * kPrefixIndicesWarps + static_cast<int>(threadIdx.x / 32);
  const int group = warp - 1;  // -1: before the first group; p.groups: after the last
  if (group > p.groups) return;
  const bool shares = group >= 0 && group < p.groups;
  const int begin = group < 0 ? 0 : first_of_group(p, group, lane);
  const int end = group < p.groups ? first_of_group(p, group + 1, lane) : p.batch;

  // 1. How many keys are read once, and through which sequence.
  constexpr int kNone = 1 << 30;  // larger than any batch of a kernel
  int keys = shares ? clamp(p.prefix_lens[group * p.prefix_lens_stride], 0, p.max_prefix) : 0, reader = kNone;
  for (int b = begin + lane; shares && b < end; b += 32) {
    const Sequence s = load_sequence<true, kCfg.paged>(p, b);
    if (s.sq == 0) continue;
    reader = min(reader, b);
    keys = min(keys, hides_keys(p, b) ? s.sk - s.sq : s.sk);
  }
  reader = warp_min(reader);
  keys = reader == kNone ? 0 : max(warp_min(keys), 0) / p.keys_an_entry;  // in entries
  if (reader == kNone) reader = begin;

  // 2. The remaining keys of each sequence. A sequence without queries reads nothing, whatever its keys and pages are.
  for (int b = begin + lane; b < end; b += 32) {
    const Sequence s = load_sequence<true, kCfg.paged>(p, b);
    const bool reads = s.sq > 0;
    p.suffix_keys[b] = first_entry(p, b) + (reads ? keys : 0);
    p.suffix_lens[b] = reads ? s.sk - keys * p.keys_an_entry : 0;
  }
  if (shares && p.chunks.count > 0) {
    write_chunks(p, group, first_query(p, begin), first_query(p, end), first_entry(p, reader), keys, lane);
  }
  if (lane != 0) return;
  if (shares) {
    p.group_queries[group] = first_query(p, begin);
    p.group_keys[group] = first_entry(p, reader);
    p.group_lens[group] = keys * p.keys_an_entry;
  }
  if (group == p.groups) {
    p.group_queries[group] = first_query(p, begin);
    p.group_keys[group] = p.suffix_keys[p.batch] = first_entry(p, p.batch);
    if (const int count = p.chunks.count; count > 0 && p.chunks.rows) {
      p.chunks.rows[2 * count * p.groups] = static_cast<int>(count * p.rows_total * p.group.value);
      p.chunks.keys[2 * count * p.groups] = first_entry(p, p.batch);
    }
  }
  if (group < 0) {
    for (int* counter : p.counters) {
      if (counter) *counter = 0;
    }
  }
}

}  // namespace tessera
