// A case's inputs as doubles that its dtype represents exactly, in the tensors' own shapes; and their layout in memory
// for a call.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "case.hpp"
#include "tensor.hpp"

namespace tessera::core::score {
struct Program;
struct Inputs;
}  // namespace tessera::core::score

namespace tessera::testing {

// A tensor that a score program names.
struct CapturedTensor {
  std::string name;
  int32_t dtype;               // in a call; the oracle reads floating-point numbers in float64
  std::vector<int64_t> shape;  // of rank 0: []
  std::vector<double> values;

  bool is_float() const { return dtype <= TESSERA_BFLOAT16; }
};

struct Inputs {
  Case c;
  int64_t rows_q = 0, rows_k = 0;            // of all sequences: B * Sq or Tq; B * Sk, Tk or pages * page_size
  std::vector<int64_t> q_begin, sq;          // [B] packed: first row; length
  std::vector<int64_t> k_begin, k_rows, sk;  // [B] and the used length
  // [B] the places in the whole; without one, 0 and the lengths
  std::vector<int64_t> first_q, total_q, first_k, total_k;
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
  // The score program, or NULL; its tensors and scalars, in its own order.
  std::shared_ptr<const core::score::Program> program;
  std::vector<CapturedTensor> captured;
  std::vector<double> scalars;

  // Of 8-bit tensors, whose elements are scale * code: codes in the tensors' shapes, scales in that of scale_shape. The
  // scales of tokens of no sequence are NaN.
  std::vector<double> q_codes, k_codes, v_codes;
  std::vector<double> q_scales, k_scales, v_scales;
  std::vector<int64_t> scale_shape(bool of_q) const;

  double scale() const;
  int64_t q_row(int64_t b, int64_t i) const;  // row of query i of sequence b, counted over all
  int64_t k_row(int64_t b, int64_t j) const;
  // The key that query 0 of sequence b is aligned with: bottom-right, and for causal masks and windows.
  int64_t bottom_right(int64_t b) const { return (total_k[b] - first_k[b]) - (total_q[b] - first_q[b]); }
  int64_t diagonal(int64_t b) const { return c.top_left ? first_q[b] - first_k[b] : bottom_right(b); }
  bool has_place() const { return c.first_q + c.first_k + c.after_q + c.after_k + c.places > 0; }
  int64_t whole_heads() const { return c.first_kv > 0 ? (c.first_kv + c.hkv + 1) * (c.hq / c.hkv) : c.hq; }
  int64_t first_head() const { return c.first_kv * (c.hq / c.hkv); }
  size_t lse_index(int64_t b, int64_t h, int64_t i) const;
  size_t span_index(int64_t span, int64_t b, int64_t h, int64_t i, int64_t j, int64_t rows, int64_t columns) const;
  size_t bias_index(int64_t b, int64_t h, int64_t i, int64_t j) const;
  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const;  // by everything but the program
  // What the program reads of a pair, but for its score.
  core::score::Inputs pair(int64_t b, int64_t h, int64_t i, int64_t j) const;
};

// std::invalid_argument: a text of the case's is not a program.
Inputs make_inputs(const Case& c);

// A gradient has the dtype of its tensor if the call has gaps, and is float32 otherwise.
int32_t gradient_dtype(const Case& c, const CapturedTensor& tensor);

// The same shapes, lengths and pages, with NaN in Q, K, V and dO: for plans, which read no values.
Inputs make_shapes(const Case& c);

// A problem with its tensors. `problem` has the layouts of the tensors that are present.
struct Call {
  tessera_problem problem;
  Tensor q, k, v, o, lse, lse_low;
  Tensor cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, page_indptr, page_indices;
  Tensor bias, mask, block_mask, slopes, sink, causal_seqs, tree, prefix_groups, prefix_lens, dropout_state, places,
      o_accum;
  Tensor d_o, d_q, d_k, d_v, d_lse, d_bias, d_sink;
  Tensor q_descale, k_descale, v_descale;
  // Of the score program, whose names captured_names has: its tensors; the gradients of those of floating point.
  std::shared_ptr<tessera_program> program;
  std::vector<std::string> captured_names;
  std::vector<Tensor> captured, d_captured;
  std::vector<double> scalars;

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
