#include "plain.hpp"

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "numbers.hpp"
#include "plain_program.hpp"

namespace tessera::testing {
namespace {

constexpr double kEpsilon32 = 0x1p-23;

// Philox4x32-10 (Salmon et al., SC 2011), table 2 of the paper.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> x, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9, key1 += 0xBB67AE85) {
    const uint64_t a = uint64_t{0xD2511F53} * x[0], b = uint64_t{0xCD9E8D57} * x[2];
    x = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ key0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ x[3] ^ key1, static_cast<uint32_t>(a)};
  }
  return x;
}

// Whether dropout keeps an entry, as the library's page on dropout defines it: 32 columns share four calls, a call
// decides columns {2 c, 2 c + 1} + {0, 8, 16, 24} by the halves of its words, low half first.
bool kept(const tessera_problem& problem, int64_t head, int64_t i, int64_t j) {
  const auto column = static_cast<uint32_t>(j % 32);
  const uint32_t call = column % 8 / 2;
  const auto words =
      philox({static_cast<uint32_t>(j / 32) * 4 + call, static_cast<uint32_t>(i), static_cast<uint32_t>(head),
              static_cast<uint32_t>(problem.dropout_offset)},
             static_cast<uint32_t>(problem.dropout_seed),
             static_cast<uint32_t>(problem.dropout_seed >> 32) ^ static_cast<uint32_t>(problem.dropout_offset >> 32));
  const uint32_t value = column % 2 ? words[column / 8] >> 16 : words[column / 8] & 0xFFFF;
  return value >= static_cast<uint32_t>(std::lround(problem.dropout_p * 65536));
}

template <class Real>
Real dot(const Real* a, const Real* b, int64_t count) {
  Real sum = 0;
  for (int64_t n = 0; n < count; ++n) sum += a[n] * b[n];
  return sum;
}

template <class Real>
double norm(const Real* a, int64_t count) {
  return std::sqrt(static_cast<double>(dot(a, a, count)));
}

// The keys or the values of one (sequence, head), [rows, width].
template <class Real>
struct Matrix {
  int64_t rows = 0, width = 0;
  std::vector<Real> row_major, column_major;
  std::vector<double> norms;  // of each row

  Matrix() = default;
  Matrix(std::vector<Real> values, int64_t width)
      : rows(static_cast<int64_t>(values.size()) / width),
        width(width),
        row_major(std::move(values)),
        column_major(row_major.size()),
        norms(rows) {
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t x = 0; x < width; ++x) column_major[x * rows + n] = row(n)[x];
      norms[n] = norm(row(n), width);
    }
  }

  const Real* row(int64_t n) const { return row_major.data() + n * width; }

  // products[n] = the dot product of row n and `vector`, each summed from its first column to its last. All rows
  // advance together, since a single sum waits for itself at each addition.
  void multiply(const Real* vector, std::vector<Real>& products) const {
    products.assign(rows, Real{0});
    Real* __restrict sums = products.data();
    for (int64_t x = 0; x < width; ++x) {
      const Real* column = column_major.data() + x * rows;
      const Real factor = vector[x];
      for (int64_t n = 0; n < rows; ++n) sums[n] += factor * column[n];
    }
  }
};

// The matrices of one (sequence, head).
template <class Real>
struct Head {
  int64_t sq, sk;
  std::vector<Real> q, d_o;  // [sq, d], [sq, dv]
  Matrix<Real> k, v;         // [sk, d], [sk, dv]
};

// rows[n] of a tensor [rows, heads, width], as one matrix.
template <class Real, class Row>
std::vector<Real> gather(const std::vector<double>& tensor, int64_t count, int64_t heads, int64_t head, int64_t width,
                         Row row) {
  std::vector<Real> matrix(count * width);
  for (int64_t n = 0; n < count; ++n)
    for (int64_t x = 0; x < width; ++x)
      matrix[n * width + x] = static_cast<Real>(tensor[(row(n) * heads + head) * width + x]);
  return matrix;
}

