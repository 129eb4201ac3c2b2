// A checked problem with its buffers, as both back ends read it: each tensor's address, and numbers derived from the
// options once; score_view: the tensor of a score option. Each back end makes its kernels' parameters of it: strides in
// bytes (cpu/params.hpp), or 32-bit sizes and divisors (tessera/attention/problem.hpp of the device code).
#pragma once

#include <cstdint>
#include <numbers>

#include "core/fields.hpp"
#include "core/geometry.hpp"
#include "core/philox.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

// Strides in elements. All are 0 if the tensor is absent.
template <class Strides>
struct TensorView {
  void* data = nullptr;
  Strides stride{};
  int64_t elem_bytes = 0;
};

template <class Strides>
TensorView<Strides> tensor_view(const tessera_layout& layout, const void* data,
                                Strides (*strides)(const tessera_layout&)) {
  if (!present(layout)) return {};
  return {const_cast<void*>(data), strides(layout), static_cast<int64_t>(tessera_dtype_bytes(layout.dtype))};
}
inline TensorView<RowStrides> row_view(const tessera_layout& layout, const void* data) {
  return tensor_view(layout, data, row_strides);
}
inline TensorView<LseStrides> lse_view(const tessera_layout& layout, const void* data) {
  return tensor_view(layout, data, lse_strides);
}

// The tensor of a score option, by the roles of its axes in the fields' table. Strides are in elements; an axis that it
// lacks or broadcasts has stride 0.
struct ScoreView {
  void* data = nullptr;
  ScoreStrides stride{};
  int64_t cols = 0;  // the extent of its last axis
  int64_t elem_bytes = 0;
  int32_t dtype = 0;
};

inline ScoreStrides strides_by_role(const Shape& shape, const tessera_layout& layout) {
  ScoreStrides strides{};
  for (int axis = 0; axis < layout.rank; ++axis) {
    const int64_t stride = layout.shape[axis] == 1 ? 0 : layout.strides[axis];
    switch (shape.axes[axis].symbol) {
      case kB:
        strides.batch = stride;
        break;
      case kHq:
        strides.head = stride;
        break;
      case kSq:
      case kTq:
      case kBlocksQ:
        strides.row = stride;
        break;
      default:  // Sk, ceil(Sk / mask_block_k), words
        strides.col = stride;
    }
  }
  return strides;
}

inline ScoreView score_view(TensorName name, const tessera_problem& problem, const tessera_buffers& buffers) {
  const TensorField& field = kTensorFields[name.index];
  const tessera_layout& layout = problem.*field.layout;
  if (!present(layout)) return {};
  return {const_cast<void*>(field.pointer(buffers)), strides_by_role(shape_of(field, problem), layout),
          layout.shape[layout.rank - 1], static_cast<int64_t>(tessera_dtype_bytes(layout.dtype)), layout.dtype};
}

inline TensorView<ScaleStrides> scale_view(const tessera_layout& layout, const void* data, bool in_pages) {
  if (!present(layout)) return {};
  return {const_cast<void*>(data), scale_strides(layout, in_pages), static_cast<int64_t>(sizeof(float))};
}

// The queries of the whole batch: dense B * Sq, packed Tq.
constexpr int64_t rows_total(const tessera_problem& problem) {
  const Sizes size = sizes(problem);
  return packed_q(problem) ? size.rows_q : size.batch * size.rows_q;
}

// For a problem whose tensors the host can read.
inline Dropout dropout_on_host(const tessera_problem& problem, const tessera_buffers& buffers) {
  Dropout dropout{problem.dropout_seed, problem.dropout_offset, dropout_threshold(problem.dropout_p)};
  if (present(problem.dropout_state) && dropout.threshold > 0) {
    dropout.seed = static_cast<uint64_t>(buffers.dropout_state[0]);
    dropout.offset = static_cast<uint64_t>(buffers.dropout_state[problem.dropout_state.strides[0]]);
  }
  return dropout;
}

// Scores are to base 2, and options have the form that the kernels' arithmetic uses.
struct ProblemView {
  TensorView<RowStrides> q, k, v;
  TensorView<ScaleStrides> q_scales, k_scales, v_scales;
  int64_t mask_block_q, mask_block_k;
  const float* sink = nullptr;  // [heads_q]
  int64_t sink_stride = 0;
  const int32_t* page_table = nullptr;  // [batch, max_pages], or CSR's page_indices
  int64_t page_table_batch = 0, page_table_col = 0;
  int64_t rows_total;  // queries of the whole batch

  float scale, scale_log2;  // scale * log2(e)
  float softcap;            // 0: none
  bool causal, top_left;
  int64_t window_left, window_right;  // -1: unbounded
  float dropout_scale;                // 1 / (1 - p)
  uint32_t dropout_threshold;         // 0: no dropout
  PhiloxKey dropout_key;              // from the problem's own seed and offset
  uint32_t dropout_offset;
  const int64_t* dropout_state = nullptr;  // seed and offset, if it is given instead of the problem's own
  int64_t dropout_state_stride = 0;
};

inline ProblemView problem_view(const tessera_problem& problem, const tessera_buffers& buffers) {
  ProblemView view{};
  view.q = row_view(problem.q, buffers.q);
  view.k = row_view(problem.k, buffers.k);
  view.v = row_view(problem.v, buffers.v);
  view.q_scales = scale_view(problem.q_descale, buffers.q_descale, false);
  view.k_scales = scale_view(problem.k_descale, buffers.k_descale, paged(problem));
  view.v_scales = scale_view(problem.v_descale, buffers.v_descale, paged(problem));
  view.mask_block_q = problem.mask_block_q, view.mask_block_k = problem.mask_block_k;
  if (present(problem.sink)) view.sink = buffers.sink, view.sink_stride = problem.sink.strides[0];
  if (csr_pages(problem)) {
    view.page_table = buffers.page_indices, view.page_table_col = problem.page_indices.strides[0];
  } else if (paged(problem)) {
    view.page_table = buffers.page_table;
    view.page_table_batch = problem.page_table.strides[0], view.page_table_col = problem.page_table.strides[1];
  }
  view.rows_total = rows_total(problem);
  view.scale = static_cast<float>(problem.scale);
  view.scale_log2 = static_cast<float>(problem.scale * std::numbers::log2e);
  view.softcap = static_cast<float>(problem.softcap);
  view.causal = problem.causal != 0, view.top_left = problem.alignment == TESSERA_TOP_LEFT;
  view.window_left = problem.window_left, view.window_right = problem.window_right;
  view.dropout_scale = static_cast<float>(1.0 / (1.0 - problem.dropout_p));
  view.dropout_threshold = dropout_threshold(problem.dropout_p);
  view.dropout_key = dropout_key(problem.dropout_seed, problem.dropout_offset);
  view.dropout_offset = static_cast<uint32_t>(problem.dropout_offset);
  if (present(problem.dropout_state)) {
    view.dropout_state = buffers.dropout_state, view.dropout_state_stride = problem.dropout_state.strides[0];
  }
  return view;
}

}  // namespace tessera::core
