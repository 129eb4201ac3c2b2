#include "core/reference.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>

#include "core/convert.hpp"
#include "core/geometry.hpp"
#include "core/philox.hpp"
#include "core/problem_view.hpp"
#include "core/score/bound.hpp"
#include "core/validate.hpp"

namespace tessera::core {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// The caller's workspace, divided into rows of float64. Without memory it only counts.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<double*>(memory)) {}
  std::span<double> take(int64_t count) {
    const int64_t begin = used_;
    used_ += count;
    return memory_ ? std::span<double>(memory_ + begin, static_cast<size_t>(count)) : std::span<double>();
  }
  int64_t used_bytes() const { return used_ * static_cast<int64_t>(sizeof(double)); }

 private:
  double* memory_;
  int64_t used_ = 0;
};

struct Workspace {
  std::span<double> k, v;      // [Sk, D], [Sk, Dv]: one head of one sequence
  std::span<double> q, o;      // [D], [Dv]: one query
  std::span<double> s, s_low;  // [Sk]: scores and their rounding errors
  std::span<double> p, keep;   // [Sk]: softmax, dropout's factors
  std::span<double> k_norm;    // [Sk]: |k|
  // backward
  std::span<double> d_k, d_v;       // [Sk, D], [Sk, Dv]
  std::span<double> d_q, d_o;       // [D], [Dv]
  std::span<double> d_s, tanh_s_c;  // [Sk]: gradient of the biased score; tanh of the soft-capped score
  std::span<double> d_bias;         // [Sk]: one row
  std::span<double> d_sink;         // [Hq]
  // for a score program
  std::span<double> s_before;  // [Sk]: the score before it
  std::array<std::span<double>, score::kMaxTensors> d_captured;

  Workspace(const tessera_plan& plan, Arena& arena) {
    const int64_t sk = plan.max_seqlen_k, head_dim = plan.head_dim, head_dim_v = plan.head_dim_v;
    k = arena.take(sk * head_dim);
    v = arena.take(sk * head_dim_v);
    q = arena.take(head_dim);
    o = arena.take(head_dim_v);
    s = arena.take(sk);
    s_low = arena.take(sk);
    p = arena.take(sk);
    keep = arena.take(sk);
    k_norm = arena.take(sk);
    if (score::has_program(plan)) s_before = arena.take(sk);
    if (plan.problem.direction != TESSERA_BACKWARD) return;
    d_k = arena.take(sk * head_dim);
    d_v = arena.take(sk * head_dim_v);
    d_q = arena.take(head_dim);
    d_o = arena.take(head_dim_v);
    d_s = arena.take(sk);
    tanh_s_c = arena.take(sk);
    d_bias = arena.take(sk);
    d_sink = arena.take(plan.heads_q);
    if (!score::has_program(plan)) return;
    const score::Bound bound = score::bind(plan);
    for (size_t n = 0; n < score::kMaxTensors; ++n) {
      if (bound.gradients[n].needed) d_captured[n] = arena.take(bound.tensors[n].elements());
    }
  }
};

double dot(std::span<const double> a, std::span<const double> b) {
  constexpr size_t kLanes = 8;  // independent sums, which a compiler can keep in one vector
  double lanes[kLanes] = {};
  size_t d = 0;
  for (; d + kLanes <= a.size(); d += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[d + lane] * b[d + lane];
  }
  double sum = 0;
  for (; d < a.size(); ++d) sum += a[d] * b[d];
  for (double lane : lanes) sum += lane;
  return sum;
}

// A number with twice float64's digits, as an unevaluated sum.
struct Twofold {
  double high, low;
};

// a + b (Knuth, "The Art of Computer Programming" 2, 4.2.2): exactly, unless it overflows.
Twofold two_sum(double a, double b) {
  const double sum = a + b, of_b = sum - a;
  return {sum, std::isfinite(sum) ? (a - (sum - of_b)) + (b - of_b) : 0.0};
}

