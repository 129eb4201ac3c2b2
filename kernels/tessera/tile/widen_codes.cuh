// A tile of codes, 8-bit floats, to 16 bits an element: exactly, since both formats fit both types. By operations that
// every GPU from Ampere on has; those for 8-bit floats came later.
#pragma once

#include "tessera/tile/shared_tile.cuh"

namespace tessera {

// Two codes, in bits 8 ... 15 and 24 ... 31 of `codes`, as two neighbours of 16 bits. A code's exponent and mantissa
// are placed where the type has its own; as a number that is the value divided by a power of two, the ratio of the two
// exponents' biases. Subnormal codes become subnormal numbers, so that the product is right for them too. What remains
// are the largest exponent (e5m2) or number (e4m3), which stand for infinity and NaN; with kFinite, neither is one of
// these, which takes half of the instructions.
template <Dtype kCodes, Dtype kTo, bool kFinite>
TESSERA_DEVICE uint32 widen_pair(uint32 codes) {
  constexpr bool kE4M3 = kCodes == Dtype::kFloat8E4M3, kHalf = kTo == Dtype::kFloat16;
  static_assert(dtype_bytes(kCodes) == 1 && dtype_bytes(kTo) == 2);
  if constexpr (!kE4M3 && kHalf) return codes;  // e5m2 is the upper half of float16
  constexpr int kShift = (kHalf ? 0 : 3) + (kE4M3 ? 1 : 0);
  constexpr uint32 kFactor = kHalf ? 0x5c005c00 : kE4M3 ? 0x7b807b80 : 0x77807780;  // 2^8; 2^120, 2^112
  constexpr uint32 kEach = 0x10001, kMagnitude = (0x7f00 >> kShift) * kEach;
  constexpr uint32 kFirstSpecial = kE4M3 ? 0x7f00 >> kShift : 0x7c00 >> kShift;
  constexpr uint32 kAbove = 0x8000 >> kShift;  // the bit that a special number's sum with the difference reaches
  constexpr int kAbove_log2 = 15 - kShift;
  constexpr uint32 kSpecial = kHalf ? 0x7e00 : kE4M3 ? 0x7fc0 : 0x7f80;  // e5m2: infinity, or NaN by the mantissa
  const uint32 magnitude = codes >> kShift & kMagnitude, sign = codes & 0x80008000;
  if constexpr (kFinite) {
    if constexpr (kHalf) return ptx::mul_f16x2(magnitude | sign, kFactor);
    return ptx::fma_rn_bf16x2(magnitude | sign, kFactor, 0x80008000);  // the sum with -0 keeps the sign of 0
  }
  const uint32 special = (magnitude + (kAbove - kFirstSpecial) * kEach) >> kAbove_log2 & kEach;
  const uint32 value = kHalf ? ptx::mul_f16x2(magnitude, kFactor) : ptx::fma_rn_bf16x2(magnitude, kFactor, 0);
  return value | special * kSpecial | sign;
}
// Whether one of four codes stands for infinity or NaN.
template <Dtype kCodes>
TESSERA_DEVICE bool has_special(uint32 codes) {
  constexpr uint32 kStep = kCodes == Dtype::kFloat8E4M3 ? 0x01010101 : 0x04040404;
  return ((codes & 0x7f7f7f7f) + kStep) & 0x80808080;
}

template <Dtype kCodes, Dtype kTo, bool kFinite>
TESSERA_DEVICE uint4 widen_codes(uint2 codes) {
  const auto low = [](uint32 four) { return widen_pair<kCodes, kTo, kFinite>(ptx::prmt<0x1404>(four, 0)); };
  const auto high = [](uint32 four) { return widen_pair<kCodes, kTo, kFinite>(ptx::prmt<0x3424>(four, 0)); };
  return make_uint4(low(codes.x), high(codes.x), low(codes.y), high(codes.y));
}

// Widens all of a tile into another of the same rows and columns, by kThreads threads: four vectors of codes at a time,
// by the instructions for finite ones if all of them are.
template <int kThreads, class From, class To>
TESSERA_DEVICE void widen_tile(To& sTo, From& sFrom) {
  static_assert(From::kRows == To::kRows && From::kCols == To::kCols);
  constexpr int kCodes = 8, kPartsPerRow = From::kCols / kCodes, kParts = From::kRows * kPartsPerRow, kAtOnce = 4;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < kParts; first += kAtOnce * kThreads) {
    uint2 codes[kAtOnce];
    bool special = false;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int part = min(first + n * kThreads, kParts - 1);
      codes[n] = *reinterpret_cast<const uint2*>(sFrom.pointer(part / kPartsPerRow, part % kPartsPerRow * kCodes));
      special |= has_special<From::kType>(codes[n].x) || has_special<From::kType>(codes[n].y);
    }
    const auto store = [&](auto widen) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int part = first + n * kThreads;
        if (part >= kParts) break;
        uint4& to = *reinterpret_cast<uint4*>(sTo.pointer(part / kPartsPerRow, part % kPartsPerRow * kCodes));
        to = widen(codes[n]);
      }
    };
    if (!special) [[likely]] {
      store([](uint2 of) { return widen_codes<From::kType, To::kType, true>(of); });
    } else {
      store([](uint2 of) { return widen_codes<From::kType, To::kType, false>(of); });
    }
  }
}

}  // namespace tessera