template <class Real>
class Plain {
 public:
  Plain(const Inputs& in, PlainResult& out, Precision precision)
      : in_(in),
        c_(in.c),
        out_(out),
        stores_scores_(precision == Precision::kScoresToo),
        fp8_tensor_cores_(precision == Precision::kFp8TensorCores),
        problem_(make_oracle_call(in).problem),
        scale_(static_cast<Real>(in.scale())) {
    // Relative errors: some roundings of float32 arithmetic; one rounding to the stored type, at most half a unit.
    epsilon_ = std::is_same_v<Real, float> ? kEpsilon32 : epsilon(TESSERA_FLOAT64);
    const bool stores_less = std::is_same_v<Real, float> && c_.dtype != TESSERA_FLOAT32;
    epsilon_stored_ = stores_less ? epsilon(o_dtype(c_)) / 2 : epsilon_;
    p_drop_ = static_cast<double>(std::lround(c_.dropout * 65536)) / 65536.0;
    if (in_.program) program_.emplace(in_, epsilon_);
  }

  void run() {
    allocate();
    for (int64_t b = 0; b < c_.b; ++b)
      for (int64_t h = 0; h < c_.hq; ++h) run_head(b, h);
    finish(out_.o, true);
    finish(out_.lse, false);
    finish(out_.d_q, true);
    finish(out_.d_k, true);
    finish(out_.d_v, true);
    finish(out_.d_bias, false);
    finish(out_.d_sink, false);
    for (size_t n = 0; n < d_captured_.size(); ++n) {
      if (d_captured_[n].sum) finish_captured(*d_captured_[n].sum, gradient_dtype(c_, in_.captured[n]));
    }
  }

 private:
  Real stored(Real value) const {
    if constexpr (std::is_same_v<Real, double>) return value;
    return c_.dtype == TESSERA_FLOAT32 ? value : static_cast<Real>(round_to(o_dtype(c_), value));
  }

  // Half a unit in the last place, at most: of a weight, and of one below the format's normal numbers.
  static constexpr double kFp8Half = 0x1p-4, kFp8LeastHalf = 0x1p-10 / 256;
  // Hopper's tensor cores add 8-bit products with 13 bits after the leading one of the largest and cut off the rest
  // (DeepSeek-V3, 2024, section 3.5.2).
  static constexpr double kFp8Sum = 0x1p-13;
  static Real fp8_weight(Real weight) {
    constexpr Real kShift = 256;
    return static_cast<Real>(round_to(TESSERA_FLOAT8_E4M3, weight * kShift)) / kShift;
  }

  Real stored_score(Real value) const { return stores_scores_ ? stored(value) : value; }

  void allocate() {
    const auto make = [](PlainTensor& tensor, int64_t size) {
      tensor.value.assign(size, 0);
      tensor.noise.assign(size, 0);
    };
    make(out_.o, in_.rows_q * c_.hq * c_.dv);
    make(out_.lse, in_.rows_q * c_.hq);
    make(out_.lse_to_twice_the_digits, c_.low ? in_.rows_q * c_.hq : 0);
    out_.unseen_q.assign(in_.rows_q * c_.hq, 1);
    out_.unseen_k.assign(in_.rows_k * c_.hkv, 1);
    if (!c_.backward) return;
    make(out_.d_q, in_.rows_q * c_.hq * c_.d);
    make(out_.d_k, in_.rows_k * c_.hkv * c_.d);
    make(out_.d_v, in_.rows_k * c_.hkv * c_.dv);
    make(out_.d_bias, c_.d_bias ? static_cast<int64_t>(in_.bias.size()) : 0);
    make(out_.d_sink, c_.d_sink ? c_.hq : 0);
    d_captured_.resize(in_.captured.size());
    for (size_t n = 0; c_.d_captured && n < d_captured_.size(); ++n) {
      const CapturedTensor& tensor = in_.captured[n];
      if (!tensor.is_float()) continue;
      d_captured_[n].sum = &out_.d_captured["d_captured." + tensor.name];
      make(*d_captured_[n].sum, static_cast<int64_t>(tensor.values.size()));
      d_captured_[n].of_row.assign(tensor.values.size(), 0);
    }
  }

