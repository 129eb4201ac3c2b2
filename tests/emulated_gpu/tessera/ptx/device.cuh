// In the place of the device's own: how functions are declared, what NVRTC declares without a header, and addresses in shared
// memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "block.hpp"
#include "tessera/types.hpp"

#define TESSERA_DEVICE inline
#define __shared__ thread_local constinit  // all of a block's threads are fibers of one
#define __align__(bytes)

using std::max;
using std::min;

struct float2 {
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
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline EmulatedDim emulated_block_index, emulated_grid;
#define threadIdx (EmulatedDim{static_cast<unsigned>(tessera::emulated::Block::current()->thread()), 0, 0})
#define blockIdx emulated_block_index
#define gridDim emulated_grid

inline void __syncthreads() { tessera::emulated::Block::current()->sync_threads(); }
inline void __syncwarp() { tessera::emulated::Block::current()->sync_warp(); }
inline void __threadfence() {}
inline void __builtin_assume(bool) {}
inline int atomicAdd(int* to, int x) {
  const int before = *to;
  *to += x;
  return before;
}

inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int n = 0; n < 4; ++n)
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * n) & 7)) & 0xff) << (8 * n);
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (32 - shift));
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}

inline int emulated_lane() { return tessera::emulated::Block::current()->thread() % tessera::emulated::kWarpThreads; }
template <class T>
T __shfl_xor_sync(unsigned, T x, int distance) {
  return tessera::emulated::Block::current()->exchange(x, [&](auto of) { return of(emulated_lane() ^ distance); });
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return tessera::emulated::Block::current()->exchange(x, [&](auto of) { return of(lane); });
}
template <class T>
T __shfl_up_sync(unsigned, T x, int distance) {
  return tessera::emulated::Block::current()->exchange(
      x, [&](auto of) { return of(std::max(emulated_lane() - distance, 0)); });
}
template <class T>
T __ldcg(const T* global) {
  return *global;
}
inline bool __any_sync(unsigned, bool x) {
  return tessera::emulated::Block::current()->exchange(x, [](auto of) {
    bool any = false;
    for (int lane = 0; lane < tessera::emulated::kWarpThreads; ++lane) any |= of(lane);
    return any;
  });
}
inline unsigned __ballot_sync(unsigned, bool x) {
  return tessera::emulated::Block::current()->exchange(x, [](auto of) {
    unsigned lanes = 0;
    for (int lane = 0; lane < tessera::emulated::kWarpThreads; ++lane) lanes |= unsigned{of(lane)} << lane;
    return lanes;
  });
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline bool __all_sync(unsigned mask, bool x) { return !__any_sync(mask, !x); }

namespace tessera {

// The largest that a block of any GPU may have.
inline constexpr size_t kEmulatedSharedBytes = 232448;
alignas(128) inline constinit thread_local char shared_memory[kEmulatedSharedBytes] = {};

// What it holds before a block: by turns of a coin numbers below 0, which are NaN, too, or drawn ones that are not, which lead past every
// tensor.
inline void poison_shared_memory() {
  static std::mt19937 random(7);
  const bool drawn = random() % 2 == 0;
  for (size_t at = 0; at < sizeof shared_memory; at += 4) {
    const auto word = drawn ? static_cast<uint32>(random()) >> 1 : ~uint32{0};
    std::memcpy(shared_memory + at, &word, sizeof word);
  }
}

inline uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(static_cast<const char*>(pointer) - shared_memory);
}

template <class T>
T uniform(T x) {
  return __shfl_sync(0xffffffff, x, 0);
}
inline uint32 not_hoisted(uint32 x) { return x; }
inline void reload_memory() {}

}  // namespace tessera
