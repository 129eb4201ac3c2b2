// The kernels' softcap, kernels/tessera/attention/score/builtin/softcap.cuh, on the host (tests/emulated_warp), against
// tanh in float64.
#include "tessera/attention/score/builtin/softcap.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace tessera {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kTolerance = 4e-7;  // relative, as its comment says

double relative_error(float x, float got) {
  const double exact = 4 * std::tanh(static_cast<double>(x) / 4);
  return std::abs(got - exact) / std::abs(exact);
}

// Every size of number from where squares vanish to where only the sign is left, and densely around where the ways
// meet.
std::vector<float> inputs() {
  std::mt19937 random(std::random_device{}());
  std::vector<float> all;
  std::uniform_real_distribution<float> exponent(-60, 8), near(1.9f, 2.1f);
  for (int n = 0; n < 200000; ++n) {
    const float x = n % 2 ? std::exp2(exponent(random)) : near(random);
    all.push_back(n % 4 < 2 ? x : -x);
  }
  return all;
}

TEST(CudaSoftcap, IsTanhToSevenDigits) {
  double worst = 0, worst_small = 0;
  for (const float x : inputs()) {
    worst = std::max(worst, relative_error(x, quadruple_tanh<false>(x)));
    if (std::abs(x) < 2) worst_small = std::max(worst_small, relative_error(x, quadruple_tanh<true>(x)));
  }
  EXPECT_LT(worst, kTolerance);
  EXPECT_LT(worst_small, kTolerance);
}

TEST(CudaSoftcap, OfInfinityIsTheCapAndOfNaNIsNaN) {
  EXPECT_EQ(quadruple_tanh<false>(kInf), 4.0f);
  EXPECT_EQ(quadruple_tanh<false>(-kInf), -4.0f);
  EXPECT_EQ(quadruple_tanh<false>(0.0f), 0.0f);
  EXPECT_TRUE(std::isnan(quadruple_tanh<false>(kNaN)));
}

// A row's elements of a lane: 2 half and 2 half + 1 of each of kN.
TEST(CudaSoftcap, IsSmallWhereEveryInputIs) {
  constexpr int kN = 4;
  ProblemParams p{};
  p.scale = 0.125f, p.softcap = 30.0f;
  const float limit = 2.0f / softcap_input(p, 1.0f);
  const float below = std::nextafter(limit, 0.0f) * 0.999f;
  for (const float large : {limit * 1.001f, -limit * 1.001f, kInf, -kInf, kNaN, 1e30f}) {
    for (int at = 0; at < kN * 4; ++at) {
      float products[kN][4];
      for (auto& row : products) std::fill(std::begin(row), std::end(row), at % 3 ? below : -below);
      EXPECT_TRUE(small_inputs(p, products, 0) && small_inputs(p, products, 1));
      products[at / 4][at % 4] = large;
      const int half = at % 4 / 2;
      EXPECT_FALSE(small_inputs(p, products, half)) << large << " at " << at;
      EXPECT_TRUE(small_inputs(p, products, 1 - half)) << large << " at " << at;
    }
  }
}

}  // namespace
}  // namespace tessera
