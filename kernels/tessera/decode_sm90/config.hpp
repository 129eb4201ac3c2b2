// The compile-time config, the launch parameters and the shared memory layout of decode_sm90, as one text for the host
// and the kernel.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/scales.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera {

inline constexpr int kDecodeRows = 16;       // query rows of a work tile of 16-bit keys: the rows of an mma
inline constexpr int kDecodeMostParts = 16;  // parts of a work tile at most, if invariant
inline constexpr int kDecodeGroupParts = 4;  // neighbouring parts that are summed as one group
inline constexpr int kDecodeMergePad = 8;    // floats of padding after a row, against bank conflicts

struct DecodeSm90Config {
  Dtype dtype;      // float16 or bfloat16
  Dtype cache;      // of K and V: dtype, float8_e4m3 or float8_e5m2
  int head_dim;     // of Q, K and V, padded to a multiple of 16, with codes of 32
  int rows;         // query rows of a work tile at most: kDecodeRows, with codes also 8 or 32
  int block_n;      // keys of a tile, which one warp computes
  int warps;        // each has its own tiles, stages and softmax
  int stages;       // tiles of K and of V that a warp has in shared memory
  bool paged;       // keys and values are addressed by a page table
  bool varlen;      // sequences may be packed, use only some of their keys, or be causal or not individually
  bool invariant;   // the parts of a work tile do not depend on the batch: schedule.cuh
  bool bulk;        // tiles are loaded by TMA, not by cp.async
  int boxes;        // bulk: a tile is one box or two, each of keys of one page
  bool key_scales;  // codes: keys of a sequence have different scales, in K or in V
  ScoreConfig score;

  // K and V have 8 bits an element: codes.cuh. In a tile, two codes count as one element of 16 bits.
  TESSERA_HOST_DEVICE constexpr bool codes() const { return dtype_bytes(cache) == 1; }
  TESSERA_HOST_DEVICE constexpr int tile_cols() const { return head_dim * dtype_bytes(cache) / 2; }
  // Tiles of 16 rows of S, of which a lane has both rows or, of eight, only the first.
  TESSERA_HOST_DEVICE constexpr int row_tiles() const { return (rows + 15) / 16; }
  TESSERA_HOST_DEVICE constexpr int row_halves() const { return rows < 16 ? 1 : 2; }
};
TESSERA_CONFIG_FIELDS(DecodeSm90Config, dtype, cache, head_dim, rows, block_n, warps, stages, paged, varlen, invariant,
                      bulk, boxes, key_scales, score)

// The number of rows that the warps of a block merge at a time: the 8 heads of a KV head, or 4 rows where shared memory
// is too small for 8.
TESSERA_HOST_DEVICE constexpr int decode_merge_rows(int head_dim) { return head_dim > 128 ? 4 : 8; }

inline constexpr int kDecodeSegmentBytes = 104, kDecodeSegmentRing = 4;  // schedule.cuh
inline constexpr int kDecodeSegmentsBytes = kDecodeSegmentRing * kDecodeSegmentBytes + 88;

// Bytes of the DecodeFold (epilogue.cuh) of one row.
TESSERA_HOST_DEVICE constexpr int decode_fold_bytes(int head_dim) { return (head_dim / 4 * 24 + 15) / 16 * 16; }

// The number of slots of the workspace for a launch of `blocks` blocks; a slot holds one part: schedule.cuh.
TESSERA_HOST_DEVICE constexpr int decode_slots(const DecodeSm90Config& c, int blocks) {
  return blocks * (c.invariant ? kDecodeMostParts : 2);
}

