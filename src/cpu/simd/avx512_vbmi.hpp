// AVX-512 VBMI: codes of 8 bits to bf16 by tables of 128 bytes.
#pragma once

#include <immintrin.h>

#include <array>
#include <bit>

#include "core/float8.hpp"
#include "cpu/simd.hpp"
#include "tessera/tessera.h"

namespace tessera::cpu {
namespace {

// The lower and the upper byte of the bf16 of each magnitude, and its sign bit 0.
struct CodeTable {
  alignas(64) std::array<uint8_t, 128> low, high;
};
// value(n): the number at index n of the table. Evaluated by the compiler: nothing of it is called.
template <class Value>
consteval CodeTable code_table(const Value& value) {
  CodeTable table{};
  for (int n = 0; n < 128; ++n) {
    const uint32_t bits = std::bit_cast<uint32_t>(value(n)) >> 16;
    table.low[static_cast<size_t>(n)] = static_cast<uint8_t>(bits);
    table.high[static_cast<size_t>(n)] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}
constexpr CodeTable kE4m3Table =
    code_table([](int n) { return core::float8_to_float(core::kE4M3, static_cast<uint8_t>(n)); });
constexpr CodeTable kE5m2Table =
    code_table([](int n) { return core::float8_to_float(core::kE5M2, static_cast<uint8_t>(n)); });
// There are 129 magnitudes of int8. Index 0, the lower bits of 128, has that one, and the code 0 is not looked up.
constexpr CodeTable kInt8Table = code_table([](int n) { return static_cast<float>(n == 0 ? 128 : n); });

// 64 codes to words of bf16. kInt8: two's complement; otherwise sign and magnitude.
template <bool kInt8>
class CodesToBf16 {
 public:
  TESSERA_INLINE explicit CodesToBf16(const CodeTable& table) {
    for (int half = 0; half < 2; ++half) {
      low_[half] = _mm512_load_si512(table.low.data() + 64 * half);
      high_[half] = _mm512_load_si512(table.high.data() + 64 * half);
    }
  }

  // even, odd: the words of the codes at even and at odd bytes. The bytes are put side by side by shifts, which have a
  // port of their own beside the tables' shuffles.
  TESSERA_INLINE void operator()(VecU codes, VecU& even, VecU& odd) const {
    const __m512i code = (__m512i)codes;
    __m512i low, high;
    if constexpr (kInt8) {
      const __mmask64 nonzero = _mm512_test_epi8_mask(code, code);
      const __m512i index = _mm512_abs_epi8(code);
      low = _mm512_maskz_permutex2var_epi8(nonzero, low_[0], index, low_[1]);
      high = _mm512_maskz_permutex2var_epi8(nonzero, high_[0], index, high_[1]);
    } else {
      low = _mm512_permutex2var_epi8(low_[0], code, low_[1]);
      high = _mm512_permutex2var_epi8(high_[0], code, high_[1]);
    }
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    high = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(static_cast<char>(0x80)), kOrAnd);
    constexpr int kAndOr = 0xec;  // (a & c) | b
    even = (VecU)_mm512_ternarylogic_epi32(low, _mm512_slli_epi16(high, 8), _mm512_set1_epi16(0x00ff), kAndOr);
    odd = (VecU)_mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, _mm512_set1_epi16(-0x100), kOrAnd);
  }

 private:
  __m512i low_[2], high_[2];
};

// Calls body with the conversion of a dtype.
template <class Body>
TESSERA_INLINE void with_codes_to_bf16(int32_t dtype, Body&& body) {
  if (dtype == TESSERA_INT8) return body(CodesToBf16<true>(kInt8Table));
  body(CodesToBf16<false>(dtype == TESSERA_FLOAT8_E4M3 ? kE4m3Table : kE5m2Table));
}

// The first `count` bytes of 64, then zeros.
TESSERA_INLINE VecU load_first_bytes(const char* p, int64_t count) {
  return (VecU)_mm512_maskz_loadu_epi8(count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1, p);
}

}  // namespace
}  // namespace tessera::cpu
