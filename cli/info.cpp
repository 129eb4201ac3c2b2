// tessera info: this machine's devices and which of them will be used.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/runtime/jit.hpp"
#include "cuda/runtime/nvrtc.hpp"
#include "machine.hpp"
#include "options.hpp"
#include "peers/standard_attention.hpp"
#include "printable.hpp"
#include "units.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string isa_reason(const tessera_device& device) {
  if (const char* forced = std::getenv("TESSERA_ISA"); forced != nullptr && *forced != '\0') {
    return fmt::format("TESSERA_ISA={} in the environment; this CPU has up to {}", forced,
                       tessera_isa_name(device.isa_limit));
  }
  const std::vector<std::string> features = cpu_features();
  if (device.isa_limit < TESSERA_ISA_AMX_BF16 && std::ranges::find(features, "amx_bf16") != features.end()) {
    return fmt::format(
        "of what this process may use, up to {}, the fastest here: the kernel refused AMX's tile registers",
        tessera_isa_name(device.isa_limit));
  }
  if (device.vector_isa != 0) {
    return fmt::format("AMX's tiles for bfloat16 where they are the fastest here, else {}",
                       tessera_isa_name(device.vector_isa));
  }
  if (device.isa < device.isa_limit) {
    return fmt::format("faster on this CPU than {}, which it has too", tessera_isa_name(device.isa_limit));
  }
  return "the best that this CPU has";
}

std::string threads_reason() {
  if (const char* forced = std::getenv("TESSERA_NUM_THREADS"); forced != nullptr && *forced != '\0') {
    return fmt::format("TESSERA_NUM_THREADS={} in the environment", forced);
  }
  return "one for each core that this process may use";
}

// The GPUs, or in `reason` why there is none; "NVRTC 13.0 at ..." or the reason.
struct Cuda {
  std::vector<tessera_device> gpus;
  std::string reason, driver, nvrtc;
  bool nvrtc_found = false;
};

Cuda find_cuda() {
  Cuda found;
  const cuda::Driver* driver = nullptr;
  if (cuda::open_driver(driver).code == TESSERA_OK) found.driver = cuda::version_text(driver->version);
  for (int32_t ordinal = 0;; ++ordinal) {
    tessera_device device{};
    const tessera_status status = tessera_device_cuda(ordinal, &device);
    if (status.code == TESSERA_OK) {
      found.gpus.push_back(device);
    } else if (!driver || ordinal >= driver->devices) {
      if (ordinal == 0) found.reason = status.message;
      break;
    } else {
      found.reason += (found.reason.empty() ? "" : "; ") + std::string(status.message);
    }
  }
  cuda::CompilerInfo compiler;
  const tessera_status status = cuda::look_for_compiler(compiler);
  found.nvrtc_found = status.code == TESSERA_OK;
  const std::string version = compiler.version ? cuda::version_text(compiler.version) : "version not told by its name";
  found.nvrtc = found.nvrtc_found ? version + ", " + compiler.path : std::string(status.message);
  return found;
}

void print_cuda(const Cuda& found) {
  for (const tessera_device& gpu : found.gpus) {
    fmt::print("GPU {:<10} {}, compute capability {}.{}, {} multiprocessors, {} of shared memory a block\n",
               gpu.ordinal, gpu.name, gpu.arch / 10, gpu.arch % 10, gpu.cores,
               bytes_text(static_cast<double>(gpu.smem_bytes)));
  }
  if (!found.reason.empty()) fmt::print("GPUs           {}{}\n", found.gpus.empty() ? "none: " : "", found.reason);
  if (!found.driver.empty()) fmt::print("driver         CUDA {}\n", found.driver);
  fmt::print("NVRTC          {}\n", found.nvrtc);
  for (const cuda::EnvironmentVariable& variable : cuda::environment_variables()) {
    const std::string value = cuda::environment_variable(variable.name);
    if (!value.empty()) fmt::print("environment    {}={}: {}\n", variable.name, printable(value), variable.meaning);
  }
  const std::string refused = cuda::default_cache().refusal(), prebuilt = cuda::prebuilt_folder();
  fmt::print("kernel cache   {}\n", refused.empty() ? cuda::default_cache().folder() : "in memory: " + refused);
  if (prebuilt.empty()) return;
  const std::string not_loaded = cuda::prebuilt_refusal();
  fmt::print("prebuilt       {}\n", not_loaded.empty() ? prebuilt : "not loaded: " + not_loaded);
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
  print_cuda(find_cuda());
  const std::string blas = peers::blas_description();
  fmt::print("standard peer  {}\n", blas.empty() ? "OpenBLAS was not found (Debian: libopenblas0)" : blas);
}

void print_json(const tessera_device& device) {
  const Cuda found = find_cuda();
  Json gpus = Json::array();
  for (const tessera_device& gpu : found.gpus) {
    gpus.push_back({{"ordinal", gpu.ordinal},
                    {"name", gpu.name},
                    {"arch", gpu.arch},
                    {"multiprocessors", gpu.cores},
                    {"l2_bytes", gpu.l2_bytes},
                    {"smem_bytes", gpu.smem_bytes}});
  }
  Json environment = Json::object();
  for (const cuda::EnvironmentVariable& variable : cuda::environment_variables()) {
    const std::string value = cuda::environment_variable(variable.name);
    if (!value.empty()) environment[variable.name] = value;
  }
  Json json = {{"version", tessera_version()},
               {"cpu",
                {{"name", device.name},
                 {"features", cpu_features()},
                 {"isa", tessera_isa_name(device.isa)},
                 {"isa_limit", tessera_isa_name(device.isa_limit)},
                 {"vector_isa", device.vector_isa != 0 ? Json(tessera_isa_name(device.vector_isa)) : Json()},
                 {"isa_reason", isa_reason(device)},
                 {"cores", device.cores},
                 {"threads", device.threads},
                 {"threads_reason", threads_reason()},
                 {"caches", Json::array()}}},
               {"memory_bytes", memory_bytes()},
               {"memory_available_bytes", peers::available_memory_bytes()},
               {"gpus", gpus},
               {"cuda",
                {{"reason", found.reason},
                 {"driver", found.driver},
                 {"nvrtc_found", found.nvrtc_found},
                 {"nvrtc", found.nvrtc},
                 {"environment", environment},
                 {"cache_folder", cuda::default_cache().folder()},
                 {"cache_refusal", cuda::default_cache().refusal()},
                 {"prebuilt_folder", cuda::prebuilt_folder()},
                 {"prebuilt_refusal", cuda::prebuilt_refusal()}}},
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
