// Loads K and V of [tiles, 16 keys, 8 or 32 heads, 64 or 128] as decode_sm90 would and computes nothing: what an order of addresses gives.
// A table says where each tile lies (pages of 16 keys; mode 4: each key), as a page table does.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "tessera/ptx/cp_async_bulk.cuh"
#include "tessera/ptx/mbarrier.cuh"

using namespace tessera;
constexpr int kMostWarps = 8, kMostStages = 3, kMostTileBytes = 8192;

struct Params {
  TensorMap k_map, v_map;
  const char *k, *v;
  const int* table;  // [tiles], mode 4: [tiles * 16]
  long long tiles;
  int heads, dim, mode, stages, sync;
  unsigned* out;
};

template <int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) stream(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ unsigned long long full[kMostWarps][kMostStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) {
    for (int s = 0; s < kMostStages; ++s) ptx::mbarrier_init(shared_address(&full[warp][s]), 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  // All tiles of 16 keys of all heads, `count` a warp.
  const int blocks = gridDim.x, tile_bytes = p.dim * 64, chunks = p.dim / 64;
  const long long count = p.mode == 1 ? p.tiles * (p.heads / kWarps) / blocks : p.tiles * p.heads / blocks / kWarps;
  int head = 0, row = 0;
  const auto tile_of = [&](long long n) {  // and its head and first row
    if (p.mode == 0 || p.mode == 4) {  // a block has a head, `heads` blocks side by side; warps have neighbouring tiles
      const int team = blockIdx.x / p.heads;
      head = blockIdx.x % p.heads;
      return team * (p.tiles / (blocks / p.heads)) + n * kWarps + warp;
    }
    if (p.mode == 1) {  // a warp has a head
      const long long unit = blockIdx.x * count + n;
      head = unit % (p.heads / kWarps) * kWarps + warp;
      return unit / (p.heads / kWarps);
    }
    // 2: a warp's tile has eight heads of two keys
    const long long unit = (blockIdx.x * count + n) * kWarps + warp, groups = p.heads / 8, of16 = unit / 8;
    head = of16 % groups * 8, row = unit % 8 * 2;
    return of16 / groups;
  };
  const auto entry_of = [&](long long n) {
    if (n >= count) return 0;
    const long long tile = tile_of(n);
    return p.table[p.mode == 4 ? tile * 16 + lane % 16 : tile];
  };
  int entry = entry_of(0);  // of the next tile to load
  const auto load = [&](long long n) {
    const int stage = static_cast<int>(n % p.stages), place = entry;
    const uint32 to = shared_address(shared) + (warp * p.stages + stage) * tile_bytes,
                 barrier = shared_address(&full[warp][stage]);
    tile_of(n);
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, tile_bytes);
    if (p.mode == 4) {
      const char* const from = (lane < 16 ? p.k : p.v) + (static_cast<long long>(place) * p.heads + head) * p.dim * 2;
      ptx::cp_async_bulk_load(to + lane * p.dim * 2, from, p.dim * 2, barrier);
    } else if (lane == 0) {
      for (int c = 0; c < chunks; ++c) {
        ptx::cp_async_bulk_tensor_4d(to + c * 2048, &p.k_map, barrier, c * 64, row, head, place);
        ptx::cp_async_bulk_tensor_4d(to + tile_bytes / 2 + c * 2048, &p.v_map, barrier, c * 64, row, head, place);
      }
    }
    entry = entry_of(n + 1);
  };
  for (int s = 0; s < p.stages && s < count; ++s) load(s);
  unsigned x = 0;
  for (long long n = 0; n < count; ++n) {
    const int stage = static_cast<int>(n % p.stages);
    ptx::mbarrier_wait_parity(shared_address(&full[warp][stage]), static_cast<int>(n / p.stages % 2));
    x ^= *reinterpret_cast<const unsigned*>(shared + (warp * p.stages + stage) * tile_bytes + lane * 16);
    if (p.sync) __syncthreads();
    __syncwarp();
    if (n + p.stages < count) load(n + p.stages);
  }
  if (x == 0x12345678u) *p.out = x;
}

extern "C" int stream_run(void* k, void* v, const int* table, long long tiles, int heads, int dim, int mode, int warps,
                          int stages, int blocks, int sync, int promotion, unsigned* out, void* cuda_stream) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  if (!encode) {
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000,
                                     cudaEnableDefault, &result);
    for (const void* kernel : {reinterpret_cast<const void*>(stream<4>), reinterpret_cast<const void*>(stream<8>)}) {
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           kMostWarps * kMostStages * kMostTileBytes);
    }
  }
  Params p{};
  p.k = static_cast<const char*>(k), p.v = static_cast<const char*>(v), p.table = table, p.tiles = tiles;
  p.heads = heads, p.dim = dim, p.mode = mode, p.stages = stages, p.sync = sync, p.out = out;
  const cuuint64_t d = dim, h = heads, extents[4] = {d, 16, h, static_cast<cuuint64_t>(tiles)},
                   strides[3] = {d * h * 2, d * 2, d * h * 32};
  const cuuint32_t box[4] = {64, mode == 2 ? 2u : 16u, mode == 2 ? 8u : 1u, 1}, steps[4] = {1, 1, 1, 1};
  for (auto [map, data] : {std::pair{&p.k_map, k}, std::pair{&p.v_map, v}}) {
    if (const int e = encode(reinterpret_cast<CUtensorMap*>(map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, data, extents,
                             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             static_cast<CUtensorMapL2promotion>(promotion), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
      return 10000 + e;
  }
  const auto cuda = static_cast<cudaStream_t>(cuda_stream);
  const int bytes = warps * stages * dim * 64;
  if (warps == 4) {
    stream<4><<<blocks, 128, bytes, cuda>>>(p);
  } else {
    stream<8><<<blocks, 256, bytes, cuda>>>(p);
  }
  return static_cast<int>(cudaGetLastError());
}
