// A libnvrtc.so.13 whose machine code is a shared object for the host: the host's C++ compiler compiles a kernel's
// source and headers, with the emulated instructions (tests/emulated_gpu/tessera) in place of the real ones.
//   EMULATED_GPU_CXX       the compiler, by default c++
//   EMULATED_GPU_CXXFLAGS  further flags, separated by spaces: -g, -O1
//   EMULATED_GPU_HEADERS   cache for headers: of kernels, and a precompiled one of their common includes
#include <fcntl.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#define EMULATED_NVRTC extern "C" __attribute__((visibility("default")))

extern char** environ;

namespace {

namespace fs = std::filesystem;

using nvrtcResult = int;
enum : nvrtcResult {
  kSuccess = 0,
  kInvalidInput = 3,
  kInvalidProgram = 4,
  kInvalidOption = 5,
  kCompilation = 6,
  kInternalError = 11
};

constexpr int kArchs[] = {80, 86, 87, 89, 90, 100, 103, 110, 120, 121};

struct Program {
  std::string source, name;
  std::vector<std::pair<std::string, std::string>> headers;  // name, text
  std::string log, code;
};
using nvrtcProgram = Program*;

// ---- kernels in their declarations ----

struct Declared {
  std::string symbol;
  int max_threads = 1024, min_blocks = 1, cluster = 1;
};

std::vector<Declared> declared_kernels(const std::string& source) {
  static const std::regex pattern(
      R"(extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\((\d+)(?:,\s*(\d+))?\)\s+)?)"
      R"((?:__cluster_dims__\((\d+),\s*1,\s*1\)\s+)?(\w+)\s*\()");
  std::vector<Declared> kernels;
  for (std::sregex_iterator at(source.begin(), source.end(), pattern), end; at != end; ++at) {
    const auto number = [&](size_t group, int usual) {
      return (*at)[group].matched ? std::stoi((*at)[group].str()) : usual;
    };
    kernels.push_back({(*at)[4].str(), number(1, 1024), number(2, 1), number(3, 1)});
  }
  return kernels;
}

std::string definitions_of(const std::vector<Declared>& kernels) {
  std::ostringstream text;
  for (const Declared& k : kernels) {
    text << "\nTESSERA_EMULATED_KERNEL(" << k.symbol << ")\nextern \"C\" __attribute__((visibility(\"default\"))) "
         << "constexpr EmulatedLaunchBounds " << k.symbol << "_bounds{" << k.max_threads << ", " << k.min_blocks << ", "
         << k.cluster << "};\n";
  }
  return text.str();
}

// The output of ptxas -v, without known register counts.
std::string ptxas_log(const std::vector<Declared>& kernels, const std::string& arch) {
  std::ostringstream text;
  for (const Declared& k : kernels) {
    text << "ptxas info    : Compiling entry function '" << k.symbol << "' for '" << arch << "'\n"
         << "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
         << "ptxas info    : Used 32 registers\n";
  }
  return text.str();
}

// ---- the host's compiler ----

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string path = (fs::temp_directory_path() / "emulated_nvrtc_XXXXXX").string();
    if (mkdtemp(path.data())) path_ = path;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

bool write_file(const fs::path& path, const std::string& text) {
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  std::ofstream file(path, std::ios::binary);
  file << text;
  return static_cast<bool>(file.flush());
}
std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string from_environment(const char* name, const char* usual) {
  const char* const value = std::getenv(name);
  return value && *value ? value : usual;
}

// Returns 0 on success. The command's output goes to `output`.
int run(const std::vector<std::string>& command, const fs::path& output) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) {
    write_file(output, command[0] + ": " + std::strerror(failed));
    return failed;
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

// The compiler with its flags for an architecture.
std::vector<std::string> compiler_for(const std::string& arch) {
  const std::string number = arch.substr(arch.find_first_of("0123456789"));
  std::vector<std::string> command = {from_environment("EMULATED_GPU_CXX", "c++")};
  // Names of kernels are also names of functions of the library that launches them, so they are hidden. Fibers jump
  // between stacks, which a fortified longjmp would report as an error. thread_local variables need no initialisation.
  for (const char* flag : {"-std=c++20", "-O1", "-march=native", "-fPIC", "-fvisibility=hidden", "-w",
                           "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-fno-extern-tls-init", "-pthread"})
    command.emplace_back(flag);
  command.push_back("-D__CUDA_ARCH__=" + std::to_string(std::stoi(number) * 10));
  if (arch.ends_with("a")) command.push_back("-D__CUDA_ARCH_FEAT_SM" + std::to_string(std::stoi(number)) + "_ALL");
  std::istringstream further(from_environment("EMULATED_GPU_CXXFLAGS", ""));
  for (std::string flag; further >> flag;) command.push_back(flag);
  return command;
}

uint64_t hash_of(const std::string& text, uint64_t hash) {
  constexpr uint64_t kPrime = 0x100000001b3;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * kPrime;
  return hash;
}

// Held by one process at a time.
class FileLock {
 public:
  explicit FileLock(const fs::path& path) : file_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    flock(file_, LOCK_EX);
  }
  ~FileLock() { close(file_); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int file_;
};

using Header = std::pair<std::string, std::string>;  // name, text

// The current emulated instructions, and the library's headers that they use.
std::vector<Header> emulated_headers() {
  const fs::path source = EMULATED_GPU_SOURCE, emulated = source / "tests/emulated_gpu";
  std::vector<Header> headers;
  for (const fs::path& folder : {emulated, emulated / "runner", emulated / "tessera/ptx"}) {
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (!entry.is_regular_file()) continue;
      headers.emplace_back(entry.path().lexically_relative(emulated).string(), read_file(entry.path()));
    }
  }
  std::sort(headers.begin(), headers.end());
  for (const char* name : {"core/half.hpp", "core/float8.hpp"}) {
    headers.emplace_back(name, read_file(source / "src" / name));
  }
  return headers;
}

