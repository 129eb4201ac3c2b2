// NEON: four lanes. Compiled for what every AArch64 processor has, and with bf16 products (FEAT_BF16) where
// TESSERA_HAS_DOT.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "cpu/simd/portable.hpp"

namespace tessera::cpu {
namespace {

using portable::fma, portable::max, portable::min, portable::Exponent;
using portable::gather_words, portable::kGathersWords, portable::store_bytes, portable::transpose;

TESSERA_INLINE bool any(VecI mask) { return vmaxvq_u32((uint32x4_t)mask) != 0; }

TESSERA_INLINE VecF float_from_f16(VecH h) { return (VecF)vcvt_f32_f16((float16x4_t)h); }
TESSERA_INLINE VecH f16_from_float(VecF v) { return (VecH)vcvt_f16_f32((float32x4_t)v); }

// portable::halves_from_finite_e4m3 and halves_from_e5m2.
TESSERA_INLINE VecU halves_from_finite_e4m3(const char* p) {
  const uint16x8_t shifted = vreinterpretq_u16_s16(vshll_n_s8(vld1_s8(reinterpret_cast<const int8_t*>(p)), 7));
  return (VecU)vandq_u16(shifted, vdupq_n_u16(0xbf80));
}
TESSERA_INLINE VecU halves_from_e5m2(const char* p) {
  return (VecU)vshlq_n_u16(vmovl_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p))), 8);
}
// Of 2 kLanes codes at p.
TESSERA_INLINE void floats_from_i8(const char* p, VecF (&v)[2]) {
  const int16x8_t words = vmovl_s8(vld1_s8(reinterpret_cast<const int8_t*>(p)));
  v[0] = (VecF)vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
  v[1] = (VecF)vcvtq_f32_s32(vmovl_high_s16(words));
}

// a b + acc, where b is one lane of `lanes`. In a loop over them, one load serves four steps, and the multiply-add
// itself broadcasts: a broadcasting load would take a vector pipe beside it.
template <int kLane>
TESSERA_INLINE VecF fma_by_lane(VecF a, VecF lanes, VecF acc) {
  return (VecF)vfmaq_laneq_f32((float32x4_t)acc, (float32x4_t)a, (float32x4_t)lanes, kLane);
}

// One or two elements of four bytes; the other lanes are 0.
template <int kCount>
TESSERA_INLINE VecF load_lanes(const char* p) {
  static_assert(kCount == 1 || kCount == 2);
  if constexpr (kCount == 2) {
    uint64_t both;
    __builtin_memcpy(&both, p, sizeof both);
    return (VecF)vsetq_lane_u64(both, vdupq_n_u64(0), 0);
  } else {
    uint32_t one;
    __builtin_memcpy(&one, p, sizeof one);
    return (VecF)vsetq_lane_u32(one, vdupq_n_u32(0), 0);
  }
}

TESSERA_INLINE VecF sum_each(VecF (&v)[kLanes]) {
  const float32x4_t low = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
  const float32x4_t high = vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]);
  return (VecF)vpaddq_f32(low, high);
}

TESSERA_INLINE portable::WideProduct multiply_wide(VecU a, uint32_t factor) {
  const uint32x4_t words = (uint32x4_t)a, factors = vdupq_n_u32(factor);
  const uint32x4_t first = (uint32x4_t)vmull_u32(vget_low_u32(words), vget_low_u32(factors));
  const uint32x4_t last = (uint32x4_t)vmull_high_u32(words, factors);
  return {(VecU)vuzp2q_u32(first, last), (VecU)vuzp1q_u32(first, last)};
}
using WideWords = portable::WholeWords<multiply_wide>;

#if defined(TESSERA_HAS_DOT)
TESSERA_INLINE VecH bf16_from_float(VecF v) { return (VecH)vcvt_bf16_f32((float32x4_t)v); }

// Lane i holds bf16(low[i]) in its low half and bf16(high[i]) in its high half.
TESSERA_INLINE VecU pair_bf16(VecF low, VecF high) {
  const uint16x8_t a = (uint16x8_t)vcvtq_low_bf16_f32((float32x4_t)low);
  const uint16x8_t b = (uint16x8_t)vcvtq_low_bf16_f32((float32x4_t)high);
  return (VecU)vzip1q_u16(a, b);
}

// acc + a.low * b.low + a.high * b.high in every lane; a lane holds two bf16. BFMMLA would do twice as many products,
// of a layout that broadcasting does not give.
TESSERA_INLINE VecF dot(VecF acc, VecU a, VecU b) {
  return (VecF)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
template <int kLane>
TESSERA_INLINE VecF dot_by_lane(VecF a, VecF lanes, VecF acc) {
  return (VecF)vbfdotq_laneq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)lanes, kLane);
}

// a0 b0 a1 b1 ... of words of 16 bits: of the first four, and of the last.
TESSERA_INLINE VecU interleave_lower(VecU a, VecU b) { return (VecU)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b); }
TESSERA_INLINE VecU interleave_upper(VecU a, VecU b) { return (VecU)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b); }
#else
using portable::bf16_from_float, portable::pair_bf16;
#endif

}  // namespace
}  // namespace tessera::cpu
