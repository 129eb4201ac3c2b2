// The operations that instruction sets differ in, by the compilers' portable vectors alone: all of the baseline's, and
// those of the others that they have no better instructions for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tessera::cpu {
namespace {
namespace portable {

template <class V>
TESSERA_INLINE void store_bytes(void* p, V v, size_t bytes) {
  __builtin_memcpy(p, &v, bytes);
}

TESSERA_INLINE VecF fma(VecF a, VecF b, VecF c) { return a * b + c; }

// max and min return the second operand when either is NaN.
TESSERA_INLINE VecF max(VecF a, VecF b) { return a > b ? a : b; }
TESSERA_INLINE VecF min(VecF a, VecF b) { return a < b ? a : b; }

TESSERA_INLINE bool any(VecI mask) {
  int32_t seen = 0;
  for (int i = 0; i < kLanes; ++i) seen |= mask[i];
  return seen != 0;
}

// x = n + fraction() with an integer n, |fraction()| <= 1/2; scaled(p) = 2^n p. x is limited to -127 ... 128.
template <VecF (*kMax)(VecF, VecF), VecF (*kMin)(VecF, VecF)>
class LimitedExponent {
 public:
  TESSERA_INLINE explicit LimitedExponent(VecF x) {
    // Adding 1.5 * 2^23 + 127 leaves round(x) + 127, the biased exponent, in the low bits.
    constexpr float kMagic = 12582912.0f + 127.0f;
    x = kMin(splat(128.0f), kMax(splat(-127.0f), x));
    biased_ = x + kMagic;
    fraction_ = x - (biased_ - kMagic);
  }
  TESSERA_INLINE VecF fraction() const { return fraction_; }
  TESSERA_INLINE VecF scaled(VecF p) const { return p * (VecF)((VecU)biased_ << 23); }