  // Sums over heads and rows are kept in Real; the noise is kept as squares until here.
  void finish(PlainTensor& tensor, bool in_dtype) const {
    for (size_t n = 0; n < tensor.value.size(); ++n) {
      if (in_dtype) tensor.value[n] = stored(static_cast<Real>(tensor.value[n]));
      // Half a unit in the last place of the result's type.
      const double unit = std::exp2(std::floor(std::log2(std::fabs(tensor.value[n]))));
      const double rounding = (in_dtype ? epsilon_stored_ : epsilon_) * unit;
      tensor.noise[n] = std::sqrt(tensor.noise[n]) + (std::isfinite(rounding) ? rounding : 0);
    }
  }

  void finish_captured(PlainTensor& tensor, int32_t dtype) const {
    finish(tensor, false);
    if (std::is_same_v<Real, double> || dtype == TESSERA_FLOAT32) return;
    for (size_t n = 0; n < tensor.value.size(); ++n) {
      tensor.value[n] = round_to(dtype, tensor.value[n]);
      if (std::isfinite(tensor.value[n])) tensor.noise[n] += epsilon(dtype) / 2 * std::fabs(tensor.value[n]);
    }
  }

  static void add(double& total, Real term) { total = static_cast<Real>(static_cast<Real>(total) + term); }
  static void add_noise(double& squares, double noise) { squares += noise * noise; }

  // Adds factor * row to the row of `sum` that begins at `at`, and the effect of an error `noise` of the factor.
  static void add_row(PlainTensor& sum, int64_t at, Real factor, double noise, const Real* row, int64_t width) {
    double* __restrict totals = &sum.value[at];
    double* __restrict squares = &sum.noise[at];
    for (int64_t x = 0; x < width; ++x) add(totals[x], factor * row[x]);
    for (int64_t x = 0; x < width; ++x) add_noise(squares[x], noise * row[x]);
  }

  void run_head(int64_t b, int64_t h) {
    const int64_t kv = h * c_.hkv / c_.hq;
    const auto q_row = [&](int64_t i) { return in_.q_row(b, i); };
    const auto k_row = [&](int64_t j) { return in_.k_row(b, j); };
    head_ = {.sq = in_.sq[b],
             .sk = in_.sk[b],
             .q = gather<Real>(in_.q, in_.sq[b], c_.hq, h, c_.d, q_row),
             .d_o = {},
             .k = {gather<Real>(in_.k, in_.sk[b], c_.hkv, kv, c_.d, k_row), c_.d},
             .v = {gather<Real>(in_.v, in_.sk[b], c_.hkv, kv, c_.dv, k_row), c_.dv}};
    if (c_.backward) head_.d_o = gather<Real>(in_.d_o, head_.sq, c_.hq, h, c_.dv, q_row);
    s_.resize(head_.sk);
    p_.resize(head_.sk);
    noise_.resize(head_.sk);
    before_.resize(head_.sk);
    kept_.resize(head_.sk);
    for (int64_t i = 0; i < head_.sq; ++i) {
      scores(b, h, i);
      forward_row(b, h, i);
      if (c_.backward) backward_row(b, h, kv, i);
    }
  }

  bool kept_in_whole(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return kept(problem_, (b + c_.first_b) * in_.whole_heads() + h + in_.first_head(), i + in_.first_q[b],
                j + in_.first_k[b]);
  }

  // Rounding changes a score s = scale q.k by epsilon_ times this.
  double score_magnitude(Real s, double norm_q, double norm_k) const {
    const double of_product = fp8_tensor_cores_ ? kFp8Sum / epsilon_ : 1;
    return 1 + std::fabs(s) + of_product * 0.5 * std::fabs(scale_) * norm_q * norm_k;
  }

