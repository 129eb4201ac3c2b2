// Division by multiplication: types.hpp.
#include <gtest/gtest.h>

#include <climits>

#include "tessera/types.hpp"

namespace tessera {
namespace {

void expect_divides(int n, int d) {
  const Divisor divisor(d);
  ASSERT_EQ(n / divisor, n / d) << n << " / " << d;
  ASSERT_EQ(n % divisor, n % d) << n << " % " << d;
}

TEST(CudaDivisor, IsExactWhereAQuotientChanges) {
  constexpr int kLarge[] = {65535, 65536, 65537, 1 << 30, (1 << 30) + 1, INT_MAX - 1, INT_MAX};
  const auto check = [](int d) {
    for (const int n : {0, 1, d - 1, d, INT_MAX - 1, INT_MAX, INT_MAX / d * d, INT_MAX / d * d - 1}) {
      expect_divides(n, d);
    }
    for (long long quotient = 1; quotient * d <= INT_MAX; quotient *= 3) {
      for (const long long n : {quotient * d - 1, quotient * d}) expect_divides(static_cast<int>(n), d);
    }
  };
  for (int d = 1; d <= 3000; ++d) check(d);
  for (const int d : kLarge) check(d);
}

TEST(CudaDivisor, NothingIsANumberToo) {
  const Divisor none(0);
  EXPECT_EQ(none, 0);
  EXPECT_EQ(INT_MAX / none, 0);
}

}  // namespace
}  // namespace tessera
