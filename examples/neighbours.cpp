// Neighbourhood attention on an image: each pixel attends to the pixels at most R rows and columns away, with a learned
// bias for each offset. The rule is a score program; its bias gets a gradient. On the CPU, float32.
//
//   c++ -std=c++20 neighbours.cpp $(pkg-config --cflags --libs tessera) -o neighbours && ./neighbours
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <random>
#include <tessera/tessera.hpp>
#include <vector>

namespace {

constexpr std::int64_t kHeight = 24, kWidth = 20, kRadius = 2, kOffsets = 2 * kRadius + 1;
constexpr std::int64_t B = 1, S = kHeight * kWidth, H = 4, D = 32;  // a pixel is a token, row by row
constexpr double kScale = 0.17677669529663687;                      // 1 / sqrt(D)

std::vector<float> normal(std::int64_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<std::size_t>(size));
  for (float& value : values) value = distribution(random);
  return values;
}

std::size_t at(std::int64_t pixel, std::int64_t head, std::int64_t d = 0) {  // [S, H, D]
  return static_cast<std::size_t>((pixel * H + head) * D + d);
}

// Calls see(key, offset) for the neighbours of a pixel; offset: [2R + 1, 2R + 1], of rows and of columns.
template <class See>
void for_each_neighbour(std::int64_t pixel, See see) {
  const std::int64_t row = pixel / kWidth, column = pixel % kWidth;
  for (std::int64_t y = std::max<std::int64_t>(0, row - kRadius); y <= std::min(kHeight - 1, row + kRadius); ++y) {
    for (std::int64_t x = std::max<std::int64_t>(0, column - kRadius); x <= std::min(kWidth - 1, column + kRadius);
         ++x) {
      see(y * kWidth + x, (row - y + kRadius) * kOffsets + column - x + kRadius);
    }
  }
}

}  // namespace

int main() try {
  const std::vector<float> q = normal(S * H * D, 1), k = normal(S * H * D, 2), v = normal(S * H * D, 3);
  const std::vector<float> bias = normal(H * kOffsets * kOffsets, 4);  // [H, 2R + 1, 2R + 1]
  std::vector<float> o(q.size()), lse(H * S);

  // The rule: s is the score, i and j are the numbers of the two pixels. `bias` and `width` are bound below.
  using namespace tessera::score;
  const Tensor table("bias", 3);
  const Scalar width("width", tessera::ValueType::integer);
  const Value rows = floor_div(i, width) - floor_div(j, width), columns = i % width - j % width;
  const tessera::Program program(s + table(h, rows + kRadius, columns + kRadius),
                                 abs(rows) <= kRadius && abs(columns) <= kRadius);
  std::printf("score  %s\nmask   %s\n", program.score().c_str(), program.mask().c_str());

  tessera::Problem problem;
  problem.q = problem.k = problem.v = problem.o = tessera::layout(tessera::float32, {B, S, H, D});
  problem.lse = tessera::lse_layout(problem);
  problem.program = program.get();
  const std::size_t captured = program.tensor("bias");
  problem.captured[captured] = tessera::layout(tessera::float32, {H, kOffsets, kOffsets});

  tessera::Buffers buffers{.q = q.data(), .k = k.data(), .v = v.data(), .o = o.data(), .lse = lse.data()};
  buffers.captured[captured] = bias.data();
  buffers.scalars[program.scalar("width")] = kWidth;
  const tessera::Plan forward = tessera::plan(problem);
  std::vector<std::byte> workspace(tessera::workspace_bytes(forward));
  tessera::forward(forward, buffers, workspace);

  const std::vector<float> d_o = normal(S * H * D, 5);
  std::vector<float> d_q(q.size()), d_k(k.size()), d_v(v.size()), d_bias(bias.size());
  tessera::Problem gradient = tessera::gradient_of(problem);
  gradient.d_captured[captured] = problem.captured[captured];
  buffers.d_o = d_o.data(), buffers.d_q = d_q.data(), buffers.d_k = d_k.data(), buffers.d_v = d_v.data();
  buffers.d_captured[captured] = d_bias.data();
  const tessera::Plan backward = tessera::plan(gradient);
  workspace.resize(tessera::workspace_bytes(backward));
  tessera::backward(backward, buffers, workspace);

  // The same by loops over the neighbours, in float64.
  double error_o = 0, error_bias = 0;
  std::vector<double> exact_d_bias(bias.size());
  for (std::int64_t head = 0; head < H; ++head) {
    for (std::int64_t pixel = 0; pixel < S; ++pixel) {
      double sum = 0, exact[D] = {};
      const auto weight = [&](std::int64_t key, std::int64_t offset) {
        double score = bias[static_cast<std::size_t>(head * kOffsets * kOffsets + offset)];
        for (std::int64_t d = 0; d < D; ++d) score += kScale * q[at(pixel, head, d)] * k[at(key, head, d)];
        return std::exp(score);
      };
      for_each_neighbour(pixel, [&](std::int64_t key, std::int64_t offset) {
        const double p = weight(key, offset);
        sum += p;
        for (std::int64_t d = 0; d < D; ++d) exact[d] += p * v[at(key, head, d)];
      });
      double delta = 0;  // dO . O
      for (std::int64_t d = 0; d < D; ++d) {
        exact[d] /= sum;
        delta += exact[d] * d_o[at(pixel, head, d)];
        error_o = std::max(error_o, std::abs(exact[d] - o[at(pixel, head, d)]));
      }
      for_each_neighbour(pixel, [&](std::int64_t key, std::int64_t offset) {
        double d_p = 0;
        for (std::int64_t d = 0; d < D; ++d) d_p += d_o[at(pixel, head, d)] * v[at(key, head, d)];
        exact_d_bias[static_cast<std::size_t>(head * kOffsets * kOffsets + offset)] +=
            weight(key, offset) / sum * (d_p - delta);
      });
    }
  }
  for (std::size_t n = 0; n < bias.size(); ++n)
    error_bias = std::max(error_bias, std::abs(exact_d_bias[n] - d_bias[n]));
  std::printf("largest error of O %.1e, of the bias's gradient %.1e\n", error_o, error_bias);
  return error_o < 1e-5 && error_bias < 1e-3 ? 0 : 1;
} catch (const tessera::Error& error) {  // one line: the argument, its value, the accepted values
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
