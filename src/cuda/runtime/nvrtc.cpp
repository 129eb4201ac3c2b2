#include "cuda/runtime/nvrtc.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/status.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/runtime/nvrtc_library.hpp"
#include "cuda/runtime/sources.hpp"

namespace tessera::cuda {
namespace {

// The architecture itself, or the newest older one of its family, whose code it can run.
tessera_status supported_arch(const NvrtcFunctions& nvrtc, const CompilerInfo& info, int32_t arch, int32_t& best) {
  int count = 0;
  nvrtc.nvrtcGetNumSupportedArchs(&count);
  std::vector<int> archs(static_cast<size_t>(std::max(count, 0)));
  if (count > 0) nvrtc.nvrtcGetSupportedArchs(archs.data());
  best = 0;
  for (const int candidate : archs) {
    if (candidate / 10 == arch / 10 && candidate <= arch) best = std::max(best, candidate);
  }
  if (best != 0) return ok();
  return unsupported("NVRTC %s (%s): does not compile for %s, a newer one is needed (%s)",
                     version_text(info.version).c_str(), info.path.c_str(), target_name(arch).c_str(), kHowToGetNvrtc);
}

class Program {
 public:
  explicit Program(const NvrtcFunctions& nvrtc) : nvrtc_(nvrtc) {}
  ~Program() {
    if (program_) nvrtc_.nvrtcDestroyProgram(&program_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  nvrtcProgram* address() { return &program_; }
  nvrtcProgram get() const { return program_; }

 private:
  const NvrtcFunctions& nvrtc_;
  nvrtcProgram program_ = nullptr;
};

std::string log_of(const NvrtcFunctions& nvrtc, nvrtcProgram program) {
  size_t size = 0;
  if (nvrtc.nvrtcGetProgramLogSize(program, &size) != 0 || size <= 1) return "";
  std::string log(size, '\0');
  nvrtc.nvrtcGetProgramLog(program, log.data());
  log.resize(std::strlen(log.c_str()));
  return log;
}

// The first error of a log: "header(12): error: ...".
std::string first_error(const std::string& log) {
  const size_t at = log.find("error");
  if (at == std::string::npos) return log.substr(0, log.find('\n'));
  const size_t begin = log.rfind('\n', at) + 1;
  return log.substr(begin, log.find('\n', at) - begin);
}

// The number right before `what` in `line`.
bool number_before(const std::string& line, const char* what, int32_t& value) {
  const size_t at = line.find(what);
  if (at == std::string::npos || at == 0) return false;
  const size_t end = line.find_last_of("0123456789", at);
  if (end == std::string::npos) return false;
  const size_t before = line.find_last_not_of("0123456789", end);
  value = std::atoi(line.c_str() + (before == std::string::npos ? 0 : before + 1));
  return true;
}

}  // namespace

std::vector<std::string> compile_options() {
  std::vector<std::string> options = {"-std=c++20", "-default-device", "--ptxas-options=-v"};
  static const bool line_info = environment_variable(kLineInfo) == "1";
  if (line_info) options.emplace_back("-lineinfo");
  return options;
}

bool read_ptxas_log(const std::string& log, const std::string& symbol, Binary& binary) {
  bool ours = false, seen = false;
  size_t begin = 0;
  while (begin < log.size()) {
    const size_t end = std::min(log.find('\n', begin), log.size());
    const std::string line = log.substr(begin, end - begin);
    begin = end + 1;
    if (line.find("wgmma") != std::string::npos && line.find("serialized") != std::string::npos) {
      binary.wgmma_serialized = 1;
    }
    if (line.find("Compiling entry function") != std::string::npos) {
      ours = line.find("'" + symbol + "'") != std::string::npos;
    }
    if (!ours) continue;
    int32_t stores = 0, loads = 0;
    number_before(line, " bytes stack frame", binary.stack_bytes);
    if (number_before(line, " bytes spill stores", stores) && number_before(line, " bytes spill loads", loads)) {
      binary.spill_bytes = stores + loads;
    }
    seen |= number_before(line, " registers", binary.registers);
  }
  return seen;
}

tessera_status compile_kernel(const std::string& source, const std::string& symbol, const Target& target,
                              Binary& binary, std::string* log_out) {
  NvrtcFunctions nvrtc;
  CompilerInfo info;
  TESSERA_RETURN_IF_ERROR(opened_nvrtc(nvrtc, info));
  Target best = target;
  TESSERA_RETURN_IF_ERROR(supported_arch(nvrtc, info, target.arch, best.arch));
  const std::string who = "NVRTC " + version_text(info.version) + " (" + info.path + ")";

  std::vector<const char*> texts, names;
  for (int i = 0; i < kNumKernelHeaders; ++i) {
    texts.push_back(kKernelHeaders[i].text);
    names.push_back(kKernelHeaders[i].name);
  }
  Program program(nvrtc);
  nvrtcResult result = nvrtc.nvrtcCreateProgram(program.address(), source.c_str(), (symbol + ".cu").c_str(),
                                                kNumKernelHeaders, texts.data(), names.data());
  if (result != 0) {
    return internal("%s: cannot take %s: %s", who.c_str(), symbol.c_str(), nvrtc.nvrtcGetErrorString(result));
  }
  std::vector<std::string> options = compile_options();
  options.insert(options.begin(), "--gpu-architecture=" + target_name(best));
  // For a kernel found in its own cache, NVRTC prints no log. Older versions have neither that cache nor this option.
  constexpr int32_t kHasOwnCache = 13000;
  if (info.version >= kHasOwnCache) options.emplace_back("--no-cache");
  std::vector<const char*> arguments;
  for (const std::string& option : options) arguments.push_back(option.c_str());
  result = nvrtc.nvrtcCompileProgram(program.get(), static_cast<int>(arguments.size()), arguments.data());
  const std::string log = log_of(nvrtc, program.get());
  if (log_out) *log_out = log;
  size_t size = 0;
  const auto get_size = target.ptx ? nvrtc.nvrtcGetPTXSize : nvrtc.nvrtcGetCUBINSize;
  const auto get_code = target.ptx ? nvrtc.nvrtcGetPTX : nvrtc.nvrtcGetCUBIN;
  if (result == 0) result = get_size(program.get(), &size);
  binary.cubin.assign(size, '\0');
  if (result == 0) result = get_code(program.get(), binary.cubin.data());
  if (result != 0) {
    return internal("%s: cannot compile %s for %s: %s: %.300s", who.c_str(), symbol.c_str(), target_name(best).c_str(),
                    nvrtc.nvrtcGetErrorString(result), first_error(log).c_str());
  }
  binary.symbol = symbol;
  binary.arch = best.arch, binary.ptx = best.ptx;
  if (!best.ptx && !read_ptxas_log(log, symbol, binary)) {
    return internal("%s: says nothing of %s's registers", who.c_str(), symbol.c_str());
  }
  return ok();
}

}  // namespace tessera::cuda
