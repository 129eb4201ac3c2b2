// The reference kernel against results in closed form. With V the identity, o is the matrix P itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "core/philox.hpp"
#include "support.hpp"

namespace tessera::test {
namespace {

using Matrix = std::vector<std::vector<double>>;

// One head: q [1, Sq, 1, D] zero, so that every visible key has the same score; v the identity.
struct Probe : Attention {
  Probe(std::int64_t sq, std::int64_t sk) {
    problem.q = layout(float64, {1, sq, 1, 2});
    problem.k = layout(float64, {1, sk, 1, 2});
    problem.v = layout(float64, {1, sk, 1, sk});
    problem.o = layout(float64, {1, sq, 1, sk});
    problem.lse = lse_layout(problem);
  }
  Matrix run() {
    std::mt19937_64 random(3);
    std::vector<double> given_bias = bias;
    std::vector<float> given_slopes = alibi_slopes, given_sink = sink;
    std::vector<std::uint8_t> given_mask = mask, given_blocks = block_mask;
    allocate(random);
    bias = given_bias, alibi_slopes = given_slopes, sink = given_sink, mask = given_mask, block_mask = given_blocks;
    std::fill(q.begin(), q.end(), 0.0);
    const std::int64_t sq = problem.q.shape[1], sk = problem.k.shape[1];
    for (std::int64_t j = 0; j < sk; ++j) {
      for (std::int64_t d = 0; d < sk; ++d) v[static_cast<std::size_t>(j * sk + d)] = j == d;
    }
    forward();
    Matrix p;
    for (std::int64_t i = 0; i < sq; ++i) p.emplace_back(o.begin() + i * sk, o.begin() + (i + 1) * sk);
    return p;
  }
};

// Rows of 0 and 1 become rows that sum to 1, or stay 0.
Matrix uniform(Matrix visible) {
  for (auto& row : visible) {
    double count = 0;
    for (const double x : row) count += x;
    for (double& x : row) x = count > 0 ? x / count : 0;
  }
  return visible;
}

void expect_matrix(const Matrix& actual, const Matrix& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].size(), expected[i].size());
    for (std::size_t j = 0; j < actual[i].size(); ++j) {
      EXPECT_NEAR(actual[i][j], expected[i][j], 4 * std::numeric_limits<double>::epsilon()) << i << ", " << j;
    }
  }
}

TEST(OracleMask, Full) {
  Probe probe(2, 3);
  expect_matrix(probe.run(), uniform({{1, 1, 1}, {1, 1, 1}}));
  EXPECT_EQ(probe.lse, (std::vector<float>(2, static_cast<float>(std::log(3.0)))));
}

