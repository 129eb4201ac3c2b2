// The backward kernel for Hopper at head sizes above 256, bwd_sm90_d512: what is fixed when it is compiled and how its shared
// memory is laid out. Its params are bwd_sm90's. Plain structs and constexpr functions, the same text for host and device.
#pragma once

#include "tessera/bwd_sm90/config.hpp"

namespace tessera {

struct BwdSm90D512Config {
  static constexpr int head_dim = 512;  // of Q, K, V and dO
  static constexpr int block_m = 64;    // queries a step
  static constexpr int block_n = 128;   // keys that a cluster of four blocks owns
  static constexpr bool varlen = false, deterministic = false;
  static constexpr int score_keys = 64;     // keys whose scores a block makes
  static constexpr int gathered_dim = 256;  // columns of dV or dK that a block gathers, of all the cluster's keys
  static constexpr int slot_dim = 128;      // columns of a slot of Q or dO, and of dQ that a block makes
  static constexpr int stages = 2;          // tiles of P, over which dS is written

  Dtype dtype;  // 16 bits
  bool window;  // a key has a last query that sees it, too
};
TESSERA_CONFIG_FIELDS(BwdSm90D512Config, dtype, window)

inline constexpr int kBwdD512ClusterBlocks = 4;

// Warpgroups: the producer, one of scores, one of dQ. setmaxnreg's numbers: their sum is that of the launch's 168 for each.
inline constexpr int kBwdD512Threads = 384;
inline constexpr int kBwdD512ProducerRegisters = 24, kBwdD512ProductRegisters = 240;

// Offsets in bytes from the start of shared memory, which is aligned to 1024: the same in all blocks.
struct BwdSm90D512Layout {
  int exchange;  // [stages][block_m][block_n] 16 bits: dS, in whose place P arrives
  int keys;      // [score_keys][head_dim]: K or V
  int k_parts;   // [2][score_keys][slot_dim]: what `keys` has not of the columns of K that dQ is made with
  int peer;      // [stages][block_m / 16][128 threads][4] 32 bits: P of the other keys, in the second of k_parts
  int factors;  // [head_dim / slot_dim][block_m][slot_dim]: Q or dO, that the keys are multiplied by; at the end dV or dK
  int gathered;  // [gathered_dim / slot_dim][block_m][slot_dim]: dO or Q, that dV or dK is gathered from
  int stats;     // [stages][block_m] float32: LSE in log2 units, or delta
  int block;     // KeyBlock
  int barriers;  // BwdD512Shared has their order
  int bytes;
};

TESSERA_HOST_DEVICE constexpr int bwd_sm90_d512_barriers() {
  using Config = BwdSm90D512Config;
  return 2 + 2 * (Config::head_dim + Config::gathered_dim) / Config::slot_dim + 4 * Config::stages;
}

TESSERA_HOST_DEVICE constexpr BwdSm90D512Layout bwd_sm90_d512_layout() {
  using Config = BwdSm90D512Config;
  constexpr int kPartBytes = Config::score_keys * Config::slot_dim * 2;
  BwdSm90D512Layout at{};
  at.keys = at.exchange + Config::stages * Config::block_m * Config::block_n * 2;
  at.k_parts = at.keys + Config::score_keys * Config::head_dim * 2;
  at.peer = at.k_parts + kPartBytes;
  at.factors = at.k_parts + 2 * kPartBytes;
  at.gathered = at.factors + Config::block_m * Config::head_dim * 2;
  at.stats = at.gathered + Config::block_m * Config::gathered_dim * 2;
  at.block = at.stats + Config::stages * Config::block_m * 4;
  at.barriers = at.block + kBwdSm90BlockBytes;
  at.bytes = at.barriers + bwd_sm90_d512_barriers() * 8;
  return at;
}

}  // namespace tessera
