// Standard attention: what its two kernels are compiled for (config), what a launch passes (params), and where their shared
// memory lies: one text for the host and the kernels.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/tile/layout.hpp"

namespace tessera {

// C = factor A B for every head: standard/product.cuh.
struct StandardProductConfig {
  Dtype dtype;
  bool transpose_a, transpose_b;  // A lies as [inner][rows], B as [columns][inner]
  int block_n;                    // columns of a tile of C: 64 or 128
  int stages;                     // tiles of A and of B in shared memory
  bool aligned;                   // every row of A and B starts at a multiple of 16 bytes
  bool probabilities;             // C = exp(factor A B - LSE), 0 where a key is masked, instead
  bool mask;                      // probabilities: the problem has one
  bool dropout;  // probabilities: what is dropped becomes negative; else: what is negative in A counts as 0
};
TESSERA_CONFIG_FIELDS(StandardProductConfig, dtype, transpose_a, transpose_b, block_n, stages, aligned, probabilities,
                      mask, dropout)

// Softmax over rows, or its gradient: standard/rows.cuh.
struct StandardRowsConfig {
  Dtype dtype;
  int threads;  // of a row
  int vectors;  // of 8 elements, that a thread holds
  bool gradient;
  bool mask;
  bool dropout;
};
TESSERA_CONFIG_FIELDS(StandardRowsConfig, dtype, threads, vectors, gradient, mask, dropout)

inline constexpr int kStandardBlockM = 128, kStandardBlockK = 64, kStandardWarps = 8;
inline constexpr int kStandardVector = 8;
inline constexpr int kStandardRowsThreads = 128;  // of a block at least: as many rows as that is threads for

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
  RowTensor a, b, c;  // a matrix of scores is one, too
  int rows, columns, inner;
  float factor;
  int c_aligned;
  StatTensor lse;  // probabilities
};

struct StandardRowsParams : ProblemParams {
  // [batch, heads_q, seqlen_q, pitch] each. Softmax: S, in whose place P comes. Gradient: P, negative where dropped; and dP, in
  // whose place dS comes.
  void *p_matrix, *d_matrix;
  int64 pitch;     // elements from a row to the next, a multiple of kStandardVector
  StatTensor lse;  // softmax: natural logarithm
};

}  // namespace tessera
