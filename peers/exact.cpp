#include "peers/exact.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "peers/loops.hpp"
#include "peers/team.hpp"

namespace tessera::peers {
namespace {

// FLOPs that the samples may cost, about half a second each on one core.
constexpr double kRowBudgetFlops = 3e9;
constexpr double kKeyBudgetFlops = 2e10;  // all rows of one KV head
constexpr std::int64_t kMostRows = 512;   // of one head
constexpr std::int64_t kFewestRows = 16;

double widen(const void* data, tessera_dtype dtype, std::int64_t at) {
  float value = 0;
  switch (dtype) {
    case TESSERA_FLOAT64:
      return static_cast<const double*>(data)[at];
    case TESSERA_FLOAT32:
      return static_cast<double>(static_cast<const float*>(data)[at]);
    case TESSERA_FLOAT16:
      best_loops().from_f16(static_cast<const std::uint16_t*>(data) + at, &value, 1);
      return static_cast<double>(value);
    case TESSERA_BFLOAT16:
      best_loops().from_bf16(static_cast<const std::uint16_t*>(data) + at, &value, 1);
      return static_cast<double>(value);
    default:
      throw std::invalid_argument("not a floating-point tensor");
  }
}

// `count` indices of 0 .. extent - 1, evenly spread, first and last included.
std::vector<std::int64_t> spread(std::int64_t extent, std::int64_t count) {
  count = std::clamp<std::int64_t>(count, 0, extent);
  std::vector<std::int64_t> indices;
  for (std::int64_t i = 0; i < count; ++i) indices.push_back(count == 1 ? 0 : i * (extent - 1) / (count - 1));
  return indices;
}

// One head of a [B, S, H, D] tensor in float64.
struct Head {
  std::int64_t width = 0;
  std::vector<double> data;  // [S, D]

  Head() = default;
  Head(const void* tensor, tessera_dtype dtype, std::int64_t b, std::int64_t h, std::int64_t rows, std::int64_t heads,
       std::int64_t d)
      : width(d), data(static_cast<std::size_t>(rows * d)) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t c = 0; c < d; ++c) {
        data[static_cast<std::size_t>(i * d + c)] = widen(tensor, dtype, ((b * rows + i) * heads + h) * d + c);
      }
    }
  }

  const double* row(std::int64_t i) const { return data.data() + i * width; }
};

// Sampled rows of one head of a result.
struct Sample {
  std::int64_t b = 0, h = 0;
  std::vector<std::int64_t> rows;
  std::vector<double> o{}, lse{}, d_q{};  // [rows, Dv], [rows], [rows, D]
};

}  // namespace

void ErrorStats::merge(const ErrorStats& other) {
  if (other.elems == 0) return;
  const auto n = static_cast<double>(elems), m = static_cast<double>(other.elems);
  rms = std::sqrt((rms * rms * n + other.rms * other.rms * m) / (n + m));
  max_abs = max_abs >= other.max_abs || std::isnan(max_abs) ? max_abs : other.max_abs;
  elems += other.elems;
}

ErrorStats error_of(const void* result, tessera_dtype dtype, const double* exact, std::int64_t elems) {
  ErrorStats stats;
  stats.elems = elems;
  double squares = 0;
  for (std::int64_t i = 0; i < elems; ++i) {
    const double got = widen(result, dtype, i);
    const bool same = got == exact[i] || (std::isnan(got) && std::isnan(exact[i]));  // infinities and NaN included
    const double error = same ? 0 : std::abs(got - exact[i]);
    squares += error * error;
    if (error > stats.max_abs || std::isnan(error)) stats.max_abs = error;
    if (std::isnan(error)) break;
  }
  stats.rms = elems == 0 ? 0 : std::sqrt(squares / static_cast<double>(elems));
  return stats;
}

