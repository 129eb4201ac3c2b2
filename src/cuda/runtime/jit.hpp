// Turns a kernel's config into a kernel that can be launched. In this order: in memory, prebuilt beside the library, in
// the cache on disk, compiled now.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/runtime/cache.hpp"
#include "cuda/runtime/codegen.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/target.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

struct Kernel {
  CUkernel handle = nullptr;
  const char* name = "";
  int32_t threads = 0;
  int64_t smem_bytes = 0;  // dynamic
  bool begins_early = false;
};

// Finds a kernel by its name, a literal, and its config's values. Returns false if it is not in memory.
bool find_kernel(const char* name, const ConfigValues& config, const tessera_device& device, Kernel& out);

// Loads a kernel into memory. One thread compiles and loads it while other threads that need it wait; captures of
// graphs are not disturbed.
tessera_status load_kernel(const KernelSpec& spec, const ConfigValues& config, const tessera_device& device,
                           Kernel& out);

// ---- without a GPU ----

enum class Origin { kPrebuilt, kCached, kCompiled };

// A kernel that GPUs of an architecture run: prebuilt, from `cache`, or compiled now and stored there. `origin`, if not
// NULL, receives which.
tessera_status find_binary(const KernelSpec& spec, int32_t arch, Cache& cache, Binary& binary,
                           Origin* origin = nullptr);

// Compiles a kernel into `cache`, even if it is prebuilt. `key`, if not NULL, receives its key there.
tessera_status build_binary(const KernelSpec& spec, const Target& target, Cache& cache, Binary& binary,
                            Origin* origin = nullptr, CacheKey* key = nullptr);

// The cache of this process, in Cache::default_folder().
Cache& default_cache();

// The folder of prebuilt kernels: tessera/aot beside the library, or aot in a wheel; "" if there is none.
std::string prebuilt_folder();
// Why no prebuilt kernel is loaded (users other than the library's writers may write the folder), or "" if they are.
std::string prebuilt_refusal();

}  // namespace tessera::cuda
