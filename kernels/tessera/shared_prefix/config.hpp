// Shared prefixes: the index tensors of the two launches that read every prefix once. The config is fixed when the
// kernel is compiled, the params are read at run time; the host fills in both.
#pragma once

#include "tessera/attention/problem.hpp"

namespace tessera {

// See shared_prefix/kernel.cuh.
struct PrefixIndicesConfig {
  bool paged;
};
TESSERA_CONFIG_FIELDS(PrefixIndicesConfig, paged)

inline constexpr int kPrefixIndicesWarps = 4;  // of a block
// Thread blocks that write index tensors.
TESSERA_HOST_DEVICE constexpr int prefix_index_blocks(int groups) {
  return (groups + 2 + kPrefixIndicesWarps - 1) / kPrefixIndicesWarps;
}

// A prefix's keys in chunks. src/core/prefix_chunks.hpp describes the contents of the index tensors.
struct PrefixChunks {
  int count, unit;          // count: number of chunks, 0 for none; unit: the entries of a chunk are a multiple of it
  int *rows, *keys, *lens;  // [sequences + 1], [sequences + 1], [sequences]; with one group, no rows
  const void* from;         // q as [T, Hq, D], 16-bit elements
  int64 from_row, from_head;
  int aligned;  // rows of `from` start at multiples of 16 bytes
  void* q;      // [count, T, group, Hkv, D]
};

// An entry is a row of k, or a page of the table.
struct PrefixIndicesParams : ProblemParams {
  const int *prefix_groups, *prefix_lens;  // [groups + 1], [groups]
  int64 prefix_groups_stride, prefix_lens_stride;
  int groups, max_prefix;            // max_prefix: upper bound of the keys that are read once
  int hides_keys;                    // every sequence may hide keys from its first query on: causal, or with a tree
                                     // mask
  const unsigned char* causal_seqs;  // [batch], the sequences that do; or NULL
  int64 causal_seqs_stride;
  int64 a_sequence;            // entries from one sequence's keys to the next's; 0: given by keys.begins
  int entries, keys_an_entry;  // entries: of all sequences
  int *group_queries, *group_keys, *group_lens;  // [groups + 1], [groups + 1], [groups]
  int *suffix_keys, *suffix_lens;                // [batch + 1], [batch]
  PrefixChunks chunks;
  int* counters[2];  // set to 0 for the following launches; or NULL
};

}  // namespace tessera
