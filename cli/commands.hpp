// The program's subcommands. Each adds itself to the command line; parsing a line that names it runs it.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera::cli {

// What main() exits with when a command has run to its end: 0, or 1 when --check found an error too large.
struct Outcome {
  int exit_code = 0;
};

void add_compare(CLI::App& program, Outcome& outcome);
void add_run(CLI::App& program, Outcome& outcome);
void add_plan(CLI::App& program, Outcome& outcome);
void add_trace(CLI::App& program, Outcome& outcome);
void add_info(CLI::App& program, Outcome& outcome);
void add_support(CLI::App& program, Outcome& outcome);
void add_cache(CLI::App& program, Outcome& outcome);

}  // namespace tessera::cli
