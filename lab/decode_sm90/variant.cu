// One config of decode_sm90 as a shared library, launched by hand: the harness's stand-in for the library's plan. build.sh
// writes config.h: CONFIG.
#include <cuda_runtime.h>

#include "config.h"
#include "tessera/decode_sm90/kernel.cuh"

using namespace tessera;

constexpr DecodeSm90Config kCfg CONFIG;
constexpr int kBytes = decode_sm90_layout(kCfg).bytes;
extern "C" __global__ void __launch_bounds__(kCfg.warps * 32, kCfg.min_blocks_per_sm)
    decode_main(const __grid_constant__ DecodeSm90Params p) {
  decode_sm90<kCfg>(p);
}

struct Args {
  void *q, *k, *v, *o;
  float* lse;
  void* workspace;
  int *seqused, *page_table, *cu_seqlens_q;
  int batch, sq, sk, heads_q, heads_kv, head_dim, causal, window_left, page_size, pages, max_pages, blocks, min_tiles, rows_q;
  float scale;
};

extern "C" void describe(int* out) {
  out[0] = kCfg.head_dim, out[1] = kCfg.block_n, out[2] = kCfg.warps, out[3] = kCfg.stages, out[4] = kBytes;
  out[5] = kCfg.dtype == Dtype::kFloat16, out[6] = kCfg.paged, out[7] = kCfg.min_blocks_per_sm;
}

extern "C" int run(const Args* a, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  DecodeSm90Params p{};
  p.batch = a->batch;
  p.heads_q = Divisor(a->heads_q), p.heads_kv = Divisor(a->heads_kv), p.group = Divisor(a->heads_q / a->heads_kv);
  const long long d = a->head_dim;
  p.head_dim = p.head_dim_v = a->head_dim;
  p.seqlen_q = p.max_seqlen_q = a->sq, p.seqlen_k = p.max_seqlen_k = a->sk;
  p.rows_q = a->rows_q;
  p.rows_total = a->cu_seqlens_q ? a->rows_q : static_cast<long long>(a->batch) * a->sq;
  p.scale = a->scale, p.scale_log2 = a->scale * 1.4426950408889634f;
  p.causal = a->causal, p.window_left = a->window_left, p.window_right = -1;
  p.q = {a->q, a->cu_seqlens_q ? 0 : d * a->heads_q * a->sq, d * a->heads_q, d};
  p.o = {a->o, a->cu_seqlens_q ? 0 : d * a->heads_q * a->sq, d * a->heads_q, d};
  p.lse = {a->lse, static_cast<long long>(a->heads_q) * a->sq, a->sq, 1};
  if (a->cu_seqlens_q) p.lse = {a->lse, 0, a->rows_q, 1};
  const long long rows = a->page_size ? a->page_size : a->sk;
  p.k = {a->k, d * a->heads_kv * rows, d * a->heads_kv, d};
  p.v = {a->v, d * a->heads_kv * rows, d * a->heads_kv, d};
  p.seqused_k = a->seqused, p.seqused_k_stride = 1;
  p.cu_seqlens_q = a->cu_seqlens_q, p.cu_seqlens_q_stride = 1;
  p.page_table = a->page_table, p.page_table_batch = a->max_pages, p.page_table_col = 1;
  p.page_size = a->page_size, p.pages = a->pages;
  p.o_aligned = 1;
  p.min_tiles = a->min_tiles;
  p.arrivals = static_cast<unsigned long long*>(a->workspace);
  p.partial_stat = reinterpret_cast<float*>(static_cast<char*>(a->workspace) + (a->blocks * 8 + 255) / 256 * 256);
  p.partial_o = p.partial_stat + a->blocks * 2 * kDecodeRows * 2;
  static const int prepared =
      static_cast<int>(cudaFuncSetAttribute(decode_main, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  if (prepared) return prepared;
  void* args[] = {&p};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(decode_main), dim3(a->blocks), dim3(kCfg.warps * 32),
                                           args, kBytes, stream));
}
