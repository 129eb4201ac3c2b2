// The backward pass, as all of its kernels read it at run time: filled in by the host, passed by value.
#pragma once

#include "tessera/attention/problem.hpp"

namespace tessera {

// If dS is computed from P in float16, P is scaled up by 2^15 so that small weights keep their bits: 15 is subtracted
// from the LSE in log2 units, and the results are multiplied by 2^-15 at the end.
inline constexpr float kBwdRaise_log2 = 15.0f, kBwdLower = 0x1p-15f;

struct BwdParams : ProblemParams {
  RowTensor o, d_o, d_q, d_k, d_v;
  StatTensor lse, lse_low, d_lse;
  float far_lse_log2;  // rows with an LSE of at least this are handled by attention/far_rows
  int tiles;           // key tiles of a sequence; packed: padded tile indices of the batch (attention/packed_slots.cuh)
  int block_n;         // keys of a tile
  int q_tiles;         // query tiles of a sequence; dense only
  int q_slots;         // padded query tile indices of the whole batch: attention/query_slots.cuh
  float* row_lse_log2;  // [heads_q, q_slots, block_m]; +inf for rows that see nothing; marked tiles: attention/far_rows
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
  int after;  // bwd_rows: run the postprocess, not the preprocess
};

}  // namespace tessera
