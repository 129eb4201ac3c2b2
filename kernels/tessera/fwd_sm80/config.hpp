// Forward by mma.sync. Config: fixed when the kernel is compiled; params: read at run time. Both are filled
// in by the host.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/attention/work_order.hpp"

namespace tessera {

// Forward by mma.sync: fwd_sm80/kernel.cuh; for problems without options fwd_sm80/bulk.cuh where tiles come by bulk
// copies, and, by blocks that take works one after another, fwd_sm80/persistent.cuh where rows are spread and
// fwd_sm80/pairs.cuh where warps stand in pairs.
struct FwdConfig {
  Dtype dtype;
  int head_dim;           // padded to a multiple of 16
  int head_dim_v;         // likewise
  int block_m;            // query rows a tile
  int block_n;            // keys a tile
  int warps;              // each takes block_m / warps query rows; a pair those of both
  int stages;             // tiles of keys, and of values, in shared memory
  int min_blocks_per_sm;  // that registers must allow
  bool aligned;           // every row of q, k and v starts at a multiple of 16 bytes, so that loads are of 16 bytes
  bool paged;             // keys and values by page table
  bool pack_gqa;          // the query heads that share a KV head stand in one tile's rows
  bool split;             // keys in parts: float32 partial results instead of o
  bool pairs;             // two warps share 32 query rows, each with half of a tile's keys and of O's columns
  bool bulk;              // tiles of keys and values come by bulk copies (TMA), of pairs whole ones: Hopper and later
  bool spread_rows;       // a warp's two tiles of 16 rows lie block_m / 2 apart
  ScoreConfig score;
};

inline constexpr int kFwdBlockBytes = 104;  // of what a persistent block knows of a work, in shared memory

struct FwdParams : ProblemParams {
  RowTensor o;
  StatTensor lse;              // natural logarithm
  Divisor tiles;               // of a sequence, or slots of a packed batch: attention/scheduler.cuh
  int num_splits, split_keys;  // keys a split, a multiple of block_n
  int o_aligned;               // every row of o starts at a multiple of 16 bytes
  float* partial_o;            // [num_splits, heads_q, rows_total, head_dim_v]
  float* partial_lse;          // [num_splits, heads_q, rows_total], natural logarithm
  WorkOrder order;             // of persistent blocks
};

// Where tiles come by bulk copies: FwdConfig::bulk. Maps of [batch, head, row, two columns], boxes of a tile's rows with their
// padding.
struct FwdBulkParams : FwdParams {
  TensorMap q_map, k_map, v_map;  // pairs: no q
};

}  // namespace tessera
