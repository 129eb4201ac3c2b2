// tessera cache: the compiled CUDA kernels that are kept on disk.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.hpp"
#include "cuda/prebuilt.hpp"
#include "cuda/runtime/nvrtc.hpp"
#include "error.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "tessera/tessera.h"
#include "units.hpp"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

void print_json(const Json& json) { fmt::print("{}\n", json.dump(2, ' ', true, Json::error_handler_t::replace)); }

// "tessera_fwd_sm80" -> "fwd_sm80"
std::string kernel_of(const cuda::Binary& binary) { return binary.symbol.substr(binary.symbol.find('_') + 1); }

std::string age_text(double seconds) {
  const struct {
    double seconds;
    const char* unit;
  } units[] = {{86400, "day"}, {3600, "hour"}, {60, "minute"}};
  for (const auto& [length, unit] : units) {
    const auto count = static_cast<long long>(seconds / length);
    if (count > 0) return fmt::format("{} {}{}", count, unit, count == 1 ? "" : "s");
  }
  return "now";
}

void list(bool as_json) {
  const cuda::Cache& cache = cuda::default_cache();
  const std::string unwritable = cache.unwritable();
  std::vector<cuda::Cache::Entry> entries = cache.list();
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.age_seconds < b.age_seconds; });
  std::int64_t bytes = 0;
  for (const auto& entry : entries) bytes += entry.bytes;
  if (as_json) {
    Json rows = Json::array();
    for (const auto& entry : entries) {
      Json row = {{"file", entry.file},
                  {"bytes", entry.bytes},
                  {"age_seconds", entry.age_seconds},
                  {"intact", entry.fault.empty()},
                  {"fault", entry.fault}};
      if (entry.fault.empty()) {
        row.update({{"key", entry.key.content.hex()},
                    {"compiler", cuda::version_text(entry.key.compiler)},
                    {"kernel", kernel_of(entry.binary)},
                    {"config", entry.binary.config},
                    {"arch", cuda::target_name({entry.binary.arch, entry.binary.ptx})},
                    {"registers", entry.binary.registers},
                    {"spill_bytes", entry.binary.spill_bytes},
                    {"stack_bytes", entry.binary.stack_bytes}});
      }
      rows.push_back(row);
    }
    print_json({{"folder", cache.folder()},
                {"unwritable", unwritable},
                {"prebuilt_folder", cuda::prebuilt_folder()},
                {"prebuilt_refusal", cuda::prebuilt_refusal()},
                {"bytes", bytes},
                {"entries", rows}});
    return;
  }
  fmt::print("folder    {}\n", cache.folder().empty() ? "none" : printable(cache.folder()));
  if (!unwritable.empty()) fmt::print("          {}: new kernels are kept in memory\n", unwritable);
  const std::string prebuilt = cuda::prebuilt_folder();
  fmt::print("prebuilt  {}\n", prebuilt.empty() ? "none (make aot)" : prebuilt);
  if (const std::string refused = cuda::prebuilt_refusal(); !refused.empty()) {
    fmt::print("          not loaded: {}\n", refused);
  }
  fmt::print("kernels   {}, {}\n", entries.size(), bytes_text(static_cast<double>(bytes)));
  if (entries.empty()) return;
  fmt::print("\n{:<10} {:<12} {:<8} {:>6} {:>10} {:>9} {:>10}\n", "key", "kernel", "arch", "NVRTC", "size", "registers",
             "age");
  for (const auto& entry : entries) {
    const std::string size = bytes_text(static_cast<double>(entry.bytes)), age = age_text(entry.age_seconds);
    if (entry.fault.empty()) {
      fmt::print("{:<10.8} {:<12} {:<8} {:>6} {:>10} {:>9} {:>10}\n", entry.file, printable(kernel_of(entry.binary)),
                 cuda::target_name({entry.binary.arch, entry.binary.ptx}), cuda::version_text(entry.key.compiler), size,
                 entry.binary.registers, age);
    } else {
      fmt::print("{:<10.8} {:<28} {:>10} {:>9} {:>10}\n", entry.file, entry.fault, size, "", age);
    }
  }
}

