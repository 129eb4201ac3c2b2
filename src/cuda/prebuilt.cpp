#include "cuda/prebuilt.hpp"

#include <algorithm>
#include <chrono>
#include <set>

#include "core/status.hpp"
#include "cuda/kernels.hpp"

namespace tessera::cuda {
namespace {

const std::vector<int32_t> kEveryArch = {80, 86, 89, 90, 100, 120};

std::vector<PrebuiltKernel> make_table() {
  return {
      // spec, archs, registers, spill bytes, stack bytes
      {spec_of(CombineConfig{Dtype::kFloat32}), kEveryArch, 64, 0, 0},
      {spec_of(CombineConfig{Dtype::kFloat16}), kEveryArch, 64, 0, 0},
      {spec_of(CombineConfig{Dtype::kBFloat16}), kEveryArch, 64, 0, 0},
  };
}

}  // namespace

const std::vector<PrebuiltKernel>& prebuilt_kernels() {
  static const std::vector<PrebuiltKernel> table = make_table();
  return table;
}

std::vector<int32_t> prebuilt_archs() {
  std::set<int32_t> archs;
  for (const PrebuiltKernel& kernel : prebuilt_kernels()) archs.insert(kernel.archs.begin(), kernel.archs.end());
  return {archs.begin(), archs.end()};
}

tessera_status warm(Cache& cache, const std::vector<int32_t>& archs, const std::function<void(const Warmed&)>& report) {
  const auto total = static_cast<int64_t>(prebuilt_kernels().size() * archs.size());
  int64_t done = 0;
  for (const int32_t arch : archs) {
    for (const PrebuiltKernel& kernel : prebuilt_kernels()) {
      Binary binary;
      CacheKey key;
      Origin origin{};
      const auto begin = std::chrono::steady_clock::now();
      TESSERA_RETURN_IF_ERROR(build_binary(kernel.spec, arch, cache, binary, &origin, &key));
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      ++done;
      report({kernel, arch, key, binary, origin, done, total, seconds.count()});
    }
  }
  return ok();
}

}  // namespace tessera::cuda
