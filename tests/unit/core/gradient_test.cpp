// The oracle's gradients against central differences of its own forward pass, every input, many combinations.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

struct Options {
  int form = 0;  // 0 dense, 1 packed, 2 packed queries over dense keys
  int heads_q = 2, heads_kv = 2;
  bool causal = false, top_left = false;
  int window_left = -1, window_right = -1;
  double softcap = 0;
  int bias = 0;   // 0 none, else bit 1: per sequence, bit 2: per head, bit 4: per query, each else broadcast
  int alibi = 0;  // 1: per head, 2: per sequence and head
  bool mask = false, block_mask = false, sink = false, d_lse = false, key_lengths = false;
  double dropout = 0;
};

std::string name_of(const Options& c) {
  static constexpr const char* kForms[] = {"dense", "packed", "packed_q"};
  std::string name =
      kForms[c.form] + std::string("_h") + std::to_string(c.heads_q) + "over" + std::to_string(c.heads_kv);
  const auto add = [&name](bool given, const std::string& word) { name += given ? "_" + word : ""; };
  add(c.causal, "causal");
  add(c.top_left, "topleft");
  add(c.window_left >= 0, "left" + std::to_string(c.window_left));
  add(c.window_right >= 0, "right" + std::to_string(c.window_right));
  add(c.softcap > 0, "softcap");
  add(c.bias > 0, "bias" + std::to_string(c.bias));
  add(c.alibi > 0, "alibi" + std::to_string(c.alibi));
  add(c.mask, "mask");
  add(c.block_mask, "blockmask");
  add(c.sink, "sink");
  add(c.d_lse, "dlse");
  add(c.key_lengths, "keylengths");
  add(c.dropout > 0, "dropout");
  return name;
}
void PrintTo(const Options& c, std::ostream* out) { *out << name_of(c); }

std::vector<Options> cases() {
  std::vector<Options> all = {
      {},
      {.heads_q = 4, .heads_kv = 2},
      {.heads_q = 3, .heads_kv = 1},
      {.causal = true},
      {.causal = true, .top_left = true},
      {.window_left = 1, .window_right = 2},
      {.top_left = true, .window_left = 0, .window_right = 0},
      {.softcap = 1.5},
      {.bias = 8},
      {.bias = 15},
      {.alibi = 1},
      {.alibi = 2},
      {.mask = true},
      {.block_mask = true},
      {.sink = true},
      {.d_lse = true},
      {.sink = true, .d_lse = true},
      {.key_lengths = true},
      {.dropout = 0.25},
      {.form = 1},
      {.form = 2},
  };
  std::mt19937_64 random(20220527);
  const auto chance = [&random] { return random() % 2 == 0; };
  for (int n = 0; n < 60; ++n) {
    static constexpr int kHeads[][2] = {{2, 2}, {4, 2}, {2, 1}};
    const int* heads = kHeads[random() % 3];
    all.push_back({.form = static_cast<int>(random() % 3),
                   .heads_q = heads[0],
                   .heads_kv = heads[1],
                   .causal = chance(),
                   .top_left = chance(),
                   .window_left = static_cast<int>(random() % 8) - 4 < 0 ? -1 : static_cast<int>(random() % 5),
                   .window_right = static_cast<int>(random() % 8) - 4 < 0 ? -1 : static_cast<int>(random() % 5),
                   .softcap = chance() ? 0 : 2.0,
                   .bias = chance() ? 0 : 8 + static_cast<int>(random() % 8),
                   .alibi = static_cast<int>(random() % 3),
                   .mask = chance(),
                   .block_mask = chance(),
                   .sink = chance(),
                   .d_lse = chance(),
                   .key_lengths = chance(),
                   .dropout = chance() ? 0 : 0.25});
  }
  return all;
}

Attention make(const Options& c) {
  constexpr std::int64_t kB = 2, kSq = 4, kSk = 6, kTq = 7, kTk = 9, kD = 3, kDv = 2;
  std::mt19937_64 random(1);
  Attention a;
  Problem& p = a.problem;
  const std::int64_t hq = c.heads_q, hkv = c.heads_kv;
  const bool q_packed = c.form != 0, k_packed = c.form == 1;
  p.q = q_packed ? layout(float64, {kTq, hq, kD}) : layout(float64, {kB, kSq, hq, kD});
  p.o = q_packed ? layout(float64, {kTq, hq, kDv}) : layout(float64, {kB, kSq, hq, kDv});
  p.k = k_packed ? layout(float64, {kTk, hkv, kD}) : layout(float64, {kB, kSk, hkv, kD});
  p.v = k_packed ? layout(float64, {kTk, hkv, kDv}) : layout(float64, {kB, kSk, hkv, kDv});
  if (q_packed) {
    p.cu_seqlens_q = layout(int32, {kB + 1});
    p.max_seqlen_q = kSq;
    a.cu_seqlens_q = {0, 4, 6};  // one row past the last sequence
  }
  if (k_packed) {
    p.cu_seqlens_k = layout(int32, {kB + 1});
    p.max_seqlen_k = kSk;
    a.cu_seqlens_k = {0, 3, 9};
  }
  if (c.key_lengths) {
    p.seqused_k = layout(int32, {kB});
    a.seqused_k = {2, 5};
  }
  const auto scores = [&](DType dtype, int axes) {
    return layout(dtype, {axes & 1 ? kB : 1, axes & 2 ? hq : 1, axes & 4 ? kSq : 1, kSk});
  };
  if (c.bias) p.bias = scores(float64, c.bias);
  if (c.mask) p.mask = scores(boolean, 7);
  if (c.block_mask) {
    p.mask_block_q = 3;
    p.mask_block_k = 2;
    p.block_mask = layout(boolean, {kB, 1, 2, 3});
  }
  if (c.alibi) p.alibi_slopes = c.alibi == 1 ? layout(float32, {hq}) : layout(float32, {kB, hq});
  if (c.sink) p.sink = layout(float32, {hq});
  p.causal = c.causal;
  p.alignment = c.top_left ? TESSERA_TOP_LEFT : TESSERA_BOTTOM_RIGHT;
  p.set_window(c.window_left, c.window_right);
  p.softcap = c.softcap;
  if (c.dropout > 0) p.set_dropout(c.dropout, 7, 3);
  p = gradient_of(p);
  if (c.d_lse) p.d_lse = p.lse;
  if (c.bias) {
    p.d_bias = p.bias;
    p.d_bias.dtype = TESSERA_FLOAT32;
  }
  if (c.sink) p.d_sink = p.sink;
  a.allocate(random);
  return a;
}

