// The compile-time config and the shared memory layout of fwd_sm90_d512, the forward kernel for Hopper at head sizes
// above 256. Its launch parameters are FwdSm90Params. Plain structs and constexpr functions, the same text for host
// and device.
#pragma once

#include "tessera/attention/forward/params.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera {

struct FwdSm90D512Config {
  // Queries of a cluster of two blocks, 64 for each of a block's two consumers.
  static constexpr int kBlockM = 128;

  Dtype dtype;   // 16 bits
  int half_dim;  // columns of Q, K, V and O that a block has: 192 or 256
  int block_n;   // keys of a K/V block
  int k_stages;  // K blocks in shared memory
  int v_stages;  // V blocks
  bool varlen;   // cu_seqlens or seqused: a sequence may end anywhere within a tile
  ScoreConfig score;
};
TESSERA_CONFIG_FIELDS(FwdSm90D512Config, dtype, half_dim, block_n, k_stages, v_stages, varlen, score)

inline constexpr int kFwdD512ClusterBlocks = 2, kFwdD512Consumers = 2;
inline constexpr int kFwdD512Threads = (kFwdD512Consumers + 1) * 128;
inline constexpr int kFwdD512TileBytes = 96;  // at least sizeof(FwdD512Tile)

// Offsets in bytes from the start of shared memory, which is aligned to 1024: the same in both blocks.
struct FwdSm90D512Layout {
  int q;         // [consumers] tiles of kConsumerRows x half_dim; at the end O
  int k;         // [k_stages] blocks of block_n x half_dim
  int v;         // [v_stages] likewise
  int partial;   // [consumers][block_n / 8][128 threads][4] float32: the other block's part of S
  int tile;      // FwdD512Tile
  int barriers;  // ordered as in FwdD512Shared
  int bytes;
};

TESSERA_HOST_DEVICE constexpr int fwd_sm90_d512_barriers(const FwdSm90D512Config& c) {
  return kFwdD512Consumers + 2 * c.k_stages + 2 * c.v_stages + 2 * 4 * kFwdD512Consumers;
}

TESSERA_HOST_DEVICE constexpr FwdSm90D512Layout fwd_sm90_d512_layout(const FwdSm90D512Config& c) {
  FwdSm90D512Layout at{};
  at.k = at.q + kFwdD512Consumers * swizzled_bytes(kConsumerRows, c.half_dim);
  at.v = at.k + c.k_stages * swizzled_bytes(c.block_n, c.half_dim);
  at.partial = at.v + c.v_stages * swizzled_bytes(c.block_n, c.half_dim);
  at.tile = at.partial + kFwdD512Consumers * kConsumerRows * c.block_n * 4;
  at.barriers = at.tile + kFwdD512TileBytes;
  at.bytes = at.barriers + fwd_sm90_d512_barriers(c) * 8;
  return at;
}

}  // namespace tessera