// a x + b y + ... to twice the digits (Ogita, Rump, Oishi, "Accurate sum and dot product", 2005, algorithm 5.3).
Twofold twofold_dot(std::span<const double> a, std::span<const double> b) {
  Twofold total{0, 0};
  for (size_t d = 0; d < a.size(); ++d) {
    const double product = a[d] * b[d];
    const Twofold sum = two_sum(total.high, product);
    const double low = total.low + (sum.low + std::fma(a[d], b[d], -product));
    total = {sum.high, std::isfinite(sum.high) ? low : 0.0};
  }
  return two_sum(total.high, total.low);
}

// Beyond it neighbouring float64 numbers differ by more than 1, and a score is its rounded value.
constexpr double kLargestTwofold = 0x1p53;
Twofold settled(Twofold s) { return {s.high, std::fabs(s.high) < kLargestTwofold ? s.low : 0.0}; }

// y += a x
void add_scaled(double a, std::span<const double> x, std::span<double> y) {
  for (size_t d = 0; d < x.size(); ++d) y[d] += a * x[d];
}

// One head of q, or of k and v: the address of row r of sequence b.
struct Head {
  const tessera_layout& layout;
  int64_t begin;  // first row of the sequence
  int64_t b, head;

  int64_t offset(int64_t row) const {
    const RowStrides stride = row_strides(layout);
    return stride.batch * b + stride.row * (begin + row) + stride.head * head;
  }
  void load_row(const void* data, int64_t row, std::span<double> to) const {
    for (size_t d = 0; d < to.size(); ++d) to[d] = load(layout.dtype, data, offset(row) + static_cast<int64_t>(d));
  }
  void store_row(std::span<const double> from, void* data, int64_t row, bool adds = false) const {
    for (size_t d = 0; d < from.size(); ++d) {
      const int64_t at = offset(row) + static_cast<int64_t>(d);
      store(layout.dtype, data, at, adds ? load(layout.dtype, data, at) + from[d] : from[d]);
    }
  }
};

// Sets every row of a packed tensor [T, H, D] to 0, which remains in rows that belong to no sequence.
void clear_packed(const tessera_layout& layout, void* data) {
  if (layout.rank != 3) return;
  for (int64_t row = 0; row < layout.shape[0]; ++row) {
    for (int64_t head = 0; head < layout.shape[1]; ++head) {
      for (int64_t d = 0; d < layout.shape[2]; ++d) {
        store(layout.dtype, data, row * layout.strides[0] + head * layout.strides[1] + d, 0.0);
      }
    }
  }
}

// Copies a packed tensor [T, H, D]: the rows that belong to no sequence keep the partial result.
void copy_packed(const tessera_layout& from, const void* data, const tessera_layout& to, void* out) {
  if (to.rank != 3) return;
  for (int64_t row = 0; row < to.shape[0]; ++row) {
    for (int64_t head = 0; head < to.shape[1]; ++head) {
      const int64_t at = row * from.strides[0] + head * from.strides[1];
      for (int64_t d = 0; d < to.shape[2]; ++d) {
        store(to.dtype, out, row * to.strides[0] + head * to.strides[1] + d, load(from.dtype, data, at + d));
      }
    }
  }
}

// The score program of a call, evaluated for one pair after another.
class ProgramStep {
 public:
  explicit ProgramStep(const score::Bound& bound)
      : bound_(bound),
        bindings_(score::bindings_of(bound_)),
        program_(bound_.program(), bindings_),
        gradient_(bound_.gradient().program, bindings_) {}
  ProgramStep(const ProgramStep&) = delete;

  // The new score; -infinity if the mask hides the key.
  Twofold score(const score::Inputs& pair, Twofold s) {
    const score::Program& program = bound_.program();
    program_.begin(pair);
    if (program.mask >= 0 && program_.value(program.mask) == 0) return {kMinusInfinity, 0};
    return program.score < 0 ? s : Twofold{program_.value(program.score), 0};
  }

