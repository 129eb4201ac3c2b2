// The compile-time config and the shared memory layout of bwd_sm90, the backward kernel for Hopper at head sizes up to
// 192. Its launch parameters are BwdSm90Params. Plain structs and constexpr functions, the same text for the host and
// the device.
#pragma once

#include "tessera/attention/backward/params.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera {

struct BwdSm90Config {
  Dtype dtype;         // 16 bits
  int head_dim;        // of Q and K, padded to 64, 96, 128 or 192
  int block_m;         // queries of a step
  int block_n;         // keys of a block: 64 for each of the two score warpgroups
  int stages;          // stages of Q and of dO in shared memory, with their rows of LSE and delta
  int ds_stages;       // stages of dS between the score warpgroups and the dQ warpgroup
  bool window;         // a key may have a last query that sees it
  bool varlen;         // sequences are packed, or use only some of their keys
  bool deterministic;  // threads of the producer's warpgroup add dQ, in an order kept by the dQ semaphore
  bool alternate;      // named barriers keep the score warpgroups half a step apart
  bool staged_dq;      // dQ is added by bulk copies from shared memory; otherwise by vector additions from registers
  bool d_bias;         // every query has its own bias entries; sequences and heads may share them
  bool d_captured;     // the gradient of a score program's tensor is requested: one element for all pairs of a head
  bool d_factor;       // likewise, and the postprocess makes it of dQ (LoadSum::kProducts)
  bool d_diagonal;     // likewise, of elements that all pairs with the same i - j share (LoadSum::kDiagonals)
  ScoreConfig score;   // without a block mask; nothing is added to a score that softcap has changed
  // Query tiles come from block lists (block_lists/kernel or, for program_lists(), block_lists/program_lists), not all
  // from first to last.
  bool block_mask;
  // The query heads of a KV head span several blocks; dK and dV are stored in float32: group_sums.cuh.
  bool split_group;
  bool sums;  // dK and dV are float32 sums (attention/backward/sums.cuh); not with split_group
  // A block has a head and all of its keys, and keeps dQ in shared memory: whole_head.cuh.
  bool whole_head;

  // Whether the lists are made from a program's mask.
  TESSERA_HOST_DEVICE constexpr bool program_lists() const { return block_mask && score.program; }
  // Of V and dO: 128 if Q and K have 192 columns.
  TESSERA_HOST_DEVICE constexpr int head_dim_v() const { return head_dim == 192 ? 128 : head_dim; }
  // Queries whose scores a warpgroup computes at once: 32 with head sizes 192 and 128, whose dK and dV leave no
  // registers for more.
  TESSERA_HOST_DEVICE constexpr int score_m() const { return head_dim == 192 ? 32 : block_m; }
  // Whether a step's bias is loaded into registers while the product runs to which it is added.
  TESSERA_HOST_DEVICE constexpr bool bias_ahead() const { return dtype_bytes(score.bias_dtype) == 2; }
};
TESSERA_CONFIG_FIELDS(BwdSm90Config, dtype, head_dim, block_m, block_n, stages, ds_stages, window, varlen,
                      deterministic, alternate, staged_dq, d_bias, d_captured, d_factor, d_diagonal, score, block_mask,
                      split_group, sums, whole_head)

// Sums the dK and dV of a split group.
struct BwdSm90GroupConfig {
  Dtype dtype;
  int head_dim, head_dim_v;  // as in the main kernel's config
  bool sums;                 // dK and dV are float32 sums
};
TESSERA_CONFIG_FIELDS(BwdSm90GroupConfig, dtype, head_dim, head_dim_v, sums)
inline constexpr int kBwdGroupThreads = 256;

// The preprocess and the postprocess: rows.cuh.
struct BwdSm90RowsConfig {
  Dtype dtype;
  int head_dim, block_m;  // as in the main kernel's config
  bool d_sink;
  bool d_bias;  // as in the main kernel's config
  // As in the main kernel's config: the first block to add stores dQ, so only tiles to which no block adds are cleared.
  // With a program's lists, which do not say what these are, all are.
  bool deterministic;
  // As in the main kernel's config: an additional block computes the order of the key tiles (rows.cuh).
  bool block_mask;
  bool sums;        // dQ is a float32 sum
  bool whole_head;  // as in the main kernel's config: it stores dQ
  // As in the main kernel's score; only where the preprocess asks which keys queries see: deterministic or whole_head,
  // without a block mask.
  bool sequence_places;

  TESSERA_HOST_DEVICE constexpr ScoreConfig positions() const {
    ScoreConfig score{};
    score.sequence_places = sequence_places;
    return score;
  }
};
TESSERA_CONFIG_FIELDS(BwdSm90RowsConfig, dtype, head_dim, block_m, d_sink, d_bias, deterministic, block_mask, sums,
                      whole_head, sequence_places)

// The postprocess with d_factor: product_sums.cuh.
struct BwdSm90ProductsConfig {
  BwdSm90RowsConfig rows;
  bool exact;         // the sums are ExactSum
  ScoreConfig score;  // as in the main kernel's config
};
TESSERA_CONFIG_FIELDS(BwdSm90ProductsConfig, rows, exact, score)

