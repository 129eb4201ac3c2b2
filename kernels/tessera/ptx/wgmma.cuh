// D += A B by one warpgroup: A [64][16] from registers or shared memory, B [16][n] from shared memory, D float32 in
// registers, asynchronous. Warp w has rows 16 w ... of D, and a lane of them what it has of mma's accumulators: with
// g = lane / 4 and c = lane % 4, d[4 t + 0 ... 3] is (g, 8 t + 2c), (g, 8 t + 2c + 1), (g + 8, ...), (g + 8, ...).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma-async
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

// Before the first wgmma, and whenever registers that one reads were written.
TESSERA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TESSERA_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
TESSERA_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers that a wgmma in flight writes: nothing that touches them may move across this.
template <int kCount>
TESSERA_DEVICE void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// That one reads, likewise.
template <int kCount>
TESSERA_DEVICE void wgmma_pin(uint32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}
// Registers whose values are not needed any more, since a wgmma is about to overwrite them: until here they are free.
template <int kCount>
TESSERA_DEVICE void wgmma_forget(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(d[i]));
}

// ss: A from shared memory; rs: from registers. kTransposeB: B lies as [16][n] with n contiguous. `accumulate` false: D = A B.
// ptx/wgmma_shapes.cuh has every width.
template <Dtype kDtype, int kN, bool kTransposeB>
struct Wgmma;

}  // namespace tessera::ptx
