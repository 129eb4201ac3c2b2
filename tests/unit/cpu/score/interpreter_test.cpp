// The CPU's score programs by vectors of lanes against the float64 evaluation, on all instruction sets of this machine.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/score/definitions.hpp"
#include "core/score/parse.hpp"
#include "cpu/score/lower.hpp"
#include "probe.hpp"
#include "tessera/tessera.h"

namespace tessera::test {
namespace {

namespace score = core::score;
using testing::definitions;
using testing::name_for_tests;
using testing::World;

struct Isa {
  const char* name;
  std::int32_t isa;
  void (*probe)(const cpu::ScoreProbe&);
};
// Those that this machine has.
std::vector<Isa> isas() {
  std::vector<Isa> all = {{"baseline", TESSERA_ISA_BASELINE, cpu::score_probe_baseline}};
#if defined(__x86_64__)
  all.push_back({"avx2", TESSERA_ISA_AVX2, cpu::score_probe_avx2});
  all.push_back({"avx512", TESSERA_ISA_AVX512, cpu::score_probe_avx512});
  all.push_back({"avx512_bf16", TESSERA_ISA_AVX512_BF16, cpu::score_probe_avx512_bf16});
#endif
  tessera_device device{};
  EXPECT_EQ(tessera_device_cpu(&device).code, TESSERA_OK);
  std::erase_if(all, [&](const Isa& isa) { return isa.isa > device.isa_limit; });
  return all;
}

// A world whose elements float32 holds, and which its programs' tensors are views of.
struct Bound {
  explicit Bound(World& world, const score::Program& program) {
    for (auto& [name, tensor] : world.tensors) {
      for (double& x : tensor.data) x = static_cast<float>(x);
    }
    for (const score::Name& name : program.tensors) {
      const testing::WorldTensor& tensor = world.tensors.at(name.text);
      cpu::CodeTensor view{reinterpret_cast<const char*>(tensor.data.data()), TESSERA_FLOAT64, name.rank, {}, {}, true};
      std::int64_t stride = sizeof(double);
      if (name.type != score::Type::kFloat) {
        integers.emplace_back(tensor.data.begin(), tensor.data.end());
        view.data = reinterpret_cast<const char*>(integers.back().data());
        view.dtype = TESSERA_INT32, stride = sizeof(std::int32_t);
        if (name.type == score::Type::kBool) {
          truths.emplace_back(tensor.data.begin(), tensor.data.end());
          view.data = reinterpret_cast<const char*>(truths.back().data());
          view.dtype = TESSERA_BOOL, stride = 1;
        }
      }
      begin.push_back(elements);
      for (int axis = name.rank; axis-- > 0; stride *= tensor.shape[static_cast<size_t>(axis)]) {
        view.stride[axis] = stride;
        view.shape[axis] = static_cast<std::int32_t>(tensor.shape[static_cast<size_t>(axis)]);
      }
      elements += static_cast<std::int64_t>(tensor.data.size());
      tensors.push_back(view);
    }
    begin.resize(score::kMaxTensors);
    for (const score::Name& name : program.scalars) scalars.push_back(world.scalars.at(name.text));
  }

  std::vector<cpu::CodeTensor> tensors;
  std::vector<double> scalars;
  std::vector<std::int64_t> begin;  // of each tensor's elements among all
  std::int64_t elements = 0;

