// A case's inputs as doubles that its dtype represents exactly, in the tensors' own shapes; and their layout in memory
// for a call.
#pragma once

#include <functional>
#include <vector>

#include "case.hpp"
#include "tensor.hpp"

namespace tessera::testing {

struct Inputs {
  Case c;
  int64_t rows_q = 0, rows_k = 0;            // of all sequences: B * Sq or Tq; B * Sk, Tk or pages * page_size
  std::vector<int64_t> q_begin, sq;          // [B] packed: first row; length
  std::vector<int64_t> k_begin, k_rows, sk;  // [B] and the used length
  int64_t pages = 0, max_pages = 0;
  std::vector<double> page_table;                 // [B, max_pages], -1 where there is no page
  std::vector<double> page_indptr, page_indices;  // the same as CSR

  // Data of no sequence (padding, unused pages) is NaN.
  std::vector<double> q, k, v, d_o;  // [rows_q, Hq, D], [rows_k, Hkv, D], [rows_k, Hkv, Dv], [rows_q, Hq, Dv]
  std::vector<double> d_lse;         // [B, Hq, Sq] or [Hq, Tq]
  std::vector<double> bias, mask;    // [B|1, Hq|1, Sq|1, Sk]
  std::vector<double> block_mask;    // [B|1, Hq|1, ceil(Sq / block_q), ceil(Sk / block_k)]
  std::vector<double> slopes, sink;  // [Hq] or [B, Hq]; [Hq]
  std::vector<double> causal_seqs;   // [B], or empty
  std::vector<double> tree;          // [rows_q, words] of int32, or empty
  std::vector<double> prefix_groups, prefix_lens;  // [G + 1], [G], or empty

  // Of 8-bit tensors, whose elements are scale * code: codes in the tensors' shapes, scales in the shape of Case::scales.
  // The scales of tokens of no sequence are NaN.
  std::vector<double> q_codes, k_codes, v_codes;
  std::vector<double> q_scales, k_scales, v_scales;
  std::vector<int64_t> scale_shape(bool of_q) const;

  double scale() const;
  int64_t q_row(int64_t b, int64_t i) const;  // row of query i of sequence b, counted over all
  int64_t k_row(int64_t b, int64_t j) const;
  size_t lse_index(int64_t b, int64_t h, int64_t i) const;
  size_t span_index(int64_t span, int64_t b, int64_t h, int64_t i, int64_t j, int64_t rows, int64_t columns) const;
  size_t bias_index(int64_t b, int64_t h, int64_t i, int64_t j) const;
  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const;
};

Inputs make_inputs(const Case& c);

// The same shapes, lengths and pages, with NaN in Q, K, V and dO: for plans, which read no values.
Inputs make_shapes(const Case& c);

// A problem with its tensors. `problem` has the layouts of the tensors that are present.
struct Call {
  tessera_problem problem;
  Tensor q, k, v, o, lse, lse_low;
  Tensor cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, page_indptr, page_indices;
  Tensor bias, mask, block_mask, slopes, sink, causal_seqs, tree, prefix_groups, prefix_lens, dropout_state;
  Tensor d_o, d_q, d_k, d_v, d_lse, d_bias, d_sink;
  Tensor q_descale, k_descale, v_descale;

  void describe();  // writes the tensors' layouts into problem
  tessera_buffers buffers() const;
  // With the tensors' elements at other addresses: a copy's in a GPU's memory.
  tessera_buffers buffers(const std::function<void*(const Tensor&)>& address) const;
  std::vector<const Tensor*> inputs() const;
};

// The case as described: its dtype, order, gaps, and so on.
Call make_call(const Inputs& in);

// The same values in float64, everything contiguous: for the oracle.
Call make_oracle_call(const Inputs& in);

}  // namespace tessera::testing
