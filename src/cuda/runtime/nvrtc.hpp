// NVIDIA's run-time compiler: searched and opened when something must be compiled, and called for one kernel at a time.
// https://docs.nvidia.com/cuda/nvrtc/
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/runtime/cache.hpp"
#include "cuda/runtime/target.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

struct CompilerInfo {
  std::string path;
  int32_t version = 0;  // 1000 * major + 10 * minor, as the driver counts
};

// The compiler to use. UNSUPPORTED, with every place that was searched, if there is none of CUDA 12.8 or newer. Places
// are searched in this order, except those that untrusted users may write (trust.hpp):
// 1. TESSERA_NVRTC (a file or folder; if set, nothing else is tried);
// 2. a library that the process has loaded;
// 3. pip's packages beside this library, if pip installed it;
// 4. VIRTUAL_ENV, CONDA_PREFIX, CUDA_HOME, CUDA_PATH, /usr/local/cuda, the system's path.
// A compiler no newer than the driver, whose code every driver accepts, has precedence over a newer one. A library is
// opened only if no file name beside it tells its version.
tessera_status find_compiler(CompilerInfo& info);

// The same for display: opens nothing. Version 0: no file name tells the version; the system's path is not searched.
tessera_status look_for_compiler(CompilerInfo& info);

// The same, opened, with the version that the library itself reports.
tessera_status open_compiler(CompilerInfo& info);

// Options after the architecture, which are part of a kernel's key. TESSERA_LINEINFO=1 adds line numbers for profilers.
std::vector<std::string> compile_options();

// Compiles `source`. Fills in cubin, target, and but for PTX registers, spills and stack of `symbol`. `log`, if not
// NULL, receives the compiler's whole output.
tessera_status compile_kernel(const std::string& source, const std::string& symbol, const Target& target,
                              Binary& binary, std::string* log = nullptr);

// Reads ptxas's report on `symbol` from a compilation's log. Returns false if there is none.
bool read_ptxas_log(const std::string& log, const std::string& symbol, Binary& binary);

std::string version_text(int32_t version);  // 13000 -> "13.0"

// The file of this library (or of the program or extension that it is linked into) as mapped by this process, and its
// folder; "" if the system cannot tell.
std::string library_path();
std::string library_folder();

}  // namespace tessera::cuda
