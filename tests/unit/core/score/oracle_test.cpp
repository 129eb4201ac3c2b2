// The oracle's attention with every program of the table: its output by plain loops, its gradients by differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/score/definitions.hpp"
#include "core/score/program_of.hpp"
#include "support.hpp"

namespace tessera::test {
namespace {

namespace score = core::score;
using testing::definitions;
using testing::name_for_tests;
using testing::World;

constexpr std::int64_t kHeadDim = 5, kHeadDimV = 3;

// Attention of the world's sizes with a definition's program, in float64, and what its names stand for.
struct Programmed {
  explicit Programmed(size_t number) : definition(definitions()[number]), world(number + 1) {
    tessera_program* const handle = program_of(definition, world, program);
    Problem problem;
    problem.q = layout(float64, {world.batch, world.len_q, world.heads, kHeadDim});
    problem.k = layout(float64, {world.batch, world.len_k, world.heads_kv, kHeadDim});
    problem.v = layout(float64, {world.batch, world.len_k, world.heads_kv, kHeadDimV});
    problem.o = layout(float64, {world.batch, world.len_q, world.heads, kHeadDimV});
    problem.program = handle;
    integers.resize(program.tensors.size()), truths.resize(program.tensors.size());
    d_captured.resize(program.tensors.size());
    for (size_t n = 0; n < program.tensors.size(); ++n) {
      testing::WorldTensor& tensor = world.tensors.at(program.tensors[n].text);
      constexpr DType kDtypes[] = {float64, int32, boolean};
      std::vector<std::int64_t> shape = tensor.shape;
      if (shape.empty()) shape = {1};
      problem.captured[n] = layout(kDtypes[static_cast<int>(tensor.name.type)], shape);
      integers[n].assign(tensor.data.begin(), tensor.data.end());
      truths[n].assign(tensor.data.begin(), tensor.data.end());
      d_captured[n].assign(tensor.data.size(), kNaN);
    }
    attention.problem = gradient_of(problem);
    for (size_t n = 0; n < program.tensors.size(); ++n) {
      if (program.tensors[n].type == score::Type::kFloat) attention.problem.d_captured[n] = problem.captured[n];
    }
    std::mt19937_64 random(number);
    attention.allocate(random);
    forward_plan = plan(problem, reference_device());
    backward_plan = plan(attention.problem, reference_device());
    tessera_program_release(handle);  // plans keep what they need
  }

  Buffers buffers() {
    Buffers all = attention.buffers();
    for (size_t n = 0; n < program.tensors.size(); ++n) {
      const void* const data[] = {world.tensors.at(program.tensors[n].text).data.data(), integers[n].data(),
                                  truths[n].data()};
      all.captured[n] = data[static_cast<int>(program.tensors[n].type)];
      all.d_captured[n] = d_captured[n].data();
    }
    for (size_t n = 0; n < program.scalars.size(); ++n) all.scalars[n] = world.scalars.at(program.scalars[n].text);
    return all;
  }
  void run(const Plan& plan) {
    std::vector<std::byte> workspace(plan.workspace_bytes, std::byte{0xFF});
    if (plan.problem.direction == TESSERA_BACKWARD) {
      backward(plan, buffers(), workspace);
    } else {
      forward(plan, buffers(), workspace);
    }
  }
  // sum of o d_o, whose gradients are those that backward computes
  double loss() {
    run(forward_plan);
    double sum = 0;
    for (size_t n = 0; n < attention.o.size(); ++n) sum += attention.o[n] * attention.d_o[n];
    return sum;
  }

