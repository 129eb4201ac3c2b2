// The problem, as every kernel reads it at run time, and what the kernels of the backward pass read in addition: filled
// in by the host, passed by value.
#pragma once

#include "tessera/attention/score/config.hpp"
#include "tessera/types.hpp"

namespace tessera {

inline constexpr int kPhiloxRounds = 10;                                         // attention/dropout.cuh
inline constexpr uint32 kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;  // from a round's key to the next

// Where the keys of the sequences lie in k and v:
//
//                  begins                              table
//   dense          NULL                                NULL
//   packed         cu_seqlens_k, rows of k and v       NULL
//   pages          NULL                                page_table, [batch, max_pages]
//   pages in CSR   page_indptr, entries of the table   page_indices, [entries]
//
// Strides in elements. In pages, those of k and v are of a page and of a row within it (RowTensor).
struct KeyStorage {
  const int* begins;  // [batch + 1]: where each sequence's keys begin; at most keys_limit
  int64 begins_stride;
  const int* table;  // the index of a page for each page_size keys of a sequence
  int64 table_batch, table_col;
  int page_size, pages;  // keys of a page, and pages of k and v
};

// A place for each sequence: [batch, 4], its first query, queries, first key and keys in the whole. Strides in
// elements. Of 32 bytes, so that the alignment of what follows in a kernel's params, and with it how they are loaded,
// does not depend on it.
struct PlaceTensor {
  const int* data;
  int64 batch, col;
  int top_left;  // queries and keys are aligned top-left
};
static_assert(sizeof(PlaceTensor) == 32);

// ProblemParams::bottom_right if the problem is a part of a whole by its heads and sequences alone: every sequence is
// whole.
inline constexpr int kNoPlace = -0x7fffffff - 1;

struct ProblemParams {
  int batch;
  Divisor heads_q, heads_kv, group;  // group = heads_q / heads_kv
  int head_dim, head_dim_v;
  int seqlen_q, seqlen_k;   // dense: of every sequence; paged: seqlen_k is the capacity of a row of the page table
  int64 rows_total;         // queries of the whole batch
  const int* cu_seqlens_q;  // [batch + 1] or NULL
  const int* seqused_k;     // [batch] or NULL
  int64 cu_seqlens_q_stride, seqused_k_stride;
  // Packed: sequences of at most this many queries are computed by decode_sm90, in a separate launch.
  int decoded_queries;
  // The bounds of cu_seqlens_q and of keys.begins: rows of q and of k, or entries of the table. One load fetches the
  // second with max_seqlen_q.
  int rows_q, keys_limit;
  int max_seqlen_q, max_seqlen_k;  // upper bounds of a sequence's lengths, from the layouts and the problem
  KeyStorage keys;
  RowTensor q, k, v;

  float scale, scale_log2;  // scale * log2(e)
  // The ratio of the factors of scores in log2 and in natural units, and its inverse, as two floats each.
  float lse_log2e, lse_log2e_low, lse_ln2, lse_ln2_low;
  float softcap;
  // fixed_diagonal: query i is aligned with key i + diagonal (top-left, or a part of a whole); otherwise with key
  // i + Sk - Sq.
  int causal, fixed_diagonal;
  int window_left, window_right;  // -1: unbounded
#define TESSERA_TENSOR(Class, flag, tensor, ...) ScoreTensor tensor;
  TESSERA_SCORE_OPTIONS(TESSERA_NO_OPTION, TESSERA_TENSOR, TESSERA_NO_OPTION)
#undef TESSERA_TENSOR
  int bias_mask_keys;  // 8, 2 or 1: aligned groups of that many keys can be read at once from tensors with entries
  int mask_block_q, mask_block_k;
  // 1: all sequences of one head before the next head, instead of all heads of one sequence: attention/sequence.cuh.
  int head_by_head;
  const float* alibi_slopes;
  int64 alibi_batch, alibi_head;
  const float* sink;  // [heads_q] or NULL
  int64 sink_head;
  float dropout_scale;  // 1 / (1 - p)
  uint32 dropout_threshold, dropout_offset;
  uint32 dropout_keys[kPhiloxRounds][2];
  const int64* dropout_state;  // [2]: replaces seed and offset above if ScoreConfig::dropout_state is set
  int64 dropout_state_stride;
  int diagonal;
  // Only with ScoreConfig::places: the key that query 0 is aligned with bottom-right, or kNoPlace; and the numbers in
  // the whole of query 0, key 0 and head 0, and its heads.
  int bottom_right, first_q, first_k, first_head, whole_heads;
  PlaceTensor
      places;  // only with ScoreConfig::sequence_places, instead of the first three of these and of the diagonal
};

// Positional masks that are tensors, for the families that support them; NULL if ScoreConfig does not have them.
struct PositionMasks {
  const unsigned char* causal_seqs;  // [batch]
  int64 causal_seqs_stride;
  const uint32* tree_mask;  // words [batch, queries, tree_words] or packed [queries, tree_words]
  int64 tree_mask_batch, tree_mask_row, tree_mask_word;
  int tree_words;
};

// ---- the backward pass ----------------------------------------------------------------------------------------------

// If dS is computed from P in float16, P is scaled up by 2^15 so that small weights keep their bits: 15 is subtracted
// from the LSE in log2 units, and the results are multiplied by 2^-15 at the end.
inline constexpr float kBwdRaise_log2 = 15.0f, kBwdLower = 0x1p-15f;

struct BwdParams : ProblemParams {
  RowTensor o, d_o, d_q, d_k, d_v;
  StatTensor lse, lse_low, d_lse;
  float far_lse_log2;   // rows with an LSE of at least this are far: attention/backward/rows.cuh
  int tiles;            // key tiles of a sequence; packed: padded tile indices of the batch (attention/sequence.cuh)
  int block_n;          // keys of a tile
  int q_tiles;          // query tiles of a sequence; dense only
  int q_slots;          // padded query tile indices of the whole batch: attention/backward/rows.cuh
  float* row_lse_log2;  // [heads_q, q_slots, block_m]; +inf for rows that see nothing; or kFarRow
  float* row_delta;     // [heads_q, q_slots, block_m], rowsum(dO o O) - dLSE
  float* dq_accum;      // [heads_q, q_slots, block_m x head_dim padded to 16]
  int* dq_semaphore;    // deterministic: [heads_q, q_slots] blocks that have added to a tile of dQ
  int* ticket;          // deterministic: blocks that have started
  int d_q_aligned, d_k_aligned, d_v_aligned;                   // every row starts at a multiple of 16 bytes
  ScoreTensor d_bias;                                          // float32
  int d_bias_batches, d_bias_heads, d_bias_rows, d_bias_cols;  // its extents
  // Sequences and KV heads of a block, if they have entries of d_bias in common; otherwise 1, 1.
  int owned_batches, owned_heads;
  float* d_sink;
  int64 d_sink_head;
  int after;       // bwd_rows: run the postprocess, not the preprocess
  int accumulate;  // if dQ, dK and dV are float32 sums: 1: the results are added to them; 0: replace them
};

}  // namespace tessera
