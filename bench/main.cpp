// tessera_bench: the promises about speed and memory, measured relative to this machine's own ceilings.
#include <benchmark/benchmark.h>
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <map>
#include <random>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cells.hpp"
#include "contest.hpp"
#include "peers/standard_attention.hpp"
#include "report.hpp"
#include "tessera/tessera.h"

namespace {

using bench::Cell;

struct Arguments {
  std::string filter;
  std::string json_path;
  bool list = false;
  bool long_cells = false;
  bench::Settings settings;
};

constexpr char kExamples[] = R"(
Examples
  tessera_bench                               every cell: a few minutes
  tessera_bench --filter '^fwd/f32'           float32 forward, one thread
  tessera_bench --filter 'bwd.*causal' --repetitions 5
  TESSERA_ISA=avx2 tessera_bench --filter '^fwd'
)";

bool is_long(const Cell& cell) { return cell.name.find("N8192") != std::string::npos; }

void add_arguments(CLI::App& app, Arguments& arguments) {
  app.add_option("--filter", arguments.filter, "Only cells whose name this regular expression finds");
  app.add_flag("--list", arguments.list, "Print the cells' names and run nothing");
  app.add_flag("--long", arguments.long_cells, "Also run the N = 8192 cells that a filter does not name");
  app.add_option("--json", arguments.json_path, "Write the results to this file, too");
  app.add_option("--repetitions", arguments.settings.repetitions, "Runs whose median counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--seed", arguments.settings.seed, "Of the random inputs [a new one every time]");
  app.add_option("--clock", arguments.settings.clock,
                 "wall, or cpu: time of this process alone, for one-thread cells on a machine that is busy")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, bench::Clock>{{"wall", bench::Clock::kWall}, {"cpu", bench::Clock::kCpu}}));
  app.add_flag("--heads-first", arguments.settings.heads_first,
               "Tensors lie in memory as [B, H, S, D]; packed ones and standard attention's stay as they are");
  app.footer(kExamples);
}

std::vector<Cell> chosen_cells(const Arguments& arguments) {
  std::vector<Cell> cells = bench::all_cells(arguments.settings.device);
  const std::regex filter(arguments.filter);
  std::erase_if(cells, [&](const Cell& cell) {
    if (!std::regex_search(cell.name, filter)) return true;
    const bool memory = cell.unit == bench::Unit::kInverseMemory;
    return is_long(cell) && !memory && !arguments.long_cells && arguments.filter.find("8192") == std::string::npos;
  });
  return cells;
}

void register_cells(const std::vector<Cell>& cells, const bench::Settings& settings) {
  for (const Cell& cell : cells) {
    benchmark::RegisterBenchmark(cell.name.c_str(),
                                 [&](benchmark::State& state) { bench::run_contest(state, cell, settings); })
        ->UseManualTime()
        ->Iterations(cell.repetitions > 0 ? cell.repetitions : settings.repetitions);
  }
}

int run(const Arguments& arguments) {
  const std::vector<Cell> cells = chosen_cells(arguments);
  if (cells.empty()) {
    fmt::print(stderr, "tessera_bench: --filter: no cell's name contains '{}'; --list shows them\n", arguments.filter);
    return 2;
  }
  if (arguments.list) {
    for (const Cell& cell : cells) fmt::print("{}\n", cell.name);
    return 0;
  }
  const bench::Settings& settings = arguments.settings;
  fmt::print("Tessera {} on {}, {}, {} threads; {}; seed {}; median of {}, {} time\n", tessera_version(),
             settings.device.name, tessera_isa_name(settings.device.isa), settings.device.threads,
             tessera::peers::blas_description(), settings.seed, settings.repetitions,
             settings.clock == bench::Clock::kWall ? "wall" : "CPU");
  register_cells(cells, settings);
  bench::TableReporter reporter(cells);
  benchmark::RunSpecifiedBenchmarks(&reporter);
  if (!arguments.json_path.empty()) bench::write_json(arguments.json_path, reporter.results(), settings);
  return std::ranges::any_of(reporter.results(), &bench::Result::failed) ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  arguments.settings.seed = std::random_device()();
  CLI::App app("Measures Tessera against this machine's ceilings and against standard attention.", "tessera_bench");
  add_arguments(app, arguments);
  CLI11_PARSE(app, argc, argv);
  try {
    const tessera_status status = tessera_device_cpu(&arguments.settings.device);
    if (status.code != TESSERA_OK) throw std::runtime_error(status.message);
    return run(arguments);
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera_bench: {}\n", error.what());
    return 2;
  }
}
