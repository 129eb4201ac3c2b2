// Searches for NVRTC and opens it.
#include "cuda/runtime/nvrtc_library.hpp"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>

#include "core/status.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/runtime/trust.hpp"

namespace tessera::cuda {
namespace {

constexpr int32_t kOldest = 12080;  // the first version that compiles for Blackwell
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
         load(library, "nvrtcGetCUBINSize", f.nvrtcGetCUBINSize) && load(library, "nvrtcGetCUBIN", f.nvrtcGetCUBIN) &&
         load(library, "nvrtcGetPTXSize", f.nvrtcGetPTXSize) && load(library, "nvrtcGetPTX", f.nvrtcGetPTX);
}

bool is_folder(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
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

// A place where libnvrtc.so may be: below a folder that is one installation.
struct Place {
  std::string installation, below;
  bool named = true;  // by the environment, or loaded by the process: its owners are trusted
  std::string folder() const { return below.empty() ? installation : installation + "/" + below; }
};

// pip's packages below a site-packages folder: one folder for all of CUDA 13, one folder per library before.
void add_site_packages(std::vector<Place>& places, const std::string& site) {
  for (const char* below : {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"}) places.push_back({site, below});
}

// The folder in which pip installed this library as part of its package; "" if it is elsewhere.
std::string own_site_packages() {
  const std::string site = folder_of(library_folder()), name = site.substr(site.rfind('/') + 1);
  const bool pips =
      name == "site-packages" || name == "dist-packages" || !matches(site + "/tessera*.dist-info").empty();
  return pips ? site : "";
}

std::vector<Place> search_places() {
  std::vector<Place> places;
  if (const std::string site = own_site_packages(); !site.empty()) add_site_packages(places, site);
  const auto add_python = [&places](const std::string& prefix) {
    for (const std::string& site : matches(prefix + "/lib/python3*/site-packages")) add_site_packages(places, site);
  };
  if (const std::string venv = environment_variable("VIRTUAL_ENV"); !venv.empty()) add_python(venv);
  if (const std::string conda = environment_variable("CONDA_PREFIX"); !conda.empty()) {
    places.push_back({conda, "lib"});
    add_python(conda);
  }
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const std::string home = environment_variable(name); !home.empty()) places.push_back({home, "lib64"});
  }
  places.push_back({"/usr/local/cuda", "lib64", false});
  return places;
}

// NVRTC opens a second library by its bare name, which the loader resolves only once it has been opened by its path.
std::vector<std::string> builtins_beside(const std::string& path) {
  const std::string folder = folder_of(path);
  return folder.empty() ? std::vector<std::string>{} : matches(folder + "/libnvrtc-builtins.so.*.*");
}

// The version in the name of the only such file beside it; 0 if there is none, or several.
int32_t version_by_name(const std::string& path) {
  int32_t version = 0;
  for (const std::string& builtins : builtins_beside(path)) {
    int major = 0, minor = 0, end = 0;
    const std::string name = builtins.substr(folder_of(builtins).size() + 1);
    if (std::sscanf(name.c_str(), "libnvrtc-builtins.so.%d.%d%n", &major, &minor, &end) != 2) continue;
    if (static_cast<size_t>(end) != name.size()) continue;  // 12.8.93: the target of a link
    if (version != 0) return 0;
    version = 1000 * major + 10 * minor;
  }
  return version;
}

// True if the library exists and no user can write it who cannot write this library or the installation that contains
// it. Otherwise `reason` says why, or is "" if there is no library.
bool trusted(const Place& place, const std::string& name, std::string& reason) {
  if (!place.installation.starts_with('/')) {
    reason = place.folder() + "/" + name + " is a relative path, accepted an absolute one";
    return false;
  }
  Writers writers;
  writers.add_own_installation(library_path());
  if (place.named) writers.add_installation(place.installation);
  struct stat info;
  const auto refused = [&](const std::string& path) {
    if (const std::string foreign = writers.refusal(info); !foreign.empty()) reason = path + " " + foreign;
    return !reason.empty();
  };
  const Descriptor installation = open_trusted(place.installation, {.writers = writers}, reason);
  if (!installation || fstat(installation.get(), &info) != 0 || !S_ISDIR(info.st_mode)) return false;
  if (refused(place.installation)) return false;
  const Descriptor file = open_trusted(place.below + "/" + name, {.writers = writers, .to_installation = false}, reason,
                                       &installation, place.installation);
  if (!file || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
  return !refused(place.folder() + "/" + name);
}

struct Compiler {
  CompilerInfo info;
  Place place;              // the folder of its file; the loader knows it if this is empty
  void* library = nullptr;  // NULL: not opened yet
  NvrtcFunctions functions{};
};

void open_builtins(const Compiler& compiler) {
  for (const std::string& builtins : builtins_beside(compiler.info.path)) {
    std::string reason;
    if (trusted(compiler.place, builtins.substr(builtins.rfind('/') + 1), reason)) {
      dlopen(builtins.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
  }
}

// Opens info.path and reads its version; on failure "" becomes the reason.
bool open_library(Compiler& compiler, int extra_flags, std::string& reason) {
  if (!(extra_flags & RTLD_NOLOAD)) open_builtins(compiler);
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

// 13000 for a driver of CUDA 13, 0 if there is none: it may be unable to load code of a newer major version.
int32_t driver_major() {
  const Driver* driver = nullptr;
  return open_driver(driver).code == TESSERA_OK ? driver->version / 1000 * 1000 : 0;
}

class Search {
 public:
  // `opens`: libraries whose names do not tell their versions are opened.
  Search(const std::set<std::string>& broken, bool opens) : broken_(broken), opens_(opens), driver_(driver_major()) {}

  tessera_status run(Compiler& out) {
    if (const std::string given = environment_variable(kGivenNvrtc); !given.empty()) {
      if (is_folder(given)) {
        for (const char* name : kNames) offer_file({given, ""}, name);
      } else {
        offer_file({folder_of(given), ""}, given.substr(given.rfind('/') + 1));
      }
      if (take(out)) return ok();
      return unsupported("TESSERA_NVRTC: %s, accepted libnvrtc.so of CUDA 12.8 or newer, or its folder%s",
                         given.c_str(), reasons().c_str());
    }
    for (const char* name : kNames) offer_loaded(name);
    for (const Place& place : search_places()) {
      looked_.push_back(place.folder());
      for (const char* name : kNames) offer_file(place, name);
    }
    if (opens_) {
      for (const char* name : kNames) offer_system(name);
    }
    if (take(out)) return ok();
    std::string places;
    for (const std::string& folder : looked_) places += folder + ", ";
    if (!opens_) {
      places.resize(places.size() - 2);
      return unsupported("NVRTC: not found in %s (%s)%s; the system's path is tried when a kernel must be compiled",
                         places.c_str(), kHowToGetNvrtc, reasons().c_str());
    }
    return unsupported("NVRTC: not found (%s)%s; looked in %sthe system's path", kHowToGetNvrtc, reasons().c_str(),
                       places.c_str());
  }

 private:
  void offer(Compiler compiler) {
    if (compiler.info.version < kOldest && compiler.info.version != 0) {
      refuse(compiler.info.path + " is of CUDA " + version_text(compiler.info.version) + ", older than 12.8");
    } else if (driver_ != 0 && compiler.info.version >= driver_ + 1000) {
      if (newer_.info.path.empty()) newer_ = std::move(compiler);
    } else if (found_.info.path.empty()) {
      found_ = std::move(compiler);
    }
  }
  void offer_loaded(const char* name) {
    if (!found_.info.path.empty()) return;
    Compiler compiler{.info = {.path = name}, .place = {}};
    std::string reason;
    if (broken_.contains(name) || !open_library(compiler, RTLD_NOLOAD, reason)) return;
    Dl_info where;
    const auto address = reinterpret_cast<const void*>(compiler.functions.nvrtcVersion);
    if (dladdr(address, &where) && where.dli_fname) compiler.info.path = where.dli_fname;
    compiler.place.installation = folder_of(compiler.info.path);
    if (opens_) open_builtins(compiler);
    offer(std::move(compiler));
  }
  void offer_file(const Place& place, const std::string& name) {
    if (!found_.info.path.empty()) return;
    const std::string path = place.folder() + "/" + name;
    if (broken_.contains(path)) return refuse(path + " cannot be opened");
    std::string reason;
    if (!trusted(place, name, reason)) return reason.empty() ? void() : refuse(reason);
    Compiler compiler{.info = {.path = path, .version = version_by_name(path)}, .place = place};
    if (opens_ && compiler.info.version == 0 && !open_library(compiler, 0, reason)) return refuse(reason);
    offer(std::move(compiler));
  }
  void offer_system(const char* name) {
    if (!found_.info.path.empty()) return;
    Compiler compiler{.info = {.path = name}, .place = {}};
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
  const bool opens_;
  const int32_t driver_;
  Compiler found_, newer_;
  std::vector<std::string> looked_, refused_;
};

// A found compiler is kept. After a failure, the next call searches again, since it may have been installed meanwhile.
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
  return Search(s.broken, true).run(s.compiler);
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

// The loader's name may be relative to a former working directory, and is argv[0] for a program. The kernel's list of
// mappings has neither problem.
std::string library_path() {
  static const std::string& path = *new std::string([]() -> std::string {
    const auto address = reinterpret_cast<uintptr_t>(&tessera_version);
    Dl_info info;
    void* extra = nullptr;
    if (dladdr1(reinterpret_cast<const void*>(address), &info, &extra, RTLD_DL_LINKMAP) && extra) {
      const char* const name = static_cast<const link_map*>(extra)->l_name;
      char* const resolved = name[0] == '/' ? realpath(name, nullptr) : nullptr;
      const std::string found = resolved ? resolved : "";
      std::free(resolved);
      if (!found.empty()) return found;
    }
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      unsigned long begin = 0, end = 0;
      const size_t slash = line.find('/');
      if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2 || slash == std::string::npos) continue;
      if (begin <= address && address < end) return line.substr(slash);
    }
    return "";
  }());
  return path;
}

std::string library_folder() { return folder_of(library_path()); }

tessera_status look_for_compiler(CompilerInfo& info) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  Compiler compiler;
  if (s.compiler.info.path.empty()) TESSERA_RETURN_IF_ERROR(Search(s.broken, false).run(compiler));
  info = s.compiler.info.path.empty() ? compiler.info : s.compiler.info;
  return ok();
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
