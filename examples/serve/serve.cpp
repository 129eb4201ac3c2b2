// An engine on Tessera, small and whole: continuous batching over a paged cache. Requests arrive over the steps,
// prompts are computed in chunks beside the sequences that generate, all in one packed batch; the pages of a common
// system prompt are computed once and shared by all; if pages run out, the youngest sequence releases its own and
// begins again.
//
//   scheduler.hpp, pages.hpp          the requests of a step, and the places of their keys: the index arrays
//   engine.hpp, engine.cpp            the model's layers; attend() holds all of Tessera's calls, two a layer
//   layers.hpp, _cpu.cpp, _cuda.cu    the other layers, plainly: what is slow here, an engine has libraries for
//   model.hpp, plain.hpp              random weights; the same model without a cache, in float64
//
//   c++ -std=c++20 -O2 -pthread serve.cpp engine.cpp layers_cpu.cpp $(pkg-config --cflags --libs tessera) -o serve
//   nvcc -std=c++20 -O2 -DSERVE_CUDA *.cpp *.cu $(pkg-config --cflags --libs tessera) -o serve    (with a GPU's layers)
//   ./serve [--device cpu|cuda] [--dtype float32|bfloat16] [--kv fp8] [--check] [--requests N] ...  (--help: the sizes)
//
// --kv fp8 keeps the cache in float8 e4m3, half of bfloat16's bytes, with a scale for each token and head that
// tessera_append computes. --check compares every generated token with the plain model: in float32 it must be the plain
// model's choice after the same tokens; in bfloat16 its logits may differ by the error of rounding.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine.hpp"
#include "plain.hpp"

