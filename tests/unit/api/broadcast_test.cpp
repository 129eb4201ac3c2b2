// Biases and masks with fewer axes, and with one entry for all keys, follow NumPy's broadcasting rules.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t kB = 2, kSq = 40, kSk = 72, kHq = 4, kHkv = 2, kD = 16;

struct Shaped {
  const char* name;
  std::vector<std::int64_t> shape;  // as given; leading axes may be missing
};
const Shaped kShapes[] = {
    {"keys", {kSk}},
    {"one", {1}},
    {"rank_2", {kSq, kSk}},
    {"rank_2_rows", {kSq, 1}},
    {"rank_2_keys", {1, kSk}},
    {"rank_3", {kHq, kSq, kSk}},
    {"rank_3_heads", {kHq, 1, 1}},
    {"rank_3_of_1", {1, kSq, kSk}},
    {"rank_4_rows", {kB, 1, kSq, 1}},
};
void PrintTo(const Shaped& shaped, std::ostream* out) { *out << shaped.name; }

class Broadcast : public testing::TestWithParam<Shaped> {
 protected:
  Broadcast() {
    problem_.q = problem_.o = layout(float32, {kB, kSq, kHq, kD});
    problem_.k = problem_.v = layout(float32, {kB, kSk, kHkv, kD});
    std::mt19937_64 random(5);
    std::normal_distribution<float> normal;
    for (auto* tensor : {&q_, &k_, &v_, &d_o_}) {
      tensor->resize(kB * kSk * kHq * kD);
      for (float& x : *tensor) x = normal(random);
    }
  }

  struct Results {
    std::vector<float> o = std::vector<float>(kB * kSq * kHq * kD), lse = std::vector<float>(kB * kHq * kSq);
    std::vector<float> d_q = o, d_k = std::vector<float>(kB * kSk * kHkv * kD), d_v = d_k, d_bias;
    bool operator==(const Results&) const = default;
  };

  Results run(const Layout& bias, const float* bias_data, const Layout& mask, const std::uint8_t* mask_data,
              bool with_d_bias) const {
    Results r;
    Problem forward = problem_;
    forward.bias = bias, forward.mask = mask;
    forward.lse = lse_layout(forward);
    Buffers b = {.q = q_.data(), .k = k_.data(), .v = v_.data(), .o = r.o.data(), .lse = r.lse.data()};
    b.bias = bias_data, b.mask = mask_data;
    b.d_o = d_o_.data(), b.d_q = r.d_q.data(), b.d_k = r.d_k.data(), b.d_v = r.d_v.data();
    Plan plan = tessera::plan(forward);
    std::vector<std::byte> workspace(plan.workspace_bytes);
    tessera::forward(plan, b, workspace);
    Problem backward = gradient_of(forward);
    if (with_d_bias) {
      backward.d_bias = bias;
      r.d_bias.resize(static_cast<std::size_t>(elements(bias)));
      b.d_bias = r.d_bias.data();
    }
    plan = tessera::plan(backward);
    workspace.resize(plan.workspace_bytes);
    tessera::backward(plan, b, workspace);
    return r;
  }

  // The same entries with every axis written out.
  template <class T>
  static std::vector<T> written_out(const std::vector<T>& data, const std::vector<std::int64_t>& shape) {
    const std::int64_t full[4] = {kB, kHq, kSq, kSk};
    std::vector<T> result(kB * kHq * kSq * kSk);
    std::int64_t index[4];
    std::size_t to = 0;
    for (index[0] = 0; index[0] < full[0]; ++index[0])
      for (index[1] = 0; index[1] < full[1]; ++index[1])
        for (index[2] = 0; index[2] < full[2]; ++index[2])
          for (index[3] = 0; index[3] < full[3]; ++index[3]) {
            std::int64_t from = 0;
            for (std::size_t axis = 0; axis < shape.size(); ++axis) {
              from = from * shape[axis] + (shape[axis] == 1 ? 0 : index[axis + 4 - shape.size()]);
            }
            result[to++] = data[static_cast<std::size_t>(from)];
          }
    return result;
  }

  Problem problem_;
  std::vector<float> q_, k_, v_, d_o_;
};

TEST_P(Broadcast, IsTheSameAsWrittenOut) {
  const std::vector<std::int64_t>& shape = GetParam().shape;
  const Layout bias = layout(float32, shape), mask = layout(boolean, shape);
  const Layout full_bias = layout(float32, {kB, kHq, kSq, kSk}), full_mask = layout(boolean, {kB, kHq, kSq, kSk});
  std::mt19937_64 random(6);
  std::vector<float> bias_data(static_cast<std::size_t>(elements(bias)));
  for (float& x : bias_data) x = std::normal_distribution<float>()(random);
  std::vector<std::uint8_t> mask_data(bias_data.size());
  for (std::uint8_t& x : mask_data) x = random() % 3 != 0;
  const std::vector<float> full_bias_data = written_out(bias_data, shape);
  const std::vector<std::uint8_t> full_mask_data = written_out(mask_data, shape);
  EXPECT_TRUE(run(bias, bias_data.data(), {}, nullptr, false) ==
              run(full_bias, full_bias_data.data(), {}, nullptr, false));
  EXPECT_TRUE(run({}, nullptr, mask, mask_data.data(), false) ==
              run({}, nullptr, full_mask, full_mask_data.data(), false));
}

TEST_P(Broadcast, SumsItsGradient) {
  const std::vector<std::int64_t>& shape = GetParam().shape;
  if (shape.back() != kSk) return;  // refused: Validate's d_bias_over_keys
  const Layout bias = layout(float32, shape);
  std::vector<std::int64_t> of_rank_4 = shape;
  while (of_rank_4.size() < 4) of_rank_4.insert(of_rank_4.begin(), 1);
  const std::vector<float> data(static_cast<std::size_t>(elements(bias)), 0.5f);
  const Results given = run(bias, data.data(), {}, nullptr, true);
  EXPECT_TRUE(given == run(layout(float32, of_rank_4), data.data(), {}, nullptr, true));
  float largest = 0;
  for (const float x : given.d_bias) largest = std::max(largest, std::fabs(x));
  EXPECT_GT(largest, 0.01f);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Broadcast, testing::ValuesIn(kShapes), [](const auto& i) { return i.param.name; });

TEST(BroadcastPlan, HasRankFour) {
  Problem problem = dense_problem();
  problem.mask = layout(boolean, {16, 1});
  const Plan plan = tessera::plan(problem);
  EXPECT_EQ(plan.problem.mask.rank, 4);
  EXPECT_EQ(plan.problem.mask.shape[3], 24);
  EXPECT_EQ(plan.problem.mask.strides[3], 0);
  EXPECT_EQ(plan.problem.mask.strides[2], 1);
}

}  // namespace
}  // namespace tessera::test
