// The compile-time config and the shared memory layout of fwd_sm90, as one text for the host, the kernel and the search
// for tiles. Its launch parameters are FwdSm90Params.
#pragma once

#include "tessera/attention/forward/params.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera {

struct FwdSm90Config {
  Dtype dtype;     // 16 bits
  int head_dim;    // padded to a multiple of 16
  int head_dim_v;  // likewise, and a width of ptx::Wgmma
  int block_n;     // keys of a K/V block
  int consumers;   // consumer warpgroups, each with kConsumerRows query rows
  int k_stages;    // K blocks in shared memory
  int v_stages;    // V blocks
  // Tiles of kConsumerRows queries: whole_q_stages; with two for each consumer, Q is loaded one work tile early.
  int q_stages;
  int o_chunks;   // chunks of 64 columns of O that each warp stages at a time before they are stored to global memory
  int page_rows;  // paged K and V: rows of a TMA box, a divisor of the page size and of block_n; 0: no page table
  bool varying_tile_cost;  // causal: later queries see more keys, so the scheduler orders work tiles by cost
  int cluster;  // blocks that multicast K and V to one another, 1 or 2; 2: neighbouring work tiles see the same keys
  bool varlen;  // cu_seqlens or seqused: a sequence may end anywhere within a tile
  // K/V blocks come from block lists (block_lists/kernel or, with a program, block_lists/program_lists), not all from
  // first to last.
  bool block_mask;
  // Packed batches: work tiles are listed by live_tiles/kernel, not derived from the sequences' offsets.
  bool live_tiles;
  bool pack_gqa;  // row r of a KV head's tile is query r / group of its head r % group; group divides kConsumerRows
  bool split;     // keys are split into parts, which the blocks of clusters (merge.cuh) or combine/kernel merge
  ScoreConfig score;
  // split: blocks of a cluster that merge their parts of one work tile, each block having one; 1: combine/kernel merges
  int merge_blocks = 1;

  TESSERA_HOST_DEVICE constexpr bool merges() const { return merge_blocks > 1; }
  // Blocks of a cluster.
  TESSERA_HOST_DEVICE constexpr int cluster_blocks() const { return merges() ? merge_blocks : cluster; }
  // Whether the block lists are made from a program's mask.
  TESSERA_HOST_DEVICE constexpr bool program_lists() const { return block_mask && score.program; }
  // Whether slots of tiles are places in the lists' order of tiles.
  TESSERA_HOST_DEVICE constexpr bool orders_lists() const { return program_lists() && !varlen; }
};
TESSERA_CONFIG_FIELDS(FwdSm90Config, dtype, head_dim, head_dim_v, block_n, consumers, k_stages, v_stages, q_stages,
                      o_chunks, page_rows, varying_tile_cost, cluster, varlen, block_mask, live_tiles, pack_gqa, split,
                      score, merge_blocks)

inline constexpr int kMergeParts = 16;     // parts of a row, or clusters' sums, that are merged at once at most
inline constexpr int kWorkTilesAhead = 4;  // work tiles that are decoded ahead of the consumers

// Whether the rings of K and V are deep enough that consumers cannot deadlock. All consumers use the K/V blocks of a
// work tile, the union of what their rows see; a consumer releases blocks that only others see as soon as they arrive.
// At the border of two work tiles it releases such blocks of K, after its last block and before its first of the next
// tile, while its last P V still holds back the release of V. Until then the producers can be ahead by k_stages +
// v_stages - 1 blocks. If it had to skip more blocks than that, the consumer would wait for K that is not loaded before
// another consumer receives its own.
TESSERA_HOST_DEVICE constexpr bool kv_rings_cannot_deadlock(int consumers, int block_n, int k_stages, int v_stages) {
  for (int consumer = 0; consumer < consumers; ++consumer) {
    const int before = consumer * kConsumerRows, after = (consumers - 1 - consumer) * kConsumerRows;
    const int unseen = (before + block_n - 1) / block_n + (after + block_n - 1) / block_n;
    if (unseen > k_stages + v_stages - 1) return false;
  }
  return true;
}

// Each stage of Q belongs to one consumer. If a stage passed from consumer to consumer, the next consumer might wait
// for its own phase while the previous one's Q is still to arrive: it would be two phases ahead of the barrier, whose
// parity would then let it pass at once.
TESSERA_HOST_DEVICE constexpr bool whole_q_stages(int consumers, int q_stages) {
  return q_stages >= consumers && q_stages % consumers == 0;
}

// With a block mask a consumer may skip any number of blocks. This is how many it may skip in sequence while the same P
// V holds back the release of V: up to a work tile's end and, with two stages of Q for each consumer, on into the next
// work tile, because its Q then does not wait for a consumer that still needs V
// (tests/protocols/test_fwd_sm90_lists.py).
TESSERA_HOST_DEVICE constexpr int most_unseen_v(int consumers, int k_stages, int v_stages, int q_stages) {
  return q_stages < 2 * consumers ? v_stages : k_stages + v_stages - 1;
}

// Offsets in bytes from the start of shared memory, which is aligned to 1024, as the swizzle requires.
struct FwdSm90Layout {
  int q;                                  // [q_stages] tiles of kConsumerRows x head_dim
  int k;                                  // [k_stages] blocks of block_n x head_dim
  int v;                                  // [v_stages] blocks of block_n x head_dim_v
  int o;                                  // [consumers * 4 warps] tiles of 16 x o_chunks * 64 columns
  int work_tiles;                         // [kWorkTilesAhead] WorkTile
  int tile_ring, q_ring, k_ring, v_ring;  // each stage has a full and an empty barrier
  int k_entries;                          // [k_stages] entries of a block mask's lists
  int bytes;
};

inline constexpr int kWorkTileBytes = 136, kRingStageBytes = 2 * 8;

TESSERA_HOST_DEVICE constexpr FwdSm90Layout fwd_sm90_layout(const FwdSm90Config& c) {
  FwdSm90Layout at{};
  at.k = at.q + c.q_stages * swizzled_bytes(kConsumerRows, c.head_dim);
  at.v = at.k + c.k_stages * swizzled_bytes(c.block_n, c.head_dim);
  at.o = at.v + c.v_stages * swizzled_bytes(c.block_n, c.head_dim_v);
  at.work_tiles = at.o + c.consumers * kConsumerRows * c.o_chunks * kChunkRowBytes;
  at.tile_ring = at.work_tiles + kWorkTilesAhead * kWorkTileBytes;
  at.q_ring = at.tile_ring + kWorkTilesAhead * kRingStageBytes;
  at.k_ring = at.q_ring + c.q_stages * kRingStageBytes;
  at.v_ring = at.k_ring + c.k_stages * kRingStageBytes;
  at.k_entries = at.v_ring + c.v_stages * kRingStageBytes;
  at.bytes = (at.k_entries + (c.block_mask ? c.k_stages * 4 : 0) + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
  return at;
}

}  // namespace tessera