 private:
  VecF biased_, fraction_;
};
using Exponent = LimitedExponent<max, min>;

// ---- 16-bit types ----

// The upper half of a lane is bf16(v); the lower half is arbitrary.
TESSERA_INLINE VecU rounded_to_bf16(VecF v) {
  const VecU u = (VecU)v;
  return (v == v) ? u + 0x7fffu + ((u >> 16) & 1u) : u | 0x400000u;
}
TESSERA_INLINE VecH bf16_from_float(VecF v) { return __builtin_convertvector(rounded_to_bf16(v) >> 16, VecH); }

// Lane i holds bf16(low[i]) in its low half and bf16(high[i]) in its high half.
TESSERA_INLINE VecU pair_bf16(VecF low, VecF high) {
  return rounded_to_bf16(low) >> 16 | (rounded_to_bf16(high) & 0xffff0000u);
}

TESSERA_INLINE VecF float_from_f16(VecH h) {
  // Shifts the exponent and mantissa into place; one multiplication rebiases them (subnormals included).
  const VecU u = __builtin_convertvector(h, VecU);
  const VecU magnitude = (u & 0x7fffu) << 13;
  const VecF scaled = (VecF)magnitude * 0x1p112f;
  const VecU special = magnitude | 0x7f800000u;
  const VecU bits = (magnitude >= 0x0f800000u) ? special : (VecU)scaled;
  return (VecF)(bits | ((u & 0x8000u) << 16));
}
TESSERA_INLINE VecH f16_from_float(VecF v) {
  const VecU u = (VecU)v;
  const VecU sign = (u >> 16) & 0x8000u;
  const VecU magnitude = u & 0x7fffffffu;
  // Normal: round to nearest even by integers. Subnormal: adding 0.5 aligns the mantissa, the FPU rounds.
  const VecU normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const VecU subnormal = (VecU)((VecF)magnitude + 0.5f) - 0x3f000000u;
  VecU h = (magnitude < 0x38800000u) ? subnormal : normal;
  h = (magnitude >= 0x477ff000u) ? splat(uint32_t{0x7c00}) : h;
  h = (magnitude > 0x7f800000u) ? splat(uint32_t{0x7e00}) : h;
  return __builtin_convertvector(h | sign, VecH);
}

// 2 kLanes codes of 8 bits at p (core/float8.hpp) as float16, which e5m2 is the upper half of, and which holds e4m3 /
// 256 with its subnormals. NaN of e4m3 becomes kHalfOfE4m3Nan, or that with its sign.
typedef uint8_t Codes __attribute__((vector_size(2 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(4 * kLanes)));
TESSERA_INLINE Halves words_of_codes(const char* p) {
  Codes codes;
  __builtin_memcpy(&codes, p, sizeof codes);
  return __builtin_convertvector(codes, Halves);
}
constexpr uint16_t kHalfOfE4m3Nan = 0x3f80;
TESSERA_INLINE VecU halves_from_finite_e4m3(const char* p) {
  const Halves code = words_of_codes(p);
  return (VecU)((code & 0x7f) << 7 | (code & 0x80) << 8);
}
TESSERA_INLINE VecU halves_from_e5m2(const char* p) { return (VecU)(words_of_codes(p) << 8); }
TESSERA_INLINE void floats_from_i8(const char* p, VecF (&v)[2]) {
  for (int i = 0; i < 2; ++i) {
    VecC codes;
    __builtin_memcpy(&codes, p + i * kLanes, sizeof codes);
    v[i] = __builtin_convertvector(__builtin_convertvector(codes, VecI), VecF);
  }
}

// ---- across lanes ----

// a0 b0 a1 b1 ... of the lower (upper) halves.
template <int... kLane>
TESSERA_INLINE VecF interleave(VecF a, VecF b, bool upper, std::integer_sequence<int, kLane...>) {
  constexpr int kHalf = kLanes / 2;
  return upper ? __builtin_shufflevector(a, b, (kLane % 2 * kLanes + kHalf + kLane / 2)...)
               : __builtin_shufflevector(a, b, (kLane % 2 * kLanes + kLane / 2)...);
}
constexpr auto kLaneIndices = std::make_integer_sequence<int, kLanes>{};

// log2(kLanes) perfect shuffles of the rows transpose the block.
TESSERA_INLINE void transpose(VecF (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int stage = 1; stage < kLanes; stage *= 2) {
    VecF next[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave(rows[i], rows[i + kLanes / 2], false, kLaneIndices);
      next[2 * i + 1] = interleave(rows[i], rows[i + kLanes / 2], true, kLaneIndices);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// Input: kLanes vectors. Result: a vector whose lane i is the sum of vector i's lanes.
TESSERA_INLINE VecF sum_each(VecF (&v)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half >= 1; half /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i) {
      v[i] = interleave(v[i], v[i + half], false, kLaneIndices) + interleave(v[i], v[i + half], true, kLaneIndices);
    }
  }
  return v[0];
}

// The words of 32 bits at p + offset, in bytes, where `inside` is not 0; 0 in other lanes. It exists where the
// instruction set has a gather.
constexpr bool kGathersWords = false;
TESSERA_INLINE VecU gather_words(const char*, VecI, VecI) { return VecU{}; }

// ---- products of 64 bits ----

struct WideProduct {
  VecU high, low;
};
TESSERA_INLINE WideProduct multiply_wide(VecU a, uint32_t factor) {
  WideProduct r{};
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t wide = uint64_t{a[i]} * factor;
    r.high[i] = static_cast<uint32_t>(wide >> 32);
    r.low[i] = static_cast<uint32_t>(wide);
  }
  return r;
}

// A vector's words as they are multiplied: in kParts parts, each in whichever lanes its products need.
template <WideProduct (*kMultiply)(VecU, uint32_t)>
struct WholeWords {
  static constexpr int kParts = 1;
  typedef VecU Words;
  TESSERA_INLINE static Words splat_words(uint32_t x) { return splat(x); }
  TESSERA_INLINE static WideProduct product(Words v, uint32_t factor) { return kMultiply(v, factor); }
  TESSERA_INLINE static Words low_of(WideProduct product) { return product.low; }
  TESSERA_INLINE static Words high_of(WideProduct product) { return product.high; }
  TESSERA_INLINE static Words exclusive_or(Words a, Words b, Words c) { return a ^ b ^ c; }
  TESSERA_INLINE static Words part(VecU v, int) { return v; }
  TESSERA_INLINE static VecU joined(const Words (&parts)[kParts]) { return parts[0]; }
};
using WideWords = WholeWords<multiply_wide>;

}  // namespace portable
}  // namespace
}  // namespace tessera::cpu
