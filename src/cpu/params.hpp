// The run-time parameters of the CPU kernels, and the table that each instruction set exports. They are plain data,
// shared by units that are compiled for different instruction sets, so nothing here may be a function with a body.
#pragma once

#include <cstdint>

#include "cpu/score/code.hpp"
#include "tessera/attention/score/list.hpp"
#include "tessera/tessera.h"

namespace tessera::cpu {

// A [batch, row, head, column] tensor whose columns are contiguous; strides in bytes.
struct RowTensor {
  char* data;
  int64_t batch, row, head;
};

// A tensor over scores or some of their axes, [batch, head, query, key]; axes that are broadcast or absent have stride
// 0; strides in bytes. NULL: absent.
struct ScoreTensor {
  char* data;
  int64_t batch, head, row, col;
  int64_t cols;  // the extent of the last axis
  int32_t dtype;
};

// Scales of 8-bit q, k or v; strides in bytes. NULL: 1. The scale of token j of sequence b and KV head h is at
// batch * b + row * (j / tokens) + head * h; in_pages: at batch * (j's page) + row * (j's place in it) + head * h.
struct Scales {
  const char* data;
  int64_t batch, row, head;
  int64_t tokens;
  int32_t in_pages;
};

// One sequence of the batch, with the number of query tiles and of work items before it.
struct Sequence {
  int64_t q_begin, sq;  // its queries are rows q_begin ... of its q
  int64_t k_begin, sk;  // its visible keys
  int64_t k_rows;       // its keys, including those past seqused_k, whose gradients are 0
  int64_t row_begin;    // index of its first query among all of the batch's queries
  int64_t tile_begin;   // index of its first query tile among all
  int64_t item_begin;   // index of its first item among those of one head and split; decode: of its first part of keys
  int64_t merge_begin;  // index of its first item of the merge
  int64_t causal;       // 1: query i sees no key right of the diagonal
  int64_t page_begin;   // paged: offset of its first page in the page table, in bytes
  // Forward with AMX: the first super-block of its keys that is packed ahead; the number packed before it, for one KV
  // head.
  int64_t packed_first, packed_begin;
  int64_t first_q, total_q, first_k, total_k;  // its place in the whole
  int64_t bottom_right;  // query i is aligned bottom-right with key i + bottom_right: for ALiBi and q_pos
  int64_t diagonal;      // causal and window are measured from key i + diagonal
};

// Entries of one sequence in numbers of the whole: heads, queries and keys low ... high.
struct ScoreBlock {
  int64_t batch, len_q, len_k;
  int64_t head_low, head_high, query_low, query_high, key_low, key_high;
};

struct Params {
  int64_t batch, heads_q, heads_kv, head_dim, head_dim_v;
  int32_t dtype, elem_bytes;        // of q, d_o and gradients
  int32_t kv_dtype, kv_elem_bytes;  // of k and v
  int32_t o_dtype, o_elem_bytes;
  int32_t d_dtype, d_elem_bytes;  // backward: of d_q, d_k, d_v
  int32_t accumulate;             // 1: results are merged with, or added to, those that the outputs hold
  const Sequence* sequences;      // [batch + 1]; the last one holds the totals

  RowTensor q, k, v, o, d_o, d_q, d_k, d_v;
  Scales q_scales, k_scales, v_scales;
  char* lse;  // NULL: not requested. Strides in bytes
  int64_t lse_batch, lse_head, lse_row;
  char* lse_low;  // the rounding error of lse. NULL: not requested, or not given
  int64_t lse_low_batch, lse_low_head, lse_low_row;
  const char* d_lse;
  int64_t d_lse_batch, d_lse_head, d_lse_row;

  const int32_t* page_table;  // NULL: not paged
  int64_t page_table_col, page_size;

