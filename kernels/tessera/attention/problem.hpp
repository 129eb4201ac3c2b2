// The problem, as every kernel reads it at run time: filled in by the host, passed by value.
#pragma once

#include "tessera/attention/divisor.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/types.hpp"

namespace tessera {

inline constexpr int kPhiloxRounds = 10;                                         // attention/dropout.cuh
inline constexpr uint32 kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;  // from a round's key to the next

// The problem: the same for every kernel.
struct ProblemParams {
  int batch;
  Divisor heads_q, heads_kv, group;  // group = heads_q / heads_kv
  int head_dim, head_dim_v;
  int seqlen_q, seqlen_k;   // dense: of every sequence; paged: seqlen_k is what a row of the page table can hold
  int64 rows_total;         // queries of the whole batch
  const int* cu_seqlens_q;  // [batch + 1] or NULL
  const int* cu_seqlens_k;  // [batch + 1] or NULL; CSR page table: where each sequence's pages start in page_table
  const int* seqused_k;     // [batch] or NULL
  int64 cu_seqlens_q_stride, cu_seqlens_k_stride, seqused_k_stride;
  int decoded_queries;  // packed: sequences of at most so many queries are decode_sm90's, in a launch of its own
  int rows_q, rows_k;   // packed: rows of q and of k, v, which no offset may pass; CSR: pages in the table
  int max_seqlen_q, max_seqlen_k;  // the most that a sequence can have, by the layouts and the problem's word
  RowTensor q, k, v;
  const int* page_table;  // [batch, max_pages]; CSR: [entries]
  int64 page_table_batch, page_table_col;
  int page_size, pages;

  float scale, scale_log2;  // scale * log2(e)
  float lse_log2e, lse_log2e_low, lse_ln2,
      lse_ln2_low;  // of what scores are multiplied by, log2 by natural units and the inverse, two floats each
  float softcap;
  int causal, top_left;
  int window_left, window_right;  // -1: unbounded
#define TESSERA_SCORE_TENSOR(name) ScoreTensor name;
  TESSERA_SCORE_TENSORS(TESSERA_SCORE_TENSOR)
#undef TESSERA_SCORE_TENSOR
  ScoreTensor block_mask;
  int bias_mask_keys;  // 8 or 2: bias and mask of so many keys, the first a multiple, can be read at once; else 1
  int mask_block_q, mask_block_k;
  int head_by_head;  // 1: one head of all sequences after the other's, not one sequence's heads: attention/sequence.cuh
  const float* alibi_slopes;
  int64 alibi_batch, alibi_head;
  const float* sink;  // [heads_q] or NULL
  int64 sink_head;
  float dropout_scale;  // 1 / (1 - p)
  uint32 dropout_threshold, dropout_offset;
  uint32 dropout_keys[kPhiloxRounds][2];
  const int64* dropout_state;  // [2]: seed and offset in the place of these, with ScoreConfig::dropout_state
  int64 dropout_state_stride;
};

// Masks by position that are tensors, for the families that support them; NULL where ScoreConfig lacks them.
struct PositionMasks {
  const unsigned char* causal_seqs;  // [batch]
  int64 causal_seqs_stride;
  const uint32* tree_mask;  // words [batch, queries, tree_words] or packed [queries, tree_words]
  int64 tree_mask_batch, tree_mask_row, tree_mask_word;
  int tree_words;
};

}  // namespace tessera
