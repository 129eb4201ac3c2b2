// AVX-512 (F, BW, DQ, VL), and its bf16 products where TESSERA_HAS_DOT: sixteen lanes.
#pragma once

#include <immintrin.h>

#include "cpu/simd/portable.hpp"

namespace tessera::cpu {
namespace {

template <class V>
TESSERA_INLINE void store_bytes(void* p, V v, uint64_t bytes) {
  if constexpr (sizeof(V) == 64) {
    _mm512_mask_storeu_epi8(p, bytes < 64 ? (uint64_t{1} << bytes) - 1 : ~uint64_t{0}, (__m512i)v);
  } else {
    portable::store_bytes(p, v, bytes);
  }
}

// The first `count` of 32 elements.
TESSERA_INLINE __mmask32 first_elems(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((uint32_t{1} << max_of<int64_t>(0, count)) - 1);
}
// Bit n is set if byte n is not 0, n < count <= 32.
TESSERA_INLINE uint32_t nonzero_bytes(const char* p, int64_t count) {
  const __m256i bytes = _mm256_maskz_loadu_epi8(first_elems(count), p);
  return _mm256_test_epi8_mask(bytes, bytes);
}

TESSERA_INLINE VecF fma(VecF a, VecF b, VecF c) { return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
TESSERA_INLINE VecF max(VecF a, VecF b) { return (VecF)_mm512_max_ps((__m512)a, (__m512)b); }
TESSERA_INLINE VecF min(VecF a, VecF b) { return (VecF)_mm512_min_ps((__m512)a, (__m512)b); }
TESSERA_INLINE bool any(VecI mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }

// portable::LimitedExponent without its limits.
class Exponent {
 public:
  TESSERA_INLINE explicit Exponent(VecF x) : x_(x), fraction_((VecF)_mm512_reduce_ps((__m512)x, 0)) {}
  TESSERA_INLINE VecF fraction() const { return fraction_; }  // 0 for an infinity
  TESSERA_INLINE VecF scaled(VecF p) const { return (VecF)_mm512_scalef_ps((__m512)p, (__m512)(x_ - fraction_)); }

 private:
  VecF x_, fraction_;
};

// ---- 16-bit types ----

TESSERA_INLINE VecF float_from_f16(VecH h) { return (VecF)_mm512_cvtph_ps((__m256i)h); }
TESSERA_INLINE VecH f16_from_float(VecF v) { return (VecH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }

// portable::halves_from_finite_e4m3 and halves_from_e5m2.
TESSERA_INLINE VecU halves_from_finite_e4m3(const char* p) {
  const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (VecU)_mm512_and_si512(_mm512_slli_epi16(codes, 7), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
}
TESSERA_INLINE VecU halves_from_e5m2(const char* p) {
  const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (VecU)_mm512_slli_epi16(codes, 8);
}
TESSERA_INLINE void floats_from_i8(const char* p, VecF (&v)[2]) {
  for (int i = 0; i < 2; ++i) {
    v[i] = (VecF)_mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * kLanes))));
  }
}

#if defined(TESSERA_HAS_DOT)
TESSERA_INLINE VecH bf16_from_float(VecF v) { return (VecH)(__m256i)_mm512_cvtneps_pbh((__m512)v); }

// Lane i holds bf16(low[i]) in its low half and bf16(high[i]) in its high half.
TESSERA_INLINE VecU pair_bf16(VecF low, VecF high) {
  const __m512i packed = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (VecU)_mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), packed);
}

// acc + a.low * b.low + a.high * b.high in every lane; a lane holds two bf16.
TESSERA_INLINE VecF dot(VecF acc, VecU a, VecU b) {
  return (VecF)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}

