// The compile-time config and the shared memory layout of bwd_sm90_d256, the backward kernel for Hopper at head sizes
// up to 256. Its launch parameters are BwdSm90Params. Plain structs and constexpr functions, the same text for host
// and device.
#pragma once

#include "tessera/attention/backward/params.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera {

struct BwdSm90D256Config {
  static constexpr int block_m = 64;   // queries of a step
  static constexpr int block_n = 128;  // keys of a cluster of two blocks: 64 for each of a block's two key warpgroups

  Dtype dtype;     // 16 bits
  int head_dim;    // of Q and K, padded to 192 or 256
  int head_dim_v;  // of V and dO, padded to 128, 192 or 256; at most head_dim
  // Buffers for halves of Q and dO in block 1's shared memory; block 0, which lacks the half of K, has two more.
  int half_slots;
  int exchange_stages;  // tiles that are in transit between the blocks: P, which dS then overwrites
  bool window;          // a key may also have a last query that sees it
  bool varlen;          // sequences are packed, or use only some of their keys
  bool deterministic;   // clusters add to a tile of dQ in a fixed order
  bool d_bias;          // every query has its own bias entries; sequences and heads may share them
  ScoreConfig score;    // as in bwd_sm90
  bool block_mask;      // as in bwd_sm90: query tiles come from block lists
  bool staged_dq;       // not deterministic: dQ is added by bulk copies from shared memory, not from registers
  bool sums;            // dK and dV are float32 sums (attention/backward/sums.cuh)

  // Whether the lists are made from a program's mask.
  TESSERA_HOST_DEVICE constexpr bool program_lists() const { return block_mask && score.program; }
  // Columns of a half of Q (also of the part of dQ that a block computes), and of a half of dO.
  TESSERA_HOST_DEVICE constexpr int half_dim() const { return head_dim / 2; }
  TESSERA_HOST_DEVICE constexpr int half_dim_v() const { return head_dim_v / 2; }
  // Queries whose scores a warpgroup computes at once.
  TESSERA_HOST_DEVICE static constexpr int score_m() { return block_m; }
  // Whether a step's bias is loaded into registers while the product runs to which it is added: with accumulators of
  // 256 columns no registers are left for it.
  TESSERA_HOST_DEVICE constexpr bool bias_ahead() const {
    return dtype_bytes(score.bias_dtype) == 2 && half_dim() < 128;
  }
  // Whether the producer writes a QueryTileStep for each step, which tells the key warpgroups the step's query tile.
  TESSERA_HOST_DEVICE constexpr bool has_steps() const { return block_mask || score.any() || d_bias; }
  // Rows of statistics of a step: with softcap, block 1 also needs the LSE, from which and P it computes softcap's
  // derivative.
  TESSERA_HOST_DEVICE constexpr int stat_rows(int rank) const { return rank == 1 && score.softcap ? 2 : 1; }
};
TESSERA_CONFIG_FIELDS(BwdSm90D256Config, dtype, head_dim, head_dim_v, half_slots, exchange_stages, window, varlen,
                      deterministic, d_bias, score, block_mask, staged_dq, sums)

inline constexpr int kBwdD256ClusterBlocks = 2;

// Stages of rows of LSE or delta, one for each step. They have no barriers of their own: a static_assert in kernel.cuh
// says why three stages are enough.
inline constexpr int kBwdD256StatStages = 3;

TESSERA_HOST_DEVICE constexpr int bwd_sm90_d256_half_slots(const BwdSm90D256Config& c, int rank) {
  return c.half_slots + (rank == 0 ? 2 : 0);
}

// With has_steps: the number of steps in progress between the producer and dQ. While a step's dS is still unused, the
// key warpgroups are at most exchange_stages steps after it; there they wait for its stage, with two halves of their
// step released. The second term is the number of steps that can have a half in the ring from there on.
TESSERA_HOST_DEVICE constexpr int bwd_sm90_d256_steps(const BwdSm90D256Config& c) {
  return c.exchange_stages + (2 + bwd_sm90_d256_half_slots(c, 0) - 1) / 4 + 1;
}

// Offsets in bytes from the start of shared memory, which is aligned to 1024. `exchange` is at the same offset in both
// blocks. A block reaches the other's memory by mapa().
struct BwdSm90D256Layout {
  int exchange;  // [exchange_stages][block_m][block_n] 16 bits: block 0: dS; block 1: P, then dS
  int keys;      // block 0: K [block_n][head_dim]; block 1: V [block_n][head_dim_v]
  int k_half;    // block 1: [block_n][half_dim], K's second half
  // [half slots][block_m][half_dim], those of dO with half_dim_v columns; at the end dV (block 0) or dK (block 1).
  int halves;
  int dq;     // staged_dq: [block_m][bwd_dq_columns] float32, the source of dQ's bulk additions
  int stats;  // [kBwdD256StatStages][stat_rows][block_m] float32: block 0: LSE in log2 units; block 1: delta, LSE
  int block;  // KeyBlock
  int steps;  // [bwd_sm90_d256_steps] QueryTileStep of the latest steps, with has_steps
  int dropout_bits;  // block 0, with dropout: a step's dropout bits, one for each score, ordered as in DropoutBits
  int barriers;      // ordered as in BwdSm90D256Shared
  int bytes;
};

TESSERA_HOST_DEVICE constexpr int bwd_sm90_d256_barriers(const BwdSm90D256Config& c) {
  return 2 + 5 * c.exchange_stages + 2 * bwd_sm90_d256_half_slots(c, 0) +
         (c.deterministic ? 2 * bwd_dq_threads(c.score) : 0) + (c.score.dropout ? 2 : 0);
}

TESSERA_HOST_DEVICE constexpr BwdSm90D256Layout bwd_sm90_d256_layout(const BwdSm90D256Config& c, int rank) {
  constexpr int kKeys = BwdSm90D256Config::block_n, kQueries = BwdSm90D256Config::block_m;
  BwdSm90D256Layout at{};
  at.exchange = 0;
  at.keys = at.exchange + c.exchange_stages * kQueries * kKeys * 2;
  at.k_half = at.keys + swizzled_bytes(kKeys, rank == 0 ? c.head_dim : c.head_dim_v);
  at.halves = at.k_half + (rank == 1 ? swizzled_bytes(kKeys, c.half_dim()) : 0);
  at.dq = at.halves + bwd_sm90_d256_half_slots(c, rank) * swizzled_bytes(kQueries, c.half_dim());
  at.stats = at.dq + (c.staged_dq ? kQueries * bwd_dq_columns(c.half_dim()) * 4 : 0);
  at.block = at.stats + kBwdD256StatStages * c.stat_rows(rank) * kQueries * 4;
  at.steps = at.block + kBwdSm90BlockBytes;
  at.dropout_bits = at.steps + (c.has_steps() ? bwd_sm90_d256_steps(c) * 8 : 0);
  at.barriers = at.dropout_bits + (rank == 0 && c.score.dropout ? kQueries * kKeys / 8 : 0);
  at.bytes = at.barriers + bwd_sm90_d256_barriers(c) * 8;
  return at;
}

}  // namespace tessera