  // Step 1: one row of S; -inf where it sees nothing. noise_[j] is rounding's relative effect on exp(s_j).
  void scores(int64_t b, int64_t h, int64_t i) {
    const Real* q = &head_.q[i * c_.d];
    const double norm_q = norm(q, c_.d);
    head_.k.multiply(q, qk_);
    for (int64_t j = 0; j < head_.sk; ++j) {
      s_[j] = -std::numeric_limits<Real>::infinity();
      noise_[j] = 0;
      if (!in_.visible(b, h, i, j)) continue;
      Real s = scale_ * qk_[j];
      double magnitude = score_magnitude(s, norm_q, head_.k.norms[j]);
      if (c_.softcap > 0) {
        const Real t = std::tanh(s / static_cast<Real>(c_.softcap));
        s = static_cast<Real>(c_.softcap) * t;
        magnitude = (std::isfinite(magnitude) ? magnitude * (1 - t * t) : 0) + 1;
      }
      if (c_.bias != kAbsent) s += static_cast<Real>(in_.bias[in_.bias_index(b, h, i, j)]);
      if (c_.alibi) {
        const auto slope = static_cast<Real>(in_.slopes[c_.alibi == 1 ? h : b * c_.hq + h]);
        s -= slope * static_cast<Real>(std::abs(i + in_.bottom_right(b) - j));
      }
      magnitude += std::isfinite(s) ? std::fabs(s) : 0;
      if (program_) {
        before_[j] = {s, std::isfinite(s) ? epsilon_ * magnitude : 0};
        program_->evaluate(in_.pair(b, h, i, j), before_[j]);
        if (!program_->visible()) continue;
        const Rounded<Real> score = program_->score();
        s = score.value;
        magnitude = 1 + score.noise / epsilon_ + (std::isfinite(s) ? std::fabs(s) : 0);
      }
      out_.unseen_q[in_.q_row(b, i) * c_.hq + h] = 0;
      out_.unseen_k[in_.k_row(b, j) * c_.hkv + h * c_.hkv / c_.hq] = 0;
      s_[j] = stored_score(s);
      noise_[j] = epsilon_ * magnitude + (stores_scores_ && std::isfinite(s) ? epsilon_stored_ * std::fabs(s) : 0);
    }
  }

  // Steps 2 and 3: softmax, and its product with V.
  void forward_row(int64_t b, int64_t h, int64_t i) {
    constexpr Real kInf = std::numeric_limits<Real>::infinity();
    const int64_t row = in_.q_row(b, i) * c_.hq + h;
    Real m = -kInf;
    for (const Real s : s_) m = std::isnan(s) ? s : std::max(m, s);
    for (const Real s : s_)
      if (std::isnan(s)) m = s;
    double& lse = out_.lse.value[in_.lse_index(b, h, i)];
    lse = -kInf;
    if (c_.low) out_.lse_to_twice_the_digits.value[in_.lse_index(b, h, i)] = -kInf;
    std::fill(p_.begin(), p_.end(), Real{0});
    if (m == -kInf) return;  // the row sees nothing: o is 0, with any sink
    if (c_.sink) m = std::max(m, static_cast<Real>(in_.sink[h]));
    Real sum = c_.sink ? std::exp(static_cast<Real>(in_.sink[h]) - m) : Real{0};
    for (int64_t j = 0; j < head_.sk; ++j) sum += p_[j] = std::exp(s_[j] - m);
    lse = m + std::log(sum);
    double worst = epsilon_;
    for (int64_t j = 0; j < head_.sk; ++j)
      if (p_[j] > 0) worst = std::max(worst, noise_[j] * static_cast<double>(p_[j] / sum) + epsilon_);
    // What is cut off makes every product smaller: these errors of a row add up.
    for (int64_t j = 0; fp8_tensor_cores_ && j < head_.sk; ++j)
      if (p_[j] > 0) worst += kFp8Sum * std::fabs(static_cast<double>(s_[j] * (p_[j] / sum)));
    // A scale of 8-bit keys is a factor of its own: where a row's keys share it, its rounding moves all of them alike.
    if (c_.scales != kNoScales) worst += epsilon_ * std::fabs(lse);
    // A shift of the LSE shifts the whole row; and it passes through a logarithm and a change of base.
    constexpr double kLseRoundings = 2;
    const double lse_noise = kLseRoundings * epsilon_ * std::fabs(lse);
    add_noise(out_.lse.noise[in_.lse_index(b, h, i)], worst + lse_noise);
    if (c_.low) {
      PlainTensor& precise = out_.lse_to_twice_the_digits;
      precise.value[in_.lse_index(b, h, i)] = static_cast<double>(m) + std::log(static_cast<double>(sum));
      precise.noise[in_.lse_index(b, h, i)] = worst + kLseRoundings * epsilon_ * std::fabs(std::log(sum));
      // A score's rounding changes the sum by its weight, and the sum divides every other weight.
      if (std::isfinite(worst))
        for (int64_t j = 0; j < head_.sk; ++j) noise_[j] += worst * (1 - static_cast<double>(p_[j] / sum));
    } else if (std::isfinite(lse_noise))
      for (double& noise : noise_) noise += lse_noise;

    const Real keep_scale = static_cast<Real>(1 / (1 - p_drop_));
    for (int64_t j = 0; j < head_.sk; ++j) {
      p_[j] /= sum;
      kept_[j] = p_drop_ == 0 || (s_[j] != -kInf && kept_in_whole(b, h, i, j)) ? keep_scale : Real{0};
      if (p_drop_ == 0) kept_[j] = 1;
      const Real p = fp8_tensor_cores_ ? fp8_weight(p_[j] * sum) / sum : stored(p_[j] * kept_[j]);
      if (s_[j] == -kInf) continue;
      const double rounding = fp8_tensor_cores_ ? kFp8Half * p + kFp8LeastHalf / sum : epsilon_stored_ * p;
      add_row(out_.o, row * c_.dv, p, rounding + p * noise_[j], head_.v.row(j), c_.dv);
    }
  }

