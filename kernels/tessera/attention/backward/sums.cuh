// dQ, dK and dV as float32 sums over several calls: each element is stored or, if the call accumulates, added to. One
// thread alone writes an element, so the additions need no atomics and have a fixed order.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/element.cuh"
#include "tessera/tile/fragment.cuh"

namespace tessera {

// Rows of one head of a gradient, and its columns from `col` on.
struct GradientRows {
  int batch, head;
  int64 row;
  int col;
  int count;  // rows that exist
  int used;   // rows whose gradient is not 0 by definition, as it is of keys past seqused_k
};

struct GradientSum {
  const RowTensor& tensor;  // float32
  int columns, aligned;     // aligned: every row starts at a multiple of 16 bytes
  int accumulate;

  // Writes a warp's accumulators of 16 rows and 8 kN columns times `factor`. They are those from `rows.row + first` on;
  // kLaneOrder: of each 32 rows those that come there in lane order.
  template <bool kLaneOrder = false, int kN>
  TESSERA_DEVICE void write(const GradientRows& rows, const float (&acc)[kN][4], float factor, int first = 0) const {
    const int lane = static_cast<int>(not_hoisted(threadIdx.x % 32)), lane_col = lane % 4 * 2;
    const int left = columns - rows.col - lane_col;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = key_at<kLaneOrder>(first / 8 + half, lane / 4);
      const bool used = row < rows.used;
      if (row >= rows.count || (accumulate && !used)) continue;
      float* const to = static_cast<float*>(tensor.data) + tensor.batch * rows.batch + tensor.head * rows.head +
                        tensor.row * (rows.row + row) + rows.col + lane_col;
      const auto value = [&](int n, int e) { return used ? acc[n][half * 2 + e] * factor : 0.0f; };
      if (aligned && columns % 2 == 0) {
        float2 sums[kN] = {};
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          if (accumulate && n * 8 < left) sums[n] = *reinterpret_cast<const float2*>(to + n * 8);
        }
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float2 sum = make_float2(sums[n].x + value(n, 0), sums[n].y + value(n, 1));
          if (n * 8 < left) *reinterpret_cast<float2*>(to + n * 8) = sum;
        }
      } else {
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& sum = to[n * 8 + e];
            if (n * 8 + e < left) sum = (accumulate ? sum : 0.0f) + value(n, e);
          }
      }
    }
  }
};

}  // namespace tessera
