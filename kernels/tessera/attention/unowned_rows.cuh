// Rows of packed tensors that belong to no sequence: those before the first sequence's and after the last's. A call
// must write its outputs completely, so blocks that are idle or have little to do clear these rows.
#pragma once

#include "tessera/attention/score/element.cuh"
#include "tessera/attention/sequence.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

struct UnownedRows {
  int begin, end;  // the rows of the sequences are begin ... end - 1
  int count;       // number of the other rows

  TESSERA_DEVICE UnownedRows(const ProblemParams& p, const int* offsets, int64 stride, int rows)
      : begin(clamp(offsets[0], 0, rows)),
        end(clamp(offsets[p.batch * stride], begin, rows)),
        count(begin + rows - end) {}

  // Calls body(row, head) for every `warps`-th (row, head), from `warp` on.
  template <class Body>
  TESSERA_DEVICE void for_each(int heads, int64 warp, int64 warps, Body&& body) const {
#pragma unroll 1
    for (int64 i = warp; i < static_cast<int64>(count) * heads; i += warps) {
      const int n = static_cast<int>(i / heads);
      body(n < begin ? n : end + n - begin, static_cast<int>(i % heads));
    }
  }
};

// Clears one row of one head, by a warp.
template <Dtype kDtype>
TESSERA_DEVICE void clear_row(const RowTensor& tensor, int batch, int64 row, int head, int columns) {
  const int64 at = tensor.batch * batch + tensor.row * row + tensor.head * head;
#pragma unroll 1
  for (int col = lane_id(); col < columns; col += 32) store_element<kDtype>(tensor.data, at + col, 0.0f);
}

// Sets o = 0 and LSE = -inf: the part of the rows of warp `warp` of `warps`.
template <Dtype kDtype, class Params>
TESSERA_DEVICE void clear_unowned_outputs(const Params& p, int64 warp, int64 warps) {
  const UnownedRows rows(p, p.cu_seqlens_q, p.cu_seqlens_q_stride, p.rows_q);
  rows.for_each(p.heads_q, warp, warps, [&](int row, int head) {
    clear_row<kDtype>(p.o, 0, row, head, p.head_dim_v);
    if (lane_id() == 0) store_lse(p, 0, head, row, unseen_lse());
  });
}

}  // namespace tessera