  // The gradient of s; pair.g is the gradient of the new score. The gradients of captured tensors are added to
  // `d_captured` if it is given.
  double gradient(const score::Inputs& pair, const Workspace* d_captured) {
    const score::Gradient& gradient = bound_.gradient();
    gradient_.begin(pair);
    for (const score::LoadGradient& load : gradient.loads) {
      const size_t tensor = static_cast<size_t>(load.tensor);
      if (!d_captured || !bound_.gradients[tensor].needed) continue;
      int64_t index[score::kMaxRank] = {}, at = 0;
      for (size_t axis = 0; axis < load.indices.size(); ++axis) {
        index[axis] = static_cast<int64_t>(gradient_.value(load.indices[axis]));
        at = at * bound_.tensors[tensor].shape[axis] + index[axis];
      }
      if (!bound_.tensors[tensor].holds(index)) continue;
      d_captured->d_captured[tensor][at] += gradient_.value(load.adjoint);
    }
    return gradient.d_s < 0 ? 0 : gradient_.value(gradient.d_s);
  }

  void clear_gradients(const Workspace& w) const {
    for (const std::span<double> sums : w.d_captured) std::ranges::fill(sums, 0.0);
  }
  void store_gradients(const Workspace& w) const {
    for (size_t n = 0; n < score::kMaxTensors; ++n) {
      const score::BoundGradient& to = bound_.gradients[n];
      if (!to.needed) continue;
      score::for_each_element(bound_.tensors[n], [&](const int64_t* index, int64_t at) {
        int64_t offset_bytes = 0;
        for (int axis = 0; axis < bound_.tensors[n].rank; ++axis) offset_bytes += to.stride_bytes[axis] * index[axis];
        store(to.dtype, static_cast<char*>(to.data) + offset_bytes, 0, w.d_captured[n][at]);
      });
    }
  }

 private:
  const score::Bound& bound_;
  const score::Bindings bindings_;
  score::Evaluator program_, gradient_;
};

// One (sequence, query head): the formulas for its rows.
class HeadAttention {
 public:
  HeadAttention(const tessera_plan& plan, const tessera_buffers& buffers, const Workspace& w, ProgramStep* program,
                int64_t b, int64_t h)
      : problem_(plan.problem),
        buffers_(buffers),
        w_(w),
        program_(program),
        b_(b),
        h_(h),
        view_(sequence(plan.problem, buffers, b)),
        heads_q_(plan.heads_q),
        head_dim_(plan.head_dim),
        head_dim_v_(plan.head_dim_v) {}

  const SequenceView& view() const { return view_; }
  int64_t kv_head() const { return h_ / (heads_q_ / (problem_.k.shape[problem_.k.rank - 2])); }
  Head queries(const tessera_layout& layout) const { return {layout, view_.q_begin, b_, h_}; }
  std::span<double> k_row(std::span<double> of, int64_t j) const { return of.subspan(j * head_dim_, head_dim_); }
  std::span<double> v_row(std::span<double> of, int64_t j) const { return of.subspan(j * head_dim_v_, head_dim_v_); }
  int64_t lse_offset(const tessera_layout& layout, int64_t i) const {
    const LseStrides stride = lse_strides(layout);
    return stride.batch * b_ + stride.head * h_ + stride.row * (view_.q_begin + i);
  }

  // K and V of this head's KV head, used keys only.
  void load_keys() const {
    for (int64_t j = 0; j < view_.sk; ++j) {
      const Head k = key_row(problem_.k, j), v = key_row(problem_.v, j);
      k.load_row(buffers_.k, 0, k_row(w_.k, j));
      scale_row(k_row(w_.k, j), key_scale(problem_.k_descale, buffers_.k_descale, j));
      w_.k_norm[j] = std::sqrt(dot(k_row(w_.k, j), k_row(w_.k, j)));
      v.load_row(buffers_.v, 0, v_row(w_.v, j));
      scale_row(v_row(w_.v, j), key_scale(problem_.v_descale, buffers_.v_descale, j));
    }
  }

  // The scale of an 8-bit key or value, and of a query; 1 without scales.
  double key_scale(const tessera_layout& layout, const float* scales, int64_t j) const {
    if (!present(layout)) return 1;
    if (layout.rank < 3 || !paged(problem_)) return token_scale(layout, scales, j);
    const int64_t page = page_of(problem_, buffers_, b_, j), slot = j % problem_.k.shape[1];
    return scales[layout.strides[0] * page + layout.strides[1] * slot + layout.strides[2] * kv_head()];
  }
  double token_scale(const tessera_layout& layout, const float* scales, int64_t token) const {
    if (!present(layout)) return 1;
    if (layout.rank == 1) return scales[layout.strides[0] * (layout.shape[0] == 1 ? 0 : kv_head())];
    if (layout.rank == 2) return scales[layout.strides[0] * b_ + layout.strides[1] * kv_head()];
    return scales[layout.strides[0] * b_ + layout.strides[1] * (token / kScaleTokens) + layout.strides[2] * kv_head()];
  }
  static void scale_row(std::span<double> row, double scale) {
    for (double& element : row) element *= scale;
  }

