// The SIMD layer: a float vector, an int vector and the few operations that the kernels need.
//
// Operations that the compilers' portable vectors express well are written once, here. The others (fused multiply-add,
// max, exp2's scaling, 16-bit conversions, the bf16 dot product, transpositions, sums over lanes, wide products) are in
// the file of an instruction set in simd/, and no intrinsic is anywhere else, but for AMX's files. An instruction set
// takes from simd/portable.hpp what it has no better instructions for.
//
// Only kernels.cpp (compiled once for each instruction set) and code_products.cpp include this file. Everything is in
// an anonymous namespace, and no inline function of a library header may be called here (one definition rule across
// instruction sets).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(TESSERA_COMPILE_AVX512_BF16) || defined(TESSERA_COMPILE_AMX_BF16)
#define TESSERA_AVX512 1
#define TESSERA_HAS_DOT 1
#elif defined(TESSERA_COMPILE_AVX512)
#define TESSERA_AVX512 1
#elif defined(TESSERA_COMPILE_AVX2)
#define TESSERA_AVX2 1
#elif defined(TESSERA_COMPILE_NEON_BF16)
#define TESSERA_NEON 1
#define TESSERA_HAS_DOT 1
#elif defined(TESSERA_COMPILE_NEON)
#define TESSERA_NEON 1
#endif

#define TESSERA_INLINE inline __attribute__((always_inline))
#define TESSERA_LAMBDA_INLINE __attribute__((always_inline))
// Gives a loop of micro-kernels a function of its own: inlined among others, gcc's register allocator spills
// accumulators inside the loop.
#define TESSERA_OWN_FUNCTION __attribute__((noinline))
// A function that is rarely called and must not cost the usual path a register.
#define TESSERA_COLD_FUNCTION __attribute__((noinline, cold))

namespace tessera::cpu {
namespace {

#if defined(TESSERA_AVX512)
constexpr int kLanes = 16;
#elif defined(TESSERA_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(TESSERA_HAS_DOT)
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));
typedef uint8_t VecB __attribute__((vector_size(kLanes)));
typedef int8_t VecC __attribute__((vector_size(kLanes)));

template <class T>
TESSERA_INLINE constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
TESSERA_INLINE constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

// ---- memory: every address is treated as unaligned ----

template <class V, class T>
TESSERA_INLINE V load_as(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
TESSERA_INLINE VecF load(const float* p) { return load_as<VecF>(p); }
template <class V, class T>
TESSERA_INLINE void store(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}
// The first n lanes; the others are 0.
template <class V, class T>
TESSERA_INLINE V load_first(const T* p, int64_t n) {
  V v = V{};
  __builtin_memcpy(&v, p, static_cast<size_t>(n) * sizeof(T));
  return v;
}

// A pointer about which the compiler knows nothing: a load through it happens here, neither earlier nor from a
// register. The micro-kernel leaves no register free, so what its epilogue needs must not stay live across it;
// otherwise gcc spills accumulators inside the loop (measured: 90 instead of 106 GFLOP/s in the backward pass).
template <class T>
TESSERA_INLINE const T* opaque(const T* p) {
  asm volatile("" : "+r"(p));
  return p;
}

// x - 0 is x, but 0 + x is not for x = -0: the sum would be computed.
TESSERA_INLINE VecF splat(float x) { return x - VecF{}; }
TESSERA_INLINE VecI splat(int32_t x) { return VecI{} + x; }
TESSERA_INLINE VecU splat(uint32_t x) { return VecU{} + x; }
template <class V>
TESSERA_INLINE V iota();
template <>
TESSERA_INLINE VecI iota<VecI>() {
  VecI v{};
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// Prefetches the cache line at p for writing.
TESSERA_INLINE void prefetch_write(const char* p) { __builtin_prefetch(p, 1); }

}  // namespace
}  // namespace tessera::cpu

#include "cpu/simd/portable.hpp"
#if defined(TESSERA_AVX512)
#include "cpu/simd/avx512.hpp"
#elif defined(TESSERA_AVX2)
#include "cpu/simd/avx2.hpp"
#elif defined(TESSERA_NEON)
#include "cpu/simd/neon.hpp"
#else
namespace tessera::cpu {
namespace {
using namespace portable;  // the baseline of x86-64
}  // namespace
}  // namespace tessera::cpu
#endif

