#include "info.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "core/text.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/runtime/jit.hpp"
#include "cuda/runtime/nvrtc.hpp"
#include "machine.hpp"
#include "peers/standard_attention.hpp"
#include "printable.hpp"
#include "units.hpp"

namespace tessera::cli {
namespace {

std::string isa_reason(const tessera_device& device) {
  if (const char* forced = std::getenv("TESSERA_ISA"); forced != nullptr && *forced != '\0') {
    return core::print("TESSERA_ISA=%.80s in the environment; this CPU has up to %s", forced,
                       tessera_isa_name(device.isa_limit));
  }
  const std::vector<std::string> features = cpu_features();
  if (device.isa_limit != TESSERA_ISA_AMX_BF16 && std::ranges::find(features, "amx_bf16") != features.end()) {
    return core::print(
        "of what this process may use, up to %s, the fastest here: the kernel refused AMX's tile registers",
        tessera_isa_name(device.isa_limit));
  }
  if (device.vector_isa != 0) {
    return core::print("AMX's tiles for bfloat16 where they are the fastest here, else %s",
                       tessera_isa_name(device.vector_isa));
  }
  if (device.isa < device.isa_limit) {
    return core::print("faster on this CPU than %s, which it has too", tessera_isa_name(device.isa_limit));
  }
  return "the best that this CPU has";
}

std::string threads_reason() {
  if (const char* forced = std::getenv("TESSERA_NUM_THREADS"); forced != nullptr && *forced != '\0') {
    return core::print("TESSERA_NUM_THREADS=%.80s in the environment", forced);
  }
  return "one for each core that this process may use";
}

// The GPUs, or in `reason` why there is none; and "NVRTC 13.0 at ..." or the reason why it is missing.
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

// Lines of a name and a text.
class Lines {
 public:
  void add(const std::string& name, const std::string& value) {
    constexpr std::size_t kNameWidth = 15;
    text_ += name + std::string(kNameWidth - std::min(name.size(), kNameWidth - 1), ' ') + value + "\n";
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

void add_cuda(Lines& lines, const Cuda& found) {
  for (const tessera_device& gpu : found.gpus) {
    lines.add(core::print("GPU %d", gpu.ordinal), core::print("%s, compute capability %d.%d, %d multiprocessors, ",
                                                              gpu.name, gpu.arch / 10, gpu.arch % 10, gpu.cores) +
                                                      bytes_text(static_cast<double>(gpu.smem_bytes)) +
                                                      " of shared memory a block");
  }
  if (!found.reason.empty()) lines.add("GPUs", (found.gpus.empty() ? "none: " : "") + found.reason);
  if (!found.driver.empty()) lines.add("driver", "CUDA " + found.driver);
  lines.add("NVRTC", found.nvrtc);
  for (const cuda::EnvironmentVariable& variable : cuda::environment_variables()) {
    const std::string value = cuda::environment_variable(variable.name);
    if (!value.empty()) {
      lines.add("environment", std::string(variable.name) + "=" + printable(value) + ": " + variable.meaning);
    }
  }
  const std::string refused = cuda::default_cache().refusal(), prebuilt = cuda::prebuilt_folder();
  lines.add("kernel cache", refused.empty() ? cuda::default_cache().folder() : "in memory: " + refused);
  if (prebuilt.empty()) return;
  const std::string not_loaded = cuda::prebuilt_refusal();
  lines.add("prebuilt", not_loaded.empty() ? prebuilt : "not loaded: " + not_loaded);
}

}  // namespace

std::string info_text(const tessera_device& device) {
  Lines lines;
  lines.add("tessera", tessera_version());
  lines.add("CPU", device.name);
  std::string features;
  for (const std::string& feature : cpu_features()) features += (features.empty() ? "" : " ") + feature;
  lines.add("features", features);
  lines.add("kernels", std::string(tessera_isa_name(device.isa)) + ": " + isa_reason(device));
  lines.add("cores", std::to_string(device.cores));
  lines.add("threads", std::to_string(device.threads) + ": " + threads_reason());
  for (const Cache& cache : caches()) {
    lines.add(cache.name, bytes_text(static_cast<double>(cache.size_bytes)) +
                              (cache.shared_by > 1 ? core::print(", shared by %d cores", cache.shared_by) : ""));
  }
  lines.add("memory", bytes_text(static_cast<double>(memory_bytes())) + ", " +
                          bytes_text(static_cast<double>(peers::available_memory_bytes())) + " available");
  add_cuda(lines, find_cuda());
  return lines.take();
}

std::string info_json(const tessera_device& device) {
  const Cuda found = find_cuda();
  core::JsonWriter json;
  // Names of devices and folders need not be UTF-8.
  const auto add = [&json](const char* key, const std::string& text) { json.add(key, printable(text).c_str()); };
  json.open(nullptr, '{');
  json.add("version", tessera_version());
  json.open("cpu", '{');
  add("name", device.name);
  json.open("features", '[');
  for (const std::string& feature : cpu_features()) add(nullptr, feature);
  json.close(']');
  json.add("isa", tessera_isa_name(device.isa));
  json.add("isa_limit", tessera_isa_name(device.isa_limit));
  if (device.vector_isa != 0) {
    json.add("vector_isa", tessera_isa_name(device.vector_isa));
  } else {
    json.add("vector_isa", std::numeric_limits<double>::quiet_NaN());  // null
  }
  add("isa_reason", isa_reason(device));
  json.add("cores", device.cores);
  json.add("threads", device.threads);
  add("threads_reason", threads_reason());
  json.open("caches", '[');
  for (const Cache& cache : caches()) {
    json.open(nullptr, '{');
    add("name", cache.name);
    json.add("bytes", cache.size_bytes);
    json.add("shared_by", cache.shared_by);
    json.close('}');
  }
  json.close(']');
  json.close('}');
  json.add("memory_bytes", memory_bytes());
  json.add("memory_available_bytes", peers::available_memory_bytes());
  json.open("gpus", '[');
  for (const tessera_device& gpu : found.gpus) {
    json.open(nullptr, '{');
    json.add("ordinal", gpu.ordinal);
    add("name", gpu.name);
    json.add("arch", gpu.arch);
    json.add("multiprocessors", gpu.cores);
    json.add("l2_bytes", gpu.l2_bytes);
    json.add("smem_bytes", gpu.smem_bytes);
    json.close('}');
  }
  json.close(']');
  json.open("cuda", '{');
  add("reason", found.reason);
  add("driver", found.driver);
  json.add("nvrtc_found", found.nvrtc_found);
  add("nvrtc", found.nvrtc);
  json.open("environment", '{');
  for (const cuda::EnvironmentVariable& variable : cuda::environment_variables()) {
    const std::string value = cuda::environment_variable(variable.name);
    if (!value.empty()) add(variable.name, value);
  }
  json.close('}');
  add("cache_folder", cuda::default_cache().folder());
  add("cache_refusal", cuda::default_cache().refusal());
  add("prebuilt_folder", cuda::prebuilt_folder());
  add("prebuilt_refusal", cuda::prebuilt_refusal());
  json.close('}');
  json.close('}');
  return json.take();
}

}  // namespace tessera::cli
