// Standard attention: the configs of its two kernels, the params of a launch and the shared-memory layouts, shared by
// host and kernels.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera {

// C = factor A B for every head: standard/product.cuh.
struct StandardProductConfig {
  Dtype dtype;
  bool transpose_a, transpose_b;  // A is stored as [inner][rows], B as [columns][inner]
  int block_n;                    // columns of a tile of C: 64 or 128
  int stages;                     // tiles of A and of B in shared memory
  bool aligned;                   // every row of A and B starts at a multiple of 16 bytes
  bool probabilities;             // C = exp(factor A B - LSE), 0 for a masked key
  bool mask;                      // with probabilities: the problem has a mask
  bool dropout;  // with probabilities: a dropped element becomes negative; otherwise: a negative element of A counts as
                 // 0
};
TESSERA_CONFIG_FIELDS(StandardProductConfig, dtype, transpose_a, transpose_b, block_n, stages, aligned, probabilities,
                      mask, dropout)

// Softmax over rows, or its gradient: standard/rows.cuh.
struct StandardRowsConfig {
  Dtype dtype;
  int threads;  // of a row
  int vectors;  // vectors of 8 elements that a thread holds
  bool gradient;
  bool mask;
  bool dropout;
};
TESSERA_CONFIG_FIELDS(StandardRowsConfig, dtype, threads, vectors, gradient, mask, dropout)

inline constexpr int kStandardBlockM = 128, kStandardBlockK = 64, kStandardWarps = 8;
inline constexpr int kStandardVector = 8;
inline constexpr int kStandardRowsThreads = 128;  // least number of threads of a block, which has as many rows as fit

TESSERA_HOST_DEVICE constexpr int standard_product_bytes(const StandardProductConfig& c) {
  const int a = c.transpose_a ? padded_bytes(c.dtype, kStandardBlockK, kStandardBlockM)
                              : padded_bytes(c.dtype, kStandardBlockM, kStandardBlockK);
  const int b = c.transpose_b ? padded_bytes(c.dtype, c.block_n, kStandardBlockK)
                              : padded_bytes(c.dtype, kStandardBlockK, c.block_n);
  const int tiles = c.stages * (a + b), result = padded_bytes(c.dtype, kStandardBlockM, c.block_n);
  return tiles > result ? tiles : result;
}

TESSERA_HOST_DEVICE constexpr int standard_rows_threads(const StandardRowsConfig& c) {
  return c.threads > kStandardRowsThreads ? c.threads : kStandardRowsThreads;
}

struct StandardProductParams : ProblemParams {
  RowTensor a, b, c;  // a matrix of scores has the same type
  int rows, columns, inner;
  float factor;
  int c_aligned;
  StatTensor lse;  // with probabilities
};

struct StandardRowsParams : ProblemParams {
  // [batch, heads_q, seqlen_q, pitch] each. Softmax: S, replaced by P. Gradient: P, negative where dropped, and dP,
  // replaced by dS.
  void *p_matrix, *d_matrix;
  int64 pitch;     // elements from one row to the next, a multiple of kStandardVector
  StatTensor lse;  // softmax: natural logarithm
};

}  // namespace tessera
