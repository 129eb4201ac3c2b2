// tessera info: this machine, and the peer that Tessera is compared with here.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "info.hpp"
#include "options.hpp"
#include "peers/standard_attention.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

}  // namespace

void add_info(CLI::App& program, Outcome& outcome) {
  CLI::App* command = program.add_subcommand("info", "The CPU, what was chosen for it, threads and GPUs");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "As JSON");
  command->footer("Examples:\n  tessera info\n  TESSERA_ISA=avx2 tessera info --json");
  command->callback([json, &outcome] {
    tessera_device device{};
    check_status(tessera_device_cpu(&device));
    const std::string blas = peers::blas_description();
    if (*json) {
      Json facts = Json::parse(info_json(device));
      facts["blas"] = blas;
      fmt::print("{}\n", facts.dump(2));
    } else {
      fmt::print("{}standard peer  {}\n", info_text(device),
                 blas.empty() ? "OpenBLAS was not found (Debian: libopenblas0)" : blas);
    }
    outcome.exit_code = 0;
  });
}

}  // namespace tessera::cli