// a0 b0 a1 b1 ... of words of 16 bits, within each 128 bits: of their lower halves, and of their upper halves.
TESSERA_INLINE VecU interleave_lower(VecU a, VecU b) { return (VecU)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
TESSERA_INLINE VecU interleave_upper(VecU a, VecU b) { return (VecU)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
#else
using portable::bf16_from_float, portable::pair_bf16;
#endif

// ---- across lanes ----

// out[c] lane r = word c of row r, whose 16 words are at row(r). The loads do the first of four steps of the
// transposition: they put halves of rows r and r + 4 side by side without a shuffle. Both halves of eight rows are
// loaded before the next eight rows, because if rows are a power of two apart, the L1 cache does not hold 16 of them.
template <class Row>
TESSERA_INLINE void transpose_rows(VecU (&out)[kLanes], Row&& row) {
  __m512i columns[2][kLanes / 2];
#pragma GCC unroll 2
  for (int group = 0; group < 2; ++group) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m512i r[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const auto part = [&](int n) TESSERA_LAMBDA_INLINE {
          return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(n) + half * 32));
        };
        r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(part(8 * group + i)), part(8 * group + i + 4), 1);
      }
      const __m512i low01 = _mm512_unpacklo_epi32(r[0], r[1]), high01 = _mm512_unpackhi_epi32(r[0], r[1]);
      const __m512i low23 = _mm512_unpacklo_epi32(r[2], r[3]), high23 = _mm512_unpackhi_epi32(r[2], r[3]);
      columns[group][4 * half] = _mm512_unpacklo_epi64(low01, low23);
      columns[group][4 * half + 1] = _mm512_unpackhi_epi64(low01, low23);
      columns[group][4 * half + 2] = _mm512_unpacklo_epi64(high01, high23);
      columns[group][4 * half + 3] = _mm512_unpackhi_epi64(high01, high23);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < kLanes / 2; ++c) {
    const int column = c / 4 * 8 + c % 4;
    out[column] = (VecU)_mm512_shuffle_i32x4(columns[0][c], columns[1][c], 0x88);
    out[column + 4] = (VecU)_mm512_shuffle_i32x4(columns[0][c], columns[1][c], 0xdd);
  }
}

// Through memory, which needs 48 shuffles; perfect shuffles would be 64.
TESSERA_INLINE void transpose(VecF (&rows)[kLanes]) {
  alignas(64) char copy[kLanes][sizeof(VecF)];
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) store(copy[r], rows[r]);
  // otherwise halves would be extracted from registers, which is a shuffle again
  const char* rows_at = opaque(copy[0]);
  VecU columns[kLanes];
  transpose_rows(columns, [&](int r) TESSERA_LAMBDA_INLINE { return rows_at + r * sizeof(VecF); });
#pragma GCC unroll 16
  for (int c = 0; c < kLanes; ++c) rows[c] = (VecF)columns[c];
}

// Within 128-bit lanes first, because these shuffles need no index from memory.
TESSERA_INLINE VecF sum_each(VecF (&v)[kLanes]) {
  __m512 quads[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto at = [&](int n) TESSERA_LAMBDA_INLINE { return (__m512)v[4 * i + n]; };
    const __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(at(0), at(1)), _mm512_unpackhi_ps(at(0), at(1)));
    const __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(at(2), at(3)), _mm512_unpackhi_ps(at(2), at(3)));
    quads[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
  }
  const auto add_lanes = [](__m512 a, __m512 b) TESSERA_LAMBDA_INLINE {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return (VecF)add_lanes(add_lanes(quads[0], quads[1]), add_lanes(quads[2], quads[3]));
}

constexpr bool kGathersWords = true;
TESSERA_INLINE VecU gather_words(const char* p, VecI offset, VecI inside) {
  const __mmask16 lanes = _mm512_movepi32_mask((__m512i)inside);
  return (VecU)_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, (__m512i)offset, p, 1);
}

// ---- products of 64 bits ----

// Even and odd lanes are separate, each in the lower half of 64 bits: a product has its low word in place and its high
// word above it, and the content of an operand's upper half does not matter.
struct WideWords {
  static constexpr int kParts = 2;
  typedef __m512i Words;
  TESSERA_INLINE static Words splat_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  TESSERA_INLINE static Words product(Words v, uint32_t factor) {
    return _mm512_mul_epu32(v, _mm512_set1_epi64(factor));
  }
  TESSERA_INLINE static Words low_of(Words product) { return product; }
  TESSERA_INLINE static Words high_of(Words product) { return _mm512_shuffle_epi32(product, _MM_PERM_CDAB); }
  TESSERA_INLINE static Words exclusive_or(Words a, Words b, Words c) {
    constexpr int kOfAllThree = 0x96;
    return _mm512_ternarylogic_epi32(a, b, c, kOfAllThree);
  }
  TESSERA_INLINE static Words part(VecU v, int odd) { return odd ? high_of((Words)v) : (Words)v; }
  TESSERA_INLINE static VecU joined(const Words (&parts)[kParts]) {
    return (VecU)_mm512_mask_shuffle_epi32(parts[0], 0xaaaa, parts[1], _MM_PERM_CDAB);
  }
};

}  // namespace
}  // namespace tessera::cpu
