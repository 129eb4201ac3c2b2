#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>

#include "crash_report.hpp"
#include "error_bound.hpp"
#include "execute.hpp"
#include "numbers.hpp"
#include "plain.hpp"

namespace tessera::testing {
namespace {

const PlainTensor& plain_tensor(const PlainResult& plain, const std::string& name) {
  if (const auto captured = plain.d_captured.find(name); captured != plain.d_captured.end()) return captured->second;
  if (name == "o") return plain.o;
  if (name == "lse") return plain.lse;
  if (name == "lse_low") return plain.lse_to_twice_the_digits;
  if (name == "d_q") return plain.d_q;
  if (name == "d_k") return plain.d_k;
  if (name == "d_v") return plain.d_v;
  return name == "d_bias" ? plain.d_bias : plain.d_sink;
}

std::string format(const char* text, auto... values) {
  char line[512];
  std::snprintf(line, sizeof line, text, values...);
  return line;
}

// Rows and keys that a NaN or an infinity may reach on a GPU beside those that see it: those of its own tiles, where
// the hiding 0 is still multiplied (docs/reference/cuda.md). Tiles are those of queries and of keys that meet by
// position.
class TileNeighbours {
 public:
  explicit TileNeighbours(const Inputs& in) : in_(in), c_(in.c) {
    o_.resize(in.rows_q * c_.hq), d_q_.resize(in.rows_q * c_.hq);
    d_k_.resize(in.rows_k * c_.hkv), d_v_.resize(in.rows_k * c_.hkv);
    for (int64_t b = 0; b < c_.b; ++b)
      for (int64_t h = 0; h < c_.hq; ++h) add_head(b, h);
  }

  bool may_reach(const std::string& name, size_t n) const {
    if (name == "o") return o_[n / c_.dv];
    if (name == "d_q") return d_q_[n / c_.d];
    if (name == "d_k") return d_k_[n / c_.d];
    return name == "d_v" && d_v_[n / c_.dv];
  }

 private:
  static constexpr int64_t kLargestTile = 256;  // of queries or of keys

  static bool finite(const std::vector<double>& tensor, int64_t row, int64_t width) {
    return std::all_of(tensor.begin() + row * width, tensor.begin() + (row + 1) * width,
                       [](double x) { return std::isfinite(x); });
  }

  // Some query near i sees some key near j by its position.
  bool meet(int64_t b, int64_t i, int64_t j) const {
    for (int64_t q = std::max<int64_t>(0, i - kLargestTile); q < std::min(in_.sq[b], i + kLargestTile); ++q) {
      const int64_t over = q + (c_.top_left ? 0 : in_.sk[b] - in_.sq[b]);
      int64_t low = 0, high = in_.sk[b] - 1;
      if (c_.causal) high = std::min(high, over);
      if (c_.wl >= 0) low = std::max(low, over - c_.wl);
      if (c_.wr >= 0) high = std::min(high, over + c_.wr);
      if (low <= high && low < j + kLargestTile && high > j - kLargestTile) return true;
    }
    return false;
  }

  void add_head(int64_t b, int64_t h) {
    const int64_t kv = h * c_.hkv / c_.hq;
    for (int64_t j = 0; j < in_.sk[b]; ++j) {
      const int64_t key = in_.k_row(b, j) * c_.hkv + kv;
      const bool finite_v = finite(in_.v, key, c_.dv), finite_k = finite(in_.k, key, c_.d);
      for (int64_t i = 0; i < in_.sq[b] && !(finite_v && finite_k); ++i) {
        const int64_t row = in_.q_row(b, i) * c_.hq + h;
        if ((o_[row] || finite_v) && (d_q_[row] || finite_k)) continue;
        if (!meet(b, i, j)) continue;
        o_[row] |= !finite_v, d_q_[row] |= !finite_k;
      }
    }
    if (!c_.backward) return;
    for (int64_t i = 0; i < in_.sq[b]; ++i) {
      const int64_t row = in_.q_row(b, i) * c_.hq + h;
      const bool finite_q = finite(in_.q, row, c_.d), finite_d_o = finite(in_.d_o, row, c_.dv);
      for (int64_t j = 0; j < in_.sk[b] && !(finite_q && finite_d_o); ++j) {
        const int64_t key = in_.k_row(b, j) * c_.hkv + kv;
        if ((d_k_[key] || finite_q) && (d_v_[key] || finite_d_o)) continue;
        if (!meet(b, i, j)) continue;
        d_k_[key] |= !finite_q, d_v_[key] |= !finite_d_o;
      }
    }
  }

