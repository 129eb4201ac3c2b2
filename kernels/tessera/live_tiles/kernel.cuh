// A prefix sum over the work tiles of a packed batch, for fwd_sm90's dynamic scheduler. A sequence that another launch
// serves (ProblemParams::decoded_queries) has no tile here; with the padded tile indices of attention/scheduler it
// would have one for every head. The kernel also clears the scheduler's counter.
//
// Grid: one block. Block: kLiveTilesThreads threads, each with a contiguous range of sequences.
#pragma once

#include "tessera/attention/sequence.cuh"
#include "tessera/live_tiles/config.hpp"

namespace tessera {

template <LiveTilesConfig kCfg>
TESSERA_DEVICE int tiles_of_sequence(const LiveTilesParams& p, int b) {
  return (load_sequence(p, b).sq + kCfg.rows - 1) / kCfg.rows;
}

template <LiveTilesConfig kCfg>
TESSERA_DEVICE void live_tiles(const LiveTilesParams& p) {
  constexpr int kThreads = kLiveTilesThreads;
  __shared__ int sSums[kThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int each = (p.batch + kThreads - 1) / kThreads, begin = min(thread * each, p.batch),
            end = min(begin + each, p.batch);
  int mine = 0;
  for (int b = begin; b < end; ++b) mine += tiles_of_sequence<kCfg>(p, b);
  int total;
  int before = sum_before<kThreads / 32>(thread, mine, sSums, total);
  int* const first = p.tiles->first();
  for (int b = begin; b < end; ++b) {
    first[b] = before;
    before += tiles_of_sequence<kCfg>(p, b);
  }
  if (thread != 0) return;
  first[p.batch] = total;
  p.tiles->counter = 0;
  WorkOrder order = p.order;
  order.tiles = Divisor(total);
  order.swizzle_tiles = Divisor(order.swizzle_heads * total);
  p.tiles->order = order;
}

}  // namespace tessera
