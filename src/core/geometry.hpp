// The sizes of a validated problem and the places of its elements, for dense, packed and paged tensors.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::core {

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr bool present(const tessera_layout& layout) { return layout.rank != 0; }
constexpr bool packed_q(const tessera_problem& problem) { return present(problem.cu_seqlens_q); }
constexpr bool packed_k(const tessera_problem& problem) { return present(problem.cu_seqlens_k); }
// Pages are listed in a table with one row per sequence, or in one row indexed by page_indptr (CSR).
constexpr bool csr_pages(const tessera_problem& problem) { return present(problem.page_indices); }
constexpr bool paged(const tessera_problem& problem) { return present(problem.page_table) || csr_pages(problem); }

struct Sizes {
  int64_t batch;
  int64_t heads_q, heads_kv;
  int64_t head_dim, head_dim_v;
  int64_t rows_q;        // dense: Sq, packed: Tq
  int64_t rows_k;        // dense: Sk, packed: Tk, paged: keys that the pages of one table row hold
  int64_t max_seqlen_q;  // the maximum by the layouts and the problem's max_seqlen_q
  int64_t max_seqlen_k;
  int64_t pages, page_size;  // 0 if not paged
};

constexpr Sizes sizes(const tessera_problem& problem) {
  const tessera_layout &q = problem.q, &k = problem.k, &v = problem.v;
  Sizes s{};
  s.batch = packed_q(problem) ? problem.cu_seqlens_q.shape[0] - 1 : q.shape[0];
  s.rows_q = packed_q(problem) ? q.shape[0] : q.shape[1];
  s.heads_q = q.shape[q.rank - 2];
  s.head_dim = q.shape[q.rank - 1];
  s.heads_kv = k.shape[k.rank - 2];
  s.head_dim_v = v.shape[v.rank - 1];
  if (paged(problem)) {
    s.pages = k.shape[0];
    s.page_size = k.shape[1];
    const int64_t row_pages = csr_pages(problem) ? problem.page_indices.shape[0] : problem.page_table.shape[1];
    s.rows_k = row_pages * s.page_size < INT32_MAX ? row_pages * s.page_size : INT32_MAX;
  } else {
    s.rows_k = packed_k(problem) ? k.shape[0] : k.shape[1];
  }
  s.max_seqlen_q = s.rows_q;
  s.max_seqlen_k = s.rows_k;
  if (packed_q(problem) && problem.max_seqlen_q > 0 && problem.max_seqlen_q < s.rows_q) {
    s.max_seqlen_q = problem.max_seqlen_q;
  }
  if ((packed_k(problem) || paged(problem)) && problem.max_seqlen_k > 0 && problem.max_seqlen_k < s.rows_k) {
    s.max_seqlen_k = problem.max_seqlen_k;
  }
  return s;
}

// ---- strides by role, in elements ----------------------------------------------------------------------------------

// Strides of q, k, v, o and their gradients. Row r of sequence b is at batch * b + row * (begin + r) + head * h; packed
// tensors have batch = 0. Paged: row j is in page p = page_of(b, j) at batch * p + row * (j % page_size) + head * h.
struct RowStrides {
  int64_t batch, row, head;
};
constexpr RowStrides row_strides(const tessera_layout& layout) {
  return layout.rank == 3 ? RowStrides{0, layout.strides[0], layout.strides[1]}
                          : RowStrides{layout.strides[0], layout.strides[1], layout.strides[2]};
}

// Strides of lse and d_lse: [B, Hq, Sq], or packed [Hq, Tq] with batch = 0.
struct LseStrides {
  int64_t batch, head, row;
};
constexpr LseStrides lse_strides(const tessera_layout& layout) {
  return layout.rank == 2 ? LseStrides{0, layout.strides[0], layout.strides[1]}
                          : LseStrides{layout.strides[0], layout.strides[1], layout.strides[2]};
}

// Strides of bias, d_bias, mask and block_mask, [B|1, Hq|1, Sq|1, Sk]: a broadcast axis has stride 0.
struct ScoreStrides {
  int64_t batch, head, row, col;
};
constexpr ScoreStrides score_strides(const tessera_layout& layout) {
  const auto stride = [&layout](int axis) { return layout.shape[axis] == 1 ? 0 : layout.strides[axis]; };
  return {stride(0), stride(1), stride(2), stride(3)};
}