namespace tessera::cpu {
namespace {

template <class V, class T>
TESSERA_INLINE void store_first(T* p, V v, int64_t n) {
  store_bytes(p, v, static_cast<size_t>(n) * sizeof(T));
}

// ---- arithmetic ----

TESSERA_INLINE VecF abs(VecF a) { return (VecF)((VecI)a & splat(0x7fffffff)); }
TESSERA_INLINE VecF select(VecI mask, VecF yes, VecF no) { return mask ? yes : no; }
TESSERA_INLINE VecF to_float(VecI v) { return __builtin_convertvector(v, VecF); }

TESSERA_INLINE float sum_lanes(VecF v) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}
TESSERA_INLINE float max_lanes(VecF v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// 2^x by a minimax polynomial of degree 5 on [-1/2, 1/2] (1.6e-7 relative, exact at integers): 0 for -infinity,
// infinity from 128 up, NaN for NaN. It is an object, so that a loop's epilogue can load the coefficients at its
// beginning.
class Exp2 {
 public:
  TESSERA_INLINE Exp2() {
    static constexpr float kCoefficients[5] = {0.693147004f, 0.240222424f, 0.0555073358f, 0.00967151299f,
                                               0.00132647273f};
    const float* c = opaque(kCoefficients);
#pragma GCC unroll 5
    for (int i = 0; i < 5; ++i) c_[i] = splat(c[i]);
  }

  TESSERA_INLINE VecF operator()(VecF x) const {
    const Exponent exponent(x);
    const VecF f = exponent.fraction();
    VecF p = fma(c_[4], f, c_[3]);
    p = fma(p, f, c_[2]);
    p = fma(p, f, c_[1]);
    p = fma(p, f, c_[0]);
    p = fma(p, f, splat(1.0f));
    return exponent.scaled(p);
  }

 private:
  VecF c_[5];
};
TESSERA_INLINE VecF exp2(VecF x) { return Exp2()(x); }

// tanh(x) = x P(x^2) / Q(x^2), minimax on [-9, 9] (3.2e-7 relative): numerator and denominator.
struct TanhRatio {
  VecF numerator, denominator;
  TESSERA_INLINE explicit TanhRatio(VecF x);
};
TESSERA_INLINE TanhRatio::TanhRatio(VecF x) {
  const VecF z = x * x;
  VecF p = fma(splat(1.33544749e-08f), z, splat(2.06089444e-05f));
  p = fma(p, z, splat(0.00349557982f));
  p = fma(p, z, splat(0.133810192f));
  p = fma(p, z, splat(1.0f));
  VecF q = fma(splat(7.77648097e-07f), z, splat(0.000328562106f));
  q = fma(q, z, splat(0.0258769505f));
  q = fma(q, z, splat(0.467143327f));
  q = fma(q, z, splat(1.0f));
  numerator = x * p, denominator = q;
}
// Beyond 9, tanh is exactly 1 in float32, so that the gradient through it is 0. NaN for NaN.
TESSERA_INLINE VecF tanh(VecF x) {
  x = min(splat(9.0f), max(splat(-9.0f), x));
  const TanhRatio ratio(x);
  return select(x * x == 81.0f, x * splat(1.0f / 9.0f), ratio.numerator / ratio.denominator);
}

// log2(x) for x > 0, infinite or NaN: x = 2^e m, sqrt(1/2) <= m < sqrt(2), and log2(m) = 2 log2(e) atanh(t), t = (m -
// 1) / (m + 1), whose series is truncated after t^9 (3e-9 relative).
TESSERA_INLINE VecF log2(VecF x) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3;
  constexpr float kLeastNormal = 0x1p-126f, kTwoLog2e = 2.885390082f;
  const VecI denormal = x < kLeastNormal;
  const VecU u = (VecU)select(denormal, x * 0x1p24f, x);
  const VecI e = (VecI)(u - kSqrtHalf) >> 23;
  const VecF m = (VecF)(u - ((VecU)e << 23));
  const VecF t = (m - 1.0f) / (m + 1.0f), z = t * t;
  VecF p = fma(splat(kTwoLog2e / 9), z, splat(kTwoLog2e / 7));
  p = fma(p, z, splat(kTwoLog2e / 5));
  p = fma(p, z, splat(kTwoLog2e / 3));
  p = fma(p, z, splat(kTwoLog2e));
  return select(x - x == 0.0f, fma(t, p, to_float(e - (denormal & 24))), x);
}

// ---- 16-bit types: bit patterns in memory, float32 in registers ----

TESSERA_INLINE VecF float_from_bf16(VecH h) { return (VecF)(__builtin_convertvector(h, VecU) << 16); }

// ---- 8-bit formats: core/float8.hpp ----

// Numbers by way of float16, which e5m2 is the upper half of, and which holds e4m3 / 256 with its subnormals.
TESSERA_INLINE VecF float_from_e5m2(VecB b) {
#if defined(TESSERA_AVX512)
  return (VecF)_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16((__m128i)b), 8));
#else
  return float_from_f16(__builtin_convertvector(b, VecH) << 8);
