// The launch parameters of the forward kernels for Hopper, fwd_sm90 and fwd_sm90_d512. Plain structs, the same text for
// the host and the device.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/work_order.hpp"
#include "tessera/block_lists/config.hpp"
#include "tessera/live_tiles/config.hpp"
#include "tessera/ptx/layout.hpp"

namespace tessera {

inline constexpr int kConsumerRows = 64;  // query rows of a consumer warpgroup: M of one wgmma

struct FwdSm90Params : ProblemParams {
  // [batch, head, row, column], boxes of 64 columns; with pack_gqa q_map is [batch, row, head, column]
  TensorMap q_map, k_map, v_map, o_map;
  RowTensor o;
  StatTensor lse, lse_low;
  WorkOrder order;
  // Dynamic scheduler (packed batches and block masks): the number of claimed work tiles; NULL: a static schedule. Work
  // tiles of at most short_tile_blocks K/V blocks are scheduled last.
  int* tile_counter;
  int short_tile_blocks;
  // Parameters instead of constants, which the compiler would write into registers again for each product; two
  // parameters, so that each stays in its register.
  uint32 q_descriptor_high = kDescriptorHigh, kv_descriptor_high = kDescriptorHigh;
  PositionMasks masks;
  BlockLists lists;       // with a block mask
  const LiveTiles* live;  // with live tiles
  // With a block mask and a dynamic scheduler: the number of long lists; if it exceeds most_long_lists, no list is
  // scheduled first.
  const int* long_lists;
  int most_long_lists;
  Divisor page;  // with a page table: page_size
  // With split keys: part n of a row has the n-th part of its work tile's K/V blocks.
  Divisor num_splits;
  // [part, head, query of the batch], o with head_dim_v columns: of each split or, where clusters merge theirs, of each
  // cluster of a work tile; `clusters` of these
  float *partial_o, *partial_lse, *partial_lse_low;
  Divisor clusters, merged_heads;  // likewise: (batch, head) pairs, packed: heads
  unsigned long long* arrivals;    // [work tile, block of a cluster], of several clusters: attention/arrivals
};

}  // namespace tessera