TEST(OracleMask, CausalBottomRight) {
  Probe wide(2, 5);
  wide.problem.causal = true;
  expect_matrix(wide.run(), uniform({{1, 1, 1, 1, 0}, {1, 1, 1, 1, 1}}));
  Probe tall(5, 2);
  tall.problem.causal = true;
  expect_matrix(tall.run(), uniform({{0, 0}, {0, 0}, {0, 0}, {1, 0}, {1, 1}}));
  EXPECT_EQ(tall.lse[0], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(tall.lse[3], 0);
}

TEST(OracleMask, CausalTopLeft) {
  Probe wide(2, 4);
  wide.problem.causal = true;
  wide.problem.alignment = TESSERA_TOP_LEFT;
  expect_matrix(wide.run(), uniform({{1, 0, 0, 0}, {1, 1, 0, 0}}));
  Probe tall(3, 2);
  tall.problem.causal = true;
  tall.problem.alignment = TESSERA_TOP_LEFT;
  expect_matrix(tall.run(), uniform({{1, 0}, {1, 1}, {1, 1}}));
}

TEST(OracleMask, Window) {
  Probe probe(3, 5);  // the diagonal is key i + 2
  probe.problem.set_window(1, 1);
  expect_matrix(probe.run(), uniform({{0, 1, 1, 1, 0}, {0, 0, 1, 1, 1}, {0, 0, 0, 1, 1}}));
  probe.problem.causal = true;
  expect_matrix(probe.run(), uniform({{0, 1, 1, 0, 0}, {0, 0, 1, 1, 0}, {0, 0, 0, 1, 1}}));
  probe.problem.causal = false;
  probe.problem.alignment = TESSERA_TOP_LEFT;
  expect_matrix(probe.run(), uniform({{1, 1, 0, 0, 0}, {1, 1, 1, 0, 0}, {0, 1, 1, 1, 0}}));
  probe.problem.set_window(-1, 0);
  expect_matrix(probe.run(), uniform({{1, 0, 0, 0, 0}, {1, 1, 0, 0, 0}, {1, 1, 1, 0, 0}}));
  probe.problem.set_window(0, -1);
  expect_matrix(probe.run(), uniform({{1, 1, 1, 1, 1}, {0, 1, 1, 1, 1}, {0, 0, 1, 1, 1}}));
  probe.problem.set_window(std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::max());
  expect_matrix(probe.run(), uniform(Matrix(3, std::vector<double>(5, 1))));
}

TEST(OracleMask, MaskAndBlockMaskCompose) {
  Probe probe(3, 4);
  probe.problem.mask = layout(boolean, {1, 1, 3, 4});
  probe.mask = {1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1};
  expect_matrix(probe.run(), uniform({{1, 0, 1, 1}, {0, 0, 0, 0}, {1, 1, 1, 1}}));
  probe.problem.mask_block_q = 2;
  probe.problem.mask_block_k = 3;
  probe.problem.block_mask = layout(boolean, {1, 1, 2, 2});
  probe.block_mask = {1, 0, 0, 1};
  expect_matrix(probe.run(), uniform({{1, 0, 1, 0}, {0, 0, 0, 0}, {0, 0, 0, 1}}));
}

TEST(OracleMask, KeyLengthMovesTheDiagonal) {
  Probe probe(2, 4);
  probe.problem.seqused_k = layout(int32, {1});
  probe.seqused_k = {3};
  probe.problem.causal = true;
  expect_matrix(probe.run(), uniform({{1, 1, 0, 0}, {1, 1, 1, 0}}));
  probe.seqused_k = {0};
  expect_matrix(probe.run(), Matrix(2, std::vector<double>(4, 0)));
}

TEST(OracleScore, AlibiFallsOffFromTheBottomRightDiagonal) {
  for (const int alignment : {TESSERA_BOTTOM_RIGHT, TESSERA_TOP_LEFT}) {
    Probe probe(2, 4);
    probe.problem.alignment = alignment;
    probe.problem.alibi_slopes = layout(float32, {1});
    probe.alibi_slopes = {0.5f};
    const Matrix p = probe.run();
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 4; ++j) {
        EXPECT_NEAR(p[i][j] / p[i][i + 2], std::exp(-0.5 * std::abs(i + 2 - j)), 1e-15);
      }
    }
  }
}

TEST(OracleScore, BiasIsAddedAndMinusInfinityHides) {
  Probe probe(1, 3);
  probe.problem.bias = layout(float64, {1, 1, 1, 3});
  probe.bias = {std::log(2.0), -kInfinity, 0};
  expect_matrix(probe.run(), {{2.0 / 3, 0, 1.0 / 3}});
  probe.bias = {-kInfinity, -kInfinity, -kInfinity};
  expect_matrix(probe.run(), {{0, 0, 0}});
  EXPECT_EQ(probe.lse[0], -std::numeric_limits<float>::infinity());
}

TEST(OracleScore, SinkJoinsTheDenominatorOnly) {
  Probe probe(2, 3);
  probe.problem.causal = true;
  probe.problem.set_window(-1, -1);
  probe.problem.sink = layout(float32, {1});
  probe.sink = {0};
  expect_matrix(probe.run(), {{1.0 / 3, 1.0 / 3, 0}, {0.25, 0.25, 0.25}});
  EXPECT_EQ(probe.lse[1], static_cast<float>(std::log(4.0)));
}

// The sink belongs to rows that see something: an empty row stays 0 and -inf.
TEST(OracleScore, SinkLeavesEmptyRowsEmpty) {
  Probe probe(2, 1);
  probe.problem.causal = true;
  probe.problem.sink = layout(float32, {1});
  probe.sink = {1};
  expect_matrix(probe.run(), {{0}, {1 / (1 + std::exp(1.0))}});
  EXPECT_EQ(probe.lse[0], -std::numeric_limits<float>::infinity());
}

