// A kernel that only reads: what memory gives in the same replays.
#include <cuda_runtime.h>
__global__ void __launch_bounds__(512) read_only(const uint4* data, long long words, unsigned* out) {
  unsigned x = 0;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * step < words; i += 8 * step) {
    uint4 w[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) w[n] = __ldcg(data + i + n * step);
#pragma unroll
    for (int n = 0; n < 8; ++n) x ^= w[n].x ^ w[n].y ^ w[n].z ^ w[n].w;
  }
  for (; i < words; i += step) x ^= __ldcg(data + i).x;
  if (x == 0x12345678u) *out = x;
}
extern "C" int read_bytes(const void* data, long long bytes, unsigned* out, int blocks, void* stream) {
  read_only<<<blocks, 512, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(data), bytes / 16, out);
  return static_cast<int>(cudaGetLastError());
}
