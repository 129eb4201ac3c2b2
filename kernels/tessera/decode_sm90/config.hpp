// What decode_sm90 is compiled for (config), what a launch passes (params), and where its shared memory lies: one text for the
// host and the kernel.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/tile/pitch.hpp"

namespace tessera {

inline constexpr int kDecodeRows = 16;      // query rows of a work: mma's tile
inline constexpr int kDecodeMergeRows = 8;  // that a block's warps merge at a time
inline constexpr int kDecodeMergePad = 8;   // floats after a row of it, so that eight rows lie in different banks

struct DecodeSm90Config {
  Dtype dtype;       // float16 or bfloat16
  int head_dim;      // padded to a multiple of 16; of values, too
  int block_n;       // keys a tile, which one warp has
  int warps;         // each with its own tiles, stages and softmax
  int stages;        // tiles of K and V of a warp in shared memory
  int min_blocks_per_sm;
  bool paged;        // keys and values by page table
  bool varlen;       // sequences may be packed, or use a part of their keys
  bool bulk;         // rows come by bulk copies, not by cp.async
  ScoreConfig score;
};

// Offsets in bytes from the start of shared memory.
struct DecodeSm90Layout {
  int stages;    // [warps][stages]: a tile of K, then one of V
  int partials;  // [warps][kDecodeMergeRows][head_dim + kDecodeMergePad] float32: what the warps merge
  int stats;     // [warps][kDecodeRows][2] float32: reference and sum
  int barriers;  // [warps][stages]
  int scan;      // [warps + 4] int: the prefix sums of the schedule, and what one thread tells all
  int bytes;
};

TESSERA_HOST_DEVICE constexpr DecodeSm90Layout decode_sm90_layout(const DecodeSm90Config& c) {
  DecodeSm90Layout at{};
  at.partials = at.stages + c.warps * c.stages * 2 * padded_bytes(c.dtype, c.block_n, c.head_dim);
  at.stats = at.partials + c.warps * kDecodeMergeRows * (c.head_dim + kDecodeMergePad) * 4;
  at.barriers = at.stats + c.warps * kDecodeRows * 2 * 4;
  at.scan = at.barriers + (c.bulk ? c.warps * c.stages * 8 : 0);
  at.bytes = (at.scan + (c.warps + 4) * 4 + 15) / 16 * 16;
  return at;
}

struct DecodeSm90Params : ProblemParams {
  RowTensor o;
  StatTensor lse;       // natural logarithm
  int o_aligned;        // every row of o starts at a multiple of 16 bytes
  int min_tiles;        // of a block, where there are so many
  float* partial_o;     // [2 blocks][kDecodeRows][head_dim]
  float* partial_stat;  // [2 blocks][kDecodeRows][2]: reference in log2 units, and sum
  unsigned long long* arrivals;  // [blocks]: attention/arrivals.cuh
};

}  // namespace tessera
