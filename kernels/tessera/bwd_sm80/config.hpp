// What bwd_sm80's kernels are compiled for (config), what a launch passes (params), and where their shared memory lies: one
// text for the host and the kernels.
#pragma once

#include "tessera/attention/backward.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/tile/layout.hpp"

namespace tessera {

struct BwdConfig {
  Dtype dtype;
  int head_dim;    // padded to a multiple of 16
  int head_dim_v;  // likewise
  int block_m;     // queries a tile
  int block_n;     // keys a block owns
  int warps;
  bool s_dp_split;        // half of the warps computes S and dV, the other dP and dK; head_dim_v = head_dim, no options
  int column_parts;       // warps, of one role, that have the same keys, each with a part of dK's and dV's columns
  int stages;             // tiles of Q, and of dO, in shared memory; 0: dO lies in Q's place, and V in K's
  int min_blocks_per_sm;  // that registers must allow
  bool aligned;           // every row of q, k, v and dO starts at a multiple of 16 bytes
  bool bulk_dq;           // Hopper and later, with the split: dQ is added by bulk copies from shared memory
  bool d_bias;            // the gradient of the bias is wanted
  bool deterministic;
  ScoreConfig score;
};
TESSERA_CONFIG_FIELDS(BwdConfig, dtype, head_dim, head_dim_v, block_m, block_n, warps, s_dp_split, column_parts, stages,
                      min_blocks_per_sm, aligned, bulk_dq, d_bias, deterministic, score)

// With the split and bfloat16 a dP warp has P in float16, raised (kBwdRaise_log2), beside what dV is made of: dS of P rounded to
// bfloat16 has 2.9e-3 of relative error where 2.4e-3 are possible.
TESSERA_HOST_DEVICE constexpr bool bwd_raises(const BwdConfig& c) {
  return c.s_dp_split && c.dtype == Dtype::kBFloat16;
}

// Offsets in bytes from the start of shared memory.
struct BwdLayout {
  int k, v;                     // at the end dK and dV; overlaid (stages 0): one place
  int q, d_o;                   // [stages]; overlaid: one place
  int weights;                  // bwd_raises: P^T in float16, from the S warps to their partners
  int scores;                   // dS^T, and P^T where warps exchange it
  int row_lse_log2, row_delta;  // [stages][block_m] float32
  int ticket;
  int bytes;
};

TESSERA_HOST_DEVICE constexpr BwdLayout bwd_layout(const BwdConfig& c) {
  const bool overlaid = c.stages == 0;
  const int stages = overlaid ? 1 : c.stages;
  const int key_row = pitch_bytes(c.dtype, c.head_dim), value_row = pitch_bytes(c.dtype, c.head_dim_v);
  const int longest_row = key_row > value_row ? key_row : value_row;
  BwdLayout at{};
  at.v = overlaid ? at.k : at.k + c.block_n * key_row;
  at.q = at.v + c.block_n * (overlaid ? longest_row : value_row);
  at.d_o = overlaid ? at.q : at.q + stages * c.block_m * key_row;
  at.weights = at.d_o + stages * c.block_m * (overlaid ? longest_row : value_row);
  at.scores = at.weights + (bwd_raises(c) ? c.block_n * c.block_m * 2 : 0);
  const int score_tiles = c.s_dp_split || c.column_parts > 1 ? 2 : 1;
  at.row_lse_log2 = at.scores + score_tiles * padded_bytes(c.dtype, c.block_n, c.block_m);
  at.row_delta = at.row_lse_log2 + stages * c.block_m * 4;
  at.ticket = at.row_delta + stages * c.block_m * 4;
  at.bytes = at.ticket + 16;
  return at;
}

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
TESSERA_CONFIG_FIELDS(BwdRowsConfig, dtype, head_dim, head_dim_v, block_m, store_keys, aligned, d_bias, d_sink)

}  // namespace tessera
