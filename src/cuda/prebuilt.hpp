// The kernels that most calls need: compiled ahead of time by `make aot` and `tessera cache warm`, and by a test that
// holds each of them to what its row allows.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuda/cache.hpp"
#include "cuda/codegen.hpp"
#include "cuda/jit.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

struct PrebuiltKernel {
  KernelSpec spec;
  std::vector<int32_t> archs;  // that `make aot` compiles it for
  int32_t registers = 0;       // the most a thread may take, on any of them
  int32_t spill_bytes = 0, stack_bytes = 0;
};

const std::vector<PrebuiltKernel>& prebuilt_kernels();

// Every architecture that some row names, ascending.
std::vector<int32_t> prebuilt_archs();

struct Warmed {
  const PrebuiltKernel& kernel;
  int32_t arch;
  const CacheKey& key;
  const Binary& binary;
  Origin origin;
  int64_t done, total;
  double seconds;
};

// Compiles the table's kernels for `archs` into `cache`, those that are not there. Stops at the first error.
tessera_status warm(Cache& cache, const std::vector<int32_t>& archs, const std::function<void(const Warmed&)>& report);

}  // namespace tessera::cuda