void clear(bool as_json) {
  const cuda::Cache::Cleared cleared = cuda::default_cache().clear();
  if (as_json) {
    print_json({{"folder", cuda::default_cache().folder()}, {"files", cleared.files}, {"bytes", cleared.bytes}});
  } else {
    fmt::print("{} kernel{} removed, {}\n", cleared.files, cleared.files == 1 ? "" : "s",
               bytes_text(static_cast<double>(cleared.bytes)));
  }
}

std::vector<std::int32_t> archs_of_gpus() {
  std::vector<std::int32_t> archs;
  tessera_device device{};
  tessera_status status = tessera_device_cuda(0, &device);
  if (status.code != TESSERA_OK) throw Failure(fmt::format("{}; name architectures by --arch", status.message));
  for (std::int32_t ordinal = 0; tessera_device_cuda(ordinal, &device).code == TESSERA_OK; ++ordinal) {
    if (std::find(archs.begin(), archs.end(), device.arch) == archs.end()) archs.push_back(device.arch);
  }
  return archs;
}

void warm(const std::vector<std::string>& names, bool as_json) {
  std::vector<std::int32_t> archs;
  for (const std::string& name : names) archs.push_back(described_gpu(name).arch);
  if (archs.empty()) archs = archs_of_gpus();
  cuda::Cache& cache = cuda::default_cache();
  if (const std::string reason = cache.unwritable(); !reason.empty()) throw Failure("cache: " + reason);
  std::size_t kernels = 0;
  for (const std::int32_t arch : archs) kernels += cuda::prebuilt_kernels(arch).size();
  Progress progress(static_cast<double>(kernels));
  std::int64_t compiled = 0, total = 0;
  progress.show("compiling");
  const tessera_status status = cuda::warm(cache, {archs.begin(), archs.end()}, [&](const cuda::Warmed& warmed) {
    compiled += warmed.origin == cuda::Origin::kCompiled;
    ++total;
    progress.advance(1);
    progress.show(fmt::format("{} for {}", warmed.kernel.spec.name, cuda::target_name(warmed.target)));
  });
  progress.clear();
  if (status.code != TESSERA_OK) throw Failure(status.message);
  if (as_json) {
    print_json({{"folder", cache.folder()}, {"kernels", total}, {"compiled", compiled}});
  } else {
    fmt::print("{} kernels in {}, {} compiled now\n", total, cache.folder(), compiled);
  }
}

}  // namespace

void add_cache(CLI::App& program, Outcome& outcome) {
  CLI::App* command = program.add_subcommand("cache", "The compiled CUDA kernels kept on disk");
  command->require_subcommand(1);
  command->footer(
      "Examples:\n  tessera cache list\n  tessera cache warm --arch 90\n  tessera cache clear\n"
      "The folder is TESSERA_CACHE_DIR, else XDG_CACHE_HOME/tessera, else HOME/.cache/tessera.");
  auto json = std::make_shared<bool>(false);
  auto archs = std::make_shared<std::vector<std::string>>();
  const auto add = [&](const char* name, const char* what) {
    CLI::App* action = command->add_subcommand(name, what);
    action->add_flag("--json", *json, "As JSON");
    return action;
  };
  add("list", "Each kernel's key, architecture, size, age and registers")->callback([json, &outcome] {
    list(*json);
    outcome.exit_code = 0;
  });
  CLI::App* warming = add("warm", "Compile the common kernels now");
  warming->add_option("--arch", *archs, "80, 90, sm_120, ...; without it, those of this machine's GPUs")
      ->delimiter(',');
  warming->callback([json, archs, &outcome] {
    warm(*archs, *json);
    outcome.exit_code = 0;
  });
  add("clear", "Take all of them away")->callback([json, &outcome] {
    clear(*json);
    outcome.exit_code = 0;
  });
}

}  // namespace tessera::cli
