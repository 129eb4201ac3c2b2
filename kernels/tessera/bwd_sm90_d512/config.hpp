// The compile-time config and the shared memory layout of bwd_sm90_d512, the backward kernel for Hopper at head sizes
// above 256. Its launch parameters are BwdSm90Params. Plain structs and constexpr functions, the same text for host
// and device.
#pragma once

#include "tessera/attention/backward/params.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera {

struct BwdSm90D512Config {
  static constexpr int head_dim = 512;  // of Q, K, V and dO
  static constexpr int block_m = 64;    // queries of a step
  static constexpr int block_n = 128;   // keys of a cluster of four blocks
  static constexpr bool varlen = false, deterministic = false;
  static constexpr ScoreConfig score{};        // no options
  static constexpr int score_keys = 64;        // keys whose scores a block computes
  static constexpr int accumulated_dim = 256;  // columns of dV or dK of a block, of all keys of the cluster
  static constexpr int slot_dim = 128;  // columns of a buffer of Q or dO, and of the part of dQ that a block computes
  static constexpr int stages = 2;      // tiles of P, which dS overwrites

  Dtype dtype;  // 16 bits
  bool window;  // a key may also have a last query that sees it
  bool sums;    // dK and dV are float32 sums (attention/backward/sums.cuh)
};
TESSERA_CONFIG_FIELDS(BwdSm90D512Config, dtype, window, sums)

inline constexpr int kBwdD512ClusterBlocks = 4;

// Three warpgroups: the producer, one for scores, one for dQ. The numbers are those of setmaxnreg; their sum is 3 x
// 168, the registers with which the warpgroups are launched.
inline constexpr int kBwdD512Threads = 384;
inline constexpr int kBwdD512ProducerRegisters = 24, kBwdD512ProductRegisters = 240;

// Offsets in bytes from the start of shared memory, which is aligned to 1024: the same in all blocks.
struct BwdSm90D512Layout {
  int exchange;  // [stages][block_m][block_n] 16 bits: dS, which overwrites the P received
  int keys;      // [score_keys][head_dim]: K or V
  int k_parts;   // [2][score_keys][slot_dim]: the columns of K for dQ that `keys` does not hold
  // [stages][block_m / 16][128 threads][4] 32 bits: P of the other side's keys, in the second buffer of k_parts.
  int peer;
  // [head_dim / slot_dim][block_m][slot_dim]: Q or dO, by which the keys are multiplied; at the end dV or dK.
  int factors;
  int accumulated;  // [accumulated_dim / slot_dim][block_m][slot_dim]: dO or Q, from which dV or dK accumulates
  int stats;        // [stages][block_m] float32: LSE in log2 units, or delta
  int block;        // KeyBlock
  int barriers;     // ordered as in BwdD512Shared
  int bytes;
};

TESSERA_HOST_DEVICE constexpr int bwd_sm90_d512_barriers() {
  using Config = BwdSm90D512Config;
  return 2 + 2 * (Config::head_dim + Config::accumulated_dim) / Config::slot_dim + 4 * Config::stages;
}

TESSERA_HOST_DEVICE constexpr BwdSm90D512Layout bwd_sm90_d512_layout() {
  using Config = BwdSm90D512Config;
  constexpr int kPartBytes = Config::score_keys * Config::slot_dim * 2;
  BwdSm90D512Layout at{};
  at.keys = at.exchange + Config::stages * Config::block_m * Config::block_n * 2;
  at.k_parts = at.keys + Config::score_keys * Config::head_dim * 2;
  at.peer = at.k_parts + kPartBytes;
  at.factors = at.k_parts + 2 * kPartBytes;
  at.accumulated = at.factors + Config::block_m * Config::head_dim * 2;
  at.stats = at.accumulated + Config::block_m * Config::accumulated_dim * 2;
  at.block = at.stats + Config::stages * Config::block_m * 4;
  at.barriers = at.block + kBwdSm90BlockBytes;
  at.bytes = at.barriers + bwd_sm90_d512_barriers() * 8;
  return at;
}

}  // namespace tessera
