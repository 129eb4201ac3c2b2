// The backward kernel for Hopper at head sizes above 256, bwd_sm90_d512: what is fixed when it is compiled and how its shared
// memory is laid out. Its params are bwd_sm90's. Plain structs and constexpr functions, the same text for host and device.
#pragma once

#include "tessera/bwd_sm90/config.hpp"

namespace tessera {

struct BwdSm90D512Config {
  static constexpr int head_dim = 512;  // of Q, K, V and dO
  static constexpr int block_m = 64;    // queries a step
  static constexpr int block_n = 64;    // keys that a cluster of two blocks owns
  static constexpr bool varlen = false, deterministic = false;
  static constexpr int block_dim = 256;  // columns that a block has
  static constexpr int half_dim = 128;   // columns of a slot of Q or dO

  Dtype dtype;     // 16 bits
  int half_slots;  // halves of the block's columns of Q and dO in shared memory
  int stages;      // tiles of P, over which dS is written
  bool window;     // a key has a last query that sees it, too
};
TESSERA_CONFIG_FIELDS(BwdSm90D512Config, dtype, half_slots, stages, window)

inline constexpr int kBwdD512ClusterBlocks = 2;

// Rows of LSE and delta are a step's, and have no barriers of their own: config's static_assert in kernel.cuh says why
// three are enough.
inline constexpr int kBwdD512StatStages = 3;

// Offsets in bytes from the start of shared memory, which is aligned to 1024: the same in both blocks.
struct BwdSm90D512Layout {
  int exchange;  // [stages][block_m][block_n] 16 bits: P, then dS
  int k, v;      // [block_n][block_dim]
  int halves;    // [half_slots][block_m][half_dim]; at the end dV and dK
  int partial;   // [block_m / 8][128 threads][4] float32: the other block's share of S, then of dP
  int stats;     // [kBwdD512StatStages][2][block_m] float32: LSE in log2 units, delta
  int block;     // KeyBlock
  int barriers;  // BwdD512Shared has their order
  int bytes;
};

TESSERA_HOST_DEVICE constexpr int bwd_sm90_d512_barriers(const BwdSm90D512Config& c) {
  return 2 + 2 * c.half_slots + 2 * 8 + 4 * c.stages + 2 * c.stages;
}

TESSERA_HOST_DEVICE constexpr BwdSm90D512Layout bwd_sm90_d512_layout(const BwdSm90D512Config& c) {
  constexpr int kKeys = BwdSm90D512Config::block_n, kQueries = BwdSm90D512Config::block_m;
  constexpr int kTileBytes = kKeys * BwdSm90D512Config::block_dim * 2;
  BwdSm90D512Layout at{};
  at.k = at.exchange + c.stages * kQueries * kKeys * 2;
  at.v = at.k + kTileBytes;
  at.halves = at.v + kTileBytes;
  at.partial = at.halves + c.half_slots * kQueries * BwdSm90D512Config::half_dim * 2;
  at.stats = at.partial + kQueries * kKeys * 4;
  at.block = at.stats + kBwdD512StatStages * 2 * kQueries * 4;
  at.barriers = at.block + kBwdSm90BlockBytes;
  at.bytes = at.barriers + bwd_sm90_d512_barriers(c) * 8;
  return at;
}

}  // namespace tessera