  const Inputs& in_;
  const Case& c_;
  std::vector<char> o_, d_q_, d_k_, d_v_;
};

class Checker {
 public:
  Checker(const Case& c, const CheckOptions& options)
      : c_(c), options_(options), in_(make_inputs(c)), call_(make_call(in_)), oracle_call_(make_oracle_call(in_)) {}

  std::vector<std::string> check() {
    if (options_.comparison && !taken_for_comparison()) return failures_;
    if (!ask_oracle()) return failures_;
    plain_ = plain_attention(in_, Precision::kSame);
    if (options_.check_oracle) compare_oracle();
    std::vector<std::vector<std::byte>> inputs_before;
    for (const Tensor* input : call_.inputs()) inputs_before.push_back(input->bytes());
    for (const Place& place : options_.places) {
      const auto options_of = [&](tessera_kernel kernel) {
        return RunOptions{.kernel = kernel, .place = place, .cores = static_cast<int32_t>(c_.cores)};
      };
      if (place != kGpu && c_.prefix) {
        check_kernel(options_of(TESSERA_KERNEL_AUTO), {TESSERA_FORWARD});
        continue;
      }
      if (place != kGpu) {
        check_kernel(options_of(TESSERA_KERNEL_DECODE), directions());
        check_kernel(options_of(TESSERA_KERNEL_TILED), directions());
        if (serves_by_two_kernels(options_of(TESSERA_KERNEL_AUTO))) {
          check_kernel(options_of(TESSERA_KERNEL_AUTO), {TESSERA_FORWARD});
        }
        continue;
      }
      if (!served_by_gpu(c_, gpu_device().arch)) continue;  // refused: CudaPlan.TakesEveryCaseOfTheTable
      if (options_.comparison) {
        check_for_comparison(options_of);
        continue;
      }
      check_kernel(options_of(TESSERA_KERNEL_AUTO), directions());
      for (const tessera_direction direction : directions()) {
        for (const tessera_kernel kernel : gpu_kernels(direction)) {
          if (takes_on_request(direction, options_of(kernel))) check_kernel(options_of(kernel), {direction});
        }
      }
    }
    for (size_t n = 0; n < inputs_before.size(); ++n)
      if (call_.inputs()[n]->bytes() != inputs_before[n]) fail("an input was written to");
    return failures_;
  }

 private:
  void fail(const std::string& what) { failures_.push_back(context_ + what); }

  bool ask_oracle() {
    context_ = "oracle: ";
    for (const tessera_direction direction : directions()) {
      const RunResult result = run(oracle_call_, direction, {.kernel = TESSERA_KERNEL_REFERENCE});
      if (!result.ok()) return fail(result.why()), false;
      for (const NamedTensor& output : outputs(oracle_call_, direction)) {
        expected_[output.name] = output.tensor->load();
        if (!all_written(output)) return false;
      }
    }
    return true;
  }

  // A call owns the whole of its outputs, rows that belong to no sequence included.
  bool all_written(const NamedTensor& output) {
    const std::vector<char> untouched = output.tensor->untouched();
    const auto at = std::ranges::find(untouched, char{1});
    if (at == untouched.end()) return true;
    fail(format("%s[%zu] is still poison, or a NaN made from it", output.name.c_str(), at - untouched.begin()));
    return false;
  }

  std::vector<tessera_direction> directions() const {
    if (c_.backward) return {TESSERA_FORWARD, TESSERA_BACKWARD};
    return {TESSERA_FORWARD};
  }