struct ExactSample::Impl {
  AttentionShape shape;
  tessera_dtype dtype;
  bool backward;
  double scale;
  const RowProgram* program;  // nullptr: none
  const Loops& loops = best_loops();
  std::vector<Sample> samples{};

  std::int64_t key_b = 0, key_h = 0;  // the KV head whose key gradients are known
  std::vector<std::int64_t> keys{};
  std::vector<double> d_k{}, d_v{};  // [keys, D], [keys, Dv]

  std::int64_t visible(std::int64_t i) const {
    if (!shape.causal) return shape.seqlen_k;
    return std::clamp<std::int64_t>(i + shape.seqlen_k - shape.seqlen_q + 1, 0, shape.seqlen_k);
  }

  std::int64_t kv_head(std::int64_t h) const { return h * shape.heads_kv / shape.heads_q; }

  // A row of head (b, h) of `count` keys.
  struct Row {
    std::vector<double> s, p, d_s;  // the scores before the program
    double lse = -std::numeric_limits<double>::infinity();
  };

  // Row i's probabilities and LSE.
  Row row_of(std::int64_t b, std::int64_t h, std::int64_t i, const Head& q, const Head& k, std::int64_t count) const {
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    Row row;
    row.s.resize(static_cast<std::size_t>(count));
    for (std::int64_t j = 0; j < count; ++j) {
      row.s[static_cast<std::size_t>(j)] = scale * loops.dot_f64(q.row(i), k.row(j), shape.head_dim);
    }
    row.p = row.s;
    if (program) program->score(b, h, i, row.p.data(), count);
    const double largest = std::accumulate(row.p.begin(), row.p.end(), kHidden,
                                           [](double a, double x) { return x > a || std::isnan(x) ? x : a; });
    if (largest == kHidden) {
      std::ranges::fill(row.p, 0.0);
      return row;
    }
    double sum = 0;
    for (double& p : row.p) sum += p = std::exp(p - largest);
    for (double& p : row.p) p /= sum;
    row.lse = largest + std::log(sum);
    return row;
  }

  // dS of a row: the gradient of scale q.k.
  void differentiate(std::int64_t b, std::int64_t h, std::int64_t i, const Head& d_o, const Head& v, Row& row) const {
    const auto count = static_cast<std::int64_t>(row.p.size());
    row.d_s.resize(row.p.size());
    double delta = 0;
    for (std::size_t j = 0; j < row.p.size(); ++j) {
      row.d_s[j] = loops.dot_f64(d_o.row(i), v.row(static_cast<std::int64_t>(j)), shape.head_dim_v);
      delta += row.p[j] * row.d_s[j];
    }
    for (std::size_t j = 0; j < row.p.size(); ++j) row.d_s[j] = row.p[j] * (row.d_s[j] - delta);
    if (program) program->gradient(b, h, i, row.s.data(), row.d_s.data(), count);
  }

  void sample_rows(Sample& sample, const void* q, const void* k, const void* v, const void* d_o, Team& team) {
    const AttentionShape& s = shape;
    const Head q_head(q, dtype, sample.b, sample.h, s.seqlen_q, s.heads_q, s.head_dim);
    const Head k_head(k, dtype, sample.b, kv_head(sample.h), s.seqlen_k, s.heads_kv, s.head_dim);
    const Head v_head(v, dtype, sample.b, kv_head(sample.h), s.seqlen_k, s.heads_kv, s.head_dim_v);
    const Head d_o_head = backward ? Head(d_o, dtype, sample.b, sample.h, s.seqlen_q, s.heads_q, s.head_dim_v) : Head();
    const std::size_t rows = sample.rows.size();
    sample.o.assign(rows * static_cast<std::size_t>(s.head_dim_v), 0);
    sample.lse.assign(rows, -std::numeric_limits<double>::infinity());
    sample.d_q.assign(backward ? rows * static_cast<std::size_t>(s.head_dim) : 0, 0);
    team.for_each(static_cast<std::int64_t>(rows), [&](std::int64_t r) {
      const std::int64_t i = sample.rows[static_cast<std::size_t>(r)], count = visible(i);
      if (count == 0) return;
      Row row = row_of(sample.b, sample.h, i, q_head, k_head, count);
      sample.lse[static_cast<std::size_t>(r)] = row.lse;
      for (std::int64_t j = 0; j < count; ++j) {
        loops.axpy_f64(row.p[static_cast<std::size_t>(j)], v_head.row(j), sample.o.data() + r * s.head_dim_v,
                       s.head_dim_v);
      }
      if (!backward) return;
      differentiate(sample.b, sample.h, i, d_o_head, v_head, row);
      for (std::int64_t j = 0; j < count; ++j) {
        loops.axpy_f64(scale * row.d_s[static_cast<std::size_t>(j)], k_head.row(j), sample.d_q.data() + r * s.head_dim,
                       s.head_dim);
      }
    });
  }