  // Bit t of the query's words belongs to key Sk - Sq + t.
  bool in_tree(int64_t i, int64_t j) const {
    const tessera_layout& tree = problem_.tree_mask;
    const bool packed = tree.rank == 2;
    const int64_t words = tree.shape[packed ? 1 : 2], t = j - (view_.sk - view_.sq);
    if (t < 0 || t >= 32 * words) return true;
    const int64_t row = packed ? tree.strides[0] * (view_.q_begin + i) : tree.strides[0] * b_ + tree.strides[1] * i;
    const int32_t word = buffers_.tree_mask[row + tree.strides[packed ? 1 : 2] * (t / 32)];
    return (static_cast<uint32_t>(word) >> (t % 32) & 1) != 0;
  }

  // Whether causal, window and all masks allow query i to see key j.
  bool visible(int64_t i, int64_t j) const {
    const int64_t distance = j - (i + diagonal(problem_, view_.place));  // distance to the right of the diagonal
    if (view_.causal && distance > 0) return false;
    if (problem_.window_left >= 0 && -distance > problem_.window_left) return false;
    if (problem_.window_right >= 0 && distance > problem_.window_right) return false;
    if (present(problem_.tree_mask) && !in_tree(i, j)) return false;
    if (present(problem_.mask) && !buffers_.mask[score_offset(problem_.mask, i, j)]) return false;
    return !present(problem_.block_mask) ||
           buffers_.block_mask[score_offset(problem_.block_mask, i / problem_.mask_block_q, j / problem_.mask_block_k)];
  }

  // A row's softmax: its largest score and the sum of exp(s - largest). LSE = largest + log(sum).
  struct RowSums {
    Twofold largest;
    double sum;
    double partial;  // the weight of the partial result

    bool sees_nothing() const { return largest.high == kMinusInfinity; }
    Twofold lse() const {
      if (!std::isfinite(largest.high)) return {largest.high + std::log(sum), 0};
      const Twofold high = two_sum(largest.high, std::log(sum));
      return two_sum(high.high, high.low + largest.low);
    }
  };

  // The LSE of the partial result with which row i is merged; -infinity: there is none.
  Twofold partial_lse(int64_t i) const {
    if (!problem_.accumulate || problem_.direction == TESSERA_BACKWARD) return {kMinusInfinity, 0};
    const double high = buffers_.lse[lse_offset(problem_.lse, i)];
    return two_sum(high, buffers_.lse_low[lse_offset(problem_.lse_low, i)]);
  }