bool write_headers(const fs::path& folder, const std::vector<Header>& headers) {
  for (const auto& [name, text] : headers) {
    if (!write_file(folder / name, text)) return false;
  }
  return true;
}

// The folder of parts that are made once per hash of their inputs.
fs::path common_folder(const char* name, uint64_t hash) {
  char key[40];
  std::snprintf(key, sizeof key, "%s-%016llx", name, static_cast<unsigned long long>(hash));
  const std::string usual = (fs::temp_directory_path() / ("emulated_gpu-" + std::to_string(getuid()))).string();
  const fs::path folder = fs::path(from_environment("EMULATED_GPU_HEADERS", usual.c_str())) / key;
  std::error_code failed;
  fs::create_directories(folder, failed);
  return folder;
}

// Adds the include paths of a program's headers, after those of the emulated instructions, and the grid's runner to the
// command. The common includes of all kernels and the runner are compiled once; those of other headers or another
// compiler have other folders.
bool add_common_parts(const Program& program, std::vector<std::string>& command) {
  const std::vector<Header> emulated = emulated_headers();
  uint64_t hash = 0xcbf29ce484222325;
  for (const std::string& word : command) hash = hash_of(word + " ", hash);
  for (const auto& [name, text] : emulated) hash = hash_of(text, hash_of(name, hash));
  const fs::path runner = common_folder("runner", hash);
  for (const auto& [name, text] : program.headers) hash = hash_of(text, hash_of(name, hash));
  const fs::path kernels = common_folder("kernels", hash), prelude = kernels / "prelude.hpp";
  const auto with = [&command](std::vector<std::string> more) {
    more.insert(more.begin(), command.begin(), command.end());
    return more;
  };

  command.insert(command.end(), {"-I" + (runner / "include").string()});
  std::vector<std::string> objects;
  {
    const FileLock lock(runner / "lock");
    const bool made = fs::exists(runner / "made");
    if (!made && !write_headers(runner / "include", emulated)) return false;
    for (const auto& [name, text] : emulated) {
      if (!name.ends_with(".cpp")) continue;
      objects.push_back((runner / fs::path(name).stem()).string() + ".o");
      if (made) continue;
      if (run(with({"-O2", "-c", "-o", objects.back(), (runner / "include" / name).string()}), runner / "log") != 0) {
        std::fprintf(stderr, "emulated GPU: %s\n", read_file(runner / "log").c_str());
        return false;
      }
    }
    if (!made && !write_file(runner / "made", "")) return false;
  }
  command.push_back("-I" + (kernels / "include").string());
  {
    const FileLock lock(kernels / "lock");
    const fs::path precompiled = kernels / "prelude.hpp.gch";
    if (!fs::exists(precompiled)) {
      if (!write_headers(kernels / "include", program.headers)) return false;
      if (!write_file(prelude, "#include \"kernel.hpp\"\n#include \"launch_bounds.hpp\"\n")) return false;
      // The kernel's own compilation reports the error as well.
      std::error_code failed;
      if (run(with({"-x", "c++-header", "-o", precompiled.string(), prelude.string()}), kernels / "log") != 0) {
        fs::remove(precompiled, failed);
      }
    }
  }
  command.insert(command.end(), {"-include", prelude.string()});
  command.insert(command.end(), objects.begin(), objects.end());
  return true;
}