namespace serve {
namespace {

struct Options {
  std::int64_t layers = 2, dim = 128, heads = 8, kv_heads = 2, head_dim = 32, hidden = 256, vocab = 512;
  std::int64_t requests = 24, system = 40, prompt = 60, generate = 24, arrivals = 2;
  std::int64_t batch = 8, step_tokens = 64, chunk = 24, page_size = 16, pages = 28, seed = 1;
  std::string device = "cpu", dtype = "float32", kv = "dtype";
  bool check = false;
};

struct Flag {
  const char* name;
  std::int64_t Options::*value;
  std::int64_t least;
  const char* meaning;
};
constexpr Flag kFlags[] = {
    {"--layers", &Options::layers, 1, "of the model"},
    {"--dim", &Options::dim, 1, "columns of the residual stream"},
    {"--heads", &Options::heads, 1, "query heads"},
    {"--kv-heads", &Options::kv_heads, 1, "heads of keys and values; divides --heads"},
    {"--head-dim", &Options::head_dim, 2, "columns of a head; even"},
    {"--hidden", &Options::hidden, 1, "columns of the MLP"},
    {"--vocab", &Options::vocab, 1, "tokens there are"},
    {"--requests", &Options::requests, 1, "to serve"},
    {"--system", &Options::system, 0, "tokens that every prompt begins with"},
    {"--prompt", &Options::prompt, 1, "tokens of a request's own prompt, at most"},
    {"--generate", &Options::generate, 1, "tokens to generate for a request, at most"},
    {"--arrivals", &Options::arrivals, 1, "steps between two requests, at most"},
    {"--batch", &Options::batch, 1, "sequences of a step"},
    {"--step-tokens", &Options::step_tokens, 1, "tokens of a step; at least --batch"},
    {"--chunk", &Options::chunk, 1, "tokens of a prompt in one step"},
    {"--page-size", &Options::page_size, 1, "keys of a page"},
    {"--pages", &Options::pages, 1, "of the cache"},
    {"--seed", &Options::seed, 0, "of weights and requests"},
};

int help() {
  std::printf("serve [--device cpu|cuda] [--dtype float32|bfloat16] [--kv dtype|fp8] [--check]\n");
  for (const Flag& flag : kFlags) {
    std::printf("  %-14s %s (%lld)\n", flag.name, flag.meaning, static_cast<long long>(Options{}.*flag.value));
  }
  return 0;
}

std::string one_of(std::string_view flag, std::string_view value, std::string_view first, std::string_view second) {
  if (value == first || value == second) return std::string(value);
  throw std::invalid_argument(std::string(flag) + ": " + std::string(value) + ", accepted " + std::string(first) +
                              " or " + std::string(second));
}

Options parse(int argc, char** argv) {
  Options options;
  for (int n = 1; n < argc; ++n) {
    const std::string_view name = argv[n];
    if (name == "--check") {
      options.check = true;
      continue;
    }
    if (n + 1 == argc) throw std::invalid_argument(std::string(name) + ": accepted with a value, or --check, --help");
    const char* value = argv[++n];
    if (name == "--device") {
      options.device = one_of(name, value, "cpu", "cuda");
    } else if (name == "--dtype") {
      options.dtype = one_of(name, value, "float32", "bfloat16");
    } else if (name == "--kv") {
      options.kv = one_of(name, value, "dtype", "fp8");
    } else {
      const auto* flag = std::ranges::find(kFlags, name, &Flag::name);
      if (flag == std::end(kFlags))
        throw std::invalid_argument(std::string(name) + ": unknown, --help lists what is accepted");
      char* end = nullptr;
      const std::int64_t number = std::strtoll(value, &end, 10);
      if (*value == 0 || *end != 0 || number < flag->least || number > 1 << 24) {
        throw std::invalid_argument(std::string(name) + ": " + value + ", accepted " + std::to_string(flag->least) +
                                    " .. 16777216");
      }
      options.*flag->value = number;
    }
  }
  if (options.kv == "fp8" && options.dtype != "bfloat16") {
    throw std::invalid_argument("--kv: fp8 with --dtype " + options.dtype + ", accepted with bfloat16");
  }
  if (options.heads % options.kv_heads != 0) throw std::invalid_argument("--heads: accepted a multiple of --kv-heads");
  if (options.head_dim % 2 != 0) throw std::invalid_argument("--head-dim: accepted an even number");
  if (options.step_tokens < options.batch) throw std::invalid_argument("--step-tokens: accepted at least --batch");
  return options;
}

std::vector<Sequence> draw_requests(const Options& options, const std::vector<std::int32_t>& system,
                                    std::mt19937_64& random) {
  const auto between = [&random](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  std::vector<Sequence> requests;
  std::int64_t arrival = 0;
  for (std::int64_t n = 0; n < options.requests; ++n) {
    Sequence request;
    request.tokens = system;
    for (std::int64_t left = between(1, options.prompt); left > 0; --left) {
      request.tokens.push_back(static_cast<std::int32_t>(between(0, options.vocab - 1)));
    }
    request.arrival = arrival;
    request.prompt = request.size();
    request.new_tokens = between((options.generate + 1) / 2, options.generate);
    requests.push_back(std::move(request));
    arrival += between(0, options.arrivals);
  }
  return requests;
}

struct Errors {
  double largest = 0, squares = 0;
  void add(double error) {
    largest = std::max(largest, std::abs(error));
    squares += error * error;
  }
};

// Compares the generated tokens with the plain model on the same tokens: if it chooses each of them after the earlier
// ones, it would have generated all of them by itself.
bool check(const Options& options, const Weights& weights, const std::vector<Sequence>& sequences) {
  const PlainModel exact(weights, false, false), rounded(weights, true, options.kv == "fp8");
  Errors engine, rounding;
  std::int64_t values = 0, tokens = 0, others = 0;
  const auto vocab = static_cast<std::size_t>(options.vocab);
  for (const Sequence& sequence : sequences) {
    const std::span<const std::int32_t> given = std::span(sequence.tokens).first(sequence.tokens.size() - 1);
    const std::vector<double> expected = exact.logits(given);
    const std::vector<double> plain = options.dtype == "bfloat16" ? rounded.logits(given) : expected;
    for (std::int64_t n = 0; n < sequence.new_tokens; ++n) {
      const std::size_t row = static_cast<std::size_t>(sequence.prompt - 1 + n) * vocab;
      for (std::size_t i = 0; i < vocab; ++i) {
        engine.add(sequence.logits[static_cast<std::size_t>(n) * vocab + i] - expected[row + i]);
        rounding.add(plain[row + i] - expected[row + i]);
      }
      const auto best = std::max_element(&expected[row], &expected[row] + vocab) - &expected[row];
      others += best != sequence.tokens[static_cast<std::size_t>(sequence.prompt + n)];
      values += options.vocab;
      ++tokens;
    }
  }
  const auto rms = [values](const Errors& errors) { return std::sqrt(errors.squares / static_cast<double>(values)); };
  std::printf("check: %lld tokens, %lld others than the plain loop's; logits differ by %.2g, RMS %.2g",
              static_cast<long long>(tokens), static_cast<long long>(others), engine.largest, rms(engine));
  if (options.dtype == "float32") {
    std::printf("\n");
    return others == 0;
  }
  std::printf("; by plain rounding %.2g, RMS %.2g\n", rounding.largest, rms(rounding));
  return engine.largest <= 2 * rounding.largest && rms(engine) <= 2 * rms(rounding);
}

bool serve(const Options& options, Layers& layers) {
  const std::int64_t longest = options.system + options.prompt + options.generate;
  const Limits limits{.batch = options.batch,
                      .step_tokens = options.step_tokens,
                      .chunk = options.chunk,
                      .page_size = options.page_size,
                      .pages = options.pages,
                      .longest = longest};
  const Weights weights = random_weights({.layers = options.layers,
                                          .dim = options.dim,
                                          .heads_q = options.heads,
                                          .heads_kv = options.kv_heads,
                                          .head_dim = options.head_dim,
                                          .hidden = options.hidden,
                                          .vocab = options.vocab},
                                         longest, static_cast<std::uint64_t>(options.seed));
  std::mt19937_64 random(static_cast<std::uint64_t>(options.seed) + 1);
  std::vector<std::int32_t> system(static_cast<std::size_t>(options.system));
  for (std::int32_t& token : system)
    token = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(options.vocab));
  std::vector<Sequence> requests = draw_requests(options, system, random);

  Scheduler scheduler(limits, system, requests);
  const tessera::DType dtype = options.dtype == "float32" ? tessera::float32 : tessera::bfloat16;
  Engine engine(layers, weights, limits, dtype, options.kv == "fp8" ? tessera::float8_e4m3 : dtype);
  std::vector<std::int32_t> next_tokens;
  std::vector<float> logits;
  std::int64_t steps = 0, mixed = 0, computed = 0, generated = 0, most_pages = 0, shared = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (std::int64_t now = 0; !scheduler.done(); ++now) {
    const Step step = scheduler.next(now);
    if (step.num_tokens == 0) continue;
    engine.run(step, next_tokens, options.check ? &logits : nullptr);
    ++steps;
    mixed += !step.decoding;
    computed += step.num_tokens;
    most_pages = std::max(most_pages, scheduler.pages_in_use());
    scheduler.advance(step, next_tokens, [&](Sequence& sequence, std::size_t slot) {
      ++generated;
      if (!options.check) return;
      const auto row = logits.begin() + static_cast<std::ptrdiff_t>(slot) * options.vocab;
      sequence.logits.insert(sequence.logits.end(), row, row + options.vocab);
    });
    shared = scheduler.shared_pages();
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%s, %s%s: %zu requests in %lld steps, %lld of them with prompts\n", layers.device().name,
              options.dtype.c_str(), options.kv == "fp8" ? " over a float8 cache" : "", requests.size(),
              static_cast<long long>(steps), static_cast<long long>(mixed));
  std::printf(
      "pages: %lld of %lld in use at most, %lld of the system prompt shared, %lld times a sequence was preempted\n",
      static_cast<long long>(most_pages), static_cast<long long>(limits.pages), static_cast<long long>(shared),
      static_cast<long long>(scheduler.preempted()));
  std::printf("%.0f tokens a second, %.0f of them generated; attention took %.0f %% of the time (%s)\n",
              static_cast<double>(computed) / seconds, static_cast<double>(generated) / seconds,
              100 * engine.attention_seconds() / seconds, engine.plan(false).family);
  return !options.check || check(options, weights, requests);
}

}  // namespace
}  // namespace serve

int main(int argc, char** argv) try {
  constexpr int kSkipped = 77;
  for (int n = 1; n < argc; ++n) {
    if (std::string_view(argv[n]) == "--help") return serve::help();
  }
  const serve::Options options = serve::parse(argc, argv);
  std::unique_ptr<serve::Layers> layers;
  if (options.device == "cuda") {
#ifdef SERVE_CUDA
    tessera::Device gpu;
    if (const tessera::Status status = tessera::try_cuda(0, gpu); !status.ok()) {
      std::printf("skipped: %s\n", status.message().data());
      return kSkipped;
    }
    layers = serve::make_cuda_layers();
#else
    std::printf("skipped: built without nvcc\n");
    return kSkipped;
#endif
  } else {
    layers = serve::make_cpu_layers();
  }
  return serve::serve(options, *layers) ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "serve: %s\n", error.what());
  return 1;
}