TEST(OracleScore, ScaleAndSoftcap) {
  Attention a;
  Problem& p = a.problem;
  p.q = p.k = layout(float64, {1, 2, 1, 4});
  p.v = p.o = layout(float64, {1, 2, 1, 1});
  std::mt19937_64 random(1);
  a.allocate(random);
  a.v = {1, 0};  // o = P_0 = 1 / (1 + exp(s_1 - s_0))
  const auto expect = [&](double scale, double softcap) {
    a.forward();
    for (int i = 0; i < 2; ++i) {
      double s[2] = {};
      for (int j = 0; j < 2; ++j) {
        for (int d = 0; d < 4; ++d) s[j] += scale * a.q[i * 4 + d] * a.k[j * 4 + d];
        if (softcap > 0) s[j] = softcap * std::tanh(s[j] / softcap);
      }
      EXPECT_NEAR(a.o[i], 1 / (1 + std::exp(s[1] - s[0])), 1e-15);
    }
  };
  expect(0.5, 0);
  p.set_scale(-3);
  expect(-3, 0);
  p.softcap = 2;
  expect(-3, 2);
}

TEST(OracleDropout, KeepsWhatPhiloxKeepsAndLeavesLse) {
  Probe probe(6, 40);
  probe.problem.set_dropout(0.25, 11, 5);
  const Matrix p = probe.run();
  const core::Dropout dropout{11, 5, core::dropout_threshold(0.25)};
  Matrix expected(6, std::vector<double>(40));
  for (std::uint32_t i = 0; i < 6; ++i) {
    for (std::uint32_t j = 0; j < 40; ++j) expected[i][j] = dropout.keeps(0, i, j) ? 1 / 0.75 / 40 : 0;
    EXPECT_EQ(probe.lse[i], static_cast<float>(std::log(40.0)));
  }
  expect_matrix(p, expected);
}

TEST(OracleHeads, QueryHeadsShareTheirKeyHead) {
  Attention a;
  a.problem.q = layout(float64, {1, 1, 6, 2});
  a.problem.k = layout(float64, {1, 1, 2, 2});
  a.problem.v = layout(float64, {1, 1, 2, 1});
  a.problem.o = layout(float64, {1, 1, 6, 1});
  std::mt19937_64 random(1);
  a.allocate(random);
  a.v = {10, 20};
  a.forward();
  EXPECT_EQ(a.o, (std::vector<double>{10, 10, 10, 20, 20, 20}));
}

// ---- one computation in several forms -------------------------------------------------------------------------------

TEST(OracleForms, PackedAndPagedAreTheSameSequences) {
  constexpr std::int64_t kB = 2, kHq = 4, kHkv = 2, kD = 3, kPageSize = 2, kPages = 6;
  const std::vector<std::int32_t> lengths_q = {3, 2}, lengths_k = {5, 4};
  std::mt19937_64 random(9);
  Attention packed;
  packed.problem.q = packed.problem.o = layout(float64, {5, kHq, kD});
  packed.problem.k = packed.problem.v = layout(float64, {9, kHkv, kD});
  packed.problem.cu_seqlens_q = packed.problem.cu_seqlens_k = layout(int32, {kB + 1});
  packed.problem.lse = lse_layout(packed.problem);
  packed.problem.causal = true;
  packed.cu_seqlens_q = {0, 3, 5};
  packed.cu_seqlens_k = {0, 5, 9};
  packed.allocate(random);
  packed.forward();

  Attention paged;
  paged.problem = packed.problem;
  paged.problem.cu_seqlens_k = {};
  paged.problem.k = paged.problem.v = layout(float64, {kPages, kPageSize, kHkv, kD});
  paged.problem.page_table = layout(int32, {kB, 3});
  paged.problem.seqused_k = layout(int32, {kB});
  paged.cu_seqlens_q = packed.cu_seqlens_q;
  paged.seqused_k = lengths_k;
  paged.page_table = {4, 0, 2, 5, 1, 999};  // the last one is not in use
  paged.allocate(random);
  paged.q = packed.q;
  std::fill(paged.k.begin(), paged.k.end(), kNaN);
  std::fill(paged.v.begin(), paged.v.end(), kNaN);
  for (std::int64_t b = 0; b < kB; ++b) {
    for (std::int64_t j = 0; j < lengths_k[b]; ++j) {
      const std::int64_t page = paged.page_table[b * 3 + j / kPageSize];
      for (std::int64_t x = 0; x < kHkv * kD; ++x) {
        const std::int64_t to = (page * kPageSize + j % kPageSize) * kHkv * kD + x;
        const std::int64_t from = (packed.cu_seqlens_k[b] + j) * kHkv * kD + x;
        paged.k[to] = packed.k[from];
        paged.v[to] = packed.v[from];
      }
    }
  }
  paged.forward();
  EXPECT_EQ(paged.o, packed.o);
  EXPECT_EQ(paged.lse, packed.lse);

  for (std::int64_t b = 0; b < kB; ++b) {
    Attention one;
    const std::int64_t sq = lengths_q[b], sk = lengths_k[b];
    one.problem.q = one.problem.o = layout(float64, {1, sq, kHq, kD});
    one.problem.k = one.problem.v = layout(float64, {1, sk, kHkv, kD});
    one.problem.causal = true;
    one.allocate(random);
    const auto part = [](const std::vector<double>& all, std::int64_t begin, std::int64_t rows, std::int64_t width) {
      return std::vector<double>(all.begin() + begin * width, all.begin() + (begin + rows) * width);
    };
    one.q = part(packed.q, packed.cu_seqlens_q[b], sq, kHq * kD);
    one.k = part(packed.k, packed.cu_seqlens_k[b], sk, kHkv * kD);
    one.v = part(packed.v, packed.cu_seqlens_k[b], sk, kHkv * kD);
    one.forward();
    EXPECT_EQ(one.o, part(packed.o, packed.cu_seqlens_q[b], sq, kHq * kD)) << b;
  }
}

