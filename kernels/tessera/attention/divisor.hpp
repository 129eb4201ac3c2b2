// A divisor that is known before the kernel runs: quotients need a multiplication and a shift, where a division is a
// chain of some twenty dependent instructions (Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994). Gives n / d and n % d for 0 <= n < 2^31 and d >= 1. A divisor of 0, for what a tensor lacks,
// is allowed: its quotients are 0.
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