  float scale, scale_log2;  // scale * log2(e), rounded: from a product to log2 units
  double units_log2;  // log2 units of a natural one: log2(e), or scale_log2 / scale if scores are only scaled products
  float huge_score;   // a maximum or LSE of at least this magnitude is subtracted in natural units: tile.hpp
  float softcap;      // 0: none
  int32_t causal;     // 1: at least one sequence may be; Sequence::causal has which
  int64_t window_left, window_right;  // -1: unbounded
#define TESSERA_TENSOR(Class, flag, tensor, ...) ScoreTensor tensor;
  TESSERA_SCORE_OPTIONS(TESSERA_NO_OPTION, TESSERA_TENSOR, TESSERA_TENSOR)
#undef TESSERA_TENSOR
  int64_t mask_block_q, mask_block_k;
  const float* sink;  // NULL: none
  int64_t sink_head;
  const ScoreCode* program;  // NULL: none
  // The program's mask alone and its score alone, for tiles whose mask is computed before their products; NULL: it has
  // no mask or one that depends on the score; the score is unchanged.
  const ScoreCode *program_mask, *program_score;
  const ScoreCode* program_gradient;  // backward
  // Which keys of a block of entries the program's mask shows: 0 none, 1 some, 2 all. NULL: the program has no mask.
  int32_t (*program_shows)(const void* program_call, const ScoreBlock& block);
  const void* program_call;
  // Backward: sums of the gradients of the program's tensors, for a chain of items; tensor t begins at
  // program_sums_begin[t].
  double* program_sums;
  int64_t program_sums_begin[core::score::kMaxTensors];
  float dropout_scale;         // 1 / (1 - p)
  uint32_t dropout_threshold;  // 0: no dropout
  uint32_t dropout_key[2], dropout_offset;
  int64_t first_head, heads, group, first_sequence;  // of the whole: core/geometry.hpp

  // Returns nonzero if the call is cancelled; an item may then leave its outputs as they are. NULL: it cannot be
  // cancelled.
  int32_t (*cancelled)(void* cancel);
  void* cancel;

  // The plan's choices.
  int32_t block_n, tiles_per_item, num_splits;
  int32_t partial;       // forward: 1: an item's results are partial ones, which are then merged
  int32_t rows_collide;  // forward, float32: rows of K and V map to few cache sets, and are copied block by block
  int32_t pack_gqa;      // 1: the query heads of a KV head are rows of the same tile
  int64_t split_keys;    // forward: keys of a split, a multiple of block_n
  int64_t rows_total;    // queries of the whole batch; decode: the most of a sequence
  char* packed_keys;     // forward by AMX: [heads_kv][super-blocks] AmxPackedKeys; NULL: items pack for themselves

  // Forward over splits: partial results, which are then merged.
  float* partial_o;  // [num_splits, heads_q, rows_total, head_dim_v]; decode: [parts, heads_q, rows_total, head_dim_v]
  float *partial_lse, *partial_lse_low;  // [num_splits, heads_q, rows_total]; decode: [parts, heads_q, rows_total]

