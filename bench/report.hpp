// The report as text and as JSON.
#pragma once

#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "contest.hpp"

namespace bench {

struct Result {
  const Cell* cell = nullptr;
  std::string error;         // the reason why it was not run, or empty
  bool unavailable = false;  // this machine lacks what the cell measures
  double value = 0, low = 0, high = 0, rate = 0, reference_rate = 0, seconds = 0;

  bool judged() const { return error.empty() && cell->threshold > 0; }
  bool passed() const { return value >= cell->threshold; }
  bool failed() const { return error.empty() ? judged() && !passed() : !unavailable; }
};

// Prints a row as soon as its cell has run, under a heading for each group.
class TableReporter : public benchmark::BenchmarkReporter {
 public:
  explicit TableReporter(const std::vector<Cell>& cells) : cells_(cells) {}

  bool ReportContext(const Context& context) override;
  void ReportRuns(const std::vector<Run>& runs) override;
  void Finalize() override;

  const std::vector<Result>& results() const { return results_; }

 private:
  const std::vector<Cell>& cells_;
  std::vector<Result> results_;
};

// Throws std::runtime_error if the file cannot be written.
void write_json(const std::string& path, const std::vector<Result>& results, const Settings& settings);

}  // namespace bench
