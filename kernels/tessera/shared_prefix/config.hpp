// Shared prefixes: the index tensors of the two launches that read prefixes once. Config: fixed when the kernel is compiled; params:
// read at run time. Both are filled in by the host.
#pragma once

#include "tessera/attention/problem.hpp"

namespace tessera {

// shared_prefix/kernel.cuh.
struct PrefixIndicesConfig {
  bool paged;
};
TESSERA_CONFIG_FIELDS(PrefixIndicesConfig, paged)

inline constexpr int kPrefixIndicesWarps = 4;  // of a block
// Blocks that write index tensors.
TESSERA_HOST_DEVICE constexpr int prefix_index_blocks(int groups) {
  return (groups + 2 + kPrefixIndicesWarps - 1) / kPrefixIndicesWarps;
}

// A prefix's keys in chunks: src/core/prefix_chunks.hpp has what the index tensors hold.
struct PrefixChunks {
  int count, unit;          // chunks, 0: none; entries that a chunk's are a multiple of
  int *rows, *keys, *lens;  // [sequences + 1], the same, [sequences]; of one group no rows
  const void* from;         // q as [T, Hq, D], of 16 bits
  int64 from_row, from_head;
  int aligned;  // its rows start at multiples of 16 bytes
  void* q;      // [count, T, group, Hkv, D]
};

// An entry is a row of k, or a page of the table.
struct PrefixIndicesParams : ProblemParams {
  const int *prefix_groups, *prefix_lens;  // [groups + 1], [groups]
  int64 prefix_groups_stride, prefix_lens_stride;
  int groups, max_prefix;            // keys that are read once, at most
  int hides_keys;                    // every sequence may hide keys from its first query on: causal, or a tree mask
  const unsigned char* causal_seqs;  // [batch], which ones do; or NULL
  int64 causal_seqs_stride;
  int64 a_sequence;                              // entries from one sequence's keys to the next's; 0: by cu_seqlens_k
  int entries, keys_an_entry;                    // entries of all sequences
  int *group_queries, *group_keys, *group_lens;  // [groups + 1], [groups + 1], [groups]
  int *suffix_keys, *suffix_lens;                // [batch + 1], [batch]
  PrefixChunks chunks;
  int* counters[2];  // become 0 for the launches after this; or NULL
};

}  // namespace tessera
