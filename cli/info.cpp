// tessera info: what was found on this machine and what will be used of it.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "machine.hpp"
#include "options.hpp"
#include "peers/standard_attention.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string isa_reason(const tessera_device& device) {
  if (const char* forced = std::getenv("TESSERA_ISA"); forced != nullptr && *forced != '\0') {
    return fmt::format("TESSERA_ISA={} in the environment; this CPU has up to {}", forced,
                       tessera_isa_name(device.isa_limit));
  }
  return "the best that this CPU has";
}

std::string threads_reason() {
  if (const char* forced = std::getenv("TESSERA_NUM_THREADS"); forced != nullptr && *forced != '\0') {
    return fmt::format("TESSERA_NUM_THREADS={} in the environment", forced);
  }
  return "one for each core that this process may use";
}

void print_text(const tessera_device& device) {
  fmt::print("tessera        {}\n", tessera_version());
  fmt::print("CPU            {}\n", device.name);
  fmt::print("features       {}\n", fmt::join(cpu_features(), " "));
  fmt::print("kernels        {}: {}\n", tessera_isa_name(device.isa), isa_reason(device));
  fmt::print("cores          {}\n", device.cores);
  fmt::print("threads        {}: {}\n", device.threads, threads_reason());
  for (const Cache& cache : caches()) {
    fmt::print("{:<14} {}{}\n", cache.name, bytes_text(static_cast<double>(cache.size_bytes)),
               cache.shared_by > 1 ? fmt::format(", shared by {} cores", cache.shared_by) : "");
  }
  fmt::print("memory         {}, {} available\n", bytes_text(static_cast<double>(memory_bytes())),
             bytes_text(static_cast<double>(peers::available_memory_bytes())));
  fmt::print("GPUs           none: no CUDA backend in this build\n");
  const std::string blas = peers::blas_description();
  fmt::print("standard peer  {}\n", blas.empty() ? "OpenBLAS was not found (Debian: libopenblas0)" : blas);
}

void print_json(const tessera_device& device) {
  Json json = {{"version", tessera_version()},
               {"cpu",
                {{"name", device.name},
                 {"features", cpu_features()},
                 {"isa", tessera_isa_name(device.isa)},
                 {"isa_limit", tessera_isa_name(device.isa_limit)},
                 {"isa_reason", isa_reason(device)},
                 {"cores", device.cores},
                 {"threads", device.threads},
                 {"threads_reason", threads_reason()},
                 {"caches", Json::array()}}},
               {"memory_bytes", memory_bytes()},
               {"memory_available_bytes", peers::available_memory_bytes()},
               {"gpus", Json::array()},
               {"cuda", "no CUDA backend in this build"},
               {"blas", peers::blas_description()}};
  for (const Cache& cache : caches()) {
    json["cpu"]["caches"].push_back(
        {{"name", cache.name}, {"bytes", cache.size_bytes}, {"shared_by", cache.shared_by}});
  }
  fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

void add_info(CLI::App& program, Outcome& outcome) {
  CLI::App* command = program.add_subcommand("info", "The CPU, what was chosen for it, threads and GPUs");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "As JSON");
  command->footer("Examples:\n  tessera info\n  TESSERA_ISA=avx2 tessera info --json");
  command->callback([json, &outcome] {
    tessera_device device{};
    check_status(tessera_device_cpu(&device));
    *json ? print_json(device) : print_text(device);
    outcome.exit_code = 0;
  });
}

}  // namespace tessera::cli
