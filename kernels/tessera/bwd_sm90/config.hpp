// The backward kernel for Hopper, bwd_sm90: what is fixed when it is compiled, how its shared memory is laid out, and what it
// reads at run time. Plain structs and constexpr functions, the same text for the host and the device.
#pragma once

#include "tessera/attention/backward.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/block_lists/config.hpp"
#include "tessera/tile/layout.hpp"

namespace tessera {

struct BwdSm90Config {
  Dtype dtype;         // 16 bits
  int head_dim;        // of Q and K, padded to 64, 96, 128 or 192
  int block_m;         // queries a step
  int block_n;         // keys a block owns: 64 for each of the two score warpgroups
  int stages;          // tiles of Q and of dO in shared memory, with their rows of LSE and delta
  int ds_stages;       // tiles of dS between the score warpgroups and the dQ warpgroup
  bool window;         // a key has a last query that sees it
  bool varlen;         // sequences are packed, or use a part of their keys
  bool deterministic;  // a thread of the producer's warpgroup adds dQ, in turns
  bool alternate;      // named barriers keep the score warpgroups half a step apart
  bool staged_dq;      // dQ is added by bulk copies from shared memory, else by vector additions from registers
  bool d_bias;         // every query has entries of its own; sequences and heads may share them
  ScoreConfig score;   // no block mask; a softcap with nothing added to what it caps
  bool block_mask;     // tiles of queries by lists (block_lists/kernel), not from the first to the last
  bool split_group;    // a KV head's query heads are several blocks': dK and dV leave in float32, for group_sums.cuh