 private:
  std::vector<std::vector<std::int32_t>> integers;
  std::vector<std::vector<std::uint8_t>> truths;
};

struct Text {
  std::string name, score, mask;
};
// Indices that keys count up, down, by steps and beyond both ends of a tensor; quotients by powers of two, whose
// dividends are negative, too. The evaluation reads 0 outside a tensor as well.
const std::vector<Text>& texts() {
  static const std::vector<Text> all = [] {
    std::vector<Text> texts;
    for (const testing::Definition& one : definitions()) texts.push_back({one.name, one.score, one.mask});
    for (const char* text :
         {"s + relative[h, j - i + len_q]", "s + relative[h, i - j]", "s + relative[h, j - i]",
          "s + relative[h, i + i - j]", "s + relative[j - i, h]", "s + dense[b, h, i, len_k - 1 - j]",
          "s + dense[b, h, i + 3, j + 2]", "s + dense[b, j, h, i]", "s + key_bias[b, j + j]",
          "s + key_bias[b, -(3 - j)]", "s + key_bias[b, (j - j) + 2]", "s + place[j] * place[i - j + i + 20]",
          "s + relative[h, (i - j) // 4 + 40] + (i - j) // 1", "s * ((j - i) // 8) + (i - j) % 16", "s * s + s",
          "s + relative[h, doc[b, j] - j + 60]", "relative[h, i - j + len_k]"}) {
      texts.push_back({text, text, ""});
    }
    for (const char* text : {"s > 0.5 && (i - j) % 8 < 5", "(q_pos - j) // 16 != 1 && relative[h, i - j] < 0.5"}) {
      texts.push_back({text, "-s", text});
    }
    return texts;
  }();
  return all;
}

class InterpreterOf : public ::testing::TestWithParam<size_t> {
 protected:
  InterpreterOf() : definition(texts()[GetParam()]), world(GetParam() + 1) {
    EXPECT_EQ(score::parse(definition.score, definition.mask, world.names(), program).code, TESSERA_OK);
  }
  const Text& definition;
  World world;
  score::Program program;
};

TEST_P(InterpreterOf, ItsScoresAndGradientsAreThoseOfTheEvaluation) {
  const Bound bound(world, program);
  const cpu::LoweredScore lowered(program, bound.tensors, bound.scalars);
  const cpu::ScoreCode code = lowered.code();
  const score::Gradient gradient = score::gradient(program);
  bool loads[score::kMaxTensors];
  std::ranges::fill(loads, true);
  // The gradient's program has the names that it uses itself, in its own order.
  const Bound gradient_bound(world, gradient.program);
  const cpu::LoweredScore lowered_gradient(gradient, gradient_bound.tensors, gradient_bound.scalars, loads);
  const cpu::ScoreCode gradient_code = lowered_gradient.code();

  const score::Bindings bindings = world.bindings(program), gradient_bindings = world.bindings(gradient.program);
  score::Evaluator evaluator(program, bindings), gradients(gradient.program, gradient_bindings);
  std::mt19937_64 random(GetParam());
  std::normal_distribution<float> normal;
  const auto pairs = static_cast<size_t>(world.len_q * world.len_k);
  for (const Isa& isa : isas()) {
    for (std::int64_t b = 0; b < world.batch; ++b) {
      for (std::int64_t h = 0; h < world.heads; h += 3) {
        std::vector<float> s(pairs), g(pairs), by_queries(pairs), by_keys(pairs), d_s(pairs);
        for (float& x : s) x = 2 * normal(random);
        for (float& x : g) x = normal(random);
        std::vector<double> sums(static_cast<size_t>(gradient_bound.elements)), expected(sums), magnitude(sums);
        isa.probe({.batch = b,
                   .head = h,
                   .heads_q = world.heads,
                   .heads_kv = world.heads_kv,
                   .queries = world.len_q,
                   .keys = world.len_k,
                   .s = s.data(),
                   .code = &code,
                   .by_queries = by_queries.data(),
                   .by_keys = by_keys.data(),
                   .gradient = &gradient_code,
                   .g = g.data(),
                   .d_s = d_s.data(),
                   .sums = sums.data(),
                   .sums_begin = gradient_bound.begin.data()});
        for (std::int64_t i = 0; i < world.len_q; ++i) {
          for (std::int64_t j = 0; j < world.len_k; ++j) {
            const auto at = static_cast<size_t>(i * world.len_k + j);
            score::Inputs pair = world.pair(b, h, i, j, s[at]);
            evaluator.begin(pair);
            double score = program.score >= 0 ? evaluator.value(program.score) : pair.s;
            if (program.mask >= 0 && evaluator.value(program.mask) == 0) score = -INFINITY;
            const double bound_of_error = 4e-6 * std::max(1.0, std::fabs(score));
            for (const float got : {by_queries[at], by_keys[at]}) {
              if (std::isfinite(score)) {
                ASSERT_NEAR(got, score, bound_of_error)
                    << definition.name << " " << isa.name << " b " << b << " h " << h << " i " << i << " j " << j;
              } else {
                ASSERT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(static_cast<float>(score)));
              }
            }
            pair.g = g[at];
            gradients.begin(pair);
            const double d = gradient.d_s >= 0 ? gradients.value(gradient.d_s) : 0;
            ASSERT_NEAR(d_s[at], d, 2e-5 * std::max(1.0, std::fabs(d)))
                << definition.name << " " << isa.name << " i " << i << " j " << j;
            for (const score::LoadGradient& load : gradient.loads) {
              const testing::WorldTensor& tensor =
                  world.tensors.at(gradient.program.tensors[static_cast<size_t>(load.tensor)].text);
              std::int64_t index[score::kMaxRank] = {};
              for (size_t n = 0; n < load.indices.size(); ++n) {
                index[n] = static_cast<std::int64_t>(gradients.value(load.indices[n]));
              }
              if (!tensor.holds(index)) continue;
              const auto element =
                  static_cast<size_t>(gradient_bound.begin[static_cast<size_t>(load.tensor)] + tensor.offset(index));
              const double adjoint = gradients.value(load.adjoint);
              expected[element] += adjoint, magnitude[element] += std::fabs(adjoint);
            }
          }
        }
        for (size_t n = 0; n < sums.size(); ++n) {
          ASSERT_NEAR(sums[n], expected[n], 2e-5 * std::max(1.0, magnitude[n]))
              << definition.name << " " << isa.name << " element " << n;
        }
      }
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<size_t>& info) {
  return info.param < definitions().size() ? name_for_tests(info.param) : "Text" + std::to_string(info.param);
}
INSTANTIATE_TEST_SUITE_P(Definitions, InterpreterOf, ::testing::Range<size_t>(0, texts().size()), name_of);

// ---- functions ------------------------------------------------------------------------------------------------------

// Numbers of all exponents and signs, and those at which a function changes its way.
std::vector<float> numbers(std::mt19937_64& random, size_t count) {
  std::vector<float> x = {0.0f,      -0.0f,      1.0f,   -1.0f,   INFINITY, -INFINITY, NAN,     0x1p-126f,
                          0x1p-149f, -0x1p-149f, 88.72f, 88.73f,  -87.4f,   -103.9f,   -104.0f, 128.0f,
                          -149.0f,   -150.0f,    0.625f, -0.625f, 9.0f,     3.4e38f};
  while (x.size() < count / 2) x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  std::uniform_real_distribution<float> moderate(-110, 110);
  while (x.size() < count) x.push_back(moderate(random));
  return x;
}

// Units in the last place of float32 that `got` is away from `expected`.
double units_away(float got, double expected) {
  const float nearest = static_cast<float>(expected);
  if (std::isnan(expected)) return std::isnan(got) ? 0 : INFINITY;
  if (std::isinf(nearest) || std::isinf(got)) return got == nearest ? 0 : INFINITY;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(expected == 0 ? 0x1p-149 : expected), -126) - 23);
  return std::fabs(got - expected) / unit;
}

TEST(ScoreFunctions, AreWithinFourUnitsInTheLastPlace) {
  std::mt19937_64 random(3);
  constexpr std::int64_t kQueries = 50, kKeys = 256;
  for (const char* function :
       {"exp", "exp2", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "floor", "abs"}) {
    score::Program program;
    ASSERT_EQ(score::parse(std::string(function) + "(s)", "", {}, program).code, TESSERA_OK);
    const cpu::LoweredScore lowered(program, {}, {});
    const cpu::ScoreCode code = lowered.code();
    score::Evaluator evaluator(program, {});
    const std::vector<float> s = numbers(random, kQueries * kKeys);
    for (const Isa& isa : isas()) {
      std::vector<float> by_queries(s.size()), by_keys(s.size());
      isa.probe({.batch = 0,
                 .head = 0,
                 .heads_q = 1,
                 .heads_kv = 1,
                 .queries = kQueries,
                 .keys = kKeys,
                 .s = s.data(),
                 .code = &code,
                 .by_queries = by_queries.data(),
                 .by_keys = by_keys.data()});
      double most = 0;
      for (size_t n = 0; n < s.size(); ++n) {
        evaluator.begin({.s = s[n]});
        const double expected = evaluator.value(program.score);
        for (const float got : {by_queries[n], by_keys[n]}) {
          const double units = units_away(got, expected);
          ASSERT_LE(units, 4) << function << "(" << s[n] << ") is " << expected << ", not " << got << ", " << isa.name;
          most = std::max(most, units);
        }
      }
      RecordProperty(std::string(function) + "_" + isa.name, std::to_string(most));
    }
  }
}

}  // namespace
}  // namespace tessera::test
