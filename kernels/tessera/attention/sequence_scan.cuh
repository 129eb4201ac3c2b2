// A prefix sum by a block, which gives the position of a sequence's tiles among those of all sequences.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera {

// Returns the sum of `mine` over the threads before this one; called by all threads of the block. total: the sum over
// all threads. sums: in shared memory, one element for each warp. Integer: int or int64.
template <int kWarps, class Integer>
TESSERA_DEVICE Integer sum_before(int thread, Integer mine, Integer* sums, Integer& total) {
  const int lane = thread % 32, warp = thread / 32;
  Integer before = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Integer other = __shfl_up_sync(0xffffffff, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const Integer sum = sums[w];
    if (w < warp) before += sum;
    total += sum;
  }
  return before - mine;
}

}  // namespace tessera
