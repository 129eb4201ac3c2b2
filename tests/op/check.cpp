#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <optional>

#include "crash_report.hpp"
#include "error_bound.hpp"
#include "execute.hpp"
#include "numbers.hpp"
#include "plain.hpp"

namespace tessera::testing {
namespace {

// The oracle's answer, by output name.
struct Expected {
  std::map<std::string, std::vector<double>> value;
  std::map<std::string, std::vector<char>> untouched;
};

const PlainTensor& plain_tensor(const PlainResult& plain, const std::string& name) {
  if (name == "o") return plain.o;
  if (name == "lse") return plain.lse;
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

class Checker {
 public:
  Checker(const Case& c, const CheckOptions& options)
      : c_(c), options_(options), in_(make_inputs(c)), call_(make_call(in_)), oracle_call_(make_oracle_call(in_)) {}

  std::vector<std::string> check() {
    if (!ask_oracle()) return failures_;
    plain_ = plain_attention(in_, Precision::kSame);
    if (options_.check_oracle) compare_oracle();
    std::vector<std::vector<std::byte>> inputs_before;
    for (const Tensor* input : call_.inputs()) inputs_before.push_back(input->bytes());
    for (const Place& place : options_.places) {
      const auto options_of = [&](tessera_kernel kernel) {
        return RunOptions{.kernel = kernel, .place = place, .cores = static_cast<int32_t>(c_.cores)};
      };
      if (place != kGpu) {
        check_kernel(options_of(TESSERA_KERNEL_DECODE), directions());
        check_kernel(options_of(TESSERA_KERNEL_TILED), directions());
        continue;
      }
      check_kernel(options_of(TESSERA_KERNEL_AUTO), directions());
      // The kernel that every GPU has, too, where this one has another of its own.
      if (forward_kernel(options_of(TESSERA_KERNEL_AUTO)) != TESSERA_KERNEL_FWD_SM80) {
        check_kernel(options_of(TESSERA_KERNEL_FWD_SM80), {TESSERA_FORWARD});
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
        expected_.value[output.name] = output.tensor->load();
        expected_.untouched[output.name] = output.tensor->untouched();
      }
    }
    return true;
  }

  std::vector<tessera_direction> directions() const {
    if (c_.backward) return {TESSERA_FORWARD, TESSERA_BACKWARD};
    return {TESSERA_FORWARD};
  }

  // Two ways to the same numbers, both in float64: apart by rounding only (lse, d_bias and d_sink are stored in float32).
  void compare_oracle() {
    context_ = "oracle against the plain computation in float64: ";
    const PlainResult plain = plain_attention(in_, Precision::kFloat64);
    constexpr double kRoundings = 64;  // each noise is of one rounding a term
    for (const auto& [name, oracle] : expected_.value) {
      const PlainTensor& tensor = plain_tensor(plain, name);
      const bool in_float32 = name == "lse" || name == "d_bias" || name == "d_sink";
      const double stored = in_float32 ? epsilon(TESSERA_FLOAT32) : 0;
      // Below this a float32 is denormal, and the squares that noise is summed from vanish.
      const double smallest =
          in_float32 ? std::numeric_limits<float>::min() : std::sqrt(std::numeric_limits<double>::min());
      for (size_t n = 0; n < oracle.size(); ++n) {
        if (expected_.untouched[name][n] || !std::isfinite(oracle[n])) continue;
        const double error = std::fabs(tensor.value[n] - oracle[n]);
        if (error <= kRoundings * tensor.noise[n] + stored * std::fabs(oracle[n]) + smallest ||
            !std::isfinite(tensor.noise[n]))
          continue;
        fail(format("%s[%zu] is %.17g there and %.17g here", name.c_str(), n, oracle[n], tensor.value[n]));
        break;
      }
    }
  }

  // That the plan of the forward pass chooses; AUTO where there is no plan.
  int32_t forward_kernel(const RunOptions& options) const {
    tessera_plan plan;
    return make_plan(call_, TESSERA_FORWARD, options, plan).code == TESSERA_OK ? plan.kernel : TESSERA_KERNEL_AUTO;
  }

  void check_kernel(const RunOptions& options, const std::vector<tessera_direction>& directions) {
    for (const tessera_direction direction : directions) {
      const bool backward = direction == TESSERA_BACKWARD;
      context_ = format("%s %s %s: ", place_name(options.place).c_str(), tessera_kernel_name(options.kernel),
                        backward ? "backward" : "forward");
      const RunResult first = run(call_, direction, options);
      if (options.kernel == TESSERA_KERNEL_AUTO && first.kernel) {
        context_ = format("%s %s: ", place_name(options.place).c_str(), tessera_kernel_name(first.kernel));
      }
      // The decode kernel takes few queries; the tiled one takes all there is.
      if (first.status.code == TESSERA_UNSUPPORTED && options.kernel == TESSERA_KERNEL_DECODE) return;
      if (!first.ok()) return fail(first.why());
      const size_t before = failures_.size();
      for (const NamedTensor& output : outputs(call_, direction)) compare(output);
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

  void compare(const NamedTensor& output) {
    const std::string name = output.name;
    const int32_t dtype = output.tensor->layout().dtype;
    const std::vector<double> value = output.tensor->load();
    const std::vector<double>& oracle = expected_.value[name];
    const std::vector<char>& untouched = expected_.untouched[name];
    const std::vector<char> left_alone = output.tensor->untouched();
    for (size_t n = 0; n < value.size(); ++n) {
      const double nearest = round_to(dtype, oracle[n]);
      if (untouched[n] != left_alone[n])
        return fail(format(untouched[n] ? "%s[%zu] was written, and no sequence owns it"
                                        : "%s[%zu] is still poison, or a NaN made from it",
                           name.c_str(), n));
      if (untouched[n]) continue;
      const bool same_kind = std::isnan(oracle[n])   ? std::isnan(value[n])
                             : std::isinf(oracle[n]) ? value[n] == oracle[n]
                             : std::isinf(nearest)   ? !std::isnan(value[n])  // overflow of the dtype
                                                     : std::isfinite(value[n]);
      if (!same_kind) return fail(format("%s[%zu] is %g, the oracle has %g", name.c_str(), n, value[n], oracle[n]));
      if (must_be_zero(name, n) && value[n] != 0)
        return fail(format("%s[%zu] is %g where nothing is seen, must be 0", name.c_str(), n, value[n]));
    }
    const PlainTensor& plain = plain_tensor(plain_, name);
    const std::string excess = excess_error(value, oracle, plain, dtype);
    if (!excess.empty()) fail(name + excess);
  }

  // o and d_q of a query that sees nothing, d_k and d_v of a key that nobody sees.
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
  Expected expected_;
  PlainResult plain_;
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
  const std::vector<std::string> failures = check_case(*c, options);
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
