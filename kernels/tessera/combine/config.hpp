// Merge of partial results. Config: fixed when the kernel is compiled; params: read at run time. Both are filled
// in by the host.
#pragma once

#include "tessera/attention/divisor.hpp"
#include "tessera/types.hpp"

namespace tessera {

// Merge of partial results: combine/kernel.cuh.
struct CombineConfig {
  Dtype dtype;       // of o
  Dtype part_dtype;  // of its parts
  bool chunks;       // CombineParams::chunks
};
TESSERA_CONFIG_FIELDS(CombineConfig, dtype, part_dtype, chunks)

inline constexpr int kCombineWidth = 4;  // neighbouring columns of a lane

// Where the parts are a shared prefix's chunks (shared_prefix/chunks): the heads of a KV head are rows of theirs, and o_part_head and
// the head strides of lse_parts lie between KV heads. One more part, of the sequences' own keys, counts after them and has all rows.
struct CombineChunks {
  Divisor group;                   // heads a KV head
  int64 o_in_group, lse_in_group;  // from one head of it to the next
  const void* own_o;
  int64 own_o_batch, own_o_row, own_o_head;
  StatTensor own_lse, own_lse_low;
};

// [part, batch, head, row], float32, strides in elements. NULL: 0.
struct PartStats {
  const float* data;
  int64 part, batch, head, row;
};

// Merge of partial results, also the public tessera_combine. Strides in elements.
struct CombineParams {
  int parts, batch;
  Divisor rows, heads;
  int head_dim_v;
  int aligned;  // four neighbouring columns of o and of its parts begin at multiples of their size
  const void* o_parts;
  int64 o_part, o_part_batch, o_part_row, o_part_head;
  PartStats lse_parts, lse_low_parts;
  RowTensor o;
  StatTensor lse, lse_low;  // NULL: not wanted
  CombineChunks chunks;
  const int *rows_begin, *rows_end;  // the parts have rows *rows_begin ... *rows_end - 1 of all sequences'; or NULL
  const float* sink;                 // joins the denominator of rows that saw something
  int64 sink_head;
};

}  // namespace tessera