TEST(OracleForms, StridesDoNotMatter) {
  std::mt19937_64 random(2);
  Attention a;
  a.problem = dense_problem(float64);
  a.problem.causal = true;
  a.allocate(random);
  a.forward();
  Attention b;
  b.problem = a.problem;
  b.problem.q = layout(float64, {2, 16, 4, 8}, {1000, 9, 200, 1});
  b.problem.o = permute(layout(float64, {4, 2, 16, 6}), {1, 2, 0, 3});
  b.allocate(random);
  b.k = a.k, b.v = a.v;
  std::fill(b.q.begin(), b.q.end(), kNaN);
  const TensorView<double> from(a.q.data(), a.problem.q), to(b.q.data(), b.problem.q);
  for (int s = 0; s < 2; ++s) {
    for (int i = 0; i < 16; ++i) {
      for (int h = 0; h < 4; ++h) {
        for (int d = 0; d < 8; ++d) to(s, i, h, d) = from(s, i, h, d);
      }
    }
  }
  b.forward();
  const TensorView<double> oa(a.o.data(), a.problem.o), ob(b.o.data(), b.problem.o);
  for (int s = 0; s < 2; ++s) {
    for (int i = 0; i < 16; ++i) {
      for (int h = 0; h < 4; ++h) {
        for (int d = 0; d < 6; ++d) ASSERT_EQ(oa(s, i, h, d), ob(s, i, h, d));
      }
    }
  }
}

// Data past a sequence's end, or masked, never affect a result; their gradient is 0.
TEST(OraclePadding, NeverReachesAResult) {
  for (const double poison : {kNaN, kInfinity}) {
    std::mt19937_64 random(4);
    Attention a;
    a.problem = gradient_of(dense_problem(float64));
    a.problem.seqused_k = layout(int32, {2});
    a.seqused_k = {20, 9};
    a.allocate(random);
    for (int b = 0; b < 2; ++b) {
      for (std::int64_t j = a.seqused_k[b]; j < 24; ++j) {
        std::fill_n(a.k.begin() + (b * 24 + j) * 16, 16, poison);
        std::fill_n(a.v.begin() + (b * 24 + j) * 12, 12, poison);
      }
    }
    a.forward();
    a.backward();
    for (const auto* result : {&a.o, &a.d_q, &a.d_k, &a.d_v}) {
      for (const double x : *result) ASSERT_TRUE(std::isfinite(x));
    }
    for (int b = 0; b < 2; ++b) {
      for (std::int64_t j = a.seqused_k[b]; j < 24; ++j) {
        for (int x = 0; x < 16; ++x) ASSERT_EQ(a.d_k[(b * 24 + j) * 16 + x], 0);
        for (int x = 0; x < 12; ++x) ASSERT_EQ(a.d_v[(b * 24 + j) * 12 + x], 0);
      }
    }
  }
}

