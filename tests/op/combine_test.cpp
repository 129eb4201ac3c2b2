// tessera_combine: partial results over disjoint keys merge into the whole.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "error_bound.hpp"
#include "execute.hpp"
#include "numbers.hpp"
#include "plain.hpp"

namespace tessera::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

tessera_status combine(const Tensor& o_parts, const Tensor& lse_parts, Tensor& o, Tensor& lse) {
  return tessera_combine(&o_parts.layout(), o_parts.data(), &lse_parts.layout(), lse_parts.data_as<float>(),
                         &o.layout(), o.data(), &lse.layout(), lse.data_as<float>());
}

class Split : public ::testing::TestWithParam<int64_t> {};

// Each part sees some of the keys; one of them sees none at all.
TEST_P(Split, PartsMergeIntoTheWhole) {
  const int64_t parts = GetParam();
  for (const Place& place : cpu_places()) {
    for (const char* text :
         {"dtype=f32 b=2 sq=37 sk=300 hq=4 hkv=2 d=48 dv=64", "dtype=f32 b=1 sq=1 sk=1000 hq=8 hkv=2 d=64 dv=64",
          "dtype=bf16 b=2 sq=20 sk=130 hq=2 hkv=2 d=64 dv=32", "dtype=f16 b=2 sq=5 sk=99 hq=2 hkv=1 d=32 dv=32"}) {
      const Inputs in = make_inputs(*parse_case(text, nullptr));
      const Case& c = in.c;
      Call oracle = make_oracle_call(in);
      ASSERT_TRUE(run(oracle, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
      const PlainResult plain = plain_attention(in, Precision::kSame);

      const auto dtype = static_cast<int32_t>(c.dtype);
      Tensor o_parts(dtype, {parts + 1, c.b, c.sq, c.hq, c.dv});
      Tensor lse_parts(TESSERA_FLOAT32, {parts + 1, c.b, c.hq, c.sq});
      const Call whole = make_call(in);
      for (int64_t n = 0; n < parts; ++n) {
        Call part = whole;
        const int64_t first = n * c.sk / parts;
        part.k = whole.k.slice(1, first, (n + 1) * c.sk / parts - first);
        part.v = whole.v.slice(1, first, (n + 1) * c.sk / parts - first);
        part.o = Tensor(dtype, {c.b, c.sq, c.hq, c.dv});
        part.lse = Tensor(TESSERA_FLOAT32, {c.b, c.hq, c.sq});
        part.describe();
        const RunResult result = run(part, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_TILED, .place = place});
        ASSERT_TRUE(result.ok()) << result.why();
        o_parts.at(n).store(part.o.load());
        lse_parts.at(n).store(part.lse.load());
      }
      // The last part saw nothing, and its o is what was in memory: NaN.
      lse_parts.at(parts).store(std::vector<double>(c.b * c.hq * c.sq, -kInfinity));

      Tensor o(dtype, {c.b, c.sq, c.hq, c.dv},
               {.order = {0, 2, 1, 3}, .gap = 3, .reversed_dim = -1, .repeated_dim = -1});
      Tensor lse(TESSERA_FLOAT32, {c.b, c.hq, c.sq});
      const tessera_status status = combine(o_parts, lse_parts, o, lse);
      ASSERT_EQ(status.code, TESSERA_OK) << status.message;
      EXPECT_TRUE(o.unharmed_outside() && lse.unharmed_outside());
      EXPECT_EQ(excess_error(o.load(), oracle.o.load(), plain.o, dtype), "") << "o: " << text << " in " << parts;
      EXPECT_EQ(excess_error(lse.load(), oracle.lse.load(), plain.lse, TESSERA_FLOAT32), "") << "lse: " << text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, Split, ::testing::Values(1, 2, 3, 8));

// Against the definition, in float64, for weights from equal to hopelessly apart.
TEST(Combine, IsTheWeightedSum) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  const int64_t parts = 4, b = 2, s = 3, h = 2, dv = 19;
  for (const int32_t dtype : {TESSERA_FLOAT32, TESSERA_FLOAT16, TESSERA_BFLOAT16}) {
    for (const double spread : {0.0, 1.0, 30.0, 1000.0}) {
      std::vector<double> o_values(parts * b * s * h * dv), lse_values(parts * b * h * s);
      for (double& value : o_values) value = round_to(dtype, normal(random));
      for (double& value : lse_values) value = round_to(TESSERA_FLOAT32, spread * normal(random));
      Tensor o_parts(dtype, {parts, b, s, h, dv}, {.order = {}, .gap = 2, .reversed_dim = -1, .repeated_dim = -1});
      Tensor lse_parts(TESSERA_FLOAT32, {parts, b, h, s});
      o_parts.store(o_values);
      lse_parts.store(lse_values);
      Tensor o(dtype, {b, s, h, dv}), lse(TESSERA_FLOAT32, {b, h, s});
      const tessera_status status = combine(o_parts, lse_parts, o, lse);
      ASSERT_EQ(status.code, TESSERA_OK) << status.message;
      const std::vector<double> o_got = o.load(), lse_got = lse.load();
      for (int64_t row = 0; row < b * s * h; ++row) {
        const int64_t batch = row / (s * h), i = row / h % s, head = row % h;
        const auto part_lse = [&](int64_t n) { return lse_values[((n * b + batch) * h + head) * s + i]; };
        double m = -kInfinity, sum = 0;
        for (int64_t n = 0; n < parts; ++n) m = std::max(m, part_lse(n));
        for (int64_t n = 0; n < parts; ++n) sum += std::exp(part_lse(n) - m);
        const double lse_expected = m + std::log(sum);
        const double lse_ulp = epsilon(TESSERA_FLOAT32) * std::max(1.0, std::fabs(lse_expected));
        EXPECT_NEAR(lse_got[(batch * h + head) * s + i], lse_expected, 2 * lse_ulp);
        for (int64_t x = 0; x < dv; ++x) {
          double expected = 0, magnitude = 0;
          for (int64_t n = 0; n < parts; ++n) {
            const double term = std::exp(part_lse(n) - lse_expected) * o_values[(n * b * s * h + row) * dv + x];
            expected += term;
            magnitude += std::fabs(term) * (1 + std::fabs(part_lse(n)));
          }
          EXPECT_NEAR(o_got[row * dv + x], expected,
                      epsilon(dtype) * std::fabs(expected) + 2 * epsilon(TESSERA_FLOAT32) * magnitude);
        }
      }
    }
  }
}

TEST(Combine, PartsThatSawNothingDoNotCount) {
  const int64_t parts = 3, dv = 8;
  Tensor o_parts(TESSERA_FLOAT32, {parts, 1, 1, 1, dv}), lse_parts(TESSERA_FLOAT32, {parts, 1, 1, 1});
  Tensor o(TESSERA_FLOAT32, {1, 1, 1, dv}), lse(TESSERA_FLOAT32, {1, 1, 1});
  const std::vector<double> values = {1, -2, 3, -4, 5, -6, 7, -8};
  o_parts.at(1).store(values);  // 0 and 2 stay NaN
  lse_parts.store({-kInfinity, 2.5, -kInfinity});
  ASSERT_EQ(combine(o_parts, lse_parts, o, lse).code, TESSERA_OK);
  EXPECT_EQ(o.load(), values);
  EXPECT_EQ(lse.load(), std::vector<double>{2.5});

  lse_parts.store({-kInfinity, -kInfinity, -kInfinity});
  o.poison();
  ASSERT_EQ(combine(o_parts, lse_parts, o, lse).code, TESSERA_OK);
  EXPECT_EQ(o.load(), std::vector<double>(dv, 0.0));
  EXPECT_EQ(lse.load(), std::vector<double>{-kInfinity});
}

TEST(Combine, RefusesShapesThatDoNotMatch) {
  const Tensor o_parts(TESSERA_FLOAT32, {2, 1, 3, 1, 8}), lse_parts(TESSERA_FLOAT32, {2, 1, 1, 4});
  Tensor o(TESSERA_FLOAT32, {1, 3, 1, 8}), lse(TESSERA_FLOAT32, {1, 1, 3});
  const tessera_status status = combine(o_parts, lse_parts, o, lse);
  EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(status.message).find("lse_parts"), 0u) << status.message;
  EXPECT_TRUE(o.load()[0] != o.load()[0]) << "outputs are untouched";
}

}  // namespace
}  // namespace tessera::testing
