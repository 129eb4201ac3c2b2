// AVX2 with FMA and F16C: eight lanes.
#pragma once

#include <immintrin.h>

#include "cpu/simd/portable.hpp"

namespace tessera::cpu {
namespace {

using portable::bf16_from_float, portable::pair_bf16, portable::store_bytes, portable::sum_each, portable::transpose;

TESSERA_INLINE VecF fma(VecF a, VecF b, VecF c) { return (VecF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
TESSERA_INLINE VecF max(VecF a, VecF b) { return (VecF)_mm256_max_ps((__m256)a, (__m256)b); }
TESSERA_INLINE VecF min(VecF a, VecF b) { return (VecF)_mm256_min_ps((__m256)a, (__m256)b); }
TESSERA_INLINE bool any(VecI mask) { return _mm256_movemask_ps((__m256)mask) != 0; }
using Exponent = portable::LimitedExponent<max, min>;

TESSERA_INLINE VecF float_from_f16(VecH h) { return (VecF)_mm256_cvtph_ps((__m128i)h); }
TESSERA_INLINE VecH f16_from_float(VecF v) { return (VecH)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }

// portable::halves_from_finite_e4m3 and halves_from_e5m2. GCC 12 converts vectors of 8 bytes one by one.
TESSERA_INLINE VecU halves_from_finite_e4m3(const char* p) {
  const __m256i shifted =
      _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
  return (VecU)_mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
}
TESSERA_INLINE VecU halves_from_e5m2(const char* p) {
  const __m256i order = _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7, -1, 8, -1, 9, -1, 10,
                                         -1, 11, -1, 12, -1, 13, -1, 14, -1, 15);
  return (VecU)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                                   order);
}
// Of 2 kLanes codes at p.
TESSERA_INLINE void floats_from_i8(const char* p, VecF (&v)[2]) {
  for (int i = 0; i < 2; ++i) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i * kLanes));
    v[i] = (VecF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
  }
}

constexpr bool kGathersWords = true;
TESSERA_INLINE VecU gather_words(const char* p, VecI offset, VecI inside) {
  return (VecU)_mm256_mask_i32gather_epi32(_mm256_setzero_si256(), reinterpret_cast<const int*>(p), (__m256i)offset,
                                           (__m256i)inside, 1);
}

TESSERA_INLINE portable::WideProduct multiply_wide(VecU a, uint32_t factor) {
  const __m256i f = _mm256_set1_epi64x(factor);
  const __m256i even = _mm256_mul_epu32((__m256i)a, f);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), f);
  return {(VecU)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa),
          (VecU)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)};
}
using WideWords = portable::WholeWords<multiply_wide>;

}  // namespace
}  // namespace tessera::cpu
