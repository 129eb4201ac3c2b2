#include "report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace bench {
namespace {

constexpr double kGiga = 1e9, kMebi = 1024 * 1024, kMilli = 1e-3;

const char* unit_heading(Unit unit) {
  switch (unit) {
    case Unit::kFlops:
      return "GFLOP/s";
    case Unit::kBytes:
      return "GB/s";
    case Unit::kInverseMemory:
      return "MiB";
  }
  return "";
}

double in_unit(double rate, Unit unit) { return unit == Unit::kInverseMemory ? 1 / (rate * kMebi) : rate / kGiga; }

std::string value_text(double value, const Cell& cell) {
  if (cell.is_share) return fmt::format("{:.1f} %", 100 * value);
  return value < 10 ? fmt::format("{:.2f} x", value) : fmt::format("{:.0f} x", value);
}

std::string spread_text(const Result& result) {
  if (result.cell->is_share) return fmt::format("{:.1f}..{:.1f}", 100 * result.low, 100 * result.high);
  return fmt::format("{:.2f}..{:.2f}", result.low, result.high);
}

Result to_result(const benchmark::BenchmarkReporter::Run& run, const std::vector<Cell>& cells) {
  Result result;
  // Google Benchmark appends its settings to the name: "fwd/.../full/iterations:9/manual_time".
  result.cell = &*std::ranges::find(cells, run.run_name.function_name, &Cell::name);
  if (run.error_occurred) {
    result.error = run.error_message;
    result.unavailable = run.report_label == kUnavailableLabel;
    return result;
  }
  const auto counter = [&](const char* name) { return run.counters.at(name).value; };
  result.value = counter(counter::kValue);
  result.low = counter(counter::kLow);
  result.high = counter(counter::kHigh);
  result.rate = counter(counter::kRate);
  result.reference_rate = counter(counter::kReferenceRate);
  result.seconds = counter(counter::kSeconds);
  return result;
}

void print_heading(const Cell& cell) {
  fmt::print("\n{}\n", cell.group);
  fmt::print("  {:<34} {:>9} {:>9} {:>13} {:>9} {:>13} {:>9}\n", "cell", "ms", unit_heading(cell.unit), cell.against,
             "value", "least..most", "needed");
}

void print_row(const Result& result) {
  const Cell& cell = *result.cell;
  if (!result.error.empty()) {
    fmt::print("  {:<34} {}: {}\n", cell.name, result.unavailable ? "not run" : "failed", result.error);
    return;
  }
  fmt::print("  {:<34} {:>9.2f} {:>9.1f} {:>13.1f} {:>9} {:>13} {:>9}  {}\n", cell.name, result.seconds / kMilli,
             in_unit(result.rate, cell.unit), in_unit(result.reference_rate, cell.unit), value_text(result.value, cell),
             spread_text(result), result.judged() ? value_text(cell.threshold, cell) : "-",
             !result.judged()  ? ""
             : result.passed() ? "pass"
                               : "FAIL");
}

}  // namespace

bool TableReporter::ReportContext(const Context&) { return true; }

void TableReporter::ReportRuns(const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    const Result result = to_result(run, cells_);
    if (results_.empty() || results_.back().cell->group != result.cell->group) print_heading(*result.cell);
    print_row(result);
    std::fflush(stdout);
    results_.push_back(result);
  }
}

void TableReporter::Finalize() {
  int passed = 0, failed = 0, informative = 0, not_run = 0;
  for (const Result& result : results_) {
    int& count = result.failed() ? failed : result.unavailable ? not_run : result.judged() ? passed : informative;
    ++count;
  }
  fmt::print("\n");
  for (const Result& result : results_) {
    if (result.judged() && !result.passed()) {
      fmt::print("  failed: {:<34} {} of {} needed\n", result.cell->name, value_text(result.value, *result.cell),
                 value_text(result.cell->threshold, *result.cell));
    }
  }
  fmt::print("{} passed, {} failed, {} for information, {} not run\n", passed, failed, informative, not_run);
}

void write_json(const std::string& path, const std::vector<Result>& results, const Settings& settings) {
  nlohmann::ordered_json cells = nlohmann::ordered_json::array();
  for (const Result& result : results) {
    const Cell& cell = *result.cell;
    nlohmann::ordered_json entry = {{"name", cell.name}, {"group", cell.group}};
    if (!result.error.empty()) {
      entry["error"] = result.error;
    } else {
      entry.update({{"against", cell.against},
                    {"value", result.value},
                    {"least", result.low},
                    {"most", result.high},
                    {"unit", unit_heading(cell.unit)},
                    {"amount", in_unit(result.rate, cell.unit)},
                    {"reference_amount", in_unit(result.reference_rate, cell.unit)},
                    {"seconds", result.seconds}});
      if (result.judged()) entry.update({{"needed", cell.threshold}, {"passed", result.passed()}});
    }
    cells.push_back(entry);
  }
  const nlohmann::ordered_json report = {{"version", tessera_version()},
                                         {"cpu", settings.device.name},
                                         {"isa", tessera_isa_name(settings.device.isa)},
                                         {"threads", settings.device.threads},
                                         {"seed", settings.seed},
                                         {"repetitions", settings.repetitions},
                                         {"clock", settings.clock == Clock::kWall ? "wall" : "cpu"},
                                         {"cells", cells}};
  std::ofstream file(path);
  file << report.dump(2) << '\n';
  if (!file.flush()) throw std::runtime_error("--json: cannot write " + path);
}

}  // namespace bench
