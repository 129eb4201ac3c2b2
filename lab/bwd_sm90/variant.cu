// One config of bwd_sm90 or bwd_sm90_d256 as a shared library, launched by hand: the harness's stand-in for the library's
// plan. build.sh writes config.h: CONFIG, and HEAD_DIM_256 for the second.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "config.h"
#include "tessera/bwd_sm90/kernel.cuh"
#include "tessera/bwd_sm90/rows.cuh"
#include "tessera/bwd_sm90_d256/kernel.cuh"

using namespace tessera;

#ifdef HEAD_DIM_256
constexpr BwdSm90D256Config kCfg CONFIG;
constexpr int kClusterBlocks = 2;
constexpr int kBytes = std::max(bwd_sm90_d256_layout(kCfg, 0).bytes, bwd_sm90_d256_layout(kCfg, 1).bytes);
extern "C" __global__ void __cluster_dims__(kClusterBlocks) __launch_bounds__(kBwdSm90Threads, 1)
    bwd_main(const __grid_constant__ BwdSm90Params p) {
  bwd_sm90_d256<kCfg>(p);
}
#else
constexpr BwdSm90Config kCfg CONFIG;
constexpr int kClusterBlocks = 1, kBytes = bwd_sm90_layout(kCfg).bytes;
extern "C" __global__ void __launch_bounds__(kBwdSm90Threads, 1) bwd_main(const __grid_constant__ BwdSm90Params p) {
  bwd_sm90<kCfg>(p);
}
#endif
constexpr BwdSm90RowsConfig kRows{kCfg.dtype, kCfg.head_dim, kCfg.block_m, false, false, kCfg.deterministic};
extern "C" __global__ void __launch_bounds__(kBwdRowsThreads) bwd_before(const __grid_constant__ BwdSm90Params p) {
  bwd_sm90_before<kRows>(p);
}
extern "C" __global__ void __launch_bounds__(kBwdRowsThreads) bwd_after(const __grid_constant__ BwdParams p) {
  bwd_sm90_after<kRows>(p);
}

struct Args {
  void *q, *k, *v, *o, *d_o, *d_q, *d_k, *d_v;  // [B, S, H, D] contiguous
  float* lse;                                   // [B, Hq, Sq]
  float *acc, *row_lse, *row_delta;             // workspace
  int* turns;                                   // a word a tile of queries, and the ticket
  int batch, sq, sk, heads_q, heads_kv, causal, section_heads, pdl, parts;
  float scale;
};

// As the library's plan has it: src/cuda/families/bwd_sm90.cpp.
static int rotation(int q_tiles, int key_tiles, bool causal) {
  static const int multiprocessors = [] {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }();
  const int per_block = (q_tiles + key_tiles - 1) / key_tiles;
  const bool each_its_own = (key_tiles - 1) * per_block < q_tiles;
  return kCfg.deterministic && !causal && key_tiles * kClusterBlocks <= multiprocessors / 2 && each_its_own ? per_block
                                                                                                            : 0;
}

static CUresult encode(CUtensorMap* map, void* data, int batch, int rows, int heads, int box_rows) {
  static PFN_cuTensorMapEncodeTiled_v12000 function = nullptr;
  if (!function) {
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&function), 12000,
                                     cudaEnableDefault, &result);
  }
  const cuuint64_t d = kCfg.head_dim;
  const cuuint64_t extents[4] = {d, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(heads),
                                 static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {d * heads * 2, d * 2, d * heads * rows * 2};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  return function(map,
                  kCfg.dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                  4, data, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

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

extern "C" void describe(int* out) {
  out[0] = kCfg.head_dim, out[1] = kCfg.block_m, out[2] = kCfg.block_n;
  out[3] = kCfg.dtype == Dtype::kFloat16, out[4] = kBytes;
}

extern "C" int run(const Args* a, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  BwdSm90Params p{};
  p.batch = a->batch;
  p.heads_q = Divisor(a->heads_q), p.heads_kv = Divisor(a->heads_kv), p.group = Divisor(a->heads_q / a->heads_kv);
  p.head_dim = p.head_dim_v = kCfg.head_dim;
  p.seqlen_q = p.max_seqlen_q = a->sq, p.seqlen_k = p.max_seqlen_k = a->sk;
  p.scale = a->scale, p.scale_log2 = a->scale * 1.4426950408889634f;
  p.dropout_scale = 1 / 0.9f,
  p.dropout_threshold = 6554;  // a tenth, where the config drops; the keys of the rounds stay 0
  p.causal = a->causal, p.window_left = p.window_right = -1;
  const auto rows = [](void* data, long long rows, int heads) {
    return RowTensor{data, rows * heads * kCfg.head_dim, static_cast<long long>(heads) * kCfg.head_dim, kCfg.head_dim};
  };
  p.o = rows(a->o, a->sq, a->heads_q), p.d_o = rows(a->d_o, a->sq, a->heads_q), p.d_q = rows(a->d_q, a->sq, a->heads_q);
  p.lse = {a->lse, static_cast<long long>(a->heads_q) * a->sq, a->sq, 1};
  p.q_tiles = (a->sq + kCfg.block_m - 1) / kCfg.block_m, p.q_slots = p.q_tiles * a->batch;
  p.row_lse_log2 = a->row_lse, p.row_delta = a->row_delta, p.dq_accum = a->acc;
  if (kCfg.deterministic) p.ticket = a->turns, p.dq_semaphore = a->turns + 1;
  p.d_q_aligned = 1;
  p.key_tiles = Divisor((a->sk + kCfg.block_n - 1) / kCfg.block_n);
  p.rotation = rotation(p.q_tiles, p.key_tiles, a->causal);
  p.heads = a->batch * a->heads_kv;
  p.section_heads = Divisor(a->section_heads < p.heads ? a->section_heads : p.heads);
  int error = 0;
  const auto map = [&](TensorMap& to, void* data, int rows, int heads, int box_rows) {
    error |= encode(reinterpret_cast<CUtensorMap*>(&to), data, a->batch, rows, heads, box_rows);
  };
  map(p.q_map, a->q, a->sq, a->heads_q, kCfg.block_m);
  map(p.d_o_map, a->d_o, a->sq, a->heads_q, kCfg.block_m);
  map(p.k_map, a->k, a->sk, a->heads_kv, kCfg.block_n);
  map(p.v_map, a->v, a->sk, a->heads_kv, kCfg.block_n);
  map(p.d_k_map, a->d_k, a->sk, a->heads_kv, 16);
  map(p.d_v_map, a->d_v, a->sk, a->heads_kv, 16);
  if (error) return 10000 + error;
  static const int prepared =
      static_cast<int>(cudaFuncSetAttribute(bwd_main, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  if (prepared) return prepared;
  const int query_tiles = p.q_slots * a->heads_q;
  if (a->parts & 1) {
    if (const int e = launch<BwdSm90Params>(bwd_before, p, query_tiles, kBwdRowsThreads, 0, false, stream)) return e;
  }
  if (a->parts & 2) {
    if (const int e = launch<BwdSm90Params>(bwd_main, p, p.heads * p.key_tiles * kClusterBlocks, kBwdSm90Threads,
                                            kBytes, a->pdl, stream))
      return e;
  }
  if (a->parts & 4) {
    BwdParams after = p;
    after.scale *= bwd_lower_late(kCfg.dtype);
    if (const int e = launch<BwdParams>(bwd_after, after, query_tiles, kBwdRowsThreads, 0, a->pdl, stream)) return e;
  }
  return 0;
}