  // Row i: scores, softmax and dropout's factors. If it sees nothing, s, p and keep are undefined.
  RowSums softmax_row(int64_t i) const {
    queries(problem_.q).load_row(buffers_.q, i, w_.q);
    scale_row(w_.q, token_scale(problem_.q_descale, buffers_.q_descale, i));
    const double q_norm = std::sqrt(dot(w_.q, w_.q));
    Twofold largest{kMinusInfinity, 0};
    const auto raise = [&largest](double high, double low) {
      if (high > largest.high || (high == largest.high && low > largest.low)) largest = {high, low};
    };
    bool undefined = false;  // a NaN score, which a maximum would ignore
    for (int64_t j = 0; j < view_.sk; ++j) {
      const bool shown = visible(i, j);
      Twofold s = shown ? score(i, j, q_norm) : Twofold{kMinusInfinity, 0};
      if (program_ && shown) {  // also of a score that a bias made -infinity
        w_.s_before[j] = s.high;
        s = program_->score(pair(i, j), s);
      }
      w_.s[j] = s.high, w_.s_low[j] = s.low;
      raise(s.high, s.low);
      undefined = undefined || std::isnan(s.high);
    }
    const Twofold partial = partial_lse(i);
    raise(partial.high, partial.low);
    if (undefined || std::isnan(partial.high)) largest = {std::numeric_limits<double>::quiet_NaN(), 0};
    if (largest.high == kMinusInfinity) return {largest, 0, 0};
    double sum = 0;
    if (present(problem_.sink)) {
      raise(sink(), 0);
      sum = exp_below(largest, {sink(), 0});
    }
    const double of_partial = partial.high == kMinusInfinity ? 0 : exp_below(largest, partial);
    sum += of_partial;
    for (int64_t j = 0; j < view_.sk; ++j) {
      w_.p[j] = hidden(j) ? 0 : exp_below(largest, {w_.s[j], w_.s_low[j]});
      sum += w_.p[j];
    }
    const Dropout dropout = dropout_on_host(problem_, buffers_);
    const Place& place = view_.place;
    const WholeHeads whole = whole_heads(problem_);
    const int64_t philox_head = (b_ + whole.first_sequence) * whole.heads + h_ + whole.first_head;
    for (int64_t j = 0; j < view_.sk; ++j) {
      if (!hidden(j)) w_.p[j] /= sum;
      w_.keep[j] = 1;
      if (dropout.threshold > 0 && !hidden(j)) {
        const bool keeps = dropout.keeps(static_cast<uint32_t>(philox_head), static_cast<uint32_t>(i + place.first_q),
                                         static_cast<uint32_t>(j + place.first_k));
        w_.keep[j] = keeps ? 1 / (1 - problem_.dropout_p) : 0;
      }
    }
    return {largest, sum, of_partial == 0 ? 0 : of_partial / sum};  // 0 / NaN is not 0, and o would be read
  }

  // s = -inf: not visible, or hidden by the bias. Such an entry is never multiplied with anything.
  bool hidden(int64_t j) const { return w_.s[j] == kMinusInfinity; }

  // O_i = sum_j keep_j P_j V_j, plus the weighted partial result, after softmax_row. The V of a dropped entry is
  // not used; but a softmax that is NaN, as after a score of infinity, is NaN for every key, kept or dropped.
  void output_row(int64_t i, const RowSums& sums) const {
    std::ranges::fill(w_.o, 0.0);
    if (sums.partial != 0) {
      const bool in_place = !present(problem_.o_accum);
      queries(in_place ? problem_.o : problem_.o_accum).load_row(in_place ? buffers_.o : buffers_.o_accum, i, w_.o);
      for (double& o : w_.o) o *= sums.partial;
    }
    for (int64_t j = 0; j < view_.sk; ++j) {
      if (hidden(j) || (w_.keep[j] == 0 && !std::isnan(w_.p[j]))) continue;
      add_scaled(w_.keep[j] * w_.p[j], v_row(w_.v, j), w_.o);
    }
  }

  // The inputs of a program for query i and key j.
  score::Inputs pair(int64_t i, int64_t j) const {
    score::Inputs pair = score::inputs_of(whole_heads(problem_), view_.place, b_, h_, i, j);
    pair.s = w_.s_before[j];
    return pair;
  }

  // dS_ij = P_ij (dP_ij - delta_i + dLSE_i) with dP_ij = keep_ij dO_i . V_j and delta_i = sum_j P_ij dP_ij, after
  // softmax_row; d_sink is the same factor of the sink's probability. With a program, dS is replaced by the
  // gradient of the score before it, and the gradients of captured tensors are added to `d_captured` if it is given.
  // false: the row sees nothing.
  bool gradient_row(int64_t i, double& d_sink, const Workspace* d_captured = nullptr) const {
    const RowSums sums = softmax_row(i);
    if (sums.sees_nothing()) return false;
    queries(problem_.d_o).load_row(buffers_.d_o, i, w_.d_o);
    double delta = 0;
    for (int64_t j = 0; j < view_.sk; ++j) {
      const bool reaches_output = !hidden(j) && w_.keep[j] != 0;
      w_.d_s[j] = reaches_output ? w_.keep[j] * dot(w_.d_o, v_row(w_.v, j)) : 0;
      if (reaches_output) delta += w_.p[j] * w_.d_s[j];
    }
    const double d_lse = present(problem_.d_lse) ? double{buffers_.d_lse[lse_offset(problem_.d_lse, i)]} : 0.0;
    for (int64_t j = 0; j < view_.sk; ++j) w_.d_s[j] = hidden(j) ? 0 : w_.p[j] * (w_.d_s[j] - delta + d_lse);
    for (int64_t j = 0; program_ && j < view_.sk; ++j) {
      if (hidden(j)) continue;
      score::Inputs at = pair(i, j);
      at.g = w_.d_s[j];
      w_.d_s[j] = program_->gradient(at, d_captured);
    }
    d_sink = present(problem_.sink) ? exp_below(sums.largest, {sink(), 0}) / sums.sum * (d_lse - delta) : 0;
    return true;
  }

