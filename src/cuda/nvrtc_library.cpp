// Where NVRTC is looked for, and how it is opened.
#include "cuda/nvrtc_library.hpp"

#include <dlfcn.h>
#include <glob.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include "core/status.hpp"
#include "cuda/driver.hpp"

namespace tessera::cuda {
namespace {

constexpr int32_t kOldest = 12080;  // the first that compiles for Blackwell
constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

template <class Function>
bool load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool load_functions(void* library, NvrtcFunctions& f) {
  return load(library, "nvrtcVersion", f.nvrtcVersion) && load(library, "nvrtcGetErrorString", f.nvrtcGetErrorString) &&
         load(library, "nvrtcGetNumSupportedArchs", f.nvrtcGetNumSupportedArchs) &&
         load(library, "nvrtcGetSupportedArchs", f.nvrtcGetSupportedArchs) &&
         load(library, "nvrtcCreateProgram", f.nvrtcCreateProgram) &&
         load(library, "nvrtcDestroyProgram", f.nvrtcDestroyProgram) &&
         load(library, "nvrtcCompileProgram", f.nvrtcCompileProgram) &&
         load(library, "nvrtcGetProgramLogSize", f.nvrtcGetProgramLogSize) &&
         load(library, "nvrtcGetProgramLog", f.nvrtcGetProgramLog) &&
         load(library, "nvrtcGetCUBINSize", f.nvrtcGetCUBINSize) && load(library, "nvrtcGetCUBIN", f.nvrtcGetCUBIN);
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

bool is_folder(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}
bool is_file(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found{};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return paths;
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

// pip's packages below a site-packages folder: one folder for all of CUDA 13, one a library before.
void add_site_packages(std::vector<std::string>& folders, const std::string& site) {
  folders.push_back(site + "/nvidia/cu13/lib");
  folders.push_back(site + "/nvidia/cuda_nvrtc/lib");
}

std::vector<std::string> search_folders() {
  std::vector<std::string> folders;
  add_site_packages(folders, library_folder() + "/..");
  if (const std::string venv = variable("VIRTUAL_ENV"); !venv.empty()) {
    for (const std::string& site : matches(venv + "/lib/python3*/site-packages")) add_site_packages(folders, site);
  }
  if (const std::string conda = variable("CONDA_PREFIX"); !conda.empty()) {
    folders.push_back(conda + "/lib");
    for (const std::string& site : matches(conda + "/lib/python3*/site-packages")) add_site_packages(folders, site);
  }
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const std::string home = variable(name); !home.empty()) folders.push_back(home + "/lib64");
  }
  folders.push_back("/usr/local/cuda/lib64");
  return folders;
}

// NVRTC opens a second library by its bare name, which the loader knows only once it has been opened by its path.
std::vector<std::string> builtins_beside(const std::string& path) {
  const std::string folder = folder_of(path);
  return folder.empty() ? std::vector<std::string>{} : matches(folder + "/libnvrtc-builtins.so.*.*");
}

// By the one file beside it that is named after its version, 0 when there is no such file, or several.
int32_t version_by_name(const std::string& path) {
  int32_t version = 0;
  for (const std::string& builtins : builtins_beside(path)) {
    int major = 0, minor = 0, end = 0;
    const std::string name = builtins.substr(folder_of(builtins).size() + 1);
    if (std::sscanf(name.c_str(), "libnvrtc-builtins.so.%d.%d%n", &major, &minor, &end) != 2) continue;
    if (static_cast<size_t>(end) != name.size()) continue;  // 12.8.93: a link's target
    if (version != 0) return 0;
    version = 1000 * major + 10 * minor;
  }
  return version;
}

struct Compiler {
  CompilerInfo info;
  void* library = nullptr;  // NULL: not opened yet
  NvrtcFunctions functions{};
};

// Opens info.path and asks it for its version; on failure "" becomes the reason.
bool open_library(Compiler& compiler, int extra_flags, std::string& reason) {
  if (!(extra_flags & RTLD_NOLOAD)) {
    for (const std::string& builtins : builtins_beside(compiler.info.path)) {
      dlopen(builtins.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
  }
  void* library = dlopen(compiler.info.path.c_str(), RTLD_NOW | RTLD_LOCAL | extra_flags);
  if (!library) {
    const char* error = dlerror();
    reason = error ? error : "cannot be opened";
    return false;
  }
  int major = 0, minor = 0;
  if (!load_functions(library, compiler.functions) || compiler.functions.nvrtcVersion(&major, &minor) != 0) {
    reason = compiler.info.path + " is no NVRTC, or one older than CUDA 11.1";
    return false;
  }
  compiler.library = library;
  compiler.info.version = 1000 * major + 10 * minor;
  return true;
}

// 13000 for a driver of CUDA 13, 0 when there is none: code of a newer major version it may not take.
int32_t driver_major() {
  const Driver* driver = nullptr;
  return open_driver(driver).code == TESSERA_OK ? driver->version / 1000 * 1000 : 0;
}

class Search {
 public:
  explicit Search(const std::set<std::string>& broken) : broken_(broken), driver_(driver_major()) {}

  tessera_status run(Compiler& out) {
    if (const std::string given = variable("TESSERA_NVRTC"); !given.empty()) {
      if (is_folder(given)) {
        for (const char* name : kNames) offer_file(given + "/" + name);
      } else {
        offer_file(given);
      }
      if (take(out)) return ok();
      return unsupported("TESSERA_NVRTC: %s, accepted libnvrtc.so of CUDA 12.8 or newer, or its folder%s",
                         given.c_str(), reasons().c_str());
    }
    for (const char* name : kNames) offer_loaded(name);
    for (const std::string& folder : search_folders()) {
      looked_.push_back(folder);
      for (const char* name : kNames) offer_file(folder + "/" + name);
    }
    for (const char* name : kNames) offer_system(name);
    if (take(out)) return ok();
    std::string places;
    for (const std::string& folder : looked_) places += folder + ", ";
    return unsupported("NVRTC: not found (%s)%s; looked in %sthe system's path", kHowToGetNvrtc, reasons().c_str(),
                       places.c_str());
  }

 private:
  void offer(Compiler compiler) {
    if (compiler.info.version < kOldest) {
      refuse(compiler.info.path + " is of CUDA " + version_text(compiler.info.version) + ", older than 12.8");
    } else if (driver_ != 0 && compiler.info.version >= driver_ + 1000) {
      if (newer_.info.path.empty()) newer_ = std::move(compiler);
    } else if (found_.info.path.empty()) {
      found_ = std::move(compiler);
    }
  }
  void offer_loaded(const char* name) {
    if (!found_.info.path.empty()) return;
    Compiler compiler{.info = {.path = name}};
    std::string reason;
    if (broken_.contains(name) || !open_library(compiler, RTLD_NOLOAD, reason)) return;
    Dl_info where;
    const auto address = reinterpret_cast<const void*>(compiler.functions.nvrtcVersion);
    if (dladdr(address, &where) && where.dli_fname) compiler.info.path = where.dli_fname;
    for (const std::string& builtins : builtins_beside(compiler.info.path)) {
      dlopen(builtins.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    offer(std::move(compiler));
  }
  void offer_file(const std::string& path) {
    if (!found_.info.path.empty()) return;
    if (broken_.contains(path)) return refuse(path + " cannot be opened");
    if (!is_file(path)) return;
    Compiler compiler{.info = {.path = path, .version = version_by_name(path)}};
    std::string reason;
    if (compiler.info.version == 0 && !open_library(compiler, 0, reason)) return refuse(reason);
    offer(std::move(compiler));
  }
  void offer_system(const char* name) {
    if (!found_.info.path.empty()) return;
    Compiler compiler{.info = {.path = name}};
    std::string reason;
    if (open_library(compiler, 0, reason)) offer(std::move(compiler));
  }
  void refuse(const std::string& reason) { refused_.push_back(reason); }

  bool take(Compiler& out) {
    Compiler& best = found_.info.path.empty() ? newer_ : found_;
    if (best.info.path.empty()) return false;
    out = std::move(best);
    return true;
  }
  std::string reasons() const {
    std::string text;
    for (const std::string& reason : refused_) text += "; " + reason;
    return text;
  }

  const std::set<std::string>& broken_;
  const int32_t driver_;
  Compiler found_, newer_;
  std::vector<std::string> looked_, refused_;
};

// What was found stays; what was not is looked for again, since it may have been installed meanwhile.
struct State {
  std::mutex mutex;
  Compiler compiler;
  std::set<std::string> broken;
};
State& state() {
  static State& it = *new State;
  return it;
}

tessera_status find_locked(State& s) {
  if (!s.compiler.info.path.empty()) return ok();
  return Search(s.broken).run(s.compiler);
}

tessera_status open_locked(State& s) {
  for (;;) {
    TESSERA_RETURN_IF_ERROR(find_locked(s));
    if (s.compiler.library) return ok();
    std::string reason;
    if (open_library(s.compiler, 0, reason)) return ok();
    s.broken.insert(s.compiler.info.path);
    s.compiler = {};
  }
}

}  // namespace

std::string version_text(int32_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string library_folder() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<const void*>(&tessera_version), &info) || !info.dli_fname) return ".";
  char* resolved = realpath(info.dli_fname, nullptr);
  const std::string path = resolved ? resolved : info.dli_fname;
  std::free(resolved);
  const std::string folder = folder_of(path);
  return folder.empty() ? "." : folder;
}

tessera_status find_compiler(CompilerInfo& info) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  TESSERA_RETURN_IF_ERROR(find_locked(s));
  info = s.compiler.info;
  return ok();
}

tessera_status open_compiler(CompilerInfo& info) {
  NvrtcFunctions functions;
  return opened_nvrtc(functions, info);
}

tessera_status opened_nvrtc(NvrtcFunctions& functions, CompilerInfo& info) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  TESSERA_RETURN_IF_ERROR(open_locked(s));
  functions = s.compiler.functions;
  info = s.compiler.info;
  return ok();
}

}  // namespace tessera::cuda
