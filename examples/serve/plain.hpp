// The same model done plainly, to compare an engine with: a whole sequence at a time, no cache, no pages, no tiles, in
// float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "bf16.hpp"
#include "model.hpp"

namespace serve {

class PlainModel {
 public:
  // rounded: q, k, v, the softmax's weights and o are rounded to bfloat16, where bfloat16's kernels round. fp8_cache: k
  // and v are rounded to float8 e4m3 as well, by a scale for each token and head. The distance from the exact logits is
  // the cost of rounding on these numbers.
  PlainModel(const Weights& weights, bool rounded, bool fp8_cache)
      : w_(weights), rounded_(rounded), fp8_cache_(fp8_cache) {}

  // Logits [tokens, vocab]: row i predicts the token after tokens 0 .. i.
  std::vector<double> logits(std::span<const std::int32_t> tokens) const {
    const Shape& s = w_.shape;
    Rows x;
    for (const std::int32_t token : tokens) {
      x.insert(x.end(), w_.embedding.begin() + token * s.dim, w_.embedding.begin() + (token + 1) * s.dim);
    }
    for (const LayerWeights& layer : w_.layers) {
      Rows qkv = product(rms_norm(x, layer.attention_norm), layer.qkv, s.dim);
      round(qkv);
      add(x, product(attention(qkv, tokens.size()), layer.out, s.q()));
      add(x, product(gate(product(rms_norm(x, layer.mlp_norm), layer.gate_up, s.dim)), layer.down, s.hidden));
    }
    return product(rms_norm(x, w_.final_norm), w_.head, s.dim);
  }

 private:
  using Rows = std::vector<double>;

  double rounded(double value) const { return rounded_ ? from_bf16(to_bf16(static_cast<float>(value))) : value; }
  void round(Rows& rows) const {
    for (double& value : rows) value = rounded(value);
  }

  static void add(Rows& x, const Rows& y) {
    for (std::size_t n = 0; n < x.size(); ++n) x[n] += y[n];
  }

  static Rows product(const Rows& in, const std::vector<float>& weight, std::int64_t depth) {
    const std::int64_t rows = static_cast<std::int64_t>(in.size()) / depth;
    const std::int64_t columns = static_cast<std::int64_t>(weight.size()) / depth;
    Rows out(static_cast<std::size_t>(rows * columns));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < depth; ++i) {
        const double a = in[r * depth + i];
        for (std::int64_t c = 0; c < columns; ++c) out[r * columns + c] += a * weight[i * columns + c];
      }
    }
    return out;
  }

  static Rows rms_norm(const Rows& x, const std::vector<float>& gain) {
    const std::size_t dim = gain.size();
    Rows out(x.size());
    for (std::size_t row = 0; row < x.size(); row += dim) {
      double squares = 0;
      for (std::size_t i = 0; i < dim; ++i) squares += x[row + i] * x[row + i];
      const double factor = 1 / std::sqrt(squares / static_cast<double>(dim) + kNormEpsilon);
      for (std::size_t i = 0; i < dim; ++i) out[row + i] = gain[i] * x[row + i] * factor;
    }
    return out;
  }

  Rows gate(const Rows& gate_up) const {
    const std::size_t hidden = static_cast<std::size_t>(w_.shape.hidden);
    Rows out;
    for (std::size_t row = 0; row < gate_up.size(); row += 2 * hidden) {
      for (std::size_t i = 0; i < hidden; ++i) {
        const double g = gate_up[row + i];
        out.push_back(g / (1 + std::exp(-g)) * gate_up[row + hidden + i]);
      }
    }
    return out;
  }

  void rotate(double* head, std::size_t position) const {
    const std::int64_t half = w_.shape.head_dim / 2;
    for (std::int64_t j = 0; j < half; ++j) {
      const double cos = w_.cos[position * half + j], sin = w_.sin[position * half + j];
      const double x = head[j], y = head[j + half];
      head[j] = rounded(x * cos - y * sin);
      head[j + half] = rounded(x * sin + y * cos);
    }
  }

  // To the nearest of float8 e4m3's numbers: 3 bits behind the point, exponents from -6, at most 448.
  static double e4m3(double value) {
    const int exponent = std::max(value == 0 ? -6 : std::ilogb(value), -6);
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, 3 - exponent)), exponent - 3);
    return std::clamp(rounded, -448.0, 448.0);
  }
  void round_cached(double* head) const {
    double largest = 0;
    for (std::int64_t d = 0; d < w_.shape.head_dim; ++d) largest = std::max(largest, std::abs(head[d]));
    const double scale = largest > 0 ? largest / 448 : 1;
    for (std::int64_t d = 0; d < w_.shape.head_dim; ++d) head[d] = scale * e4m3(head[d] / scale);
  }

  // o [tokens, Hq D] of qkv [tokens, (Hq + 2 Hkv) D].
  Rows attention(Rows qkv, std::size_t tokens) const {
    const Shape& s = w_.shape;
    const std::int64_t D = s.head_dim;
    for (std::size_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < s.heads_q + s.heads_kv; ++h) rotate(&qkv[t * s.qkv() + h * D], t);
      for (std::int64_t h = 0; fp8_cache_ && h < 2 * s.heads_kv; ++h) round_cached(&qkv[t * s.qkv() + s.q() + h * D]);
    }
    Rows o(tokens * s.q());
    Rows p(tokens);
    for (std::size_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < s.heads_q; ++h) {
        const std::int64_t kv = h * s.heads_kv / s.heads_q;
        const double* q = &qkv[t * s.qkv() + h * D];
        for (std::size_t j = 0; j <= t; ++j) {
          const double* k = &qkv[j * s.qkv() + s.q() + kv * D];
          p[j] = 0;
          for (std::int64_t d = 0; d < D; ++d) p[j] += q[d] * k[d] / std::sqrt(static_cast<double>(D));
        }
        const double most = *std::max_element(p.begin(), p.begin() + t + 1);
        double sum = 0;
        double* out = &o[t * s.q() + h * D];
        for (std::size_t j = 0; j <= t; ++j) {
          const double weight = std::exp(p[j] - most);
          const double* v = &qkv[j * s.qkv() + s.q() + s.kv() + kv * D];
          sum += weight;
          for (std::int64_t d = 0; d < D; ++d) out[d] += rounded(weight) * v[d];
        }
        for (std::int64_t d = 0; d < D; ++d) out[d] = rounded(out[d] / sum);
      }
    }
    return o;
  }

  const Weights& w_;
  bool rounded_, fp8_cache_;
};

}  // namespace serve