  void backward_row(int64_t b, int64_t h, int64_t kv, int64_t i) {
    const int64_t row = in_.q_row(b, i) * c_.hq + h;
    if (out_.lse.value[in_.lse_index(b, h, i)] == -std::numeric_limits<double>::infinity()) return;
    const Real* d_o = &head_.d_o[i * c_.dv];
    std::vector<Real> o(c_.dv);
    for (int64_t x = 0; x < c_.dv; ++x) o[x] = stored(static_cast<Real>(out_.o.value[row * c_.dv + x]));
    Real delta = dot(d_o, o.data(), c_.dv);
    const Real d_lse = c_.d_lse ? static_cast<Real>(in_.d_lse[in_.lse_index(b, h, i)]) : Real{0};
    const double norm_d_o = norm(d_o, c_.dv);
    // delta is off by the rounding of each column of o, and by that of P, which shifts all columns alike.
    double delta_noise =
        norm_d_o * norm(o.data(), c_.dv) * (epsilon_ + epsilon_stored_ / std::sqrt(static_cast<double>(c_.dv)));
    double of_p = 0;
    head_.v.multiply(d_o, d_p_);
    for (int64_t j = 0; j < head_.sk; ++j) {
      if (p_[j] == 0 || s_[j] == -std::numeric_limits<Real>::infinity()) continue;
      d_p_[j] = kept_[j] * stored_score(d_p_[j]);
      p_[j] = stored_score(p_[j]);
      add_noise(of_p, p_[j] * (epsilon_stored_ + noise_[j]) * d_p_[j]);
    }
    if (stores_scores_) {  // the sum over its own row
      delta = 0;
      for (int64_t j = 0; j < head_.sk; ++j) {
        if (p_[j] != 0 && s_[j] != -std::numeric_limits<Real>::infinity()) delta += p_[j] * d_p_[j];
      }
    }
    delta_noise += std::sqrt(of_p);
    if (c_.d_sink) {
      const auto lse = static_cast<Real>(out_.lse.value[in_.lse_index(b, h, i)]);
      const Real p_sink = std::exp(static_cast<Real>(in_.sink[h]) - lse);
      add(out_.d_sink.value[h], p_sink * (d_lse - delta));
      add_noise(out_.d_sink.noise[h], p_sink * (delta_noise + std::fabs(d_lse - delta) *
                                                                  (epsilon_ + out_.lse.noise[in_.lse_index(b, h, i)])));
    }
    const Real* q = &head_.q[i * c_.d];
    const double norm_q = norm(q, c_.d);
    for (int64_t j = 0; j < head_.sk; ++j) {
      if (p_[j] == 0 || s_[j] == -std::numeric_limits<Real>::infinity()) continue;
      const int64_t key = in_.k_row(b, j) * c_.hkv + kv;
      const Real p_dropped = stored(p_[j] * kept_[j]);
      add_row(out_.d_v, key * c_.dv, p_dropped, p_dropped * (epsilon_stored_ + noise_[j]), d_o, c_.dv);
      Real d_s = p_[j] * (d_p_[j] - delta + d_lse);
      double d_s_noise =
          p_[j] * (kept_[j] * epsilon_ * norm_d_o * head_.v.norms[j] + delta_noise + epsilon_ * std::fabs(d_lse)) +
          std::fabs(d_s) * noise_[j];
      if (program_) differentiate(b, h, i, j, d_s, d_s_noise);
      if (c_.d_bias) {
        add(out_.d_bias.value[in_.bias_index(b, h, i, j)], d_s);
        add_noise(out_.d_bias.noise[in_.bias_index(b, h, i, j)], d_s_noise);
      }
      if (c_.softcap > 0) {
        // The factor 1 - tanh^2 carries the rounding of tanh^2, near 1, and what the score's rounding does to it.
        const Real s = scale_ * qk_[j], t = std::tanh(s / static_cast<Real>(c_.softcap)), factor = 1 - t * t;
        const double shift = 2 * factor * score_magnitude(s, norm_q, head_.k.norms[j]) / c_.softcap;
        d_s_noise = d_s_noise * factor + std::fabs(d_s) * epsilon_ * (1 + (std::isfinite(shift) ? shift : 0));
        d_s *= factor;
      }
      d_s_noise += epsilon_stored_ * std::fabs(d_s);
      d_s = stored(d_s);
      add_row(out_.d_q, row * c_.d, d_s * scale_, d_s_noise * scale_, head_.k.row(j), c_.d);
      add_row(out_.d_k, key * c_.d, d_s * scale_, d_s_noise * scale_, q, c_.d);
    }
    add_noise_of_row();
  }

