// From a kernel's config to a kernel that can be launched: in memory, prebuilt beside the library, in the cache on disk,
// or compiled now.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/runtime/cache.hpp"
#include "cuda/runtime/codegen.hpp"
#include "cuda/runtime/driver.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

struct Kernel {
  CUkernel handle = nullptr;
  const char* name = "";
  int32_t threads = 0;
  int64_t smem_bytes = 0;  // dynamic
  bool begins_early = false;
};

// A kernel by its name, a literal, and its config's values. False: it is not in memory.
bool find_kernel(const char* name, const ConfigValues& config, const tessera_device& device, Kernel& out);

// Into memory. One thread compiles and loads it, others that want it wait, and what is captured into graphs meanwhile is not
// disturbed.
tessera_status load_kernel(const KernelSpec& spec, const ConfigValues& config, const tessera_device& device,
                           Kernel& out);

// ---- without a GPU ----

enum class Origin { kPrebuilt, kCached, kCompiled };

// A kernel compiled for an architecture: prebuilt, from `cache`, or compiled now and put there. `origin`, if wanted,
// tells which.
tessera_status find_binary(const KernelSpec& spec, int32_t arch, Cache& cache, Binary& binary,
                           Origin* origin = nullptr);

// Into `cache`, whatever is prebuilt. `key`, if wanted: under which it lies there.
tessera_status build_binary(const KernelSpec& spec, int32_t arch, Cache& cache, Binary& binary,
                            Origin* origin = nullptr, CacheKey* key = nullptr);

// The cache of this process, in Cache::default_folder().
Cache& default_cache();

// Where prebuilt kernels lie: tessera/aot beside the library, or aot in a wheel; "" when there are none.
std::string prebuilt_folder();
// Why none of them is loaded: others than the library's own writers may write them. "" when they are.
std::string prebuilt_refusal();

}  // namespace tessera::cuda
