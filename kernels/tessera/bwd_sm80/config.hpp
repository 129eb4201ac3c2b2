// Backward by mma.sync. Config: fixed when the kernel is compiled; params: read at run time. Both are filled
// in by the host.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/config.hpp"

namespace tessera {

// Backward by mma.sync: bwd_sm80/kernel.cuh.
struct BwdConfig {
  Dtype dtype;
  int head_dim;    // padded to a multiple of 16
  int head_dim_v;  // likewise
  int block_m;     // queries a tile
  int block_n;     // keys a block owns
  int warps;
  bool halves;            // half of the warps computes S and dV, the other dP and dK; head_dim_v = head_dim, no options
  int column_parts;       // warps, of a half, that have the same keys, each with a part of dK's and dV's columns
  int stages;             // tiles of queries, and of dO, in shared memory; 0: these take turns, and so do K and V
  int min_blocks_per_sm;  // that registers must allow
  bool aligned;           // as above, and dO
  bool bulk_dq;  // Hopper and later, with halves: dQ is added by bulk copies from shared memory, not from registers
  bool d_bias;   // the gradient of the bias is wanted
  bool deterministic;
  ScoreConfig score;
};

// What goes before and after the backward pass's products: bwd_sm80/rows.cuh.
struct BwdRowsConfig {
  Dtype dtype;
  int head_dim;    // padded to a multiple of 16
  int head_dim_v;  // likewise
  int block_m;     // as the products'
  int store_keys;  // the products' block_n where a block that alone adds to a tile of dQ stores instead; else 0
  bool aligned;    // every row of o and dO starts at a multiple of 16 bytes
  bool d_bias, d_sink;
};

struct BwdParams : ProblemParams {
  RowTensor o, d_o, d_q, d_k, d_v;
  StatTensor lse, d_lse;
  int tiles;            // of a sequence's keys, or slots of a packed batch: attention/scheduler.cuh
  int block_n;          // keys of a tile
  int q_tiles;          // of a sequence's queries, dense only
  int q_slots;          // tiles of queries of the whole batch: bwd_sm80/query_slots.cuh
  float* row_lse_log2;  // [heads_q, q_slots, block_m], +inf where nothing is seen
  float* row_delta;     // [heads_q, q_slots, block_m], rowsum(dO o O) - dLSE
  float* acc_dq;        // [heads_q, q_slots, block_m x head_dim padded to 16]
  int* turn;            // deterministic: [heads_q, q_slots] whose turn it is to add to a tile of dQ
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