// The scalar whose gradients backward computes, and a bound of the change that rounding lse to float32 causes in it.
struct Loss {
  double value = 0, rounding = 0;
};

Loss loss(Attention& a) {
  a.forward();
  Loss sum;
  for (std::size_t n = 0; n < a.o.size(); ++n) {
    sum.value += a.o[n] * a.d_o[n];
    sum.rounding += 0x1p-50 * std::fabs(a.o[n] * a.d_o[n]);
  }
  for (std::size_t n = 0; n < a.d_lse.size(); ++n) {
    if (!std::isfinite(a.lse[n])) continue;  // it sees nothing, or belongs to no sequence
    const double term = double{a.lse[n]} * a.d_lse[n];
    sum.value += term;
    sum.rounding += 0x1p-24 * std::fabs(term);
  }
  return sum;
}

// Central differences of sixth order; the fourth-order ones of the same values say how far they are from converged.
struct Slope {
  double value, error;
};

template <typename T>
Slope slope(Attention& a, T& x) {
  constexpr double kStep = 0x1p-4;  // exact in float32, in which sinks are
  const T centre = x;
  std::array<double, 3> difference{};  // L(x + n h) - L(x - n h)
  double rounding = 0;
  for (int n = 1; n <= 3; ++n) {
    x = static_cast<T>(centre + n * kStep);
    const Loss above = loss(a);
    x = static_cast<T>(centre - n * kStep);
    const Loss below = loss(a);
    difference[static_cast<std::size_t>(n - 1)] = above.value - below.value;
    rounding = std::max({rounding, above.rounding, below.rounding});
  }
  x = centre;
  const double sixth = (45 * difference[0] - 9 * difference[1] + difference[2]) / (60 * kStep);
  const double fourth = (8 * difference[0] - difference[1]) / (12 * kStep);
  constexpr double kWeights = 2.0 * (45 + 9 + 1) / (60 * kStep);
  return {sixth, std::fabs(sixth - fourth) + kWeights * rounding};
}

// A tolerance for the whole tensor: how far from converged the differences are anywhere in it, since a single element's
// estimate can vanish by chance.
template <typename T, typename G>
void check(Attention& a, const char* name, std::vector<T>& inputs, const std::vector<G>& gradients) {
  ASSERT_EQ(inputs.size(), gradients.size());
  std::vector<Slope> expected;
  double error = 0, largest = 0;
  for (std::size_t n = 0; n < inputs.size(); ++n) {
    expected.push_back(slope(a, inputs[n]));
    error = std::max(error, expected[n].error);
    largest = std::max(largest, std::fabs(expected[n].value));
  }
  const double last_place = largest * std::numeric_limits<G>::epsilon();
  for (std::size_t n = 0; n < inputs.size(); ++n) {
    ASSERT_NEAR(gradients[n], expected[n].value, error + last_place) << name << "[" << n << "]";
  }
}

class Gradient : public testing::TestWithParam<Options> {};

TEST_P(Gradient, IsThatOfCentralDifferences) {
  Attention a = make(GetParam());
  a.forward();
  a.backward();
  const Problem& p = a.problem;
  const std::vector<double> d_q = a.d_q, d_k = a.d_k, d_v = a.d_v;
  check(a, "d_q", a.q, d_q);
  check(a, "d_k", a.k, d_k);
  check(a, "d_v", a.v, d_v);
  if (p.d_bias.rank) check(a, "d_bias", a.bias, a.d_bias);
  if (p.d_sink.rank) check(a, "d_sink", a.sink, a.d_sink);
}
INSTANTIATE_TEST_SUITE_P(Options, Gradient, testing::ValuesIn(cases()),
                         [](const auto& i) { return std::to_string(i.index) + "_" + name_of(i.param); });

}  // namespace
}  // namespace tessera::test
