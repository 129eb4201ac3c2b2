#include "peers/blas.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "peers/standard_attention.hpp"

namespace tessera::peers {
namespace {

constexpr const char* kLibrary = "libopenblas.so.0";

template <typename Function>
Function symbol(void* library, const char* name) {
  void* address = dlsym(library, name);
  if (address == nullptr) throw std::runtime_error(std::string(kLibrary) + ": has no function " + name);
  return reinterpret_cast<Function>(address);
}

void* open_library() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error(std::string("standard attention needs OpenBLAS (Debian: libopenblas0): ") + dlerror());
  }
  return library;
}

Blas load() {
  unsetenv("OPENBLAS_CORETYPE");
  unsetenv("OPENBLAS_L2_SIZE");
  void* library = open_library();
  // OpenBLAS takes a model that is newer than it for a Prescott, of SSE3, and is 20 times slower there than it can be.
  const char* core = symbol<char* (*)()>(library, "openblas_get_corename")();
  if (std::strcmp(core, "Prescott") == 0 && __builtin_cpu_supports("avx2")) {
    dlclose(library);
    setenv("OPENBLAS_CORETYPE", __builtin_cpu_supports("avx512vl") ? "SkylakeX" : "Haswell", 1);
    library = open_library();
    unsetenv("OPENBLAS_CORETYPE");
  }
  return {.sgemm = symbol<decltype(&cblas_sgemm)>(library, "cblas_sgemm"),
          .set_num_threads = symbol<void (*)(int)>(library, "openblas_set_num_threads"),
          .config = symbol<char* (*)()>(library, "openblas_get_config")()};
}

}  // namespace

const Blas& blas() {
  static const Blas loaded = load();
  return loaded;
}

std::string blas_description() {
  try {
    return blas().config;
  } catch (const std::runtime_error&) {
    return "";
  }
}

}  // namespace tessera::peers
