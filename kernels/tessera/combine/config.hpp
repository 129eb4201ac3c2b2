// Merge of partial results. Config: fixed when the kernel is compiled; params: read at run time. Both are filled
// in by the host.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// Merge of partial results: combine/kernel.cuh.
struct CombineConfig {
  Dtype dtype;       // of o
  Dtype part_dtype;  // of its parts
};
TESSERA_CONFIG_FIELDS(CombineConfig, dtype, part_dtype)

// Merge of partial results, also the public tessera_combine. Strides in elements.
struct CombineParams {
  int parts, batch, rows, heads, head_dim_v;
  const void* o_parts;
  int64 o_part, o_part_batch, o_part_row, o_part_head;
  const float* lse_parts;
  int64 lse_part, lse_part_batch, lse_part_head, lse_part_row;
  RowTensor o;
  StatTensor lse;                    // NULL: not wanted
  const int *rows_begin, *rows_end;  // packed: the sequences have rows *rows_begin ... *rows_end - 1; or NULL
  const float* sink;                 // joins the denominator of rows that saw something
  int64 sink_head;
};

}  // namespace tessera
