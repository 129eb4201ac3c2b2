// What a kernel reads at run time: plain structs, filled in by the host and passed by value.
#pragma once

#include "tessera/core/divisor.hpp"

namespace tessera {

using int64 = long long;
using uint32 = unsigned;
static_assert(sizeof(int64) == 8 && sizeof(uint32) == 4);

// A [batch, row, head, column] tensor whose columns are contiguous; strides in elements. Packed: batch = 0.
// Paged: `batch` is the stride of a page and `row` that of a row within it.
struct RowTensor {
  void* data;
  int64 batch, row, head;
};

// [batch, head, row], float32, strides in elements. NULL: absent.
struct StatTensor {
  float* data;
  int64 batch, head, row;
};

// A tensor over scores, [batch, head, query, key]; what is broadcast has stride 0; strides in elements. NULL: absent.
struct ScoreTensor {
  void* data;
  int64 batch, head, row, col;
};

inline constexpr int kPhiloxRounds = 10;  // core/philox.cuh

// The problem: the same for every kernel.
struct ProblemParams {
  int batch;
  Divisor heads_q, heads_kv, group;  // group = heads_q / heads_kv
  int head_dim, head_dim_v;
  int seqlen_q, seqlen_k;   // dense: of every sequence; paged: seqlen_k is what the page table can hold
  int64 rows_total;         // queries of the whole batch
  const int* cu_seqlens_q;  // [batch + 1] or NULL
  const int* cu_seqlens_k;  // [batch + 1] or NULL
  const int* seqused_k;     // [batch] or NULL
  int64 cu_seqlens_q_stride, cu_seqlens_k_stride, seqused_k_stride;
  int rows_q, rows_k;              // packed: rows of q and of k, v, which no offset may pass
  int max_seqlen_q, max_seqlen_k;  // the most that a sequence can have, by the layouts and the problem's word
  RowTensor q, k, v;
  const int* page_table;  // [batch, max_pages]
  int64 page_table_batch, page_table_col;
  int page_size, pages;

  float scale, scale_log2;  // scale * log2(e): scores are held in log2 units
  float softcap;
  int causal, top_left;
  int window_left, window_right;  // -1: unbounded
  ScoreTensor bias, mask, block_mask;
  int entry_keys;  // 8 or 2: the entries of bias and mask for so many keys, the first a multiple, can be read at once; else 1
  int mask_block_q, mask_block_k;
  int head_by_head;  // 1: one head of all sequences after the other's, not one sequence's heads: core/scheduler.cuh
  const float* alibi_slopes;
  int64 alibi_batch, alibi_head;
  const float* sink;  // [heads_q] or NULL
  int64 sink_head;
  float dropout_scale;  // 1 / (1 - p)
  uint32 dropout_threshold, dropout_offset;
  uint32 dropout_keys[kPhiloxRounds][2];
};

// How persistent blocks' works stand in one sequence: core/work_order.hpp.
struct WorkOrder {
  Divisor tiles;    // of a head (packed: slots of the batch); heads * tiles works in all
  int heads;        // (batch, head) pairs, packed: heads; (batch, head, split) where keys are split
  int turns;        // heads, the first, whose large and small tiles come in turns; turns * tiles is even, or all works
  Divisor section;  // heads of the others whose tiles stand together
  Divisor section_works;  // section * tiles
  int rising;  // 1: the first section begins with its smallest tiles; 0: with its largest. The next is the other way
};

struct FwdParams : ProblemParams {
  RowTensor o;
  StatTensor lse;              // natural logarithm
  Divisor tiles;               // of a sequence, or slots of a packed batch: core/scheduler.cuh
  int num_splits, split_keys;  // keys a split, a multiple of block_n
  int o_aligned;               // every row of o starts at a multiple of 16 bytes
  float* partial_o;            // [num_splits, heads_q, rows_total, head_dim_v]
  float* partial_lse;          // [num_splits, heads_q, rows_total], natural logarithm
  WorkOrder order;             // of persistent blocks
};

// CUtensorMap: how a bulk copy finds a tensor. Made by the driver.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

// Where tiles come by bulk copies: FwdConfig::bulk. Maps of [batch, head, row, two columns], boxes of a tile's rows with their
// padding.
struct FwdBulkParams : FwdParams {
  TensorMap q_map, k_map, v_map;  // pairs: no q
};

// Forward by wgmma: fwd_sm90.cuh.
// The upper half of all of fwd_sm90's matrix descriptors: 8 rows of 128 bytes lie behind each other, swizzled over all 128.
inline constexpr uint32 kDescriptorHigh = 8 * 128 / 16 | 1u << 30;

struct FwdSm90Params : ProblemParams {
  TensorMap q_map, k_map, v_map, o_map;  // [batch, head, row, column], boxes of 64 columns
  RowTensor o;
  StatTensor lse;
  WorkOrder order;
  int* next_work;  // packed: how many have been taken; or NULL: every block knows its works
  int short_work;  // of these: blocks of keys up to which a work is left for the end
  // Parameters, since constants were written into registers anew for each product, and two, that each keeps its place.
  uint32 q_descriptor_high = kDescriptorHigh, kv_descriptor_high = kDescriptorHigh;
};

struct BwdParams : ProblemParams {
  RowTensor o, d_o, d_q, d_k, d_v;
  StatTensor lse, d_lse;
  int tiles;            // of a sequence's keys, or slots of a packed batch: core/scheduler.cuh
  int q_tiles;          // of a sequence's queries, dense only
  int q_slots;          // tiles of queries of the whole batch: core/query_slots.cuh
  float* row_lse_log2;  // [heads_q, q_slots, block_m], +inf where nothing is seen
  float* row_delta;     // [heads_q, q_slots, block_m], rowsum(dO o O) - dLSE
  float* acc_dq;        // [heads_q, q_slots, block_m x head_dim padded to 16]
  int* turn;            // deterministic: [heads_q, q_slots] whose turn it is to add to a tile of dQ
  int* ticket;          // deterministic: blocks that have started
  int d_q_aligned, d_k_aligned, d_v_aligned;                   // every row starts at a multiple of 16 bytes
  ScoreTensor d_bias;                                          // float32
  int d_bias_batches, d_bias_heads, d_bias_rows, d_bias_cols;  // its extents
  int owned_batches, owned_heads;  // sequences and KV heads of a block: they share entries of d_bias; else 1, 1
  float* d_sink;
  int64 d_sink_head;
  int after;  // bwd_rows: what goes after the products, not before them
};

// Merge of partial results, also the public tessera_combine. Strides in elements.
struct CombineParams {
  int parts, batch, rows, heads, head_dim_v;
  const void* o_parts;
  int64 o_part, o_part_batch, o_part_row, o_part_head;
  const float* lse_parts;
  int64 lse_part, lse_part_batch, lse_part_head, lse_part_row;
  RowTensor o;
  StatTensor lse;       // NULL: not wanted
  const int *rows_begin, *rows_end;  // packed: the sequences have rows *rows_begin ... *rows_end - 1; or NULL
  const float* sink;    // joins the denominator of rows that saw something
  int64 sink_head;
};

}  // namespace tessera
