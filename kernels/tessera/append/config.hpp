// Rotation of new tokens and their way into the cache. Config: fixed when the kernel is compiled; params: read at run time.
// Both are filled in by the host.
#pragma once

#include "tessera/attention/divisor.hpp"
#include "tessera/types.hpp"

namespace tessera {

// append/kernel.cuh.
struct AppendConfig {
  Dtype dtype;
  bool
      aligned;  // rows, heads and the columns that are rotated together start at multiples of 16 bytes, so that loads are of 16 bytes
};
TESSERA_CONFIG_FIELDS(AppendConfig, dtype, aligned)

// Neighbouring columns that a thread loads at once.
TESSERA_HOST_DEVICE constexpr int append_width(const AppendConfig& c) {
  return c.aligned ? 16 / dtype_bytes(c.dtype) : 1;
}

inline constexpr int kAppendThreads = 192;
inline constexpr int kAppendHeads = 4;  // of which a thread has the same columns

// A tensor's columns that are rotated, or those that are copied, from one place to another. A thread has a unit at a time: append_width()
// columns, or as many pairs of columns that are rotated together, of the heads h, h + groups, ...
struct AppendWay {
  RowTensor from, to;
  int heads, groups;  // groups: as many as heads by kAppendHeads, rounded up
  int column;         // of each head: the first
  int rotates;
  Divisor columns, units;  // vectors, or pairs of them, of a head; units of a token: groups * columns
  int begin;  // the block's first unit of this way: the ways' units come one way after another, in a way the tokens'
};
enum AppendWays { kRotatedKeys, kCopiedKeys, kValues, kRotatedQueries, kCopiedQueries, kAppendWays };

// The public tessera_append. Strides in elements.
struct AppendParams {
  int batch;
  Divisor tokens, tokens_q;  // dense: of a sequence; packed: of all
  int pages, room;           // room: keys that a sequence's pages hold
  Divisor page_size;
  int rotary_dim, angles;  // 0: nothing is rotated; rows of cos and sin
  int interleaved;         // pairs are neighbours, not columns half of rotary_dim apart
  Dtype angle_dtype;
  AppendWay ways[kAppendWays];               // of the caches `batch` is the stride of a page
  int key_tokens, query_tokens, key_blocks;  // of a block; blocks for k and v, those for q come after them
  int key_units, query_units;                // of a block
  const void *cos, *sin;
  int64 cos_row, sin_row;
  const int* seqused_k;   // [batch], the new tokens included
  const int* cu_seqlens;  // [batch + 1] or NULL
  const int* page_table;  // [batch, max_pages] or NULL: a sequence's row of the cache is its page
  int64 seqused_k_stride, cu_seqlens_stride, page_table_batch, page_table_col;
  const int *positions_q, *positions_k;  // [batch, tokens], packed [tokens] with batch = 0; or NULL
  int64 positions_q_batch, positions_q_col, positions_k_batch, positions_k_col;
  int* dropped;  // counts the tokens that write nothing; or NULL
};

// Blocks of a launch.
TESSERA_HOST_DEVICE constexpr int64 append_blocks(const AppendParams& p) {
  const int64 queries = (p.cu_seqlens ? 1 : static_cast<int64>(p.batch)) * p.tokens_q.value;
  return p.batch == 0 ? 0 : p.key_blocks + (queries + p.query_tokens - 1) / p.query_tokens;
}

}  // namespace tessera
