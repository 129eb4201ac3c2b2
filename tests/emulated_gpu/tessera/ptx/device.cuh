// Replaces the device's own header: function attributes, NVRTC's built-in declarations, and addresses in shared memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "block.hpp"
#include "grid.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ thread_local constinit  // each block has its own thread of the host
#define __align__(bytes)

#include "tessera/types.hpp"

#define TESSERA_DEVICE inline

template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
constexpr long long max(long long a, int b) { return max<long long>(a, b); }
constexpr long long max(int a, long long b) { return max<long long>(a, b); }
constexpr long long min(long long a, int b) { return min<long long>(a, b); }
constexpr long long min(int a, long long b) { return min<long long>(a, b); }
// For a number and a NaN, the result is the number.
constexpr float max(float a, float b) { return a < b || a != a ? b : a; }
constexpr float min(float a, float b) { return b < a || a != a ? b : a; }

struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace tessera::emulated {
// Called by all lanes of the warp: each passes a value and gets compute(value of a lane, own lane) over all.
template <class Out, class In, class Compute>
Out of_warp(const char* what, unsigned mask, const In& mine, const Compute& compute) {
  if (mask != kAllLanes) here().fail("%s of the lanes %08x, not emulated", what, mask);
  return here().meet<In, Out>(what, mine, [&compute](const In* in, Out* out) {
    for (int lane = 0; lane < kWarpThreads; ++lane) out[lane] = compute(in, lane);
  });
}
}  // namespace tessera::emulated

inline void __syncthreads() { tessera::emulated::here().sync_threads(); }
inline void __syncwarp(unsigned mask = tessera::emulated::kAllLanes) { tessera::emulated::here().sync_lanes(mask); }
inline bool __syncthreads_or(bool x) { return tessera::emulated::here().sync_threads_or(x); }
inline void __threadfence() {}
inline void __builtin_assume(bool) {}
inline int atomicAdd(int* to, int x) {
  tessera::emulated::here().may_yield_block();
  const int before = *to;
  *to += x;
  return before;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __fmul_rn(float a, float b) {
  const volatile float product = a * b;  // never part of a fused multiply-add
  return product;
}
inline float __fadd_rn(float a, float b) {
  const volatile float sum = a + b;  // a product before it is rounded by itself
  return sum;
}
inline float __fsub_rn(float a, float b) { return __fadd_rn(a, -b); }
inline float __saturatef(float x) { return x > 0 ? min(x, 1.0f) : 0.0f; }  // NaN becomes 0
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int n = 0; n < 4; ++n)
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * n) & 7)) & 0xff) << (8 * n);
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (32 - (shift & 31)));
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline int __popc(unsigned x) { return std::popcount(x); }

template <class T>
T __ldcg(const T* global) {
  return *global;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int distance) {
  return tessera::emulated::of_warp<T>("__shfl_xor_sync", mask, x,
                                       [=](const T* in, int lane) { return in[(lane ^ distance) & 31]; });
}
template <class T>
T __shfl_sync(unsigned mask, T x, int from) {
  struct Request {
    T x;
    int from;
  };
  return tessera::emulated::of_warp<T>("__shfl_sync", mask, Request{x, from},
                                       [](const Request* in, int lane) { return in[in[lane].from & 31].x; });
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int distance) {
  return tessera::emulated::of_warp<T>(
      "__shfl_up_sync", mask, x, [=](const T* in, int lane) { return in[lane < distance ? lane : lane - distance]; });
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
  return tessera::emulated::of_warp<unsigned>("a vote", mask, x, [](const bool* in, int) {
    unsigned lanes = 0;
    for (int lane = 0; lane < tessera::emulated::kWarpThreads; ++lane) lanes |= unsigned{in[lane]} << lane;
    return lanes;
  });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
  return tessera::emulated::of_warp<unsigned>("__reduce_max_sync", mask, x, [](const unsigned* in, int) {
    return *std::max_element(in, in + tessera::emulated::kWarpThreads);
  });
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, !x) == 0; }

namespace tessera {

inline uint32 shared_address(const void* pointer) { return emulated::here().address_of(pointer); }

template <class T>
T uniform(T x) {
  return __shfl_sync(0xffffffff, x, 0);
}
inline uint32 not_hoisted(uint32 x) { return x; }
inline void reload_memory() {}

}  // namespace tessera