TEST(OracleEmpty, NoQueriesOrNoKeys) {
  std::mt19937_64 random(4);
  Attention no_keys;
  no_keys.problem = dense_problem(float64);
  no_keys.problem.k = layout(float64, {2, 0, 2, 8});
  no_keys.problem.v = layout(float64, {2, 0, 2, 6});
  no_keys.problem = gradient_of(no_keys.problem);
  no_keys.allocate(random);
  no_keys.forward();
  no_keys.backward();
  for (const double x : no_keys.o) EXPECT_EQ(x, 0);
  for (const float x : no_keys.lse) EXPECT_EQ(x, -std::numeric_limits<float>::infinity());
  for (const double x : no_keys.d_q) EXPECT_EQ(x, 0);

  Attention no_queries;
  no_queries.problem = dense_problem(float64);
  no_queries.problem.q = layout(float64, {2, 0, 4, 8});
  no_queries.problem.o = layout(float64, {2, 0, 4, 6});
  no_queries.problem = gradient_of(no_queries.problem);
  no_queries.allocate(random);
  no_queries.forward();
  no_queries.backward();
  for (const double x : no_queries.d_k) EXPECT_EQ(x, 0);
  for (const double x : no_queries.d_v) EXPECT_EQ(x, 0);
}

// Results in a shorter format are the float64 ones rounded once.
TEST(OracleDtypes, RoundsOnlyWhatItStores) {
  std::mt19937_64 random(6);
  std::normal_distribution<float> normal;
  Problem problem = dense_problem(float32);
  std::vector<float> q(span_elements(problem.q)), k(span_elements(problem.k)), v(span_elements(problem.v)),
      o(span_elements(problem.o));
  for (auto* data : {&q, &k, &v}) {
    for (float& x : *data) x = normal(random);
  }
  const Plan plan = tessera::plan(problem, reference_device());
  std::vector<std::byte> workspace(plan.workspace_bytes);
  forward(plan, {.q = q.data(), .k = k.data(), .v = v.data(), .o = o.data()}, workspace);
  Attention wide;
  wide.problem = dense_problem(float64);
  wide.allocate(random);
  wide.q.assign(q.begin(), q.end());
  wide.k.assign(k.begin(), k.end());
  wide.v.assign(v.begin(), v.end());
  wide.forward();
  for (std::size_t n = 0; n < o.size(); ++n) ASSERT_EQ(o[n], static_cast<float>(wide.o[n]));
}

// ---- scores of any size ---------------------------------------------------------------------------------------------

// Keys that differ little from a long vector, of integers: scores of 2^22 with parts of 2^-58, whose differences are
// exact in 128 bits. Weights, sums and averages of them in long double.
struct SharedScores : Attention {
  static constexpr std::int64_t kSq = 3, kSk = 40, kD = 2, kDv = 3;
  using Row = std::array<std::int64_t, kD>;
  std::vector<Row> queries, keys;
  std::vector<std::vector<long double>> weights;  // [Sq][Sk]
  std::vector<long double> lse_above;             // the LSE less the score of key 0

  SharedScores() {
    problem.q = layout(float64, {1, kSq, 1, kD});
    problem.k = layout(float64, {1, kSk, 1, kD});
    problem.v = layout(float64, {1, kSk, 1, kDv});
    problem.o = layout(float64, {1, kSq, 1, kDv});
    problem = gradient_of(problem);
    problem.lse_low = problem.lse;
    problem.set_scale(0x1p-58);
    std::mt19937_64 random(5);
    allocate(random);
    const auto integer = [&](int bits) {
      return static_cast<std::int64_t>(random() >> (63 - bits)) - (std::int64_t{1} << bits);
    };
    queries.resize(kSq), keys.resize(kSk);
    const Row base = {integer(40), integer(40)};
    for (Row& row : queries) row = {integer(40), integer(40)};
    for (Row& row : keys) row = {base[0] + integer(19), base[1] + integer(19)};
    for (std::size_t n = 0; n < q.size(); ++n) q[n] = static_cast<double>(queries[n / kD][n % kD]);
    for (std::size_t n = 0; n < k.size(); ++n) k[n] = static_cast<double>(keys[n / kD][n % kD]);
    for (const Row& query : queries) {
      std::vector<long double> row;
      long double sum = 0;
      for (const Row& key : keys) {
        __extension__ __int128 difference = 0;
        for (std::size_t d = 0; d < kD; ++d) {
          difference += static_cast<__int128>(query[d]) * (key[d] - keys[0][d]);
        }
        row.push_back(std::exp(static_cast<long double>(difference) * 0x1p-58L));
        sum += row.back();
      }
      for (long double& weight : row) weight /= sum;
      weights.push_back(row);
      lse_above.push_back(std::log(sum));
    }
  }
};

