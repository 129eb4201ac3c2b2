// Splits a prefix's keys into chunks: writes the index tensors of a group's chunks, and copies the queries once per
// chunk.
#pragma once

#include "tessera/ptx/device.cuh"
#include "tessera/shared_prefix/config.hpp"

namespace tessera {

// For a group with queries `begin` ... `end` - 1, whose `keys` entries begin at entry `first`. Called by a warp. Chunks
// without keys come last.
TESSERA_DEVICE void write_chunks(const PrefixIndicesParams& p, int group, int begin, int end, int first, int keys,
                                 int lane) {
  const PrefixChunks& chunks = p.chunks;
  const int each = ((keys + chunks.count - 1) / chunks.count + chunks.unit - 1) / chunks.unit * chunks.unit;
  for (int chunk = lane; chunk < chunks.count; chunk += 32) {
    const int64 rows = chunk * p.rows_total;
    const int from = min(chunk * each, keys), to = min(from + each, keys);
    const int at = 2 * (chunk * p.groups + group);
    if (!chunks.rows) {
      chunks.keys[chunk] = first + from, chunks.lens[chunk] = (to - from) * p.keys_an_entry;
      continue;
    }
    chunks.rows[at] = static_cast<int>((rows + begin) * p.group.value);
    chunks.rows[at + 1] = static_cast<int>((rows + end) * p.group.value);
    chunks.keys[at] = first + from, chunks.keys[at + 1] = first + to;
    chunks.lens[at] = (to - from) * p.keys_an_entry, chunks.lens[at + 1] = 0;
  }
  if (!chunks.rows && lane == 0) chunks.keys[chunks.count] = first + keys;
}

// Copies the queries, 8 columns per thread of `threads`: each is read once and stored `count` times.
TESSERA_DEVICE void copy_queries(const PrefixIndicesParams& p, int64 thread, int64 threads) {
  constexpr int kColumns = 8;
  const PrefixChunks& chunks = p.chunks;
  const int words = p.head_dim / kColumns;
  const int64 queries = p.rows_total * p.heads_q.value, chunk_words = queries * words;
  for (int64 n = thread; n < chunk_words; n += threads) {
    const int64 query = n / words, row = query / p.heads_q.value;
    const int head = static_cast<int>(query % p.heads_q.value), word = static_cast<int>(n % words);
    const auto* from = static_cast<const unsigned short*>(chunks.from) + row * chunks.from_row +
                       head * chunks.from_head + word * kColumns;
    uint4 columns;
    if (chunks.aligned) {
      columns = *reinterpret_cast<const uint4*>(from);
    } else {
      uint32 pairs[kColumns / 2];
#pragma unroll
      for (int pair = 0; pair < kColumns / 2; ++pair) pairs[pair] = from[2 * pair] | uint32{from[2 * pair + 1]} << 16;
      columns = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    const int kv_head = head / p.group, in_group = head - kv_head * p.group.value;
    auto* to =
        static_cast<uint4*>(chunks.q) + ((row * p.group.value + in_group) * p.heads_kv.value + kv_head) * words + word;
    for (int chunk = 0; chunk < chunks.count; ++chunk) to[chunk * chunk_words] = columns;
  }
}

}  // namespace tessera