  // Two ways to the same numbers, both in float64: they differ by rounding only (lse, d_bias and d_sink are stored in
  // float32).
  void compare_oracle() {
    context_ = "oracle against the plain computation in float64: ";
    const PlainResult plain = plain_attention(in_, Precision::kFloat64);
    constexpr double kRoundings = 64;  // each noise is of one rounding a term
    for (const auto& [name, oracle] : expected_) {
      if (name == "lse_low") continue;  // the lower digits of a sum that is rounded in another order
      const PlainTensor& tensor = plain_tensor(plain, name);
      const bool in_float32 = name == "lse" || name == "d_bias" || name == "d_sink";
      const double stored = in_float32 ? epsilon(TESSERA_FLOAT32) : 0;
      // Below this a float32 is denormal, and the squares that noise is summed from vanish.
      const double smallest =
          in_float32 ? std::numeric_limits<float>::min() : std::sqrt(std::numeric_limits<double>::min());
      for (size_t n = 0; n < oracle.size(); ++n) {
        if (!std::isfinite(oracle[n])) continue;
        const double error = std::fabs(tensor.value[n] - oracle[n]);
        if (error <= kRoundings * tensor.noise[n] + stored * std::fabs(oracle[n]) + smallest ||
            !std::isfinite(tensor.noise[n]))
          continue;
        fail(format("%s[%zu] is %.17g there and %.17g here", name.c_str(), n, oracle[n], tensor.value[n]));
        break;
      }
    }
  }

  // Whether a kernel supports the case, and the plan would choose another.
  bool takes_on_request(tessera_direction direction, RunOptions options) const {
    const tessera_kernel kernel = options.kernel;
    tessera_plan plan;
    if (make_plan(call_, direction, options, plan).code != TESSERA_OK) return false;
    options.kernel = TESSERA_KERNEL_AUTO;
    return make_plan(call_, direction, options, plan).code != TESSERA_OK || plan.kernel != kernel;
  }

  // The CPU's plan for packed queries: each sequence's number of rows decides.
  bool serves_by_two_kernels(const RunOptions& options) const {
    tessera_plan plan;
    if (make_plan(call_, TESSERA_FORWARD, options, plan).code != TESSERA_OK) return false;
    return plan.kernel == TESSERA_KERNEL_TILED && plan.decode_queries > 0;
  }

  bool taken_for_comparison() const {
    const auto takes = [this](tessera_direction direction, tessera_kernel kernel) {
      return takes_on_request(direction, {.kernel = kernel, .place = kGpu});
    };
    return std::ranges::any_of(kComparisonKernels, [&](const ComparisonKernels& kernels) {
      return takes(TESSERA_FORWARD, kernels.forward) || (c_.backward && takes(TESSERA_BACKWARD, kernels.backward));
    });
  }

  // The backward pass reads the forward pass's outputs. Products that ignore masks spread a NaN everywhere.
  template <class OptionsOf>
  void check_for_comparison(const OptionsOf& options_of) {
    if (holds_nonfinite(c_)) return;
    for (const auto& [forward, backward, stores_scores] : kComparisonKernels) {
      if (takes_on_request(TESSERA_FORWARD, options_of(forward))) {
        if (stores_scores) standard_plain_ = plain_attention(in_, Precision::kScoresToo);
        check_kernel(options_of(forward), {TESSERA_FORWARD});
      }
      if (c_.backward && takes_on_request(TESSERA_BACKWARD, options_of(backward))) {
        if (stores_scores && !standard_plain_) standard_plain_ = plain_attention(in_, Precision::kScoresToo);
        check_kernel(options_of(backward), {TESSERA_BACKWARD});
      }
      standard_plain_.reset();
    }
  }

