// The backward pass, as every one of its kernels reads it at run time: filled in by the host, passed by value.
#pragma once

#include "tessera/attention/problem.hpp"

namespace tessera {

// Where dS is made of P in float16, P is raised by 2^15, so that small weights keep their bits: 15 is subtracted from the LSE in log2
// units, and what is made of P is multiplied by 2^-15 at the end.
inline constexpr float kBwdRaise_log2 = 15.0f, kBwdLower = 0x1p-15f;

struct BwdParams : ProblemParams {
  RowTensor o, d_o, d_q, d_k, d_v;
  StatTensor lse, lse_low, d_lse;
  float far_lse_log2;   // rows with an LSE from here on are attention/far_rows's
  int tiles;            // of a sequence's keys, or slots of a packed batch: attention/packed_slots.cuh
  int block_n;          // keys of a tile
  int q_tiles;          // of a sequence's queries, dense only
  int q_slots;          // tiles of queries of the whole batch: attention/query_slots.cuh
  float* row_lse_log2;  // [heads_q, q_slots, block_m], +inf where nothing is seen; marked tiles: attention/far_rows
  float* row_delta;     // [heads_q, q_slots, block_m], rowsum(dO o O) - dLSE
  float* dq_accum;      // [heads_q, q_slots, block_m x head_dim padded to 16]
  int* dq_semaphore;    // deterministic: [heads_q, q_slots] blocks that have added to a tile of dQ
  int* ticket;          // deterministic: blocks that have started
  int d_q_aligned, d_k_aligned, d_v_aligned;                   // every row starts at a multiple of 16 bytes
  ScoreTensor d_bias;                                          // float32
  int d_bias_batches, d_bias_heads, d_bias_rows, d_bias_cols;  // its extents
  int owned_batches, owned_heads;  // sequences and KV heads of a block: they share entries of d_bias; else 1, 1
  float* d_sink;
  int64 d_sink_head;
  int after;  // bwd_rows: what goes after the products, not before them
};

}  // namespace tessera