#endif
}
TESSERA_INLINE VecF float_from_e4m3(VecB b) {
#if defined(TESSERA_AVX512)
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)b), 7);
  const __m512 scaled = _mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
  const __mmask16 number = _mm_cmpneq_epi8_mask(_mm_or_si128((__m128i)b, _mm_set1_epi8(static_cast<char>(0x80))),
                                                _mm_set1_epi8(static_cast<char>(0xff)));
  return (VecF)_mm512_mask_mul_ps(_mm512_set1_ps(__builtin_nanf("")), number, scaled, _mm512_set1_ps(256.0f));
#else
  const VecH code = __builtin_convertvector(b, VecH), magnitude = (code & 0x7f) << 7;
  const VecH number = magnitude | (code & 0x80) << 8, nan = number | 0x7e00;
  return float_from_f16(magnitude == 0x3f80 ? nan : number) * 256.0f;
#endif
}
TESSERA_INLINE VecF float_from_i8(VecB b) {
#if defined(TESSERA_AVX512)
  return (VecF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)b));
#else
  return __builtin_convertvector(__builtin_convertvector((VecC)b, VecI), VecF);
#endif
}
// Of 2 kLanes codes at p.
TESSERA_INLINE void floats_from_halves(VecU halves, float factor, VecF (&v)[2]) {
  VecH half[2];
  __builtin_memcpy(half, &halves, sizeof half);
  for (int i = 0; i < 2; ++i) v[i] = float_from_f16(half[i]) * factor;
}
constexpr float kHalfOfE4m3 = 256.0f;  // times what halves_from_e4m3 gives is the number
TESSERA_INLINE VecU halves_from_e4m3(const char* p) {
  using portable::Halves, portable::kHalfOfE4m3Nan;
  const Halves number = (Halves)halves_from_finite_e4m3(p);
  return (VecU)(number | ((Halves)((number & kHalfOfE4m3Nan) == kHalfOfE4m3Nan) & 0x7e00));
}
// Whether one of `count` codes of e4m3 is NaN.
TESSERA_INLINE bool holds_nan_of_e4m3(const char* codes, int64_t count) {
  typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));
  Bytes most{};  // of the codes without their signs, of which NaN is the largest
  const auto look = [&](Bytes some) TESSERA_LAMBDA_INLINE {
    some |= 0x80;
    most = most > some ? most : some;
  };
  int64_t n = 0;
  for (; n + 4 * kLanes <= count; n += 4 * kLanes) look(load_as<Bytes>(codes + n));
  if (n < count) look(load_first<Bytes>(codes + n, count - n));
  return any((VecI)(most == 0xff) != 0);
}
TESSERA_INLINE void floats_from_e4m3(const char* p, VecF (&v)[2]) {
  floats_from_halves(halves_from_e4m3(p), kHalfOfE4m3, v);
}
TESSERA_INLINE void floats_from_e5m2(const char* p, VecF (&v)[2]) { floats_from_halves(halves_from_e5m2(p), 1.0f, v); }

// Rounded to nearest, ties to even; numbers too large become the largest finite one. kDropped: bits of a float32's
// mantissa that the format lacks; kBias, kLargest: of the format.
template <int kDropped, int kBias, uint32_t kLargestBits, uint32_t kLargestCode>
TESSERA_INLINE VecB float8_from_float(VecF v) {
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 1 - kBias + kDropped) << 23;  // its last place: a subnormal
  const VecU u = (VecU)v, sign = u >> 24 & 0x80u, magnitude = u & 0x7fffffffu;
  const VecU normal = (magnitude - kRebias + ((1u << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1u)) >> kDropped;
  const VecU subnormal = (VecU)((VecF)magnitude + (VecF)splat(kMagic)) - kMagic;
  VecU code = (magnitude < kRebias + (1u << 23)) ? subnormal : normal;
  code = (magnitude >= kLargestBits) ? splat(kLargestCode) : code;
  code = (magnitude > 0x7f800000u) ? splat(uint32_t{0x7f}) : code;
  return __builtin_convertvector(code | sign, VecB);
}
TESSERA_INLINE VecB e4m3_from_float(VecF v) { return float8_from_float<20, 7, 0x43e00000u, 0x7e>(v); }
TESSERA_INLINE VecB e5m2_from_float(VecF v) { return float8_from_float<21, 15, 0x47600000u, 0x7b>(v); }
// -127 ... 127; 0 for NaN.
TESSERA_INLINE VecB i8_from_float(VecF v) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: its last place is 1
  const VecF number = select(v == v, v, VecF{});
  const VecF limited = min(splat(127.0f), max(splat(-127.0f), number));
  return __builtin_convertvector((VecU)(limited + kMagic) - 0x4b400000u, VecB);
}

}  // namespace
}  // namespace tessera::cpu
