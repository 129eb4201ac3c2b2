// What is fixed when a kernel is compiled. Plain structs, shared by the host, which fills them in, and the device, which
// takes them as template arguments.
#pragma once

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

namespace tessera {

enum class Dtype : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };  // tessera_dtype's numbers

TESSERA_HOST_DEVICE constexpr int dtype_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// What is done to a score beside scale and causal, window and length, which every kernel has.
struct ScoreConfig {
  bool softcap;
  bool bias;
  Dtype bias_dtype;
  bool alibi;
  bool mask;
  bool block_mask;
  bool dropout;
  bool scale_first;  // scale <= 0: the largest product is not the largest score

  TESSERA_HOST_DEVICE constexpr bool any() const {
    return softcap || bias || alibi || mask || block_mask || dropout || scale_first;
  }
  // Entries of a tensor for each score, or for each block of them.
  TESSERA_HOST_DEVICE constexpr bool entries() const { return bias || mask || block_mask; }
  // Whether entries of a tile of `keys` keys are read as eight neighbours, for which the keys stand in lane order
  // (tile/shared_tile.cuh). A call of Philox has the keys of the other order.
  TESSERA_HOST_DEVICE constexpr bool lane_order(int keys) const {
    return entries() && !block_mask && !dropout && keys % 32 == 0;
  }
  // Something is added to a score.
  TESSERA_HOST_DEVICE constexpr bool adds() const { return bias || alibi; }
  // Scores are changed before they are exponentiated, not scaled by the same instruction.
  TESSERA_HOST_DEVICE constexpr bool scaled() const { return softcap || adds() || scale_first; }
};

// Forward by mma.sync: fwd_sm80.cuh; for problems without options fwd_sm80_bulk.cuh where tiles come by bulk copies, and,
// by blocks that take works one after another, fwd_sm80_persistent.cuh where rows are spread and fwd_sm80_pairs.cuh where
// warps stand in pairs.
struct FwdConfig {
  Dtype dtype;
  int head_dim;       // padded to a multiple of 16
  int head_dim_v;     // likewise
  int block_m;        // query rows a tile
  int block_n;        // keys a tile
  int warps;          // each takes block_m / warps query rows; a pair those of both
  int stages;         // tiles of keys, and of values, in shared memory
  int blocks_per_sm;  // that registers must allow
  bool aligned;       // every row of q, k and v starts at a multiple of 16 bytes, so that loads are of 16 bytes
  bool paged;         // keys and values by page table
  bool pack_heads;    // the query heads that share a KV head stand in one tile's rows
  bool split;         // keys in parts: float32 partial results instead of o
  bool pairs;         // two warps share 32 query rows, each with half of a tile's keys and of O's columns
  bool bulk;          // tiles of keys and values come by bulk copies (TMA), of pairs whole ones: Hopper and later
  bool spread_rows;   // a warp's two tiles of 16 rows lie block_m / 2 apart
  ScoreConfig score;
};

inline constexpr int kFwdBlockBytes = 104;  // of what a persistent block knows of a work, in shared memory

// Forward by wgmma: fwd_sm90.cuh.
struct FwdSm90Config {
  Dtype dtype;     // 16 bits
  int head_dim;    // padded to a multiple of 16
  int head_dim_v;  // likewise
  int block_n;     // keys a tile
  int consumers;   // warpgroups that multiply, each with 64 query rows
  int k_stages;    // tiles of keys in shared memory
  int v_stages;    // tiles of values
  int q_stages;    // tiles of 64 queries: with more than consumers, the next work's arrive while this one's are in use
  int o_chunks;    // of 64 columns of O, for which each warp has a place on their way out
  int page_rows;   // by page table: rows of a box, which divide a page's and block_n; 0: keys are dense or packed
  bool causal;     // queries see the more keys the later they stand: works differ in size
  int cluster;     // blocks that fetch K and V for each other, 1 or 2; 2: neighbouring works see the same keys
  bool uneven;     // sequences are packed, or use a part of their keys: their ends lie anywhere
  ScoreConfig score;
};

inline constexpr int kConsumerRows = 64;  // queries of a warpgroup

// Blocks of keys of one work and the next that other consumers see and one consumer does not: behind its last, and before its
// first. It lets their keys go before it may their values, and waits for ever where others wait for these to load the keys
// that it waits for.
TESSERA_HOST_DEVICE constexpr bool keys_may_run_ahead(int consumers, int block_n, int k_stages, int v_stages) {
  for (int consumer = 0; consumer < consumers; ++consumer) {
    const int before = consumer * kConsumerRows, behind = (consumers - 1 - consumer) * kConsumerRows;
    const int unseen = (before + block_n - 1) / block_n + (behind + block_n - 1) / block_n;
    if (unseen > k_stages + v_stages - 1) return false;
  }
  return true;
}

// Backward by mma.sync: bwd_sm80.cuh.
struct BwdConfig {
  Dtype dtype;
  int head_dim;    // padded to a multiple of 16
  int head_dim_v;  // likewise
  int block_m;     // queries a tile
  int block_n;     // keys a block owns
  int warps;
  bool halves;        // half of the warps computes S and dV, the other dP and dK; head_dim_v = head_dim, no options
  int column_parts;   // warps, of a half, that have the same keys, each with a part of dK's and dV's columns
  int stages;         // tiles of queries, and of dO, in shared memory; 0: these take turns, and so do K and V
  int blocks_per_sm;  // that registers must allow
  bool aligned;       // as above, and dO
  bool bulk_dq;  // Hopper and later, with halves: dQ is added by bulk copies from shared memory, not from registers
  bool d_bias;   // the gradient of the bias is wanted
  bool deterministic;
  ScoreConfig score;
};

// Merge of partial results: combine.cuh.
struct CombineConfig {
  Dtype dtype;       // of o
  Dtype part_dtype;  // of its parts
};

// What goes before and after the backward pass's products: bwd_rows.cuh.
struct BwdRowsConfig {
  Dtype dtype;
  int head_dim;    // padded to a multiple of 16
  int head_dim_v;  // likewise
  int block_m;     // as the products'
  int store_keys;  // the products' block_n where a block that alone adds to a tile of dQ stores instead; else 0
  bool aligned;    // every row of o and dO starts at a multiple of 16 bytes
  bool d_bias, d_sink;
};

}  // namespace tessera
