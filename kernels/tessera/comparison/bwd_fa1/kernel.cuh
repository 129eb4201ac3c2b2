// Backward by the first FlashAttention's schedule (arXiv 2205.14135, algorithm 4), for comparison with bwd_sm80 and bwd_sm90:
// one block has all of a head, tiles of K and V are its outer loop and tiles of Q and dO the inner one; dK and dV accumulate in
// registers, dQ in float32 in device memory, to which every tile of keys adds. The tiles, the products and the score step
// are bwd_sm80's, and so are the kernels before and after, which make delta and round dQ. What FlashAttention-2 changed is
// that each tile of keys has a block of its own: here one head waits for itself.
//
// Grid: one block for each KV head of a sequence. Page: docs/reference/kernels/comparison.md.
#pragma once

#include "tessera/bwd_sm80/kernel.cuh"

namespace tessera {

template <BwdConfig kCfg>
TESSERA_DEVICE void bwd_fa1(const BwdParams& p) {
  static_assert(!kCfg.s_dp_split && !kCfg.deterministic && !kCfg.d_bias);  // one block adds to a tile of dQ: in order
  static_assert(has_bwd_layout<kCfg>(), "shared memory lies where the host has it");
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<BwdSharedMemory<kCfg>*>(shared_memory);
  const int index = static_cast<int>(blockIdx.x), batch = index / p.heads_kv, head = index % p.heads_kv;
  const Sequence s = load_sequence(p, batch);
#pragma unroll 1
  for (int key0 = 0; key0 < s.k_rows; key0 += kCfg.block_n) {
    if (key0 > 0) __syncthreads();  // all warps are done with shared memory
    bwd_key_block(KeyBlock<kCfg>(p, shared, s, batch, head, key0));
  }
}

}  // namespace tessera
