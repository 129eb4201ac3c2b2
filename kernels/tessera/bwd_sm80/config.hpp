// The compile-time config, the launch parameters and the shared memory layout of bwd_sm80's kernels, as one text for
// the host and the kernels.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/block_lists/config.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera {

struct BwdConfig {
  Dtype dtype;
  int head_dim;    // padded to a multiple of 16
  int head_dim_v;  // likewise
  int block_m;     // queries of a tile
  int block_n;     // keys of a block
  int warps;
  bool s_dp_split;   // half of the warps compute S and dV, the other half dP and dK; head_dim_v = head_dim, no options
  int column_parts;  // warps of one role that have the same keys, each with a part of the columns of dK and dV
  int stages;        // stages of Q, and of dO, in shared memory; 0: dO overlays Q, and V overlays K
  int min_blocks_per_sm;  // the register limit must allow this many
  bool aligned;           // every row of q, k, v and dO starts at a multiple of 16 bytes
  bool bulk_dq;           // Hopper and later, with the S/dP warp split: dQ is added by bulk copies from shared memory
  bool d_bias;            // the gradient of the bias is requested
  bool d_captured;        // the gradient of a score program's tensor is requested
  bool deterministic;
  ScoreConfig score;
  bool sums;  // dQ, dK and dV are float32 sums (attention/backward/sums.cuh), whatever dtype is
};
TESSERA_CONFIG_FIELDS(BwdConfig, dtype, head_dim, head_dim_v, block_m, block_n, warps, s_dp_split, column_parts, stages,
                      min_blocks_per_sm, aligned, bulk_dq, d_bias, d_captured, deterministic, score, sums)

// With the split and bfloat16, a dP warp gets P in float16, scaled up by kBwdRaise_log2, in addition to the P that the
// product for dV uses: dS computed from P in bfloat16 has a relative error of 2.9e-3, where 2.4e-3 is possible.
TESSERA_HOST_DEVICE constexpr bool bwd_raises(const BwdConfig& c) {
  return c.s_dp_split && c.dtype == Dtype::kBFloat16;
}

// Offsets in bytes from the start of shared memory.
struct BwdLayout {
  int k, v;                     // at the end dK and dV; overlaid (stages 0): at one offset
  int q, d_o;                   // [stages]; overlaid: at one offset
  int weights;                  // bwd_raises: P^T in float16, from the S warps to their partner warps
  int scores;                   // dS^T, and P^T if warps exchange it
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

struct BwdSm80Params : BwdParams {
  BlockLists lists;  // with a program: of the query tiles to which its mask shows keys; no words: there are none
  DqOrder dq_order;  // with lists and deterministic
};

// The preprocess and the postprocess of the backward pass: bwd_sm80/rows.cuh.
struct BwdRowsConfig {
  Dtype dtype;
  int head_dim;    // padded to a multiple of 16
  int head_dim_v;  // likewise
  int block_m;     // as in the main kernel's config
  // The main kernel's block_n if a block that alone adds to a tile of dQ stores it instead; otherwise 0.
  int store_keys;
  bool aligned;  // every row of o and dO starts at a multiple of 16 bytes
  bool d_bias, d_sink;
  bool sums;  // as in the main kernel's config
};
TESSERA_CONFIG_FIELDS(BwdRowsConfig, dtype, head_dim, head_dim_v, block_m, store_keys, aligned, d_bias, d_sink, sums)

}  // namespace tessera
