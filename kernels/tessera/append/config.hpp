// append/kernel.cuh: rotates new tokens and writes them to the cache. The config is fixed when the kernel is compiled,
// the params are read at run time; the host fills in both.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// See append/kernel.cuh.
struct AppendConfig {
  Dtype dtype;
  Dtype cache;   // dtype, or float8_e4m3 or float8_e5m2
  bool aligned;  // rows, heads and the columns that are rotated together start at multiples of 16 bytes, those of a
                 // cache of 8 bits at multiples of 4: loads are 16 bytes wide, or 4 columns
};
TESSERA_CONFIG_FIELDS(AppendConfig, dtype, cache, aligned)

TESSERA_HOST_DEVICE constexpr bool writes_codes(const AppendConfig& c) { return c.cache != c.dtype; }

// Neighbouring columns that a thread loads with one instruction.
TESSERA_HOST_DEVICE constexpr int append_width(const AppendConfig& c) {
  return c.aligned ? 16 / dtype_bytes(c.dtype) : 1;
}
// The same of keys and values that are converted to 8 bits.
TESSERA_HOST_DEVICE constexpr int append_code_width(const AppendConfig& c) { return c.aligned ? 4 : 1; }

inline constexpr int kAppendThreads = 192;
inline constexpr int kAppendHeads = 4;  // heads per thread, for which it handles the same columns
inline constexpr int kCodeLanes = 16;   // lanes that convert kAppendHeads heads of a token to 8 bits

// One copy: the rotated columns, or the unrotated ones, of a tensor, from one place to another. A thread processes one
// unit at a time: append_width() columns (or as many pairs of columns that are rotated together) of the heads h, h +
// groups, h + 2 groups, ... To a cache of 8 bits, kRotatedKeys and kValues copy all columns, a unit is all columns of
// these heads, and kCodeLanes threads process it.
struct AppendWay {
  RowTensor from, to;
  int heads, groups;  // groups: heads / kAppendHeads, rounded up
  int column;         // the first column of each head
  int rotates;
  Divisor columns, units;  // columns: vectors (or pairs of vectors) of a head, to 8 bits its columns; units: units of
                           // a token, groups * columns, to 8 bits groups
  int begin;               // the block's first unit of this copy; units are ordered by copy, then by token
};
enum AppendWays { kRotatedKeys, kCopiedKeys, kValues, kRotatedQueries, kCopiedQueries, kAppendWays };

// The scales of a cache of 8 bits: of a token's place if they are computed, otherwise of its sequence. NULL: 1.
struct AppendScales {
  float* data;
  int64 batch, row, head;  // batch: the stride of a page or a sequence
};

// Parameters of the public tessera_append. Strides are in elements.
struct AppendParams {
  int batch;
  Divisor tokens, tokens_q;  // dense: tokens of a sequence; packed: tokens of the batch
  int pages, room;           // room: the number of keys that a sequence's pages hold
  Divisor page_size;
  int rotary_dim, angles;  // rotary_dim 0: nothing is rotated; angles: rows of cos and sin
  int interleaved;         // a pair is two neighbouring columns; otherwise its columns are rotary_dim / 2 apart
  Dtype angle_dtype;
  AppendWay ways[kAppendWays];               // for the caches, `batch` is the stride of a page
  int key_tokens, query_tokens, key_blocks;  // tokens of a block; key_blocks: blocks for k and v, before those for q
  int key_units, query_units;                // units of a block
  const void *cos, *sin;
  int64 cos_row, sin_row;
  const int* seqused_k;   // [batch], including the new tokens
  const int* cu_seqlens;  // [batch + 1] or NULL
  const int* page_table;  // [batch, max_pages] or NULL: sequence b is row b of the cache
  int64 seqused_k_stride, cu_seqlens_stride, page_table_batch, page_table_col;
  const int *positions_q, *positions_k;  // [batch, tokens], packed [tokens] with batch stride 0; or NULL
  int64 positions_q_batch, positions_q_col, positions_k_batch, positions_k_col;
  int* dropped;  // counts the tokens that are not written; or NULL
  AppendScales k_scales, v_scales;
  int computes_scales;
};

// Thread blocks of a launch.
TESSERA_HOST_DEVICE constexpr int64 append_blocks(const AppendParams& p) {
  const int64 queries = (p.cu_seqlens ? 1 : static_cast<int64>(p.batch)) * p.tokens_q.value;
  return p.batch == 0 ? 0 : p.key_blocks + (queries + p.query_tokens - 1) / p.query_tokens;
}

}  // namespace tessera
