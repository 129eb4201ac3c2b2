// tessera_fuzz: compares random cases with the reference until the count or the time is used up, or one fails. A
// failure is simplified and printed as a line that repeats it.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <random>

#include "fuzz/draw.hpp"
#include "op/check.hpp"
#include "op/crash_report.hpp"
#include "op/execute.hpp"

namespace {

using namespace tessera::testing;
using Clock = std::chrono::steady_clock;

// Always the last place (the best ISA, or the GPU), and one other in alternation: a replay runs all of them. A run on a
// GPU leaves checking the reference kernel to the CPU's.
CheckOptions options_for(const std::vector<Place>& all, uint64_t index) {
  CheckOptions options{.places = {all.back()}, .check_oracle = all.front() != kGpu};
  const Place other = all[index % all.size()];
  if (other != all.back()) options.places.push_back(other);
  return options;
}

int report(const Case& failing, const std::vector<std::string>& failures, const CheckOptions& options) {
  std::printf("FAILED: %s\n", to_text(failing).c_str());
  for (const std::string& failure : failures) std::printf("%s\n", failure.c_str());
  std::printf("simplifying ...\n");
  std::fflush(stdout);
  const Case simple = shrink(failing, [&](const Case& c) { return !check_case(c, options).empty(); });
  for (const std::string& failure : check_case(simple, options)) std::printf("%s\n", failure.c_str());
  std::printf("as drawn: %s\nreplay: %s\n", replay(failing, options.places).c_str(),
              replay(simple, options.places).c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  install_crash_report();
  CLI::App app("Random cases of attention against the float64 oracle.", "tessera_fuzz");
  std::string one_case, backend;
  uint64_t seed = std::random_device{}();
  uint64_t count = 0;
  double seconds = 0;
  app.add_option("--case", one_case, "Check this case only, in every place of the backend");
  app.add_option("--backend", backend, "cpu, cuda or all; TESSERA_TEST_BACKEND, or cpu, unless given");
  app.add_option("--seed", seed, "Of the cases; random unless given");
  app.add_option("--count", count, "Stop after this many cases; 0 = no end");
  app.add_option("--seconds", seconds, "Stop after this time; 0 = no end")->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  if (!one_case.empty()) return replay_main(one_case, backend);
  std::string error;
  const auto places = places_of(backend, &error);
  if (!places) {
    std::printf("%s\n", error.c_str());
    return error.starts_with("skipped: ") ? 0 : 2;
  }

  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  const Clock::time_point start = Clock::now();
  Clock::time_point last_report = start;
  uint64_t index = 0;
  const auto elapsed = [](Clock::time_point since) {
    return std::chrono::duration<double>(Clock::now() - since).count();
  };
  constexpr double kReportEverySeconds = 30;
  for (; (count == 0 || index < count) && (seconds == 0 || elapsed(start) < seconds); ++index) {
    const Case c = draw_case(seed, index);
    const CheckOptions options = options_for(*places, index);
    const std::vector<std::string> failures = check_case(c, options);
    if (!failures.empty()) return report(c, failures, options);
    if (elapsed(last_report) < kReportEverySeconds) continue;
    std::printf("%llu cases passed in %.0f s\n", static_cast<unsigned long long>(index + 1), elapsed(start));
    std::fflush(stdout);
    last_report = Clock::now();
  }
  std::printf("%llu cases passed in %.0f s\n", static_cast<unsigned long long>(index), elapsed(start));
  return 0;
}