  // Adds the contributions of row i to dQ, dK and dV, after gradient_row.
  void propagate_row() const {
    std::ranges::fill(w_.d_q, 0.0);
    for (int64_t j = 0; j < view_.sk; ++j) {
      if (hidden(j)) continue;
      // ds / d(q.k) = scale, times 1 - tanh^2 with a soft cap
      const double slope = problem_.scale * (problem_.softcap > 0 ? 1 - w_.tanh_s_c[j] * w_.tanh_s_c[j] : 1);
      add_scaled(slope * w_.d_s[j], k_row(w_.k, j), w_.d_q);
      add_scaled(slope * w_.d_s[j], w_.q, k_row(w_.d_k, j));
      if (w_.keep[j] != 0) add_scaled(w_.keep[j] * w_.p[j], w_.d_o, v_row(w_.d_v, j));
    }
  }

  // Key j's row of k, v or their gradients, as row 0 of the result.
  Head key_row(const tessera_layout& layout, int64_t j) const {
    if (!paged(problem_)) return {layout, view_.k_begin + j, b_, kv_head()};
    return {layout, j % problem_.k.shape[1], page_of(problem_, buffers_, b_, j), kv_head()};
  }

 private:
  int64_t score_offset(const tessera_layout& layout, int64_t i, int64_t j) const {
    const ScoreStrides stride = score_strides(layout);
    return stride.batch * b_ + stride.head * h_ + stride.row * i + stride.col * j;
  }

  double sink() const { return buffers_.sink[h_ * problem_.sink.strides[0]]; }

  // exp(s - largest)
  static double exp_below(const Twofold& largest, const Twofold& s) {
    return std::exp((s.high - largest.high) + (s.low - largest.low));
  }

  // Rounded only if a score is so large that float64 cannot resolve 1e-14 near it, which the product of norms bounds.
  Twofold score(int64_t i, int64_t j, double q_norm) const {
    constexpr double kPreciseEnough = 32;
    const std::span<const double> k = k_row(w_.k, j);
    Twofold s{problem_.scale * dot(w_.q, k), 0};
    if (std::fabs(problem_.scale) * q_norm * w_.k_norm[j] > kPreciseEnough) {
      const Twofold product = twofold_dot(w_.q, k);
      const double scaled = problem_.scale * product.high;
      const double low = std::fma(problem_.scale, product.high, -scaled) + problem_.scale * product.low;
      s = std::isfinite(scaled) ? settled(two_sum(scaled, low)) : Twofold{scaled, 0};
    }
    if (problem_.softcap > 0) {
      const long double c = problem_.softcap;
      const long double t = c > kPreciseEnough ? std::tanh((static_cast<long double>(s.high) + s.low) / c)
                                               : std::tanh(s.high / problem_.softcap);
      if (problem_.direction == TESSERA_BACKWARD) w_.tanh_s_c[j] = static_cast<double>(t);
      s.high = static_cast<double>(c * t);
      s = settled({s.high, static_cast<double>(c * t - s.high)});
    }
    if (present(problem_.bias))
      s = plus(s, load(problem_.bias.dtype, buffers_.bias, score_offset(problem_.bias, i, j)));
    if (present(problem_.alibi_slopes)) {
      const SlopeStrides stride = slope_strides(problem_.alibi_slopes);
      const double slope = buffers_.alibi_slopes[stride.batch * b_ + stride.head * h_];
      s = plus(s, -slope * std::fabs(static_cast<double>(i + bottom_right(view_.place) - j)));
    }
    return s;
  }

