// The compile-time config, the launch parameters and the shared memory layout of fwd_sm80's kernels, as one text for
// the host and the kernels.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/scales.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/attention/work_order.hpp"
#include "tessera/block_lists/config.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera {

// Which rows of a block's tile a warp has. All but kContiguous are for problems without options.
enum class RowMap : int {
  kContiguous = 0,  // block_m / warps neighbours
  kSpread = 1,      // two tiles of 16 rows, block_m / 2 apart: fwd_sm80/persistent.cuh
  kPairs = 2,  // two warps have the same 32 rows, each half of a tile's keys and of O's columns: fwd_sm80/pairs.cuh
};
TESSERA_ENUM_NAME(RowMap)

struct FwdSm80Config {
  Dtype dtype;
  int head_dim;           // padded to a multiple of 16
  int head_dim_v;         // likewise
  int block_m;            // query rows of a tile
  int block_n;            // keys of a tile
  int warps;              // each has block_m / warps query rows; a pair has the rows of both warps
  int stages;             // stages of K, and of V, in shared memory
  int min_blocks_per_sm;  // the register limit must allow this many
  bool aligned;           // every row of q, k and v starts at a multiple of 16 bytes, so that loads are of 16 bytes
  bool paged;             // keys and values are addressed by a page table
  bool pack_gqa;          // a tile has rows of all query heads of a KV head
  bool split;             // keys are split: partial results in float32 instead of o
  RowMap row_map;
  bool bulk;        // tiles of K and V (with pairs, full ones) are loaded by bulk copies (TMA): Hopper and later
  Dtype codes;      // of K and V if they have 8 bits an element: fwd_sm80/codes.cuh; otherwise float32
  bool key_scales;  // codes: K or V has a scale for each key or 128 keys, instead of one for each sequence and head
  ScoreConfig score;
};
TESSERA_CONFIG_FIELDS(FwdSm80Config, dtype, head_dim, head_dim_v, block_m, block_n, warps, stages, min_blocks_per_sm,
                      aligned, paged, pack_gqa, split, row_map, bulk, codes, key_scales, score)

// Whether K and V have 8 bits an element.
TESSERA_HOST_DEVICE constexpr bool has_codes(const FwdSm80Config& c) { return dtype_bytes(c.codes) == 1; }

// The tile scheduler: persistent blocks, which process one work tile after another, or one block for each work tile.
TESSERA_HOST_DEVICE constexpr bool persistent(const FwdSm80Config& c) { return c.row_map != RowMap::kContiguous; }

inline constexpr int kFwdBlockBytes = 104;  // sizeof(FwdBlock), which a persistent block keeps in shared memory

// Offsets in bytes from the start of shared memory. Members that a kernel does not use have size 0.
struct FwdSm80Layout {
  int q;         // [block_m][head_dim]; contiguous rows: at the end O
  int k;         // [stages][block_n][head_dim]; spread rows: each stage is a tile of K, then one of V
  int v;         // [stages][block_n][head_dim_v]; pairs: at the end O
  int codes;     // codes: a tile of K, then one of V, of 8 bits; k and v are these tiles in 16 bits, one stage
  int scales;    // codes: [2][block_n] float32, of the keys and of the values
  int p;         // pairs: [block_m][block_n], P
  int barriers;  // bulk copies: a full barrier for each stage of K and of V, with contiguous rows also an empty one
  int row_stat;  // pairs: [2][block_m] float32
  int work;      // persistent: [2] FwdBlock, this work tile and the next
  int bytes;
};

TESSERA_HOST_DEVICE constexpr FwdSm80Layout fwd_sm80_layout(const FwdSm80Config& c) {
  const int key_row = pitch_bytes(c.dtype, c.head_dim), value_row = pitch_bytes(c.dtype, c.head_dim_v);
  const bool o_takes_q = c.row_map == RowMap::kContiguous, pairs = c.row_map == RowMap::kPairs;
  const int stage_barriers = pairs ? 2 : c.bulk ? 4 : 0;
  FwdSm80Layout at{};
  at.k = at.q + c.block_m * (o_takes_q && value_row > key_row ? value_row : key_row);
  at.v = at.k + (c.row_map == RowMap::kSpread ? 1 : c.stages) * c.block_n * key_row;
  at.codes = at.k + c.stages * c.block_n * (key_row + value_row);
  const int code_rows = has_codes(c) ? pitch_bytes(c.codes, c.head_dim) + pitch_bytes(c.codes, c.head_dim_v) : 0;
  at.scales = at.codes + c.block_n * code_rows;
  at.p = at.scales + (has_codes(c) ? 2 * c.block_n * 4 : 0);
  at.barriers = at.p + (pairs ? padded_bytes(c.dtype, c.block_m, c.block_n) : 0);
  at.row_stat = at.barriers + c.stages * stage_barriers * 8;
  at.work = at.row_stat + (pairs ? 2 * c.block_m * 4 : 0);
  at.bytes = at.work + (persistent(c) ? 2 * kFwdBlockBytes : 0);
  return at;
}

struct FwdSm80Params : ProblemParams {
  RowTensor o;
  StatTensor lse, lse_low;     // natural logarithm
  Divisor tiles;               // of a sequence; packed: padded tile indices of the batch (attention/sequence.cuh)
  int num_splits, split_keys;  // split_keys: keys of a split, a multiple of block_n
  int o_aligned;               // every row of o starts at a multiple of 16 bytes
  float* partial_o;            // [num_splits, heads_q, rows_total, head_dim_v]
  float *partial_lse, *partial_lse_low;  // [num_splits, heads_q, rows_total], natural logarithm
  WorkOrder order;                       // of persistent blocks
  PositionMasks masks;
  BlockLists lists;  // with a program: of the tiles of keys that its mask shows; no words: there are none
};

// If K and V have 8 bits an element.
struct FwdSm80CodesParams : FwdSm80Params {
  ScaleTensor k_scales, v_scales;
};

// If tiles are loaded by bulk copies: FwdSm80Config::bulk. The maps are of [batch, head, row, two columns], with boxes
// of a tile's rows with their padding.
struct FwdSm80BulkParams : FwdSm80Params {
  TensorMap q_map, k_map, v_map;  // pairs: q_map is unused
};

}  // namespace tessera
