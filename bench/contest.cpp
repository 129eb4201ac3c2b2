#include "contest.hpp"

#include <time.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace bench {
namespace {

double now_seconds(Clock clock) {
  timespec time;
  clock_gettime(clock == Clock::kWall ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

}  // namespace

double time_call(const std::function<void()>& call, Clock clock) {
  const double start = now_seconds(clock);
  call();
  return now_seconds(clock) - start;
}

Sampler timed(std::function<void()> run, double work, Clock clock) {
  return [run = std::move(run), work, clock] { return work / time_call(run, clock); };
}

void run_contest(benchmark::State& state, const Cell& cell, const Settings& settings) {
  try {
    const Contest contest = cell.make(settings);
    contest.reference();
    contest.subject();  // touches pages, settles caches and clocks
    std::vector<double> ratios, rates, reference_rates, seconds;
    double before = contest.reference();
    for ([[maybe_unused]] auto _ : state) {
      double rate = 0;
      seconds.push_back(time_call([&] { rate = contest.subject(); }, contest.clock));
      state.SetIterationTime(seconds.back());
      const double after = contest.reference();
      const double reference_rate = (before + after) / 2;
      ratios.push_back(rate / reference_rate);
      rates.push_back(rate);
      reference_rates.push_back(reference_rate);
      before = after;
    }
    state.counters[counter::kValue] = median(ratios);
    state.counters[counter::kLow] = std::ranges::min(ratios);
    state.counters[counter::kHigh] = std::ranges::max(ratios);
    state.counters[counter::kRate] = median(rates);
    state.counters[counter::kReferenceRate] = median(reference_rates);
    state.counters[counter::kSeconds] = median(seconds);
  } catch (const Unavailable& lack) {
    state.SetLabel(kUnavailableLabel);
    state.SkipWithError(lack.what());
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
  }
}

}  // namespace bench