// Strides of tree_mask: [B, Sq, W], or packed [Tq, W] with batch = 0.
struct TreeStrides {
  int64_t batch, row, word;
};
constexpr TreeStrides tree_strides(const tessera_layout& layout) {
  return layout.rank == 2 ? TreeStrides{0, layout.strides[0], layout.strides[1]}
                          : TreeStrides{layout.strides[0], layout.strides[1], layout.strides[2]};
}
constexpr int64_t tree_words(const tessera_layout& layout) { return layout.shape[layout.rank - 1]; }

// Strides of alibi_slopes: [Hq] or [B, Hq].
struct SlopeStrides {
  int64_t batch, head;
};
constexpr SlopeStrides slope_strides(const tessera_layout& layout) {
  return layout.rank == 1 ? SlopeStrides{0, layout.strides[0]} : SlopeStrides{layout.strides[0], layout.strides[1]};
}

// Scales of q, k or v. That of token j of sequence b and KV head h is at batch * b + row * (j / tokens) + head * h; with
// `tokens` 1 and pages, at batch * page_of(b, j) + row * (j % page_size) + head * h.
inline constexpr int64_t kScaleTokens = 128;  // of a block
struct ScaleStrides {
  int64_t batch, row, head;
  int64_t tokens;  // that share a scale
};
constexpr ScaleStrides scale_strides(const tessera_layout& layout, bool in_pages) {
  const int64_t all = int64_t{1} << 40;
  const auto stride = [&layout](int axis) { return layout.shape[axis] == 1 ? 0 : layout.strides[axis]; };
  if (layout.rank == 1) return {0, 0, stride(0), all};
  if (layout.rank == 2) return {stride(0), 0, stride(1), all};
  return {stride(0), stride(1), stride(2), in_pages ? 1 : kScaleTokens};
}

// ---- one sequence --------------------------------------------------------------------------------------------------

struct SequenceView {
  int64_t q_begin, sq;  // its queries are rows q_begin .. q_begin + sq of q
  int64_t k_begin, sk;  // its keys in use
  int64_t k_rows;       // including those past seqused_k (dense and packed; paged: sk)
  bool causal;
};

inline SequenceView sequence(const tessera_problem& problem, const tessera_buffers& buffers, int64_t b) {
  SequenceView view{};
  if (packed_q(problem)) {
    const int64_t stride = problem.cu_seqlens_q.strides[0];
    view.q_begin = buffers.cu_seqlens_q[b * stride];
    view.sq = buffers.cu_seqlens_q[(b + 1) * stride] - view.q_begin;
  } else {
    view.sq = problem.q.shape[1];
  }
  if (packed_k(problem)) {
    const int64_t stride = problem.cu_seqlens_k.strides[0];
    view.k_begin = buffers.cu_seqlens_k[b * stride];
    view.k_rows = buffers.cu_seqlens_k[(b + 1) * stride] - view.k_begin;
  } else if (!paged(problem)) {
    view.k_rows = problem.k.shape[1];
  }
  view.sk = view.k_rows;
  if (present(problem.seqused_k)) view.sk = buffers.seqused_k[b * problem.seqused_k.strides[0]];
  if (paged(problem)) view.k_rows = view.sk;
  view.causal = problem.causal != 0;
  if (present(problem.causal_seqs)) view.causal = buffers.causal_seqs[b * problem.causal_seqs.strides[0]] != 0;
  return view;
}

// The page of key j of sequence b.
inline int64_t page_of(const tessera_problem& problem, const tessera_buffers& buffers, int64_t b, int64_t j) {
  if (csr_pages(problem)) {
    const int64_t begin = buffers.page_indptr[b * problem.page_indptr.strides[0]];
    return buffers.page_indices[(begin + j / problem.k.shape[1]) * problem.page_indices.strides[0]];
  }
  const tessera_layout& table = problem.page_table;
  return buffers.page_table[b * table.strides[0] + j / problem.k.shape[1] * table.strides[1]];
}

// Query i is aligned with key i + diagonal(...), from which causal and the window are measured.
constexpr int64_t diagonal(const tessera_problem& problem, int64_t sq, int64_t sk) {
  return problem.alignment == TESSERA_TOP_LEFT ? 0 : sk - sq;
}

}  // namespace tessera::core
