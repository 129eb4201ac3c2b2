// The kernels' online softmax, kernels/tessera/attention/softmax.cuh, by a warp on the host (tests/emulated_warp): each
// code path that a kernel uses, against softmax in float64.
#include "tessera/attention/softmax.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/half.hpp"

namespace tessera {
namespace {

constexpr int kRows = 16, kN = 4, kTile = kN * 8, kTiles = 36, kKeys = kTile * kTiles, kColumns = 8;
constexpr float kNatural = 0.26f, kLowest = std::numeric_limits<float>::lowest();
constexpr ScoreUnit kUnit{kNatural, kNatural*kLog2e},
    kAdded{1.0f, kLog2e};  // as kernels have them without and with a bias
constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

using Scores = std::vector<float>;  // [kRows, kKeys]
using Fragment = float[1][kN][4];

struct Outputs {
  std::vector<double> o = std::vector<double>(kRows * kColumns);
  std::vector<double> lse = std::vector<double>(kRows);  // both floats'
  int tiles_done_again = 0;
};

double value(int key, int column) { return std::sin(1.0 + key * 7 + column * 3); }

// A lane's two rows, and its first key of eight: tile/product.cuh.
struct Place {
  int lane;
  int row(int half) const { return lane / 4 + 8 * half; }
  int key(int n, int e) const { return n * 8 + lane % 4 * 2 + e % 2; }
};

void load(const Scores& scores, Place at, int tile, Fragment& s) {
  for (int n = 0; n < kN; ++n) {
    for (int e = 0; e < 4; ++e) s[0][n][e] = scores[at.row(e / 2) * kKeys + tile * kTile + at.key(n, e)];
  }
}

// The softmax of one tile: s becomes P, and o the accumulator of P V. Returns true if the tile was recomputed.
template <int kThreshold_log2>
struct Updating {
  template <class Reload>
  static bool step(OnlineSoftmax<1>& softmax, ScoreUnit unit, Fragment& s, float (&o)[1][1][4], const Reload&) {
    softmax.update(s, unit, o, kThreshold_log2);
    return false;
  }
};
using RunningMax = Updating<0>;

// As fwd_sm80 has it.
struct StaleMax {
  template <class Reload>
  static bool step(OnlineSoftmax<1>& softmax, ScoreUnit unit, Fragment& s, float (&o)[1][1][4], const Reload& reload) {
    const bool ready = softmax.ready;
    if (ready && softmax.try_stale_max(s, unit)) return false;
    if (ready) reload();
    softmax.update(s, unit, o, 0.0f);
    return ready;
  }
};

// As fwd_sm90 has it: the columns in two parts.
struct StaleMaxInParts {
  template <class Reload>
  static bool step(OnlineSoftmax<1>& softmax, ScoreUnit unit, Fragment& s, float (&o)[1][1][4], const Reload& reload) {
    const bool ready = softmax.ready;
    if (ready) {
      SumParts total[1];
      softmax.exponentiate_stale_max<0, kN / 2>(s, unit, total);
      softmax.exponentiate_stale_max<kN / 2, kN>(s, unit, total);
      if (softmax.accept(total)) return false;
      reload();
    }
    float alpha[1][2];
    const bool moves = softmax.update_max(s, unit, alpha, 0.0f);
    softmax.exponentiate(s, unit);
    if (moves) softmax.rescale(alpha, o);
    return ready;
  }
};

// As fwd_sm90 has it where the growth of the scores is foretold, here by numbers that have nothing to do with them: the
// max is raised by large ones.
struct RaisedMax {
  template <class Reload>
  static bool step(OnlineSoftmax<1>& softmax, ScoreUnit unit, Fragment& s, float (&o)[1][1][4], const Reload& reload) {
    const bool ready = softmax.ready;
    float alpha[1][2], before[2] = {softmax.max[0][0], softmax.max[0][1]};
    if (ready) {
      const float growths_log2[] = {0, 5, 2.5f, 40, 0.5f, 9, 1, 300};
      const float growth_log2 = growths_log2[static_cast<unsigned>(std::abs(softmax.sum[0][0]) * 8) % 8];
      const bool raises = __shfl_sync(0xffffffff, growth_log2, 0) > 4;
      for (int half = 0; half < 2; ++half) {
        const float by = __shfl_sync(0xffffffff, growth_log2, lane_id() / 4 * 4);  // one number for each row
        if (raises) softmax.max[0][half] += by;
        alpha[0][half] = std::exp2(raises ? -by : std::min(by, 8.0f));
      }
      SumParts total[1];
      softmax.exponentiate_stale_max<0, kN>(s, unit, total);
      if (raises ? softmax.accept_raised(total, alpha) : softmax.accept_grown(total, alpha)) {
        if (raises) softmax.rescale(alpha, o);
        return false;
      }
      reload();
      softmax.max[0][0] = before[0], softmax.max[0][1] = before[1];
    }
    const bool moves = softmax.update_max(s, unit, alpha, 0.0f);
    softmax.exponentiate(s, unit);
    if (moves) softmax.rescale(alpha, o);
    return ready;
  }
};

// The units as the host gives them to kernels.
ProblemParams units_of(ScoreUnit unit) {
  const double log2e = double{unit.log2} / unit.natural;
  ProblemParams p{};
  p.lse_log2e = static_cast<float>(log2e), p.lse_log2e_low = static_cast<float>(log2e - p.lse_log2e);
  p.lse_ln2 = static_cast<float>(1 / log2e), p.lse_ln2_low = static_cast<float>(1 / log2e - p.lse_ln2);
  return p;
}

float unrounded(float p) { return p; }
float bfloat16(float p) { return core::bfloat16_to_float(core::float_to_bfloat16(p)); }

template <class Way>
Outputs attend(const Scores& scores, ScoreUnit unit, float (*round_p)(float) = unrounded) {
  Outputs out;
  std::vector<float> p(kRows * kTile);
  emulated::Warp::run([&](int lane) {
    const Place at{lane};
    OnlineSoftmax<1> softmax;
    Fragment s;
    float o[1][1][4] = {};
    for (int tile = 0; tile < kTiles; ++tile) {
      load(scores, at, tile, s);
      const bool again = Way::step(softmax, unit, s, o, [&] { load(scores, at, tile, s); });
      for (int n = 0; n < kN; ++n) {
        for (int e = 0; e < 4; ++e) p[at.row(e / 2) * kTile + at.key(n, e)] = round_p(s[0][n][e]);
      }
      __any_sync(0xffffffff, false);  // P is complete
      for (int e = 0; e < 4; ++e) {
        for (int key = 0; key < kTile; ++key) {
          o[0][0][e] += p[at.row(e / 2) * kTile + key] * static_cast<float>(value(tile * kTile + key, at.key(0, e)));
        }
      }
      __any_sync(0xffffffff, false);  // and was read
      if (lane == 0) out.tiles_done_again += again;
    }
    softmax.finish();
    for (int e = 0; e < 4; ++e) {
      const float sum = softmax.sum[0][e / 2];
      out.o[at.row(e / 2) * kColumns + at.key(0, e)] = sum == 0.0f ? 0.0 : static_cast<double>(o[0][0][e]) / sum;
    }
    if (lane % 4 == 0) {
      for (int half = 0; half < 2; ++half) {
        const RowTotal total = softmax.total(0, half);
        const TwoFloats lse = total.lse(units_of(unit), ptx::lg2_approx_ftz(total.sum), true);
        out.lse[at.row(half)] = softmax.sum[0][half] == 0.0f ? -kInf : static_cast<double>(lse.high) + lse.low;
      }
    }
  });
  return out;
}

// By the definition, of scores rounded to float32.
Outputs exact(const Scores& scores, ScoreUnit unit) {
  Outputs out;
  for (int row = 0; row < kRows; ++row) {
    double most = -kInf, sum = 0;
    std::vector<double> s(kKeys);
    for (int key = 0; key < kKeys; ++key) {
      s[key] = scores[row * kKeys + key] * unit.natural;
      most = std::isnan(s[key]) || std::isnan(most) ? kNaN : std::max(most, s[key]);
    }
    const bool nothing = most == -kInf;
    for (int key = 0; key < kKeys; ++key) {
      const double p = nothing ? 0.0 : std::exp(s[key] - most);
      sum += p;
      for (int column = 0; column < kColumns; ++column) out.o[row * kColumns + column] += p * value(key, column);
    }
    for (int column = 0; column < kColumns; ++column) out.o[row * kColumns + column] /= nothing ? 1.0 : sum;
    out.lse[row] = most + std::log(sum);
  }
  return out;
}

struct Case {
  const char* name;
  float deviation, growth;  // of scores; from one key to the next
  float special;            // the score of one key in three of the rows
  int hidden_until;         // keys of row 3 that it does not see
  float tolerance;
  float base = 0;  // added to every score
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

const Case kCases[] = {
    {"normal", 4, 0, 0, 0, 1e-5f},
    {"even", 0, 0, 0, 0, 1e-5f},
    {"growing", 4, 3, 0, 0, 1e-4f},
    {"growing_by_thousands", 4, 3000, 0, 0, 2e-3f},
    {"falling", 4, -3, 0, 0, 1e-4f},
    {"falling_by_thousands", 4, -3000, 0, 0, 2e-3f},
    {"huge", 1e9f, 0, 0, 0, 1e-5f},
    {"one_key_outweighs_all", 4, 0, 200, 0, 1e-5f},
    {"a_huge_key", 4, 0, 1.4142136e30f, 0, 1e-5f},  // times kScale rounded up
    {"nan", 4, 0, kNaN, 0, 1e-5f},
    {"infinity", 4, 0, kInf, 0, 1e-5f},
    {"minus_infinity", 4, 0, -kInf, 0, 1e-5f},
    {"sees_late", 4, 0, 0, kTile * 3 + 5, 1e-5f},
    {"sees_nothing", 4, 0, 0, kKeys, 1e-5f},
    {"lowest", 4, 0, 0, 0, 1e-5f, kLowest},
    {"lowest_and_unseen", 4, 0, -kInf, kTile * 3 + 5, 1e-5f, kLowest},
    {"one_key_above_the_lowest", 4, 0, -2.6e38f, 0, 1e-5f, kLowest},
    {"a_key_among_the_lowest", 4, 0, 3, 0, 1e-5f, kLowest},
    {"largest", 4, 0, 0, 0, 1e-5f, 3.3e38f},
    {"a_key_of_the_largest", 4, 0, 3.3e38f, 0, 1e-5f},
    {"padding_of_1e9", 4, 0, 0, kTile + 3, 1e-5f, -1e9f},
    {"around_a_large_number", 0.01f, 0, 0, 0, 3e-3f, 3e4f},
};

Scores draw(const Case& c, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Scores scores(kRows * kKeys);
  for (int i = 0; i < kRows * kKeys; ++i) {
    scores[i] = c.deviation * normal(generator) + c.growth * static_cast<float>(i % kKeys) + c.base;
  }
  // A tile's rows follow different paths: one row of each, and of each column.
  const int at[][3] = {{5, 7, 11}, {12, 4, 2}, {9, 3, 29}};  // row, tile, key
  for (const auto& [row, tile, key] : at) {
    if (c.special != 0) scores[row * kKeys + tile * kTile + key] = c.special;
  }
  for (int key = 0; key < c.hidden_until; ++key) scores[3 * kKeys + key] = -kInf;
  return scores;
}

void expect_close(double got, double want, double tolerance, const std::string& what) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << what << " is " << got;
  } else if (std::isinf(want)) {
    EXPECT_EQ(got, want) << what;
  } else {
    EXPECT_NEAR(got, want, tolerance) << what;
  }
}

class CudaSoftmax : public testing::TestWithParam<Case> {
 protected:
  template <class Way>
  void check() {
    const unsigned seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Scores scores = draw(GetParam(), seed);
    for (const ScoreUnit unit : {kUnit, kAdded}) {
      SCOPED_TRACE("unit " + std::to_string(unit.natural));
      const Outputs got = attend<Way>(scores, unit), want = exact(scores, unit);
      for (int row = 0; row < kRows; ++row) {
        const double lse = want.lse[row];
        // A product that is not rounded differs from one that is, as those of huge scores are.
        const bool fused = unit.natural != 1.0f && std::abs(lse) * kLog2e < kHugeScore_log2;
        const double rounding = fused ? std::ldexp(std::abs(lse), -24) : 0.0;
        expect_close(got.lse[row], lse, 1e-5 + rounding, "lse of row " + std::to_string(row));
        for (int column = 0; column < kColumns; ++column) {
          const int at = row * kColumns + column;
          expect_close(got.o[at], want.o[at], GetParam().tolerance, "o[" + std::to_string(row) + "]");
        }
      }
    }
  }
};

TEST_P(CudaSoftmax, RunningMax) { check<RunningMax>(); }
TEST_P(CudaSoftmax, Updating) { check<Updating<8>>(); }
TEST_P(CudaSoftmax, StaleMax) { check<StaleMax>(); }
TEST_P(CudaSoftmax, StaleMaxInParts) { check<StaleMaxInParts>(); }
TEST_P(CudaSoftmax, RaisedMax) { check<RaisedMax>(); }

INSTANTIATE_TEST_SUITE_P(Scores, CudaSoftmax, testing::ValuesIn(kCases),
                         [](const auto& of) { return std::string(of.param.name); });

int tiles_done_again(const char* name) {
  for (const Case& c : kCases) {
    if (std::string(c.name) == name)
      return attend<StaleMaxInParts>(draw(c, std::random_device{}()), kUnit).tiles_done_again;
  }
  return -1;
}

TEST(CudaSoftmax, DoesTilesAgainWhereScoresPassTheBound) {
  EXPECT_EQ(tiles_done_again("even"), 0);
  EXPECT_EQ(tiles_done_again("falling"), 0);
  EXPECT_EQ(tiles_done_again("growing"), kTiles - 1);
  EXPECT_EQ(tiles_done_again("one_key_outweighs_all"), 3);
  EXPECT_EQ(tiles_done_again("nan"), 3);
}

// The squared error of O, P rounded to bfloat16, where each row has a key that outweighs all others by 2^7 to 2^13.
template <class Way>
double squared_error(unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> above_log2(7, 13);
  std::uniform_int_distribution<int> key(kTile, kKeys - 1);
  Scores scores = draw({"", 1, 0, 0, 0, 0}, seed);
  for (int row = 0; row < kRows; ++row) scores[row * kKeys + key(generator)] += above_log2(generator) / kUnit.log2 + 4;
  const Outputs got = attend<Way>(scores, kUnit, bfloat16), want = exact(scores, kUnit);
  double sum = 0;
  for (int i = 0; i < kRows * kColumns; ++i) sum += (got.o[i] - want.o[i]) * (got.o[i] - want.o[i]);
  return sum;
}

// By a running maximum that key's weight is 1. Against a stale max that is not given up it is rounded as any other, and
// is most of O's error.
TEST(CudaSoftmax, AKeyThatOutweighsOthersIsWeighedExactly) {
  double running = 0, stale = 0, in_parts = 0;
  for (unsigned seed = 0; seed < 24; ++seed) {
    running += squared_error<RunningMax>(seed);
    stale += squared_error<StaleMax>(seed);
    in_parts += squared_error<StaleMaxInParts>(seed);
  }
  EXPECT_LE(std::sqrt(stale / running), 1.10);
  EXPECT_LE(std::sqrt(in_parts / running), 1.10);
}

// Sinks above and below a row's scores, at any size of them.
TEST(CudaSoftmax, SinksJoinTheSum) {
  for (const float most : {0.0f, 3.0f, -700.0f, 3e4f, 1e9f, -1e30f, 3.2e38f, kLowest}) {
    for (const float above : {-1e38f, -1e9f, -20.0f, -1.0f, 0.0f, 2.0f, 100.0f, 1e9f}) {
      for (const ScoreUnit unit : {kUnit, kAdded}) {
        const float sum = 5.25f, sink = most * unit.natural + above;
        if (std::isinf(sink)) continue;
        const bool huge = is_huge(most * unit.log2);
        const ProblemParams p = units_of(unit);
        RowTotal row(huge ? most * unit.natural : most * unit.log2, sum, huge);
        const double max = huge ? row.max : row.max * (double{unit.natural} / unit.log2);
        const double with_sink = std::exp(std::min(sink - max, 700.0)) + sum;
        const float scale = row.join_sink(p, sink);
        SCOPED_TRACE(std::to_string(most) + ", sink " + std::to_string(sink));
        const TwoFloats lse = row.lse(p, ptx::lg2_approx_ftz(row.sum), true);
        const double want = sink - max > 600 ? sink - max : std::log(with_sink);  // greater than the maximum
        EXPECT_NEAR((static_cast<double>(lse.high) - max) + lse.low, want, 1e-5 + std::abs(want) * 1e-7);
        EXPECT_NEAR(scale * sum / row.sum, sink - max > 600 ? 0.0 : sum / with_sink, 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