nvrtcResult compile(Program& program, const std::string& arch) {
  const TemporaryFolder temporary;
  const fs::path& folder = temporary.path();
  const std::vector<Declared> kernels = declared_kernels(program.source);
  std::vector<std::string> command = compiler_for(arch);
  if (folder.empty() || !add_common_parts(program, command)) return kInternalError;
  const fs::path source = folder / (program.name + ".cpp"), code = folder / "kernel.so", output = folder / "log";
  if (!write_file(source, program.source + definitions_of(kernels))) return kInternalError;
  command.insert(command.end(), {"-shared", "-o", code.string(), source.string()});
  const int failed = run(command, output);
  program.log = read_file(output) + ptxas_log(kernels, arch);
  if (failed != 0) return kCompilation;
  program.code = read_file(code);
  return kSuccess;
}

}  // namespace

EMULATED_NVRTC nvrtcResult nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, kSuccess; }
EMULATED_NVRTC const char* nvrtcGetErrorString(nvrtcResult result) {
  switch (result) {
    case kSuccess:
      return "NVRTC_SUCCESS";
    case kInvalidInput:
      return "NVRTC_ERROR_INVALID_INPUT";
    case kInvalidProgram:
      return "NVRTC_ERROR_INVALID_PROGRAM";
    case kInvalidOption:
      return "NVRTC_ERROR_INVALID_OPTION";
    case kCompilation:
      return "NVRTC_ERROR_COMPILATION";
    default:
      return "NVRTC_ERROR_INTERNAL_ERROR";
  }
}
EMULATED_NVRTC nvrtcResult nvrtcGetNumSupportedArchs(int* count) { return *count = std::size(kArchs), kSuccess; }
EMULATED_NVRTC nvrtcResult nvrtcGetSupportedArchs(int* archs) {
  return std::memcpy(archs, kArchs, sizeof kArchs), kSuccess;
}

EMULATED_NVRTC nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char* source, const char* name, int headers,
                                              const char* const* texts, const char* const* names) {
  auto* const made = new Program{source, name ? name : "default_program", {}, {}, {}};
  for (int i = 0; i < headers; ++i) made->headers.emplace_back(names[i], texts[i]);
  return *program = made, kSuccess;
}
EMULATED_NVRTC nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete *program;
  return *program = nullptr, kSuccess;
}
EMULATED_NVRTC nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
  constexpr const char* kArchOption = "--gpu-architecture=";
  std::string arch;
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    if (option.starts_with(kArchOption)) arch = option.substr(std::strlen(kArchOption));
  }
  return arch.starts_with("sm_") ? compile(*program, arch) : kInvalidOption;
}
EMULATED_NVRTC nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* size) {
  return *size = program->log.size() + 1, kSuccess;
}
EMULATED_NVRTC nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) {
  return std::memcpy(log, program->log.c_str(), program->log.size() + 1), kSuccess;
}
EMULATED_NVRTC nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* size) {
  return *size = program->code.size(), program->code.empty() ? kInvalidProgram : kSuccess;
}
EMULATED_NVRTC nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* code) {
  return std::memcpy(code, program->code.data(), program->code.size()), kSuccess;
}
EMULATED_NVRTC nvrtcResult nvrtcGetPTXSize(nvrtcProgram, size_t*) { return kInvalidProgram; }
EMULATED_NVRTC nvrtcResult nvrtcGetPTX(nvrtcProgram, char*) { return kInvalidProgram; }
