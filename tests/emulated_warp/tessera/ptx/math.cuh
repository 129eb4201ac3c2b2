// Replaces the device's own header: the instructions' results, exactly rounded.
#pragma once

#include <limits>

#include "core/convert.hpp"
#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline float ex2_approx_ftz(float x) {
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
}

inline float lg2_approx_ftz(float x) { return std::log2(x); }

inline float rcp_approx_ftz(float x) { return 1.0f / x; }

inline uint32 cvt_rn_f16x2(float low, float high) {
  return core::float_to_float16(low) | uint32{core::float_to_float16(high)} << 16;
}
inline uint32 cvt_rn_bf16x2(float low, float high) {
  return core::float_to_bfloat16(low) | uint32{core::float_to_bfloat16(high)} << 16;
}
inline float cvt_f32_f16(unsigned short bits) { return core::float16_to_float(bits); }

}  // namespace tessera::ptx
