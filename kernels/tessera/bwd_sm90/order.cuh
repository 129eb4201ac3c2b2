// With a block mask: the order in which bwd_sm90's blocks process the key tiles. Keys that many queries see (a
// document's beginning, every 16th block) have much longer lists than others. If a head's long lists started only after
// all blocks of the heads before it, they would end long after everything else. The long lists of all heads therefore
// start first, and the rest fills the GPU after them.
#pragma once

#include "tessera/attention/sequence_scan.cuh"
#include "tessera/bwd_sm90/block.cuh"

namespace tessera {

// A list is long if it has this many times the mean number of entries. The lists of a random mask are all shorter and
// keep their order, in which a head's Q, dO and dQ stay in L2.
inline constexpr int kLongList = 2;

// Writes p.order, by a block of kThreads threads with some neighbouring key tiles each: a stable partition into long
// lists and others.
template <int kThreads>
TESSERA_DEVICE void order_key_tiles(const BwdSm90Params& p) {
  __shared__ int64 sSums[2][kThreads / 32];
  const int tiles = p.heads * static_cast<int>(p.key_tiles), each = (tiles + kThreads - 1) / kThreads;
  const int thread = static_cast<int>(threadIdx.x), begin = min(thread * each, tiles), end = min(begin + each, tiles);
  int64 mine = 0, all;
  for (int n = begin; n < end; ++n) mine += steps_of(p, key_tile_place(p, n));
  sum_before<kThreads / 32>(thread, mine, sSums[0], all);
  const auto is_long = [&](int n) { return int64{steps_of(p, key_tile_place(p, n))} * tiles > kLongList * all; };
  int64 mine_long = 0, all_long;
  for (int n = begin; n < end; ++n) mine_long += is_long(n);
  int64 next_long = sum_before<kThreads / 32>(thread, mine_long, sSums[1], all_long);
  int64 next_other = all_long + begin - next_long;
  for (int n = begin; n < end; ++n) p.order[is_long(n) ? next_long++ : next_other++] = n;
}

}  // namespace tessera
