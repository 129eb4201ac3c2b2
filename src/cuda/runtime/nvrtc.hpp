// NVIDIA's run-time compiler: found, opened when something must be compiled, and asked for one kernel at a time.
// https://docs.nvidia.com/cuda/nvrtc/
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/runtime/cache.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

struct CompilerInfo {
  std::string path;
  int32_t version = 0;  // 1000 * major + 10 * minor, as the driver counts
};

// The compiler that would be used. UNSUPPORTED, with every place that was looked at, when there is none of CUDA 12.8 or newer.
// In order: TESSERA_NVRTC (file or folder; nothing else is tried), one that the process has loaded, pip's packages beside the
// library, if pip has put it there, and in VIRTUAL_ENV, CONDA_PREFIX, CUDA_HOME, CUDA_PATH, /usr/local/cuda, the system's path;
// nothing that strangers may write (trust.hpp). One no newer than the driver, whose code every driver takes, goes before a
// newer one. It is opened only where no file beside it is named after its version.
tessera_status find_compiler(CompilerInfo& info);

// The same, for people to read: nothing is opened. Version 0: no name tells; the system's path is not looked at.
tessera_status look_for_compiler(CompilerInfo& info);

// The same, opened, so that its version is its own word.
tessera_status open_compiler(CompilerInfo& info);

// Options after the architecture; they are part of a kernel's key. TESSERA_LINEINFO=1 adds line numbers for profilers.
std::vector<std::string> compile_options();

// `source` for `arch` (90: sm_90a). Fills in cubin, arch, registers, spills and stack of `symbol`. `log`, if wanted: all
// that the compiler said.
tessera_status compile_kernel(const std::string& source, const std::string& symbol, int32_t arch, Binary& binary,
                              std::string* log = nullptr);

// "sm_90a": Hopper's wgmma and setmaxnreg are of its own architecture alone.
std::string arch_name(int32_t arch);

// What ptxas said of `symbol` in a compilation's log; false when it said nothing.
bool read_ptxas_log(const std::string& log, const std::string& symbol, Binary& binary);

std::string version_text(int32_t version);  // 13000 -> "13.0"

// The file of the library (or of the program or extension that it is linked into) as this process has mapped it, and its
// folder; "" where the system does not tell.
std::string library_path();
std::string library_folder();

}  // namespace tessera::cuda
