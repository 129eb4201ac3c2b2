// A cell of the benchmark: one thing measured against another in the same seconds.
//
// Machines change their speed from second to second, so a cell compares only neighbouring runs: reference and subject
// alternate, each run of the subject is compared with the reference just before and just after it, and the median of
// these ratios is the cell's value.
#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/tessera.h"

namespace bench {

enum class Clock { kWall, kCpu };

struct Settings {
  tessera_device device = {};  // with all its threads
  uint64_t seed = 0;
  int repetitions = 9;
  Clock clock = Clock::kWall;  // for cells on one thread; the others always use wall time
  bool heads_first = false;    // tensors are [B, H, S, D] in memory instead of [B, S, H, D]
};

// Runs once and returns the result in the cell's unit; larger is better.
using Sampler = std::function<double()>;

struct Contest {
  Sampler subject, reference;
  Clock clock = Clock::kWall;  // of the subject
};

// A sampler's unit: FLOPs a second, bytes a second, or one over the bytes that a run held.
enum class Unit { kFlops, kBytes, kInverseMemory };

struct Cell {
  std::string group;  // heading in the report
  std::string name;   // fwd/f32/N2048/D128/causal
  std::string against;
  double threshold = 0;  // the least value that passes; 0: for information
  bool is_share = true;  // of a ceiling, and so shown in per cent; else a ratio of two programs
  Unit unit = Unit::kFlops;
  int repetitions = 0;  // 0: the settings' number
  std::function<Contest(const Settings&)> make;
};

// Thrown if this machine cannot run a cell at all, which is not a failure.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};
inline constexpr char kUnavailableLabel[] = "unavailable";

// Names of a cell's counters in Google Benchmark's state.
namespace counter {
inline constexpr char kValue[] = "value";
inline constexpr char kLow[] = "low";
inline constexpr char kHigh[] = "high";
inline constexpr char kRate[] = "rate";
inline constexpr char kReferenceRate[] = "reference_rate";
inline constexpr char kSeconds[] = "seconds";
}  // namespace counter

// Seconds that one call takes.
double time_call(const std::function<void()>& call, Clock clock);

// A sampler that times one call of `run`, which does `work`.
Sampler timed(std::function<void()> run, double work, Clock clock);

// The body of the registered benchmark: runs the contest and fills the counters.
void run_contest(benchmark::State& state, const Cell& cell, const Settings& settings);

}  // namespace bench
