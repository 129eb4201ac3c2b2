// Backward pass by the first FlashAttention's schedule (arXiv 2205.14135, algorithm 4), for comparison with bwd_sm80
// and bwd_sm90. One block processes a whole head: tiles of K and V are the outer loop, tiles of Q and dO the inner
// loop. dK and dV accumulate in registers; dQ accumulates in float32 in device memory, to which every tile of keys
// adds. The tiles, the products and the score step are those of bwd_sm80, and so are the preprocess and postprocess
// kernels, which compute delta and round dQ. FlashAttention-2 gave each tile of keys its own block; here the tiles of a
// head run one after another.
//
// Grid: one block for each KV head of a sequence. Page: docs/reference/kernels/comparison.md.
#pragma once

#include "tessera/bwd_sm80/kernel.cuh"

namespace tessera {

template <BwdConfig kCfg>
TESSERA_DEVICE void bwd_fa1(const BwdParams& p) {
  static_assert(!kCfg.s_dp_split && !kCfg.deterministic && !kCfg.d_bias);  // one block adds to a tile of dQ, in order
  static_assert(has_bwd_layout<kCfg>(), "shared memory lies where the host has it");
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<BwdSharedMemory<kCfg>*>(shared_memory);
  const int index = static_cast<int>(blockIdx.x), batch = index / p.heads_kv, head = index % p.heads_kv;
  const Sequence s = load_sequence(p, batch);
#pragma unroll 1
  for (int key0 = 0; key0 < s.k_rows; key0 += kCfg.block_n) {
    if (key0 > 0) __syncthreads();  // all warps have finished reading shared memory
    bwd_key_block(KeyBlock<kCfg>(p, shared, s, batch, head, key0));
  }
}

}  // namespace tessera
