// What decode_sm90 is compiled for (config), what a launch passes (params), and where its shared memory lies: one text for the
// host and the kernel.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/tile/layout.hpp"

namespace tessera {

inline constexpr int kDecodeRows = 16;       // query rows of a work tile: mma's
inline constexpr int kDecodeMostParts = 16;  // of a work tile, where parts do not depend on the batch
inline constexpr int kDecodeGroupParts = 4;  // of these, neighbours whose sum is added to the other groups'
inline constexpr int kDecodeMergePad = 8;    // floats after a row of it, so that rows lie in different banks

struct DecodeSm90Config {
  Dtype dtype;     // float16 or bfloat16
  int head_dim;    // padded to a multiple of 16; of values, too
  int block_n;     // keys a tile, which one warp has
  int warps;       // each with its own tiles, stages and softmax
  int stages;      // tiles of K and V of a warp in shared memory
  bool paged;      // keys and values by page table
  bool varlen;     // sequences may be packed, use a part of their keys, or be causal each by itself
  bool invariant;  // a work tile's parts do not depend on the batch: schedule.cuh
  bool bulk;       // tiles come by TMA, not by cp.async: a page has a multiple of block_n keys
  ScoreConfig score;
};
TESSERA_CONFIG_FIELDS(DecodeSm90Config, dtype, head_dim, block_n, warps, stages, paged, varlen, invariant, bulk, score)

// Rows that a block's warps merge at a time: 8 heads of a KV head at once, but where shared memory has no room for it.
TESSERA_HOST_DEVICE constexpr int decode_merge_rows(int head_dim) { return head_dim > 128 ? 4 : 8; }

inline constexpr int kDecodeSegmentBytes = 104, kDecodeSegmentRing = 4;  // schedule.cuh
inline constexpr int kDecodeSegmentsBytes = kDecodeSegmentRing * kDecodeSegmentBytes + 88;

// Of a row: what DecodeFold (merge.cuh) has of four columns each.
TESSERA_HOST_DEVICE constexpr int decode_fold_bytes(int head_dim) { return (head_dim / 4 * 24 + 15) / 16 * 16; }

// Slots of the workspace, a part each, with which a launch of so many blocks does: schedule.cuh.
TESSERA_HOST_DEVICE constexpr int decode_slots(const DecodeSm90Config& c, int blocks) {
  return blocks * (c.invariant ? kDecodeMostParts : 2);
}

// Offsets in bytes from the start of shared memory.
struct DecodeSm90Layout {
  int stages;    // [warps][stages]: a tile of K, then one of V
  int partials;  // [warps][decode_merge_rows][head_dim + kDecodeMergePad] float32: what the warps merge
  int stats;     // [warps][kDecodeRows][2] float32: stale max and sum, as DecodePart has them
  int folds;  // DecodeFold of every row, of a group and of all; one that is not used, where parts depend on the batch
  int q;      // [kDecodeRows][head_dim]
  int barriers;  // of bulk copies: [warps][stages][2]; else one that is not used
  int segments;  // ShareSegments
  int parted;    // Segment
  int scan;      // [warps + 2] int: the prefix sums of the schedule, and which work tiles the block merges
  int bytes;
};

TESSERA_HOST_DEVICE constexpr DecodeSm90Layout decode_sm90_layout(const DecodeSm90Config& c) {
  DecodeSm90Layout at{};
  const int tile = c.bulk ? swizzled_bytes(c.block_n, c.head_dim) : padded_bytes(c.dtype, c.block_n, c.head_dim);
  at.partials = at.stages + c.warps * c.stages * 2 * tile;
  at.stats = at.partials + c.warps * decode_merge_rows(c.head_dim) * (c.head_dim + kDecodeMergePad) * 4;
  at.folds = at.stats + c.warps * kDecodeRows * 2 * 4;
  at.q = at.folds + (c.invariant ? 2 * kDecodeRows : 1) * decode_fold_bytes(c.head_dim);
  at.barriers = at.q + padded_bytes(c.dtype, kDecodeRows, c.head_dim);
  at.segments = at.barriers + (c.bulk ? c.warps * c.stages * 2 : 1) * 8;
  at.parted = at.segments + kDecodeSegmentsBytes;
  at.scan = at.parted + kDecodeSegmentBytes;
  const int alignment = c.bulk ? kSwizzleBytes : 16;
  at.bytes = (at.scan + (c.warps + 2) * 4 + alignment - 1) / alignment * alignment;
  return at;
}

struct DecodeSm90Params : ProblemParams {
  RowTensor o;
  StatTensor lse, lse_low;          // natural logarithm
  int o_aligned;                    // every row of o starts at a multiple of 16 bytes
  int least_queries, most_queries;  // of a sequence; those with fewer or more are another launch's
  int beside;                       // that launch, ahead of this one, may still run: this one reads nothing of it
  int min_tiles;                    // of a block, where there are so many; invariant: of a part
  int short_tiles;                  // invariant: parts of a work tile with more have twice as many at least
  Divisor most_parts;               // invariant: of a work tile, kDecodeMostParts at most
  Divisor team;                     // blocks that read the same keys side by side: team_heads x team_rows
  Divisor team_heads;               // heads of keys, which lie side by side: a divisor of heads_kv
  Divisor team_rows;                // work tiles of a head's rows, which read the same
  int head_groups;                  // heads_kv / team_heads
  Divisor teams;                    // of the launch
  Divisor page;                     // page_size; 1 without pages
  int part_rows;                    // rows of a work tile at most
  float* partial_o;                 // [slots][part_rows][head_dim]: schedule.cuh
  float* partial_stat;              // [slots][part_rows][2]: stale max and sum, as DecodePart has them
  unsigned long long* arrivals;     // [blocks]: decode_sm90/arrivals.cuh
  TensorMap k_map, v_map;           // of bulk copies: boxes of block_n rows of 64 columns
  PositionMasks masks;
};

}  // namespace tessera
