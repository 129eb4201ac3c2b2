#pragma once

#include "core/convert.hpp"
#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

inline float ex2_approx_ftz(float x) { return std::exp2(x); }
inline float lg2_approx_ftz(float x) { return std::log2(x); }
inline float rcp_approx_ftz(float x) { return 1.0f / x; }

inline float cvt_f32_f16(unsigned short bits) { return core::float16_to_float(bits); }
inline uint32 cvt_rn_f16x2(float low, float high) {
  return core::float_to_float16(low) | uint32{core::float_to_float16(high)} << 16;
}
inline uint32 cvt_rn_bf16x2(float low, float high) {
  return core::float_to_bfloat16(low) | uint32{core::float_to_bfloat16(high)} << 16;
}

inline uint32 max_f16x2(uint32 a, uint32 b) {
  const auto at = [](uint32 pair, int n) { return cvt_f32_f16(static_cast<unsigned short>(pair >> (16 * n))); };
  return cvt_rn_f16x2(std::fmax(at(a, 0), at(b, 0)), std::fmax(at(a, 1), at(b, 1)));
}
inline uint32 max_bf16x2(uint32 a, uint32 b) {
  const auto at = [](uint32 pair, int n) { return __uint_as_float(pair >> (16 * n) << 16); };
  return cvt_rn_bf16x2(std::fmax(at(a, 0), at(b, 0)), std::fmax(at(a, 1), at(b, 1)));
}

inline uint32 cvt_rna_tf32(float x) { return __float_as_uint(x); }

}  // namespace tessera::ptx
