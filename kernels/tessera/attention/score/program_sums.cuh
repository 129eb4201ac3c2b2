// The sums of the gradients of a program's tensors: one sum for each element, to which every block adds.
#pragma once

#include "tessera/attention/score/program_params.hpp"
#include "tessera/ptx/atomic.cuh"
#include "tessera/tile/numbers.cuh"

namespace tessera {

// Adds x to an exact sum (ExactSum): its 24 bits are split at a word's end.
TESSERA_DEVICE void add_exactly(ExactSum& sum, float x) {
  using uint64 = unsigned long long;
  const uint32 bits = __float_as_uint(x);
  const uint32 exponent = bits >> 23 & 0xffu, fraction = bits & 0x7fffffu;
  if (exponent == 0xffu) {
    ptx::red_or_b32(&sum.special, fraction != 0 ? kNanAdded : bits >> 31 ? kMinusInfinityAdded : kPlusInfinityAdded);
    return;
  }
  // |x| = mantissa x 2^(place - 149)
  const uint32 mantissa = exponent > 0 ? fraction | 0x800000u : fraction, place = exponent > 0 ? exponent - 1 : 0;
  if (mantissa == 0) return;
  const uint64 shifted = static_cast<uint64>(mantissa) << (place & 31u);
  const uint64 low = shifted & 0xffffffffu, high = shifted >> 32;
  uint64* const word = sum.words + (place >> 5);
  const bool negative = bits >> 31;
  if (low != 0) ptx::red_add_u64(word, negative ? 0 - low : low);
  if (high != 0) ptx::red_add_u64(word + 1, negative ? 0 - high : high);
}

// The sum as float64, rounded once for each word of which it consists.
TESSERA_DEVICE double value_of(const ExactSum& sum) {
  if (sum.special & kNanAdded || (sum.special & kPlusInfinityAdded && sum.special & kMinusInfinityAdded)) {
    return static_cast<double>(__int_as_float(0x7fc00000));
  }
  if (sum.special) return static_cast<double>(sum.special & kMinusInfinityAdded ? -infinity() : infinity());
  // Carries make all digits but the sign's non-negative, so that nothing cancels.
  uint32 digit[kExactWords];
  int64 carry = 0;
#pragma unroll
  for (int w = 0; w < kExactWords; ++w) {
    const int64 word = static_cast<int64>(sum.words[w]);
    const int64 low = (word & 0xffffffffll) + (carry & 0xffffffffll);
    digit[w] = static_cast<uint32>(low);
    carry = (word >> 32) + (carry >> 32) + (low >> 32);
  }
  const bool negative = carry < 0;
  if (negative) {
    bool borrow = true;  // two's complement
#pragma unroll
    for (int w = 0; w < kExactWords; ++w) {
      digit[w] = ~digit[w] + (borrow ? 1u : 0u);
      borrow = borrow && digit[w] == 0;
    }
    carry = ~carry + (borrow ? 1 : 0);
  }
  double value = static_cast<double>(carry);
#pragma unroll
  for (int w = kExactWords - 1; w >= 0; --w) value = value * 0x1p32 + static_cast<double>(digit[w]);
  value *= 0x1p-149;
  return negative ? -value : value;
}

// Adds a gradient to the sum of the tensor's element. kExact: the result does not depend on the order of additions.
template <bool kExact>
TESSERA_DEVICE void add_to_sum(void* sums, int64 element, float x) {
  if constexpr (kExact) {
    add_exactly(static_cast<ExactSum*>(sums)[element], x);
  } else {
    ptx::red_add_f32(static_cast<float*>(sums) + element, x);
  }
}

// The element's place among the sums of its tensor, which are contiguous.
template <class... Index>
TESSERA_DEVICE int64 sum_index(const ProgramTensor& tensor, Index... index) {
  int64 element = 0;
  [[maybe_unused]] int axis = 0;
  ((element = element * tensor.extent[axis++] + index), ...);
  return element;
}

}  // namespace tessera
