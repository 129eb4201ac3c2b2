// The kernels that most calls need. They are compiled ahead of time by `make aot` and `tessera cache warm`, and a test
// checks each of them against the limits of its row.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cuda/runtime/cache.hpp"
#include "cuda/runtime/codegen.hpp"
#include "cuda/runtime/jit.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

struct PrebuiltKernel {
  KernelSpec spec;
  Limits limits;
};

// The rows are exact for this compiler. Other versions, 12.8 to 13.5, allocate registers differently: the largest
// excess seen over a row was 204 bytes of spills (13.5, sm_100) and 40 bytes of stack.
inline constexpr int32_t kRowsCompiler = 13000;
inline constexpr int32_t kOtherSpillBytes = 256, kOtherStackBytes = 64;

// The kernels that the families' prebuilt problems launch on a GPU of an architecture, each once; as PTX those of the
// GPUs that use it (ptx_users).
std::vector<PrebuiltKernel> prebuilt_kernels(const Target& target);

struct Warmed {
  const PrebuiltKernel& kernel;
  Target target;
  const CacheKey& key;
  const Binary& binary;
  Origin origin;
  int64_t done, total;
  double seconds;
};

// Compiles those kernels of `targets` into `cache` that it lacks. Stops at the first error.
tessera_status warm(Cache& cache, const std::vector<Target>& targets, const std::function<void(const Warmed&)>& report);

}  // namespace tessera::cuda