  // d_s of the score before the program, and the gradients of what it reads.
  void differentiate(int64_t b, int64_t h, int64_t i, int64_t j, Real& d_s, double& d_s_noise) {
    program_->evaluate(in_.pair(b, h, i, j), before_[j]);
    const Rounded<Real> before = program_->gradient({d_s, d_s_noise}, [&](size_t n, int64_t element, auto gradient) {
      if (!d_captured_[n].sum) return;
      add(d_captured_[n].sum->value[element], gradient.value);
      d_captured_[n].of_row[element] += gradient.noise;
      touched_.push_back({n, element});
    });
    d_s = before.value, d_s_noise = before.noise;
  }

  // What shifts a row of gradients, as an error of delta does, shifts all terms of an element alike.
  void add_noise_of_row() {
    for (const auto& [n, element] : touched_) {
      double& noise = d_captured_[n].of_row[element];
      add_noise(d_captured_[n].sum->noise[element], noise);
      noise = 0;
    }
    touched_.clear();
  }

  struct CapturedGradient {
    PlainTensor* sum = nullptr;  // nullptr: not asked for
    std::vector<double> of_row;  // the noise of the current row's terms
  };

  const Inputs& in_;
  const Case& c_;
  PlainResult& out_;
  const bool stores_scores_, fp8_tensor_cores_;
  const tessera_problem problem_;
  Head<Real> head_{};
  std::vector<Real> qk_, s_, p_, kept_, d_p_;
  std::vector<double> noise_;
  std::optional<PlainProgram<Real>> program_;
  std::vector<Rounded<Real>> before_;  // scores that the program reads
  std::vector<CapturedGradient> d_captured_;
  std::vector<std::pair<size_t, int64_t>> touched_;
  Real scale_;
  double epsilon_ = 0, epsilon_stored_ = 0, p_drop_ = 0;
};

}  // namespace

PlainResult plain_attention(const Inputs& in, Precision precision) {
  PlainResult out;
  if (precision == Precision::kFloat64) {
    Plain<double>(in, out, precision).run();
  } else {
    Plain<float>(in, out, precision).run();
  }
  return out;
}

}  // namespace tessera::testing