TEST(Oracle, IsRightToFourteenDigitsWhereARowsScoresShareALargeNumber) {
  SharedScores a;
  a.forward();
  a.backward();
  constexpr long double kDigits = 1e-14L;
  const auto at = [](auto row, auto width, auto column) { return static_cast<std::size_t>(row * width + column); };
  long double d_v[SharedScores::kSk][SharedScores::kDv] = {};
  for (std::int64_t i = 0; i < a.kSq; ++i) {
    long double smallest = 1;
    for (const long double weight : a.weights[i]) smallest = std::min(smallest, weight);
    EXPECT_LT(smallest, 0.02L) << "the weights differ";
    for (std::int64_t d = 0; d < a.kDv; ++d) {
      long double o = 0, magnitude = 0;
      for (std::int64_t j = 0; j < a.kSk; ++j) {
        const long double term = a.weights[i][j] * a.v[at(j, a.kDv, d)];
        o += term, magnitude += std::fabs(term);
        d_v[j][d] += a.weights[i][j] * a.d_o[at(i, a.kDv, d)];
      }
      EXPECT_LT(std::fabs(a.o[at(i, a.kDv, d)] - o), kDigits * magnitude);
    }
    __extension__ __int128 score = 0;
    for (std::size_t d = 0; d < a.kD; ++d) score += static_cast<__int128>(a.queries[i][d]) * a.keys[0][d];
    const long double lse = static_cast<long double>(a.lse[i]) + static_cast<long double>(a.lse_low[i]);
    const auto high = static_cast<__int128>(static_cast<long double>(a.lse[i]) * 0x1p58L);  // exact
    const long double rest = static_cast<long double>(score - high) * 0x1p-58L + a.lse_above[i];
    EXPECT_GT(std::fabs(lse), 1e5L);
    EXPECT_NEAR(a.lse_low[i], static_cast<double>(rest), 1e-7) << "of " << a.lse[i];
  }
  for (std::int64_t j = 0; j < a.kSk; ++j) {
    for (std::int64_t d = 0; d < a.kDv; ++d) {
      EXPECT_LT(std::fabs(a.d_v[at(j, a.kDv, d)] - d_v[j][d]), kDigits * 4);
    }
  }
}

TEST(Oracle, AveragesWhatScoresOfAnyFiniteSizeShare) {
  for (const double c : {1e3, 1e6, 1e9, 1e15, 1e30, 1e100, 1e153}) {
    Attention a;
    a.problem.q = layout(float64, {1, 5, 1, 8});
    a.problem.k = a.problem.v = layout(float64, {1, 50, 1, 8});
    a.problem.o = a.problem.q;
    a.problem.bias = layout(float64, {1, 1, 5, 50});
    a.problem = gradient_of(a.problem);
    std::mt19937_64 random(1);
    a.allocate(random);
    std::ranges::fill(a.q, c), std::ranges::fill(a.k, c);
    for (std::size_t n = 0; n < a.bias.size(); ++n) {
      const double rows[] = {0, -c, -std::numeric_limits<double>::max(), std::numeric_limits<double>::max() / 2, 0};
      a.bias[n] = rows[n / 50];
      if (n / 50 == 4 && n % 2 == 1) a.bias[n] = -std::numeric_limits<double>::max();  // none of them counts
    }
    a.forward();
    a.backward();
    for (std::int64_t i = 0; i < 5; ++i) {
      for (std::int64_t d = 0; d < 8; ++d) {
        long double mean = 0;
        const std::int64_t step = i == 4 ? 2 : 1;
        for (std::int64_t j = 0; j < 50; j += step) mean += a.v[static_cast<std::size_t>(j * 8 + d)];
        EXPECT_NEAR(a.o[static_cast<std::size_t>(i * 8 + d)], static_cast<double>(mean * step / 50), 1e-14) << c;
      }
    }
    for (std::size_t n = 0; n < a.d_v.size(); ++n) {
      long double sum = n / 8 % 2 == 0 ? a.d_o[4 * 8 + n % 8] / 25 : 0;
      for (std::size_t i = 0; i < 4; ++i) sum += a.d_o[i * 8 + n % 8] / 50;
      EXPECT_NEAR(a.d_v[n], static_cast<double>(sum), 1e-14) << c;
    }
  }
}

}  // namespace
}  // namespace tessera::test