  // Backward.
  float* row_shift;  // [heads_q, rows_total], natural units: the LSE if it is huge, else 0
  float* row_lse;    // [heads_q, rows_total], log2 units: the rest of the LSE, +inf if the row sees nothing
  float* row_delta;  // [heads_q, rows_total], rowsum(dO o O) - dLSE
  float* acc_dq;     // [num_splits, heads_q, rows_total, acc_dq_ld] float32, or NULL: d_q itself accumulates
  int64_t acc_dq_ld;
  int32_t rows_in_items;  // 1: an item owns its heads' queries, and does their preprocess and postprocess, too
  char* d_bias;           // float32, strides in bytes
  int64_t d_bias_batch, d_bias_head, d_bias_row;
  int32_t groups_batch,
      groups_head;  // number of (batch, kv head) pairs that one item owns, so that a broadcast d_bias has one writer
  float* d_sink;
  int64_t d_sink_head;
};

// A merge of partial results, also for the public tessera_combine. Strides in bytes.
struct CombineParams {
  int64_t parts, batch, rows, heads, head_dim_v;
  int32_t part_dtype, dtype;
  const char* o_parts;
  int64_t o_part, o_part_batch, o_part_row, o_part_head;
  const char* lse_parts;
  int64_t lse_part, lse_part_batch, lse_part_head, lse_part_row;
  const char* lse_low_parts;  // NULL: 0
  int64_t lse_low_part, lse_low_part_batch, lse_low_part_head, lse_low_part_row;
  char* o;
  int64_t o_batch, o_row, o_head;
  char* lse;
  int64_t lse_batch, lse_head, lse_row;
  char* lse_low;
  int64_t lse_low_batch, lse_low_head, lse_low_row;
  const float* sink;  // is added to the denominator of rows that see a key
  int64_t sink_head;
  // One more part, after the others: its lse and lse_low are in the outputs. NULL: none.
  const char* accum_o;
  int32_t accum_dtype;
  int64_t accum_row, accum_head;
};

// The rotation of a token's heads: rotary position embedding. Strides in bytes.
struct RotaryParams {
  int32_t dtype, elem_bytes, angle_dtype;
  int32_t interleaved;           // pairs are neighbours, not columns half of rotary_dim apart
  int64_t head_dim, rotary_dim;  // 0: nothing is rotated
  const char *cos, *sin;         // [positions, rotary_dim / 2]
  int64_t cos_row, sin_row;
};

// How a token is stored in an 8-bit cache.
struct QuantizeParams {
  int32_t dtype;     // of the cache
  int32_t computes;  // 1: the scale of each head is computed and written; 0: it is read
  int64_t cols;      // of a head
};

// The kernels of one instruction set.
struct KernelTable {
  int32_t lanes;
  int32_t block_m;                       // queries of a tile
  int32_t has_dot;                       // 1: products of bf16 by a dot-product instruction
  int32_t decode_rows, decode_keys;      // query rows and keys that the decode kernel processes at once
  int64_t tile_bytes, decode_row_bytes;  // sizes of the kernels' own records, for the scratch arithmetic
  void (*forward)(const Params&, int64_t item, char* scratch);
  void (*forward_dot)(const Params&, int64_t item, char* scratch);
  void (*decode)(const Params&, int64_t item, char* scratch);
  void (*decode_dot)(const Params&, int64_t item, char* scratch);
  // 8-bit keys and values, bfloat16 queries; where can_multiply_codes() (tables.hpp). NULL: none.
  void (*decode_codes)(const Params&, int64_t item, char* scratch) = nullptr;
  void (*backward_preprocess)(const Params&, int64_t item, char* scratch);
  void (*backward)(const Params&, int64_t item, char* scratch);
  void (*backward_dot)(const Params&, int64_t item, char* scratch);
  void (*backward_postprocess)(const Params&, int64_t item, char* scratch);
  void (*combine)(const CombineParams&, int64_t row_begin, int64_t row_end);
  void (*rotate_token)(const RotaryParams&, const char* row, char* out, int64_t position, int64_t heads,
                       int64_t row_head, int64_t out_head);
  // scales: of the token's heads, scale_head bytes apart. NULL: 1
  void (*quantize_token)(const RotaryParams&, const QuantizeParams&, const char* row, char* out, int64_t position,
                         int64_t heads, int64_t row_head, int64_t out_head, char* scales, int64_t scale_head);
};

// The AMX kernels for bfloat16, in addition to a KernelTable.
struct AmxKernelTable {
  int32_t block_m;                       // queries of a tile
  int32_t decode_keys;                   // keys that the decode kernel processes at once
  int64_t tile_bytes, decode_row_bytes;  // sizes of the kernels' own records
  void (*pack_keys)(const Params&, int64_t item);
  void (*forward)(const Params&, int64_t item, char* scratch);
  void (*decode)(const Params&, int64_t item, char* scratch);
  void (*backward_preprocess)(const Params&, int64_t item, char* scratch);
  void (*backward)(const Params&, int64_t item, char* scratch);
  void (*backward_postprocess)(const Params&, int64_t item, char* scratch);
};

extern const KernelTable kernels_baseline;
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx512;
extern const KernelTable kernels_avx512_bf16;
extern const KernelTable kernels_neon;
extern const KernelTable kernels_neon_bf16;
// avx512's kernels of FMAs, which avx512_bf16's table has too: the same text would make the same instructions.
void avx512_forward(const Params&, int64_t item, char* scratch);
void avx512_decode(const Params&, int64_t item, char* scratch);
void avx512_backward(const Params&, int64_t item, char* scratch);
extern const AmxKernelTable kernels_amx_bf16;
extern const AmxKernelTable kernels_amx_emulated;

}  // namespace tessera::cpu
