// Replaces the device's own header: function attributes and NVRTC's built-in declarations.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "tessera/types.hpp"
#include "warp.hpp"

#define TESSERA_DEVICE inline

using std::max;
using std::min;

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x;
};
inline thread_local Index threadIdx;  // set by tests whose code reads it
inline Index blockIdx, gridDim;

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace tessera {
template <class T>
T uniform(T x) {
  return x;
}
}  // namespace tessera

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __saturatef(float x) { return x > 0 ? min(x, 1.0f) : 0.0f; }  // NaN becomes 0
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;  // not fused with its use
  return product;
}
inline float __fadd_rn(float a, float b) {
  const volatile float sum = a + b;  // a product before it is rounded by itself
  return sum;
}
inline float __fsub_rn(float a, float b) { return __fadd_rn(a, -b); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