  static Twofold plus(const Twofold& s, double term) {
    const Twofold sum = two_sum(s.high, term);
    return std::isfinite(sum.high) ? settled(two_sum(sum.high, sum.low + s.low)) : Twofold{sum.high, 0};
  }

  const tessera_problem& problem_;
  const tessera_buffers& buffers_;
  const Workspace& w_;
  ProgramStep* const program_;  // NULL: none
  const int64_t b_, h_;
  const SequenceView view_;
  const int64_t heads_q_, head_dim_, head_dim_v_;
};

// dQ, dK, dV (and dSink): dK and dV of a KV head sum over all of its query heads.
void gradients_of_inputs(const tessera_plan& plan, const tessera_buffers& buffers, const Workspace& w,
                         ProgramStep* program, Cancel& cancel) {
  const tessera_problem& problem = plan.problem;
  const int64_t group = plan.heads_q / plan.heads_kv;
  const bool adds = problem.accumulate != 0;
  if (!adds) {
    clear_packed(problem.d_q, buffers.d_q);
    clear_packed(problem.d_k, buffers.d_k);
    clear_packed(problem.d_v, buffers.d_v);
  }
  std::ranges::fill(w.d_sink, 0.0);
  if (program) program->clear_gradients(w);
  for (int64_t b = 0; b < plan.batch; ++b) {
    for (int64_t h_kv = 0; h_kv < plan.heads_kv; ++h_kv) {
      const HeadAttention first(plan, buffers, w, program, b, h_kv * group);
      const int64_t sk = first.view().sk;
      first.load_keys();
      std::ranges::fill(w.d_k, 0.0);
      std::ranges::fill(w.d_v, 0.0);
      for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
        const HeadAttention head(plan, buffers, w, program, b, h);
        for (int64_t i = 0; i < head.view().sq; ++i) {
          if (cancel.asked()) return;
          double d_sink = 0;
          if (head.gradient_row(i, d_sink, &w)) {
            head.propagate_row();
          } else {
            std::ranges::fill(w.d_q, 0.0);
          }
          w.d_sink[h] += d_sink;
          head.queries(problem.d_q).store_row(w.d_q, buffers.d_q, i, adds);
        }
      }
      for (int64_t j = 0; j < first.view().k_rows; ++j) {
        if (j == sk) {  // keys past seqused_k have gradient 0
          std::ranges::fill(w.d_k, 0.0);
          std::ranges::fill(w.d_v, 0.0);
        }
        const int64_t row = j < sk ? j : 0;
        first.key_row(problem.d_k, j).store_row(first.k_row(w.d_k, row), buffers.d_k, 0, adds);
        first.key_row(problem.d_v, j).store_row(first.v_row(w.d_v, row), buffers.d_v, 0, adds);
      }
    }
  }
  if (program) program->store_gradients(w);
  for (int64_t h = 0; present(problem.d_sink) && h < plan.heads_q; ++h) {
    buffers.d_sink[h * problem.d_sink.strides[0]] = static_cast<float>(w.d_sink[h]);
  }
}

// dBias = dS, summed over the bias's broadcast dimensions. One row at a time collects all entries that it serves.
void gradient_of_bias(const tessera_plan& plan, const tessera_buffers& buffers, const Workspace& w,
                      ProgramStep* program, Cancel& cancel) {
  const tessera_layout& layout = plan.problem.d_bias;
  const auto [batches, heads, rows, cols, unused] = layout.shape;
  struct Range {
    int64_t begin, end;
  };
  const auto served = [](int64_t index, int64_t extent, int64_t count) {
    return extent == 1 ? Range{0, count} : Range{index, std::min(index + 1, count)};
  };
  for (int64_t row = 0; row < batches * heads * rows; ++row) {
    const int64_t bias_b = row / (heads * rows), bias_h = row / rows % heads, bias_i = row % rows;
    std::ranges::fill(w.d_bias, 0.0);
    const Range bs = served(bias_b, batches, plan.batch), hs = served(bias_h, heads, plan.heads_q);
    for (int64_t b = bs.begin; b < bs.end; ++b) {
      for (int64_t h = hs.begin; h < hs.end; ++h) {
        const HeadAttention head(plan, buffers, w, program, b, h);
        const Range is = served(bias_i, rows, head.view().sq);
        if (is.begin < is.end) head.load_keys();
        for (int64_t i = is.begin; i < is.end; ++i) {
          if (cancel.asked()) return;
          double d_sink = 0;
          if (head.gradient_row(i, d_sink)) add_scaled(1, w.d_s.first(head.view().sk), w.d_bias);
        }
      }
    }
    float* out = buffers.d_bias + bias_b * layout.strides[0] + bias_h * layout.strides[1] + bias_i * layout.strides[2];
    for (int64_t j = 0; j < cols; ++j) {
      out[j] = j < static_cast<int64_t>(w.d_bias.size()) ? static_cast<float>(w.d_bias[j]) : 0.0f;
    }
  }
}