// Offsets in bytes from the start of shared memory.
struct DecodeSm90Layout {
  int stages;    // [warps][stages]: a tile of K, then one of V
  int partials;  // [warps][decode_merge_rows][head_dim + kDecodeMergePad] float32: the warps' sums, to be merged
  int stats;     // [warps][rows][2] float32: stale max and sum, as in DecodePart
  int folds;     // DecodeFold of every row, for a group and for all groups; one unused DecodeFold unless invariant
  int q;         // [rows][head_dim]; codes: also units
  int barriers;  // of bulk copies: [warps][stages][2]; without them one unused barrier
  int segments;  // RangeSegments
  int parted;    // Segment
  int scan;      // [warps + 2] int: the prefix sums of the schedule, and two flags: which work tiles the block merges
  int scales;    // key_scales: [warps][stages][2][block_n] float32, of a tile's keys and of its values
  int bytes;
};

TESSERA_HOST_DEVICE constexpr DecodeSm90Layout decode_sm90_layout(const DecodeSm90Config& c) {
  const int units = c.codes() ? c.rows * 4 : 0;  // of DecodeQueries (codes.cuh) after its tile
  DecodeSm90Layout at{};
  const int tile = c.bulk ? swizzled_bytes(c.block_n, c.tile_cols()) : padded_bytes(c.dtype, c.block_n, c.tile_cols());
  at.partials = at.stages + c.warps * c.stages * 2 * tile;
  at.stats = at.partials + c.warps * decode_merge_rows(c.head_dim) * (c.head_dim + kDecodeMergePad) * 4;
  at.folds = at.stats + c.warps * c.rows * 2 * 4;
  at.q = at.folds + (c.invariant ? 2 * c.rows : 1) * decode_fold_bytes(c.head_dim);
  at.barriers = at.q + padded_bytes(c.dtype, c.rows, c.head_dim) + units;
  at.segments = at.barriers + (c.bulk ? c.warps * c.stages * 2 : 1) * 8;
  at.parted = at.segments + kDecodeSegmentsBytes;
  at.scan = at.parted + kDecodeSegmentBytes;
  const int alignment = c.bulk ? kSwizzleBytes : 16;
  at.scales = (at.scan + (c.warps + 2) * 4 + alignment - 1) / alignment * alignment;
  const int scales = c.key_scales ? c.warps * c.stages * 2 * c.block_n * 4 : 0;
  at.bytes = (at.scales + scales + alignment - 1) / alignment * alignment;
  return at;
}

struct DecodeSm90Params : ProblemParams {
  RowTensor o;
  StatTensor lse, lse_low;          // natural logarithm
  int o_aligned;                    // every row of o starts at a multiple of 16 bytes
  int least_queries, most_queries;  // accepted query counts of a sequence; another launch computes the other sequences
  int beside;            // that other launch, earlier in the stream, may still run: this one reads none of its results
  int min_tiles;         // a block's K/V tiles at least, if there are enough; invariant: a part's
  int short_tiles;       // invariant: a work tile with more K/V tiles has parts of at least 2 min_tiles
  Divisor most_parts;    // invariant: parts of a work tile, at most kDecodeMostParts
  int many_parts;        // not invariant: a work tile with more parts is merged in two levels; at least group_parts
  Divisor group_parts;   // not invariant: neighbouring parts that the first level merges, at least 2
  Divisor group_blocks;  // blocks of a group, which read the same rows of memory together: group_heads x group_rows
  Divisor group_heads;   // KV heads of a group, neighbours in memory: a divisor of heads_kv
  Divisor group_rows;    // row tiles of a KV head in a group, which read the same keys
  int head_groups;       // heads_kv / group_heads
  Divisor block_groups;  // groups of the launch
  Divisor page;          // page_size; 1 without pages
  int part_rows;         // rows of a work tile at most
  float* partial_o;      // [slots][part_rows][head_dim]: schedule.cuh
  float* partial_stat;   // [slots][part_rows][2]: stale max and sum, as in DecodePart
  unsigned long long* arrivals;  // [2][blocks], of work tiles and of groups of parts: decode_sm90/epilogue.cuh
  TensorMap k_map, v_map;        // of bulk copies: boxes of block_n / boxes rows and 64 columns
  PositionMasks masks;
  ScaleTensor k_scales, v_scales;  // of codes
  int same_scale_places;           // a key's two scales have the same offset in their tensors
};

}  // namespace tessera
