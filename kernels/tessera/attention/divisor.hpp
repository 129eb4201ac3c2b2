// A divisor that is known before the kernel: quotients by a multiplication and a shift, where a division takes some twenty
// instructions, each waiting for the last (Granlund and Montgomery, "Division by invariant integers using multiplication",
// 1994). n / d, n % d for 0 <= n < 2^31, d >= 1. What a tensor has none of, 0, is kept as a number: quotients are 0.
#pragma once

#include "tessera/types.hpp"

namespace tessera {

struct Divisor {
  int value;
  unsigned multiplier;  // ceil(2^shift / value), or 0
  int shift;            // 31 + ceil(log2(value))

  Divisor() = default;
  TESSERA_HOST_DEVICE constexpr explicit Divisor(int divisor) : value(divisor), multiplier(0), shift(31) {
    while ((1u << (shift - 31)) < static_cast<unsigned>(value)) ++shift;
    const unsigned d = static_cast<unsigned>(value);
    if (d > 0) multiplier = static_cast<unsigned>(((1ull << shift) + d - 1) / d);
  }
  TESSERA_HOST_DEVICE constexpr operator int() const { return value; }
};

TESSERA_HOST_DEVICE constexpr int operator/(int n, const Divisor& d) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * d.multiplier >> d.shift);
}
TESSERA_HOST_DEVICE constexpr int operator%(int n, const Divisor& d) { return n - n / d * d.value; }

}  // namespace tessera