// Offsets in bytes from the start of shared memory, which is aligned to 1024, the period of the 128-byte swizzle.
struct BwdSm90Layout {
  int k, v;    // [block_n][head_dim], [head_dim_v]; reused for dK and dV at the end. whole_head: V comes by way of dO
  int q, d_o;  // [stages], [bwd_sm90_d_o_stages] x [block_m] x [head_dim], [head_dim_v]
  int d_s;     // [ds_stages][block_m][block_n]
  int dq;      // [bwd_sm90_dq_stages][block_m][head_dim] float32: the source of the bulk additions, or a head's dQ
  int stats;   // [stages][2][block_m] float32: LSE in log2 units, delta
  int steps;   // [stages] QueryTileStep
  int block;   // [bwd_sm90_key_blocks] KeyBlock
  int slots;   // [bwd_sm90_step_slots] DqAddition of the latest steps, with a block mask
  int diagonals;  // with d_diagonal: [8 warps][kBwdDiagonalBlocks][8][8] float32, the sums of a step (diagonals.cuh)
  int rings;      // [kBwdDiagonalWarps][256] float32, the sums of diagonals
  int diagonal_step;  // the step's query head and first query
  int dropout_bits;   // [bwd_sm90_dropout_stages] dropout bits, one for each score, ordered as in DropoutBits
  int barriers;       // ordered as in BwdSm90Shared
  int bytes;
};

// Deterministic: tiles of dQ between the dQ warpgroup and the threads that add it.
inline constexpr int kBwdDqStages = 2;
// Stages of dropout bits: as many as there are stages of Q. Deterministic kernels with two stages have one, because
// with a head size of 128 two tiles of dQ leave no room for more.
TESSERA_HOST_DEVICE constexpr int bwd_sm90_dropout_stages(const BwdSm90Config& c) {
  return !c.score.dropout ? 0 : c.deterministic && c.stages == 2 ? 1 : c.stages;
}

// With d_diagonal: warps of the producer's warpgroup that add the sums of diagonals, and blocks of 8 x 8 sums that a
// score warp has of a step.
inline constexpr int kBwdDiagonalWarps = 3, kBwdDiagonalBlocks = 9;

// With whole_head: the most queries and keys of a head, and its tiles of 128.
inline constexpr int kBwdWholeHeadRows = 512, kBwdWholeHeadTiles = kBwdWholeHeadRows / 128;
TESSERA_HOST_DEVICE constexpr int bwd_sm90_d_o_stages(const BwdSm90Config& c) { return c.whole_head ? 1 : c.stages; }
TESSERA_HOST_DEVICE constexpr int bwd_sm90_key_blocks(const BwdSm90Config& c) {
  return c.whole_head ? kBwdWholeHeadTiles : 1;
}
// Three warpgroups with whole_head: the producer and two for scores.
inline constexpr BwdSm90Registers kBwdWholeHeadRegisters{24, 240, 0};
static_assert(kBwdWholeHeadRegisters.sum() <= 3 * 168);
TESSERA_HOST_DEVICE constexpr int bwd_sm90_threads(const BwdSm90Config& c) {
  return c.whole_head ? 384 : kBwdSm90Threads;
}

TESSERA_HOST_DEVICE constexpr int bwd_sm90_barriers(const BwdSm90Config& c) {
  return 2 + 2 * (c.stages + bwd_sm90_d_o_stages(c) + c.ds_stages + (c.deterministic ? kBwdDqStages : 0) +
                  bwd_sm90_dropout_stages(c) + (c.d_diagonal ? 1 : 0));
}
TESSERA_HOST_DEVICE constexpr int bwd_sm90_dq_stages(const BwdSm90Config& c) {
  return c.whole_head ? kBwdWholeHeadTiles : c.deterministic ? kBwdDqStages : c.staged_dq ? 1 : 0;
}

// Steps that may be in progress between the producer and the threads that add dQ.
TESSERA_HOST_DEVICE constexpr int bwd_sm90_step_slots(const BwdSm90Config& c) {
  return c.stages + c.ds_stages + (c.deterministic ? kBwdDqStages : 0);
}

TESSERA_HOST_DEVICE constexpr BwdSm90Layout bwd_sm90_layout(const BwdSm90Config& c) {
  BwdSm90Layout at{};
  at.k = 0;
  at.v = at.k + swizzled_bytes(c.block_n, c.head_dim);
  at.q = at.v + (c.whole_head ? 0 : swizzled_bytes(c.block_n, c.head_dim_v()));
  at.d_o = at.q + c.stages * swizzled_bytes(c.block_m, c.head_dim);
  at.d_s = at.d_o + bwd_sm90_d_o_stages(c) * swizzled_bytes(c.block_m, c.head_dim_v());
  at.dq = at.d_s + c.ds_stages * c.block_m * c.block_n * 2;
  at.stats = at.dq + bwd_sm90_dq_stages(c) * c.block_m * c.head_dim * 4;
  at.steps = at.stats + c.stages * 2 * c.block_m * 4;
  at.block = at.steps + (c.stages + c.stages % 2) * 8;
  at.slots = at.block + bwd_sm90_key_blocks(c) * kBwdSm90BlockBytes;
  at.diagonals = at.slots + (c.block_mask ? bwd_sm90_step_slots(c) * 8 : 0);
  at.diagonals += c.d_diagonal ? (16 - at.diagonals % 16) % 16 : 0;
  at.rings = at.diagonals + (c.d_diagonal ? 8 * kBwdDiagonalBlocks * 64 * 4 : 0);
  at.diagonal_step = at.rings + (c.d_diagonal ? kBwdDiagonalWarps * 256 * 4 : 0);
  at.dropout_bits = at.diagonal_step + (c.d_diagonal ? 8 : 0);
  at.barriers = at.dropout_bits + bwd_sm90_dropout_stages(c) * c.block_m * c.block_n / 8;
  at.bytes = at.barriers + bwd_sm90_barriers(c) * 8;
  return at;
}

}  // namespace tessera
