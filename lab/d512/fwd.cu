// One config of fwd_sm90_d512 as a shared library, launched by hand. build.sh writes config.h: CONFIG.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "config.h"
#include "tensor_map.h"
#include "tessera/fwd_sm90_d512/kernel.cuh"

using namespace tessera;

constexpr FwdSm90D512Config kCfg CONFIG;
constexpr int kBytes = fwd_sm90_d512_layout(kCfg).bytes;
extern "C" __global__ void __cluster_dims__(kFwdD512ClusterBlocks) __launch_bounds__(kFwdD512Threads, 1)
    fwd_main(const __grid_constant__ FwdSm90Params p) {
  fwd_sm90_d512<kCfg>(p);
}

struct Args {
  void *q, *k, *v, *o;  // [B, S, H, D] contiguous
  float* lse;           // [B, Hq, Sq]
  int* cu_q;            // [B + 1] or null: then q and o are [1, total, H, D], sq the longest
  int* cu_k;
  int* seqused;  // [B] or null
  int batch, sq, sk, heads_q, heads_kv, head_dim, causal, window_left, window_right, section_heads, total_q, total_k;
  float scale;
};

extern "C" int describe() { return kBytes; }

extern "C" int run(const Args* a, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  FwdSm90Params p{};
  p.batch = a->batch;
  p.heads_q = Divisor(a->heads_q), p.heads_kv = Divisor(a->heads_kv), p.group = Divisor(a->heads_q / a->heads_kv);
  const int d = p.head_dim = p.head_dim_v = a->head_dim;
  p.seqlen_q = p.max_seqlen_q = a->sq, p.seqlen_k = p.max_seqlen_k = a->sk;
  p.cu_seqlens_q = a->cu_q, p.cu_seqlens_k = a->cu_k, p.seqused_k = a->seqused;
  p.cu_seqlens_q_stride = p.cu_seqlens_k_stride = p.seqused_k_stride = 1;
  p.rows_q = a->total_q, p.rows_k = a->total_k;
  p.scale = a->scale, p.scale_log2 = a->scale * 1.4426950408889634f;
  p.causal = a->causal, p.window_left = a->window_left, p.window_right = a->window_right;
  const int rows_q = a->cu_q ? a->total_q : a->sq, rows_k = a->cu_k ? a->total_k : a->sk;
  p.o = {a->o, a->cu_q ? 0 : static_cast<long long>(rows_q) * a->heads_q * d, static_cast<long long>(a->heads_q) * d,
         d};
  p.lse = {a->lse, a->cu_q ? 0 : static_cast<long long>(a->heads_q) * rows_q, rows_q, 1};
  constexpr int kRows = FwdSm90D512Config::kBlockM;
  const int tiles = a->cu_q ? a->total_q / kRows + a->batch : (a->sq + kRows - 1) / kRows;
  p.order.tiles = Divisor(tiles), p.order.heads = a->heads_q * (a->cu_q ? 1 : a->batch);
  const int section = a->section_heads < p.order.heads ? a->section_heads : p.order.heads;
  p.order.ascending = (p.order.heads + section - 1) / section % 2 == 0;  // the last section ends with its shortest
  p.order.swizzle_heads = Divisor(section), p.order.swizzle_tiles = Divisor(section * tiles);
  const int bq = a->cu_q ? 1 : a->batch, bk = a->cu_k ? 1 : a->batch;
  int error = encode(&p.q_map, kCfg.dtype, a->q, bq, rows_q, a->heads_q, d, kConsumerRows) |
              encode(&p.k_map, kCfg.dtype, a->k, bk, rows_k, a->heads_kv, d, kCfg.block_n) |
              encode(&p.v_map, kCfg.dtype, a->v, bk, rows_k, a->heads_kv, d, kCfg.block_n) |
              encode(&p.o_map, kCfg.dtype, a->o, bq, rows_q, a->heads_q, d, 16);
  if (error) return 10000 + error;
  static const int prepared =
      static_cast<int>(cudaFuncSetAttribute(fwd_main, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  if (prepared) return prepared;
  void* args[] = {&p};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(fwd_main),
                                           dim3(tiles * p.order.heads * kFwdD512ClusterBlocks), dim3(kFwdD512Threads),
                                           args, kBytes, stream));
}
