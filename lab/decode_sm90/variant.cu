// One config of decode_sm90 as a shared library, launched by hand: the harness's stand-in for the library's plan. build.sh
// writes config.h: CONFIG.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "config.h"
#include "tessera/decode_sm90/kernel.cuh"

using namespace tessera;

constexpr DecodeSm90Config kCfg CONFIG;
#ifndef BOUND_BLOCKS
#define BOUND_BLOCKS MIN_BLOCKS
#endif
#ifndef L2_PROMOTION
#define L2_PROMOTION CU_TENSOR_MAP_L2_PROMOTION_L2_256B
#endif
constexpr int kBytes = decode_sm90_layout(kCfg).bytes;
#ifdef TRACE
constexpr int kTraced = 1056;
__device__ long long lab_trace[kTraced][4];  // globaltimer at start and end, clocks, multiprocessor
#endif
extern "C" __global__ void __launch_bounds__(kCfg.warps * 32, BOUND_BLOCKS)
    decode_main(const __grid_constant__ DecodeSm90Params p) {
#ifdef TRACE
  const auto now = [] {
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return static_cast<long long>(time);
  };
  const long long began = now(), began_clock = clock64();
#endif
  decode_sm90<kCfg>(p);
#ifdef TRACE
  if (threadIdx.x == 0 && blockIdx.x < kTraced) {
    long long* const trace = lab_trace[blockIdx.x];
    trace[0] = began, trace[1] = now(), trace[2] = clock64() - began_clock;
    unsigned multiprocessor;
    asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor));
    trace[3] = multiprocessor;
  }
#endif
}

struct Args {
  void *q, *k, *v, *o;
  float* lse;
  void* workspace;
  int *seqused, *page_table, *cu_seqlens_q;
  int batch, sq, sk, heads_q, heads_kv, head_dim, causal, window_left, page_size, pages, max_pages, blocks, min_tiles,
      rows_q, team;
  float scale;
};

static CUresult encode(CUtensorMap* map, void* data, int batch, long long rows, int heads, int head_dim) {
  static PFN_cuTensorMapEncodeTiled_v12000 function = nullptr;
  if (!function) {
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&function), 12000,
                                     cudaEnableDefault, &result);
  }
  const cuuint64_t d = head_dim, extents[4] = {d, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(heads),
                                               static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {d * heads * 2, d * 2, d * heads * rows * 2};
  const cuuint32_t box[4] = {64, kCfg.block_n, 1, 1}, steps[4] = {1, 1, 1, 1};
  return function(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, data, extents, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, L2_PROMOTION,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

extern "C" void describe(int* out) {
  out[0] = kCfg.head_dim, out[1] = kCfg.block_n, out[2] = kCfg.warps, out[3] = kCfg.stages, out[4] = kBytes;
  out[5] = kCfg.dtype == Dtype::kFloat16, out[6] = kCfg.paged, out[7] = MIN_BLOCKS, out[8] = kCfg.varlen,
  out[9] = kCfg.invariant;
}

#ifdef TRACE
extern "C" int trace(long long* to) { return static_cast<int>(cudaMemcpyFromSymbol(to, lab_trace, sizeof lab_trace)); }
#endif

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
  p.min_tiles = a->min_tiles, p.short_tiles = a->sk,
  p.most_parts = Divisor(a->blocks / a->team * a->team / a->heads_kv);
  if (p.most_parts.value < 1 || p.most_parts.value > kDecodeMostParts)
    p.most_parts = Divisor(p.most_parts.value < 1 ? 1 : kDecodeMostParts);
  p.most_queries = a->sq;
  p.part_rows = min(kDecodeRows, a->sq * (a->heads_q / a->heads_kv));
  p.team = p.team_heads = Divisor(a->team), p.team_rows = Divisor(1), p.head_groups = a->heads_kv / a->team;
  p.teams = Divisor(a->blocks / a->team), p.page = Divisor(a->page_size ? a->page_size : 1);
  p.arrivals = static_cast<unsigned long long*>(a->workspace);
  p.partial_stat = reinterpret_cast<float*>(static_cast<char*>(a->workspace) + (a->blocks * 8 + 255) / 256 * 256);
  p.partial_o = p.partial_stat + (decode_slots(kCfg, a->blocks) * p.part_rows * 2 + 3) / 4 * 4;
  static const int prepared =
      static_cast<int>(cudaFuncSetAttribute(decode_main, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  if (prepared) return prepared;
  if (kCfg.bulk) {
    const int batch = a->page_size ? a->pages : a->batch;
    const int error = encode(reinterpret_cast<CUtensorMap*>(&p.k_map), a->k, batch, rows, a->heads_kv, a->head_dim) |
                      encode(reinterpret_cast<CUtensorMap*>(&p.v_map), a->v, batch, rows, a->heads_kv, a->head_dim);
    if (error) return 10000 + error;
  }
  void* args[] = {&p};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = a->blocks, config.blockDim = kCfg.warps * 32, config.dynamicSmemBytes = kBytes,
  config.stream = stream;
  config.attrs = &attribute;
#ifdef PDL
  config.numAttrs = 1;
#endif
  return static_cast<int>(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(decode_main), args));
}
