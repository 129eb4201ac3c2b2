// The kernels that most calls need: compiled ahead of time by `make aot` and `tessera cache warm`, and by a test that
// holds each of them to what its row allows.
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

// The rows hold for this compiler to the byte. Others, from 12.8 to 13.5, allocate registers differently: the most that one was
// seen to spill beyond a row was 204 bytes (13.5, sm_100), the most stack 40.
inline constexpr int32_t kRowsCompiler = 13000;
inline constexpr int32_t kOtherSpillBytes = 256, kOtherStackBytes = 64;

// What the families' prebuilt problems launch on a GPU of an architecture, each kernel once.
std::vector<PrebuiltKernel> prebuilt_kernels(int32_t arch);

// Every architecture that `make aot` compiles for, ascending.
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

// Compiles the kernels of `archs` into `cache`, those that are not there. Stops at the first error.
tessera_status warm(Cache& cache, const std::vector<int32_t>& archs, const std::function<void(const Warmed&)>& report);

}  // namespace tessera::cuda