  void check_kernel(const RunOptions& options, const std::vector<tessera_direction>& directions) {
    for (const tessera_direction direction : directions) {
      const bool backward = direction == TESSERA_BACKWARD;
      context_ = format("%s %s %s: ", place_name(options.place).c_str(), tessera_kernel_name(options.kernel),
                        backward ? "backward" : "forward");
      // Gradients use the oracle's o and LSE, so that a NaN in the kernel's does not reach more here.
      if (backward && holds_nonfinite(c_)) call_.o.store(expected_["o"]), call_.lse.store(expected_["lse"]);
      if (backward && holds_nonfinite(c_) && c_.low) call_.lse_low.store(expected_["lse_low"]);
      const RunResult first = run(call_, direction, options);
      if (options.kernel == TESSERA_KERNEL_AUTO && first.kernel) {
        context_ = format("%s auto (%s): ", place_name(options.place).c_str(), tessera_kernel_name(first.kernel));
      }
      // The decode kernel supports few queries; the tiled kernel supports everything.
      if (first.status.code == TESSERA_UNSUPPORTED && options.kernel == TESSERA_KERNEL_DECODE) return;
      if (!first.ok()) return fail(first.why());
      const size_t before = failures_.size();
      for (const NamedTensor& output : outputs(call_, direction)) compare(output, options.place);
      if (failures_.size() > before) return;
      if (options_.check_repeats) check_repeats(direction, options);
    }
  }

  void check_repeats(tessera_direction direction, const RunOptions& options) {
    const bool on_gpu = options.place == kGpu;
    if (on_gpu && direction == TESSERA_BACKWARD && !c_.deterministic) return;
    const auto bits = output_bytes(call_, direction);
    for (const int32_t threads : on_gpu ? std::vector<int32_t>{1} : std::vector<int32_t>{1, 2, 3}) {
      RunOptions again = options;
      again.threads = threads;
      again.workspace_fill = threads == 1 ? 0x00 : 0xFF;
      const RunResult result = run(call_, direction, again);
      if (!result.ok()) return fail(format("again with %d threads: ", threads) + result.why());
      if (output_bytes(call_, direction) != bits) {
        return fail(threads == 1 ? "the second call gives other bits" : format("%d threads give other bits", threads));
      }
    }
  }

  void compare(const NamedTensor& output, const Place& place) {
    const std::string name = output.name;
    const int32_t dtype = output.tensor->layout().dtype;
    std::vector<double> value = output.tensor->load();
    std::vector<double> oracle = expected_[name];
    if (!all_written(output)) return;
    if (name == "lse_low") {  // has a meaning beside the higher digits alone
      for (size_t n = 0; n < value.size(); ++n) {
        if (!std::isfinite(value[n])) return fail(format("lse_low[%zu] is %g, must be finite", n, value[n]));
      }
      const std::vector<double> high = call_.lse.load();
      for (size_t n = 0; n < value.size(); ++n) value[n] += high[n], oracle[n] += expected_["lse"][n];
    }
    if (place == kGpu && holds_nonfinite(c_)) {
      if (!neighbours_) neighbours_.emplace(in_);
      for (size_t n = 0; n < value.size(); ++n) {
        const bool query = name == "o" || name == "d_q";  // a query that sees nothing is always 0
        if (!std::isnan(oracle[n]) && !(query && must_be_zero(name, n)) && neighbours_->may_reach(name, n)) {
          value[n] = oracle[n];  // an infinity, too, may become a NaN: another one meets a 0
        }
      }
    }
    if (place == kGpu && c_.dtype == TESSERA_FLOAT8_E4M3 && !fp8_plain_) {
      fp8_plain_ = plain_attention(in_, Precision::kFp8TensorCores);
    }
    const PlainResult& all = standard_plain_ ? *standard_plain_ : place == kGpu && fp8_plain_ ? *fp8_plain_ : plain_;
    const PlainTensor& plain = plain_tensor(all, name);
    for (size_t n = 0; standard_plain_ && n < value.size(); ++n) {
      if (!std::isfinite(plain.value[n]) && std::isfinite(oracle[n]))
        value[n] = oracle[n];  // a score overflows its dtype
    }
    for (size_t n = 0; n < value.size(); ++n) {
      const double nearest = round_to(dtype, oracle[n]);
      const bool same_kind = std::isnan(oracle[n])   ? std::isnan(value[n])
                             : std::isinf(oracle[n]) ? value[n] == oracle[n]
                             : std::isinf(nearest)   ? !std::isnan(value[n])  // overflow of the dtype
                                                     : std::isfinite(value[n]);
      if (!same_kind) return fail(format("%s[%zu] is %g, the oracle has %g", name.c_str(), n, value[n], oracle[n]));
      if (must_be_zero(name, n) && value[n] != 0)
        return fail(format("%s[%zu] is %g where nothing is seen, must be 0", name.c_str(), n, value[n]));
    }
    // Scores of tensor cores, whose sums are not rounded to nearest, are off by more than plain ones. There lse_low is
    // held by what it is for: gradients made of it, and that lse is the sum's nearest float.
    if (name == "lse_low" && place == kGpu) {
      const std::vector<double> high = call_.lse.load();
      for (size_t n = 0; n < value.size(); ++n) {
        if (std::isfinite(high[n]) && static_cast<float>(value[n]) != static_cast<float>(high[n])) {
          return fail(format("lse_low[%zu] is %g beside %g", n, value[n] - high[n], high[n]));
        }
      }
      return;
    }
    const std::string excess =
        excess_error(value, oracle, plain, name == "lse_low" ? static_cast<int32_t>(TESSERA_FLOAT64) : dtype);
    if (!excess.empty()) fail(name + excess);
  }