// Stores the LSE in float32 and, if requested, its rounding error.
void store_lse(const tessera_problem& problem, const tessera_buffers& buffers, Twofold lse, int64_t offset,
               int64_t low_offset) {
  if (!present(problem.lse)) return;
  const float high = static_cast<float>(lse.high);
  buffers.lse[offset] = high;
  if (!present(problem.lse_low)) return;
  const bool finite = std::isfinite(high);
  buffers.lse_low[low_offset] = finite ? static_cast<float>((lse.high - high) + lse.low) : 0.0f;
}

}  // namespace

int64_t reference_workspace_bytes(const tessera_plan& plan) {
  Arena counter(nullptr);
  Workspace(plan, counter);
  return counter.used_bytes();
}

void reference_forward(const tessera_plan& plan, const tessera_buffers& buffers, const score::Bound* bound,
                       void* workspace, Cancel& cancel) {
  Arena arena(workspace);
  const Workspace w(plan, arena);
  const tessera_problem& problem = plan.problem;
  const int64_t group = plan.heads_q / plan.heads_kv;
  std::optional<ProgramStep> program;
  if (bound) program.emplace(*bound);
  if (!problem.accumulate) clear_packed(problem.o, buffers.o);
  if (present(problem.o_accum)) copy_packed(problem.o_accum, buffers.o_accum, problem.o, buffers.o);
  if (packed_q(problem) && present(problem.lse) && !problem.accumulate) {
    const LseStrides stride = lse_strides(problem.lse), low = lse_strides(problem.lse_low);
    for (int64_t h = 0; h < plan.heads_q; ++h) {
      for (int64_t row = 0; row < problem.lse.shape[1]; ++row) {
        store_lse(problem, buffers, {kMinusInfinity, 0}, stride.head * h + stride.row * row,
                  low.head * h + low.row * row);
      }
    }
  }
  for (int64_t b = 0; b < plan.batch; ++b) {
    for (int64_t h = 0; h < plan.heads_q; ++h) {
      const HeadAttention head(plan, buffers, w, program ? &*program : nullptr, b, h);
      if (h % group == 0) head.load_keys();
      for (int64_t i = 0; i < head.view().sq; ++i) {
        if (cancel.asked()) return;
        const HeadAttention::RowSums sums = head.softmax_row(i);
        if (sums.sees_nothing()) {
          std::ranges::fill(w.o, 0.0);
        } else {
          head.output_row(i, sums);
        }
        head.queries(problem.o).store_row(w.o, buffers.o, i);
        store_lse(problem, buffers, sums.lse(), head.lse_offset(problem.lse, i), head.lse_offset(problem.lse_low, i));
      }
    }
  }
}

void reference_backward(const tessera_plan& plan, const tessera_buffers& buffers, const score::Bound* bound,
                        void* workspace, Cancel& cancel) {
  Arena arena(workspace);
  const Workspace w(plan, arena);
  std::optional<ProgramStep> program;
  if (bound) program.emplace(*bound);
  ProgramStep* const step = program ? &*program : nullptr;
  gradients_of_inputs(plan, buffers, w, step, cancel);
  if (elements(plan.problem.d_bias) > 0) gradient_of_bias(plan, buffers, w, step, cancel);
}

}  // namespace tessera::core