  // Of V and dO: beside 192 columns 128.
  TESSERA_HOST_DEVICE constexpr int head_dim_v() const { return head_dim == 192 ? 128 : head_dim; }
  // Queries of a step whose scores a warpgroup makes at once: dK and dV of 192 and 128 columns leave registers for 32.
  TESSERA_HOST_DEVICE constexpr int score_m() const { return head_dim == 192 ? 32 : block_m; }
  // A step's biases have registers while the product is made that they are added to.
  TESSERA_HOST_DEVICE constexpr bool bias_ahead() const { return dtype_bytes(score.bias_dtype) == 2; }
};
TESSERA_CONFIG_FIELDS(BwdSm90Config, dtype, head_dim, block_m, block_n, stages, ds_stages, window, varlen,
                      deterministic, alternate, staged_dq, d_bias, score, block_mask, split_group)

// Sums of a split group's dK and dV.
struct BwdSm90GroupConfig {
  Dtype dtype;
  int head_dim, head_dim_v;  // as the products'
};
TESSERA_CONFIG_FIELDS(BwdSm90GroupConfig, dtype, head_dim, head_dim_v)
inline constexpr int kBwdGroupThreads = 256;

// What goes before and after the products: rows.cuh.
struct BwdSm90RowsConfig {
  Dtype dtype;
  int head_dim, block_m;  // as the products'
  bool d_sink;
  bool d_bias;         // as the products'
  bool deterministic;  // as the products': the first block stores dQ, so that only tiles that none adds to are cleared
  bool block_mask;     // as the products': a block more, which makes their order (order.cuh)
};
TESSERA_CONFIG_FIELDS(BwdSm90RowsConfig, dtype, head_dim, block_m, d_sink, d_bias, deterministic, block_mask)

// Warpgroups: the producer, two of 64 keys each, and one for dQ. setmaxnreg's numbers: their sum is that of the launch's 128 for
// each.
inline constexpr int kBwdSm90Threads = 512;
struct BwdSm90Registers {
  int producer, scores, dq;
  TESSERA_HOST_DEVICE constexpr int sum() const { return producer + 2 * scores + dq; }
};
// Of 96 columns dK and dV take 32 registers less than of 128, and dQ's warpgroup gets them. Dropout is drawn by the producer's warps,
// which overlap calls of Philox in 32 registers.
TESSERA_HOST_DEVICE constexpr BwdSm90Registers bwd_registers(int columns, bool dropout = false) {
  const int drawing = dropout ? 8 : 0, scores = columns == 96 ? 192 : 208;
  return {24 + drawing, scores, 4 * 128 - 24 - drawing - 2 * scores};
}
static_assert(bwd_registers(96).sum() <= 4 * 128 && bwd_registers(128).sum() <= 4 * 128);

// How many of dQ's columns are computed at once: 96 take 48 registers, 128 would take 64, and the warpgroup 90.
TESSERA_HOST_DEVICE constexpr int bwd_dq_columns(int columns) { return columns == 96 ? 96 : 64; }

// P is raised (kBwdRaise_log2). Of float16 inputs dS would overflow: it and delta are multiplied by 2^-15 before dS is rounded.
TESSERA_HOST_DEVICE constexpr bool bwd_lowers_early(Dtype dtype) { return dtype == Dtype::kFloat16; }
TESSERA_HOST_DEVICE constexpr float bwd_lower_late(Dtype dtype) { return bwd_lowers_early(dtype) ? 1.0f : kBwdLower; }

inline constexpr int kBwdSm90BlockBytes = 96;  // of KeyBlock

// Offsets in bytes from the start of shared memory, which is aligned to 1024, the period of the 128-byte swizzle.
struct BwdSm90Layout {
  int k, v;      // [block_n][head_dim], [head_dim_v]; at the end dK and dV
  int q, d_o;    // [stages][block_m][head_dim], [head_dim_v]
  int d_s;       // [ds_stages][block_m][block_n]
  int dq;        // [bwd_sm90_dq_stages][block_m][head_dim] float32, staged for the bulk additions
  int stats;     // [stages][2][block_m] float32: LSE in log2 units, delta
  int steps;     // [stages] QueryTileStep
  int block;     // KeyBlock
  int slots;     // [bwd_sm90_step_slots] QueryTileTurn, with a block mask: of the last steps
  int drawn;     // [bwd_sm90_drawn_stages] with dropout: a bit a score, DrawnBits has their order
  int barriers;  // BwdSm90Shared has their order
  int bytes;
};

inline constexpr int kBwdDqStages = 2;  // deterministic: tiles of dQ between its warpgroup and the threads that add it
// Deterministic: threads that take turns, step by step: a turn's way through memory takes longer than a step at a head size of 128 or 256, and
// two of them overlap. Dropout wants the other warps.
TESSERA_HOST_DEVICE constexpr int bwd_turn_threads(const ScoreConfig& score) { return score.dropout ? 1 : 2; }
// Of the bits that dropout draws: as many as steps are loaded, for which two tiles of dQ leave no room at a head size of 128.
TESSERA_HOST_DEVICE constexpr int bwd_sm90_drawn_stages(const BwdSm90Config& c) {
  return !c.score.dropout ? 0 : c.deterministic && c.stages == 2 ? 1 : c.stages;
}

TESSERA_HOST_DEVICE constexpr int bwd_sm90_barriers(const BwdSm90Config& c) {
  return 2 + 2 * (2 * c.stages + c.ds_stages + (c.deterministic ? kBwdDqStages : 0) + bwd_sm90_drawn_stages(c));
}
TESSERA_HOST_DEVICE constexpr int bwd_sm90_dq_stages(const BwdSm90Config& c) {
  return c.deterministic ? kBwdDqStages : c.staged_dq ? 1 : 0;
}

// Steps between the producer and who adds dQ.
TESSERA_HOST_DEVICE constexpr int bwd_sm90_step_slots(const BwdSm90Config& c) {
  return c.stages + c.ds_stages + (c.deterministic ? kBwdDqStages : 0);
}

TESSERA_HOST_DEVICE constexpr BwdSm90Layout bwd_sm90_layout(const BwdSm90Config& c) {
  BwdSm90Layout at{};
  at.k = 0;
  at.v = at.k + swizzled_bytes(c.block_n, c.head_dim);
  at.q = at.v + swizzled_bytes(c.block_n, c.head_dim_v());
  at.d_o = at.q + c.stages * swizzled_bytes(c.block_m, c.head_dim);
  at.d_s = at.d_o + c.stages * swizzled_bytes(c.block_m, c.head_dim_v());
  at.dq = at.d_s + c.ds_stages * c.block_m * c.block_n * 2;
  at.stats = at.dq + bwd_sm90_dq_stages(c) * c.block_m * c.head_dim * 4;
  at.steps = at.stats + c.stages * 2 * c.block_m * 4;
  at.block = at.steps + (c.stages + c.stages % 2) * 8;
  at.slots = at.block + kBwdSm90BlockBytes;
  at.drawn = at.slots + (c.block_mask ? bwd_sm90_step_slots(c) * 8 : 0);
  at.barriers = at.drawn + bwd_sm90_drawn_stages(c) * c.block_m * c.block_n / 8;
  at.bytes = at.barriers + bwd_sm90_barriers(c) * 8;
  return at;
}

struct BwdSm90Params : BwdParams {
  TensorMap q_map, d_o_map;    // [batch, head, row, column], boxes of block_m rows and 64 columns
  TensorMap k_map, v_map;      // boxes of block_n rows
  TensorMap d_k_map, d_v_map;  // boxes of 16 rows, a warp's
  Divisor key_tiles;           // of a sequence, or slots of a packed batch: attention/packed_slots.cuh
  Divisor section_heads;       // heads whose tiles stand together, the longest first
  int heads;                   // (sequence, KV head) pairs; packed: KV heads
  int group_splits;  // of a split group; heads, heads_kv and group then count its parts as KV heads of their own
  float *d_k_parts, *d_v_parts;  // [heads, key_tiles * block_n, head_dim or head_dim_v of the config], of a split group
  BlockLists lists;              // with a block mask, transposed
  BlockTurns turns;              // with a block mask, deterministic
  int* order;    // with a block mask, in any order: [heads x key_tiles], the tile of keys that each block takes
  int rotation;  // deterministic: a key block begins with this many query tiles later than the one before it, or 0
};

}  // namespace tessera
