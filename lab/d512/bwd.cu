// One config of bwd_sm90_d512 as a shared library, launched by hand. build.sh writes config.h: CONFIG.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "config.h"
#include "tensor_map.h"
#include "tessera/bwd_sm80/rows.cuh"
#include "tessera/bwd_sm90_d512/kernel.cuh"

using namespace tessera;

constexpr BwdSm90D512Config kCfg CONFIG;
constexpr int kBytes = bwd_sm90_d512_layout().bytes;
extern "C" __global__ void __cluster_dims__(kBwdD512ClusterBlocks) __launch_bounds__(kBwdD512Threads, 1)
    bwd_main(const __grid_constant__ BwdSm90Params p) {
  bwd_sm90_d512<kCfg>(p);
}
constexpr BwdRowsConfig kRows{kCfg.dtype, kCfg.head_dim, kCfg.head_dim, kCfg.block_m, 0, true, false, false};
extern "C" __global__ void __launch_bounds__(kBwdRowsThreads) bwd_row_pass(const __grid_constant__ BwdParams p) {
  bwd_rows<kRows>(p);
}

struct Args {
  void *q, *k, *v, *o, *d_o, *d_q, *d_k, *d_v;  // [B, S, H, D] contiguous
  float* lse;                                   // [B, Hq, Sq]
  float *acc, *row_lse, *row_delta;             // workspace
  int batch, sq, sk, heads_q, heads_kv, head_dim, causal, section_heads, pdl, parts;
  float scale;
};

template <class Params>
static int launch(void (*kernel)(Params), const Params& p, int grid, int threads, int bytes, bool dependent,
                  cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = dependent ? 1 : 0;
  void* args[] = {const_cast<Params*>(&p)};
  return static_cast<int>(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), args));
}

extern "C" int run(const Args* a, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  BwdSm90Params p{};
  p.batch = a->batch;
  p.heads_q = Divisor(a->heads_q), p.heads_kv = Divisor(a->heads_kv), p.group = Divisor(a->heads_q / a->heads_kv);
  const int d = p.head_dim = p.head_dim_v = a->head_dim;
  p.seqlen_q = p.max_seqlen_q = a->sq, p.seqlen_k = p.max_seqlen_k = a->sk;
  p.scale = a->scale, p.scale_log2 = a->scale * 1.4426950408889634f;
  p.causal = a->causal, p.window_left = p.window_right = -1;
  const auto rows = [d](void* data, long long rows, int heads) {
    return RowTensor{data, rows * heads * d, static_cast<long long>(heads) * d, d};
  };
  p.o = rows(a->o, a->sq, a->heads_q), p.d_o = rows(a->d_o, a->sq, a->heads_q), p.d_q = rows(a->d_q, a->sq, a->heads_q);
  p.lse = {a->lse, static_cast<long long>(a->heads_q) * a->sq, a->sq, 1};
  p.q_tiles = (a->sq + kCfg.block_m - 1) / kCfg.block_m, p.q_slots = p.q_tiles * a->batch;
  p.row_lse_log2 = a->row_lse, p.row_delta = a->row_delta, p.dq_accum = a->acc;
  p.d_q_aligned = 1;
  p.key_tiles = Divisor((a->sk + kCfg.block_n - 1) / kCfg.block_n);
  p.heads = a->batch * a->heads_kv;
  p.section_heads = Divisor(a->section_heads < p.heads ? a->section_heads : p.heads);
  int error = 0;
  const auto map = [&](TensorMap& to, void* data, int rows, int heads, int box_rows) {
    error |= encode(&to, kCfg.dtype, data, a->batch, rows, heads, d, box_rows);
  };
  map(p.q_map, a->q, a->sq, a->heads_q, kCfg.block_m);
  map(p.d_o_map, a->d_o, a->sq, a->heads_q, kCfg.block_m);
  map(p.k_map, a->k, a->sk, a->heads_kv, kCfg.score_keys);
  map(p.v_map, a->v, a->sk, a->heads_kv, kCfg.score_keys);
  map(p.d_k_map, a->d_k, a->sk, a->heads_kv, 16);
  map(p.d_v_map, a->d_v, a->sk, a->heads_kv, 16);
  if (error) return 10000 + error;
  static const int prepared =
      static_cast<int>(cudaFuncSetAttribute(bwd_main, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  if (prepared) return prepared;
  const int query_tiles = p.q_slots * a->heads_q;
  if (a->parts & 1) {
    if (const int e = launch<BwdParams>(bwd_row_pass, p, query_tiles, kBwdRowsThreads, 0, false, stream)) return e;
  }
  if (a->parts & 2) {
    if (const int e = launch<BwdSm90Params>(bwd_main, p, p.heads * p.key_tiles * kBwdD512ClusterBlocks, kBwdD512Threads,
                                            kBytes, false, stream))
      return e;
  }
  if (a->parts & 4) {
    BwdParams after = p;
    after.after = 1, after.scale *= bwd_lower_late(kCfg.dtype);
    if (const int e = launch<BwdParams>(bwd_row_pass, after, query_tiles, kBwdRowsThreads, 0, false, stream)) return e;
  }
  return 0;
}
