// Forward by wgmma. Config: fixed when the kernel is compiled; params: read at run time. Both are filled
// in by the host.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/score/config.hpp"
#include "tessera/attention/work_order.hpp"

namespace tessera {

// Forward by wgmma: fwd_sm90/kernel.cuh.
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

// Whether the rings of K and V are deep enough that consumers cannot deadlock. All consumers share the K/V blocks of a work
// tile, the union of what their rows see; a consumer releases those that only others see as soon as they arrive. At the
// border of two tiles it releases such blocks of K, after its last block and before its first of the next tile, while its
// last P V still holds back the release of V. Until then the producers can be ahead by k_stages + v_stages - 1 blocks: with
// more blocks to skip than that, the consumer waits for K that is not loaded before another consumer gets its own.
TESSERA_HOST_DEVICE constexpr bool keys_may_run_ahead(int consumers, int block_n, int k_stages, int v_stages) {
  for (int consumer = 0; consumer < consumers; ++consumer) {
    const int before = consumer * kConsumerRows, behind = (consumers - 1 - consumer) * kConsumerRows;
    const int unseen = (before + block_n - 1) / block_n + (behind + block_n - 1) / block_n;
    if (unseen > k_stages + v_stages - 1) return false;
  }
  return true;
}

// The upper half of all of fwd_sm90's matrix descriptors: 8 rows of 128 bytes lie behind each other, swizzled over all 128.
inline constexpr uint32 kDescriptorHigh = 8 * 128 / 16 | 1u << 30;

struct FwdSm90Params : ProblemParams {
  TensorMap q_map, k_map, v_map, o_map;  // [batch, head, row, column], boxes of 64 columns
  RowTensor o;
  StatTensor lse;
  WorkOrder order;
  int* next_work;  // packed: how many have been taken; or NULL: every block knows its works
  int short_work;  // of these: blocks of keys up to which a work is left for the end
  // Parameters, since constants were written into registers anew for each product, and two, that each keeps its place.
  uint32 q_descriptor_high = kDescriptorHigh, kv_descriptor_high = kDescriptorHigh;
};

}  // namespace tessera
