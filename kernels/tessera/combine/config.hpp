// combine/kernel.cuh: merges partial results. The config is fixed when the kernel is compiled, the params are read at
// run time; the host fills in both.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

// See combine/kernel.cuh.
struct CombineConfig {
  Dtype dtype;       // of o
  Dtype part_dtype;  // of the partial o
  bool chunks;       // CombineParams::chunks is used
  // One more part, in float32: own_o of CombineParams::chunks, with the lse and lse_low of the output.
  bool accumulate = false;
};
TESSERA_CONFIG_FIELDS(CombineConfig, dtype, part_dtype, chunks, accumulate)

inline constexpr int kCombineWidth = 4;  // neighbouring columns of a lane

// Whether a merge may be by_block. The part that a merge accumulates to has the lse of the output, which only one warp
// may read and write.
TESSERA_HOST_DEVICE constexpr bool combines_by_block(const CombineConfig& config) {
  return !config.chunks && !config.accumulate;
}
// by_block: the blocks of a row.
TESSERA_HOST_DEVICE constexpr int combine_row_blocks(int head_dim_v) {
  return (head_dim_v + 32 * kCombineWidth - 1) / (32 * kCombineWidth);
}

// Used if the parts are the chunks of a shared prefix (shared_prefix/chunks). The heads of a KV head are then rows of a
// part, and o_part_head and the head strides of lse_parts are distances between KV heads. One more part, over the
// sequences' own keys, follows the chunks and has all rows.
struct CombineChunks {
  Divisor group;                   // heads per KV head
  int64 o_in_group, lse_in_group;  // distance between neighbouring heads of a group
  const void* own_o;
  int64 own_o_batch, own_o_row, own_o_head;
  StatTensor own_lse, own_lse_low;
};

// [part, batch, head, row], float32; strides in elements. data NULL: every value is 0.
struct PartStats {
  const float* data;
  int64 part, batch, head, row;
};

// Parameters of a merge, also of the public tessera_combine. Strides are in elements.
struct CombineParams {
  int parts, batch;
  Divisor rows, heads;
  int head_dim_v;
  int by_block;  // a block for a row and 128 columns of it, whose warps divide the parts: for few rows
  int aligned;   // four neighbouring columns of o and of the parts begin at multiples of their size
  const void* o_parts;
  int64 o_part, o_part_batch, o_part_row, o_part_head;
  PartStats lse_parts, lse_low_parts;
  RowTensor o;
  StatTensor lse, lse_low;  // NULL: not written
  CombineChunks chunks;
  const int *rows_begin, *rows_end;  // the parts have only rows *rows_begin ... *rows_end - 1 of the batch; or NULL:
                                     // all rows
  const float* sink;                 // joins the denominator of rows that see a key
  int64 sink_head;
};

}  // namespace tessera
