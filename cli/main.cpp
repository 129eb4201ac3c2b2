// tessera: exact attention on this machine. Each subcommand has its own file.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "commands.hpp"
#include "error.hpp"
#include "interrupts.hpp"
#include "printable.hpp"
#include "tessera/tessera.h"

namespace {

constexpr int kFailed = 1;
constexpr int kWrongUse = 2;

constexpr const char* kFooter = R"(Examples:
  tessera compare                                      Tessera beside standard attention, over a range of lengths
  tessera compare --causal --dtype bfloat16 --report compare.json
  tessera run q.npy k.npy v.npy -o out.npy --causal    attention on your own tensors
  tessera plan --sq 4096 -H 32 --kv-heads 8 -D 128     which kernel, why, and what it moves
  tessera trace --length 512 --causal                  how tiled attention gets there, tile by tile
  tessera info                                         what was found on this machine
  tessera support                                      which options each back end supports, in which dtypes
  tessera cache list                                   the compiled CUDA kernels kept on disk

TESSERA_ISA and TESSERA_NUM_THREADS in the environment force an instruction set and a number of threads.
Exit codes: 0 done, 1 failed, 2 wrong use.)";

int complain(const char* what, int exit_code) {
  std::string line = what;
  std::replace(line.begin(), line.end(), '\n', ' ');
  fmt::print(stderr, "tessera: {}\n", tessera::cli::printable(line));
  return exit_code;
}

void check_command(const CLI::App& program, int argc, char** argv) {
  constexpr const char* kAccepted = "accepted compare, run, plan, trace, info, support and cache (tessera --help)";
  if (argc < 2) throw tessera::cli::WrongUse(fmt::format("COMMAND: none given, {}", kAccepted));
  const std::vector<const CLI::App*> commands =
      program.get_subcommands([&](const CLI::App* command) { return command->get_name() == argv[1]; });
  if (argv[1][0] != '-' && commands.empty()) {
    throw tessera::cli::WrongUse(fmt::format("COMMAND: '{}', {}", argv[1], kAccepted));
  }
}

// The error of a value that belongs to no flag, by the flag that it follows; "" if no flag precedes it, or if it is an
// unknown flag.
std::string stray_value(const CLI::App& program, int argc, char** argv) {
  const std::vector<std::string> left = program.remaining(true);
  const std::vector<CLI::App*> commands = program.get_subcommands();
  if (left.empty() || left.front().starts_with('-') || commands.empty()) return "";
  const CLI::Option* flag = nullptr;
  int values = 0;
  for (int n = 2; n < argc; ++n) {
    const CLI::Option* option = argv[n][0] == '-' ? commands.front()->get_option_no_throw(argv[n]) : nullptr;
    if (option) {
      flag = option, values = 0;
      continue;
    }
    const int accepted = flag ? flag->get_items_expected_max() : 0;
    if (flag && ++values > accepted && argv[n] == left.front()) {
      return fmt::format("{}: followed by '{}', accepted {} (tessera {} --help)", flag->get_name(), argv[n],
                         accepted == 0   ? "no value"
                         : accepted == 1 ? "one value"
                                         : fmt::format("{} values", accepted),
                         commands.front()->get_name());
    }
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("Exact attention that never stores the score matrix.", "tessera");
  tessera::cli::Outcome outcome;
  try {
    program.footer(kFooter);
    program.set_version_flag("--version", std::string("tessera ") + tessera_version());
    program.require_subcommand(1);
    tessera::cli::add_compare(program, outcome);
    tessera::cli::add_run(program, outcome);
    tessera::cli::add_plan(program, outcome);
    tessera::cli::add_trace(program, outcome);
    tessera::cli::add_info(program, outcome);
    tessera::cli::add_support(program, outcome);
    tessera::cli::add_cache(program, outcome);
    check_command(program, argc, argv);
    program.parse(argc, argv);
    if (std::fflush(stdout) != 0) return complain("standard output: cannot be written", kFailed);
    return outcome.exit_code;
  } catch (const CLI::Success& wanted) {  // --help, --version
    return program.exit(wanted);
  } catch (const CLI::ParseError& error) {
    if (const std::string stray = stray_value(program, argc, argv); !stray.empty()) {
      return complain(stray.c_str(), kWrongUse);
    }
    return complain((std::string(error.what()) + " (tessera --help, tessera COMMAND --help)").c_str(), kWrongUse);
  } catch (const tessera::cli::WrongUse& error) {
    return complain(error.what(), kWrongUse);
  } catch (const tessera::cli::Interrupted& interrupted) {
    std::raise(interrupted.signal);  // it has its default action again, and so ends the process
    return kFailed;
  } catch (const std::bad_alloc&) {
    return complain("not enough memory", kFailed);
  } catch (const std::exception& error) {
    return complain(error.what(), kFailed);
  }
}
