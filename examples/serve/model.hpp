// A decoder of the usual kind: RMSNorm, rotary position embedding, grouped-query attention, a gated MLP. Its weights
// are random: an engine's work does not depend on their meaning.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace serve {

struct Shape {
  std::int64_t layers, dim, heads_q, heads_kv, head_dim, hidden, vocab;

  std::int64_t qkv() const { return (heads_q + 2 * heads_kv) * head_dim; }  // columns of the joint projection
  std::int64_t q() const { return heads_q * head_dim; }
  std::int64_t kv() const { return heads_kv * head_dim; }
};

struct LayerWeights {
  std::vector<float> attention_norm;  // [dim]
  std::vector<float> qkv;             // [dim, (Hq + 2 Hkv) D]
  std::vector<float> out;             // [Hq D, dim]
  std::vector<float> mlp_norm;        // [dim]
  std::vector<float> gate_up;         // [dim, 2 hidden]
  std::vector<float> down;            // [hidden, dim]
};

struct Weights {
  Shape shape{};
  std::vector<float> embedding;  // [vocab, dim]
  std::vector<LayerWeights> layers;
  std::vector<float> final_norm;  // [dim]
  std::vector<float> head;        // [dim, vocab]
  std::vector<float> cos, sin;    // [positions, D / 2]
};

constexpr double kNormEpsilon = 1e-5, kRotaryBase = 10000;

inline Weights random_weights(const Shape& s, std::int64_t positions, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto draw = [&random](std::int64_t rows, std::int64_t columns, double gain) {
    std::normal_distribution<float> normal(0, static_cast<float>(gain));
    std::vector<float> values(static_cast<std::size_t>(rows * columns));
    for (float& value : values) value = normal(random);
    return values;
  };
  const auto projection = [&draw](std::int64_t in, std::int64_t out, double gain = 1) {
    return draw(in, out, gain / std::sqrt(static_cast<double>(in)));
  };
  const auto norm = [&random](std::int64_t size) {
    std::uniform_real_distribution<float> around_1(0.5f, 1.5f);
    std::vector<float> values(static_cast<std::size_t>(size));
    for (float& value : values) value = around_1(random);
    return values;
  };
  Weights w;
  w.shape = s;
  w.embedding = draw(s.vocab, s.dim, 1);
  // Random attention averages over many keys, and its output is small: it is scaled up so that it decides tokens.
  constexpr double kAttentionGain = 4;
  for (std::int64_t layer = 0; layer < s.layers; ++layer) {
    w.layers.push_back({norm(s.dim), projection(s.dim, s.qkv()), projection(s.q(), s.dim, kAttentionGain), norm(s.dim),
                        projection(s.dim, 2 * s.hidden), projection(s.hidden, s.dim)});
  }
  w.final_norm = norm(s.dim);
  w.head = projection(s.dim, s.vocab);
  const std::int64_t half = s.head_dim / 2;
  for (std::int64_t position = 0; position < positions; ++position) {
    for (std::int64_t pair = 0; pair < half; ++pair) {
      const double angle =
          static_cast<double>(position) * std::pow(kRotaryBase, -static_cast<double>(pair) / static_cast<double>(half));
      w.cos.push_back(static_cast<float>(std::cos(angle)));
      w.sin.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return w;
}

}  // namespace serve