  void sample_keys(const void* q, const void* k, const void* v, const void* d_o, Team& team) {
    const AttentionShape& s = shape;
    const std::int64_t group = s.heads_q / s.heads_kv;
    const Head k_head(k, dtype, key_b, key_h, s.seqlen_k, s.heads_kv, s.head_dim);
    const Head v_head(v, dtype, key_b, key_h, s.seqlen_k, s.heads_kv, s.head_dim_v);
    d_k.assign(keys.size() * static_cast<std::size_t>(s.head_dim), 0);
    d_v.assign(keys.size() * static_cast<std::size_t>(s.head_dim_v), 0);
    for (std::int64_t h = key_h * group; h < (key_h + 1) * group; ++h) {
      const Head q_head(q, dtype, key_b, h, s.seqlen_q, s.heads_q, s.head_dim);
      const Head d_o_head(d_o, dtype, key_b, h, s.seqlen_q, s.heads_q, s.head_dim_v);
      // [Sq, sampled keys]
      const std::size_t columns = keys.size();
      std::vector<double> p(static_cast<std::size_t>(s.seqlen_q) * columns), d_s(p.size());
      team.for_each(s.seqlen_q, [&](std::int64_t i) {
        const std::int64_t count = visible(i);
        if (count == 0) return;
        Row row = row_of(key_b, h, i, q_head, k_head, count);
        differentiate(key_b, h, i, d_o_head, v_head, row);
        for (std::size_t r = 0; r < columns && keys[r] < count; ++r) {
          p[static_cast<std::size_t>(i) * columns + r] = row.p[static_cast<std::size_t>(keys[r])];
          d_s[static_cast<std::size_t>(i) * columns + r] = row.d_s[static_cast<std::size_t>(keys[r])];
        }
      });
      team.for_each(static_cast<std::int64_t>(columns), [&](std::int64_t r) {
        for (std::int64_t i = 0; i < s.seqlen_q; ++i) {
          const std::size_t at = static_cast<std::size_t>(i) * columns + static_cast<std::size_t>(r);
          loops.axpy_f64(p[at], d_o_head.row(i), d_v.data() + r * s.head_dim_v, s.head_dim_v);
          loops.axpy_f64(scale * d_s[at], q_head.row(i), d_k.data() + r * s.head_dim, s.head_dim);
        }
      });
    }
  }

  // Error of the sampled rows of a [B, Sq, Hq, width] result, against `exact` of each sample.
  ErrorStats row_error(const void* result, std::int64_t width, std::vector<double> Sample::*exact) const {
    const std::size_t element = tessera_dtype_bytes(dtype);
    ErrorStats stats;
    for (const Sample& sample : samples) {
      for (std::size_t r = 0; r < sample.rows.size(); ++r) {
        const std::int64_t at = ((sample.b * shape.seqlen_q + sample.rows[r]) * shape.heads_q + sample.h) * width;
        stats.merge(error_of(static_cast<const char*>(result) + static_cast<std::size_t>(at) * element, dtype,
                             (sample.*exact).data() + r * static_cast<std::size_t>(width), width));
      }
    }
    return stats;
  }

