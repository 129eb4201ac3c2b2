// What fwd_fa1 reads beside a forward kernel's params, and its shared-memory layout. The kernel is compiled for a
// FwdSm80Config; it holds one tile of K, one of V and two of Q.
#pragma once

#include "tessera/fwd_sm80/config.hpp"

namespace tessera {

// Offsets in bytes from the start of shared memory.
struct FwdFa1Layout {
  int q;     // [2][block_m][head_dim]; after a tile's last visit it holds O
  int k, v;  // [block_n][head_dim]
  int bytes;
};

TESSERA_HOST_DEVICE constexpr FwdFa1Layout fwd_fa1_layout(const FwdSm80Config& c) {
  const int row = pitch_bytes(c.dtype, c.head_dim);
  FwdFa1Layout at{};
  at.k = at.q + 2 * c.block_m * row;
  at.v = at.k + c.block_n * row;
  at.bytes = at.v + c.block_n * row;
  return at;
}

// State in device memory between two tiles of keys. Tiles have block_m queries: [batch x heads_q, tiles].
struct FwdFa1Params : FwdSm80Params {
  float* o_accum;  // a tile in its warps' accumulator layout: [warp][16 rows][8 columns][lane][4]
  float* row_max;  // m, [block_m] per tile
  float* row_sum;  // l, [block_m] per tile
};

}  // namespace tessera