  // o and d_q of a query that sees nothing, d_k and d_v of a key that no query sees, and of rows of no sequence. (On a
  // GPU a NaN query may reach such keys of its tile: TileNeighbours.)
  bool must_be_zero(const std::string& name, size_t n) const {
    if (name == "o") return plain_.unseen_q[n / c_.dv];
    if (name == "d_q") return plain_.unseen_q[n / c_.d];
    if (name == "d_k") return plain_.unseen_k[n / c_.d];
    return name == "d_v" && plain_.unseen_k[n / c_.dv];
  }

  const Case c_;
  const CheckOptions& options_;
  const Inputs in_;
  Call call_, oracle_call_;
  std::optional<PlainResult> fp8_plain_;                 // of a GPU, if q, k and v are e4m3
  std::optional<PlainResult> standard_plain_;            // while a kernel runs that stores its scores
  std::map<std::string, std::vector<double>> expected_;  // the oracle's answer, by output name
  PlainResult plain_;
  std::optional<TileNeighbours> neighbours_;
  std::string context_;
  std::vector<std::string> failures_;
};

}  // namespace

std::vector<std::string> check_case(const Case& c, const CheckOptions& options) {
  set_current_case(c, options.places);
  return Checker(c, options).check();
}

std::string replay(const Case& c, const std::vector<Place>& places) {
  const bool on_gpu = std::ranges::find(places, kGpu) != places.end();
  return std::string("tests/tessera_fuzz ") + (on_gpu ? "--backend cuda " : "") + "--case '" + to_text(c) + "'";
}

namespace {

// 0, 1 or 2, as replay_main.
int replay_one(const std::string& text, const CheckOptions& options) {
  std::string error;
  std::optional<Case> c = parse_case(text, &error);
  if (!c) {
    std::fprintf(stderr, "--case: %s\n", error.c_str());
    return 2;
  }
  c = legalised(*c);
  std::vector<std::string> failures;
  try {
    failures = check_case(*c, options);
  } catch (const std::invalid_argument& wrong_program) {
    std::fprintf(stderr, "--case: %s\n", wrong_program.what());
    return 2;
  }
  for (const std::string& failure : failures) std::printf("%s\n", failure.c_str());
  std::printf("%s: %s\n", failures.empty() ? "passed" : "FAILED", to_text(*c).c_str());
  std::fflush(stdout);
  return failures.empty() ? 0 : 1;
}

std::optional<std::vector<Place>> places_or_message(const std::string& backend) {
  std::string error;
  auto places = places_of(backend, &error);
  if (!places) std::fprintf(stderr, "%s\n", error.c_str());
  return places;
}

}  // namespace

int replay_main(const std::string& text, const std::string& backend) {
  const auto places = places_or_message(backend);
  return places ? replay_one(text, {.places = *places}) : 2;
}

int replay_file_main(const std::string& path, const std::string& backend) {
  const auto places = places_or_message(backend);
  if (!places) return 2;
  std::ifstream file(path);
  if (!file) {
    std::fprintf(stderr, "--cases: %s cannot be read\n", path.c_str());
    return 2;
  }
  int worst = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    worst = std::max(worst, replay_one(line, {.places = *places, .check_repeats = false, .check_oracle = false}));
  }
  return worst;
}

}  // namespace tessera::testing