  ErrorStats key_error(const void* result, std::int64_t width, const std::vector<double>& exact) const {
    const std::size_t element = tessera_dtype_bytes(dtype);
    ErrorStats stats;
    for (std::size_t r = 0; r < keys.size(); ++r) {
      const std::int64_t at = ((key_b * shape.seqlen_k + keys[r]) * shape.heads_kv + key_h) * width;
      stats.merge(error_of(static_cast<const char*>(result) + static_cast<std::size_t>(at) * element, dtype,
                           exact.data() + r * static_cast<std::size_t>(width), width));
    }
    return stats;
  }
};

ExactSample::ExactSample(const AttentionShape& shape, tessera_dtype dtype, const void* q, const void* k, const void* v,
                         const void* d_o, int threads, const RowProgram* program)
    : impl_(new Impl{.shape = shape,
                     .dtype = dtype,
                     .backward = d_o != nullptr,
                     .scale = shape.effective_scale(),
                     .program = program}) {
  Impl& my = *impl_;
  Team team(threads);
  const double score_flops = 2.0 * static_cast<double>(shape.head_dim + shape.head_dim_v);
  const double row_flops =
      static_cast<double>(std::max<std::int64_t>(shape.seqlen_k, 1)) * score_flops * (my.backward ? 2 : 1);
  const std::int64_t rows =
      std::clamp(static_cast<std::int64_t>(kRowBudgetFlops / 2 / row_flops), kFewestRows, kMostRows);
  if (shape.batch == 0 || shape.heads_q == 0) return;
  const std::int64_t last_b = shape.batch - 1, last_h = shape.heads_q - 1;
  my.samples.push_back({.b = 0, .h = 0, .rows = spread(shape.seqlen_q, rows)});
  if (last_b != 0 || last_h != 0) {
    my.samples.push_back({.b = last_b, .h = last_h, .rows = spread(shape.seqlen_q, rows)});
  }
  for (Sample& sample : my.samples) my.sample_rows(sample, q, k, v, d_o, team);

  const double key_flops = static_cast<double>(shape.heads_q / shape.heads_kv) * static_cast<double>(shape.seqlen_q) *
                           static_cast<double>(shape.seqlen_k) * score_flops;
  if (my.backward && key_flops <= kKeyBudgetFlops) {
    my.key_b = last_b;
    my.key_h = shape.heads_kv - 1;
    my.keys = spread(shape.seqlen_k, rows);
    my.sample_keys(q, k, v, d_o, team);
  }
}

ExactSample::~ExactSample() = default;

bool ExactSample::has_key_gradients() const { return !impl_->keys.empty(); }

ErrorStats ExactSample::o(const void* result) const {
  return impl_->row_error(result, impl_->shape.head_dim_v, &Sample::o);
}

ErrorStats ExactSample::d_q(const void* result) const {
  return impl_->row_error(result, impl_->shape.head_dim, &Sample::d_q);
}

ErrorStats ExactSample::d_k(const void* result) const {
  return impl_->key_error(result, impl_->shape.head_dim, impl_->d_k);
}

ErrorStats ExactSample::d_v(const void* result) const {
  return impl_->key_error(result, impl_->shape.head_dim_v, impl_->d_v);
}

ErrorStats ExactSample::lse(const float* result) const {
  ErrorStats stats;
  for (const Sample& sample : impl_->samples) {
    const float* row = result + (sample.b * impl_->shape.heads_q + sample.h) * impl_->shape.seqlen_q;
    for (std::size_t r = 0; r < sample.rows.size(); ++r) {
      stats.merge(error_of(row + sample.rows[r], TESSERA_FLOAT32, &sample.lse[r], 1));
    }
  }
  return stats;
}

}  // namespace tessera::peers
