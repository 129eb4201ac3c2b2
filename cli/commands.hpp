// The program's subcommands. Each adds itself to the command line; parsing a line that names it runs it.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera::cli {

// main()'s exit code after a complete command: 0, or 1 if --check found too large an error.
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
