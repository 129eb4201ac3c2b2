// Reductions over a row of a warp's accumulator (tile/fragment.cuh), which four neighbouring lanes hold.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera {

TESSERA_DEVICE float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
TESSERA_DEVICE float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

}  // namespace tessera
