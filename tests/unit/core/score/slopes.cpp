#include "core/score/slopes.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>

#include "core/score/derivative.hpp"
#include "core/score/evaluate.hpp"

namespace tessera::testing {

namespace score = core::score;

namespace {

constexpr double kStep = 1e-4, kTolerance = 1e-6, kMostScore = 1e4;
constexpr double kG = 0.75;  // the cotangent of the score

// The slope of f at 0 by four points: its error is of the fifth derivative.
double slope_of(const std::function<double(double)>& f) {
  return (8 * (f(kStep) - f(-kStep)) - (f(2 * kStep) - f(-2 * kStep))) / (12 * kStep);
}

std::string difference(const std::string& of, double gradient, double slope, double score) {
  if (std::fabs(gradient - slope) <= kTolerance * std::max({1.0, std::fabs(slope), std::fabs(score)})) return "";
  char text[160];
  std::snprintf(text, sizeof text, "the derivative by %s is %.12g, the slope %.12g", of.c_str(), gradient, slope);
  return text;
}

}  // namespace

Pair drawn_pair(const World& world, std::mt19937_64& random) {
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  std::normal_distribution<double> normal(0, 2);
  return world.pair(below(world.batch), below(world.heads), below(world.len_q), below(world.len_k), normal(random));
}

std::string wrong_gradient(World& world, const score::Program& program, std::mt19937_64& random, int pairs) {
  const score::Gradient gradient = score::gradient(program);
  const score::Bindings bindings = world.bindings(program), gradient_bindings = world.bindings(gradient.program);
  score::Evaluator evaluator(program, bindings), reverse(gradient.program, gradient_bindings);
  const auto score_of = [&](const Pair& pair) {
    evaluator.begin(pair);
    return program.score < 0 ? pair.s : evaluator.value(program.score);
  };
  for (int n = 0; n < pairs; ++n) {
    Pair pair = drawn_pair(world, random);
    pair.g = kG;
    const double at = score_of(pair);
    if (!(std::fabs(at) <= kMostScore)) continue;
    reverse.begin(pair);
    const double d_s = gradient.d_s < 0 ? 0 : reverse.value(gradient.d_s);
    const double slope = kG * slope_of([&](double step) {
                           Pair moved = pair;
                           moved.s += step;
                           return score_of(moved);
                         });
    if (std::string wrong = difference("s", d_s, slope, at); !wrong.empty()) return wrong;
    for (const score::LoadGradient& load : gradient.loads) {
      const auto index_of = [&](const score::LoadGradient& of, size_t axis) {
        return static_cast<int64_t>(reverse.value(of.indices[axis]));
      };
      const core::score::Name& name = gradient.program.tensors[static_cast<size_t>(load.tensor)];
      Tensor& tensor = world.tensors.at(name.text);
      int64_t index[score::kMaxRank] = {};
      for (size_t axis = 0; axis < load.indices.size(); ++axis) index[axis] = index_of(load, axis);
      // All loads of this element together are what moving it changes.
      double sum = 0;
      for (const score::LoadGradient& other : gradient.loads) {
        bool same = other.tensor == load.tensor;
        for (size_t axis = 0; same && axis < other.indices.size(); ++axis) same = index_of(other, axis) == index[axis];
        if (same) sum += reverse.value(other.adjoint);
      }
      double& element = tensor.data[static_cast<size_t>(tensor.offset(index))];
      const double was = element;
      const double by_element = kG * slope_of([&](double step) {
                                  element = was + step;
                                  const double moved = score_of(pair);
                                  element = was;
                                  return moved;
                                });
      if (std::string wrong = difference(name.text, sum, by_element, at); !wrong.empty()) return wrong;
    }
  }
  return "";
}

}  // namespace tessera::testing