  const testing::Definition& definition;
  World world;
  score::Program program;
  Attention attention;
  Plan forward_plan, backward_plan;
  std::vector<std::vector<std::int32_t>> integers;
  std::vector<std::vector<std::uint8_t>> truths;
  std::vector<std::vector<double>> d_captured;
};

class OracleOf : public ::testing::TestWithParam<size_t> {
 protected:
  Programmed call{GetParam()};
};

TEST_P(OracleOf, ItsOutputIsThatOfPlainLoops) {
  call.run(call.forward_plan);
  const World& w = call.world;
  const double scale = 1 / std::sqrt(static_cast<double>(kHeadDim));
  for (std::int64_t b = 0; b < w.batch; ++b) {
    for (std::int64_t h = 0; h < w.heads; ++h) {
      for (std::int64_t i = 0; i < w.len_q; ++i) {
        double sum = 0, o[kHeadDimV] = {};
        for (std::int64_t j = 0; j < w.len_k; ++j) {
          const std::int64_t h_kv = h / (w.heads / w.heads_kv);
          const double* q = &call.attention.q[static_cast<size_t>(((b * w.len_q + i) * w.heads + h) * kHeadDim)];
          const double* k = &call.attention.k[static_cast<size_t>(((b * w.len_k + j) * w.heads_kv + h_kv) * kHeadDim)];
          const double* v = &call.attention.v[static_cast<size_t>(((b * w.len_k + j) * w.heads_kv + h_kv) * kHeadDimV)];
          double s = 0;
          for (std::int64_t d = 0; d < kHeadDim; ++d) s += scale * q[d] * k[d];
          const testing::Pair pair = w.pair(b, h, i, j, s);
          if (!call.definition.visible(pair, w)) continue;
          const double p = std::exp(call.definition.new_score(pair, w));
          sum += p;
          for (std::int64_t d = 0; d < kHeadDimV; ++d) o[d] += p * v[d];
        }
        for (std::int64_t d = 0; d < kHeadDimV; ++d) {
          const double expected = sum == 0 ? 0 : o[d] / sum;
          ASSERT_NEAR(call.attention.o[static_cast<size_t>(((b * w.len_q + i) * w.heads + h) * kHeadDimV + d)],
                      expected, 1e-12 * std::max(1.0, std::fabs(expected)))
              << call.definition.name << " b " << b << " h " << h << " i " << i;
        }
      }
    }
  }
}

TEST_P(OracleOf, ItsGradientsAreTheSlopesOfItsOutput) {
  if (!call.definition.smooth) GTEST_SKIP() << "not smooth";
  call.run(call.backward_plan);
  std::mt19937_64 random(GetParam());
  const auto check = [&](const char* name, std::vector<double>& x, const std::vector<double>& d_x, int samples) {
    constexpr double kStep = 1e-5;
    for (int sample = 0; sample < samples; ++sample) {
      const size_t n = random() % x.size();
      const double was = x[n];
      x[n] = was + kStep;
      const double above = call.loss();
      x[n] = was - kStep;
      const double below = call.loss();
      x[n] = was;
      const double slope = (above - below) / (2 * kStep);
      EXPECT_NEAR(d_x[n], slope, 1e-7 * std::max(1.0, std::fabs(slope))) << call.definition.name << " " << name << n;
    }
    EXPECT_TRUE(std::ranges::none_of(d_x, [](double gradient) { return std::isnan(gradient); })) << name;
  };
  check("q", call.attention.q, call.attention.d_q, 1);
  check("k", call.attention.k, call.attention.d_k, 1);
  check("v", call.attention.v, call.attention.d_v, 1);
  for (size_t n = 0; n < call.program.tensors.size(); ++n) {
    if (call.program.tensors[n].type != score::Type::kFloat) continue;
    const std::string& name = call.program.tensors[n].text;
    check(name.c_str(), call.world.tensors.at(name).data, call.d_captured[n], 2);
  }
}

std::string name_of(const ::testing::TestParamInfo<size_t>& info) { return name_for_tests(info.param); }
INSTANTIATE_TEST_SUITE_P(Definitions, OracleOf, ::testing::Range<size_t>(0, definitions().size()), name_of);

}  // namespace
}  // namespace tessera::test
