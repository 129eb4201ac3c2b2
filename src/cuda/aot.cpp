// tessera_aot FOLDER [TARGET...]: writes the prebuilt kernels of every target, or of the given ones (90 is sm_90a, ptx
// all PTX), to FOLDER, and removes all other kernels there. tessera_aot --sources FOLDER [TARGET...]: writes the
// sources that would be compiled instead, as FOLDER/sm_90a/0007-fwd_sm90.cu, for scripts/compare_sass.py. This needs no
// compiler.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "cuda/prebuilt.hpp"
#include "cuda/runtime/nvrtc.hpp"

namespace {

using namespace tessera::cuda;

// Of the command line.
std::vector<Target> targets_of(int count, char** names) {
  if (count == 0) return prebuilt_targets();
  std::vector<Target> targets;
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(names[i], "ptx") != 0) {
      targets.emplace_back(std::atoi(names[i]));
      continue;
    }
    for (const Target& target : prebuilt_targets()) {
      if (target.ptx) targets.push_back(target);
    }
  }
  return targets;
}

int build(const std::string& folder, const std::vector<Target>& targets) {
  Writers writers;
  writers.add_installation(folder);
  Cache cache(folder, writers);
  if (const std::string reason = cache.unwritable(); !reason.empty()) {
    std::fprintf(stderr, "tessera_aot: %s\n", reason.c_str());
    return 1;
  }
  // Kernels of older sources serve no call.
  const auto outdated = cache.list();
  std::set<std::string> needed;
  int64_t bytes = 0, compiled = 0;
  const tessera_status status = warm(cache, targets, [&](const Warmed& warmed) {
    bytes += static_cast<int64_t>(warmed.binary.cubin.size());
    compiled += warmed.origin == Origin::kCompiled;
    needed.insert(warmed.key.file_name());
    std::printf("[%lld/%lld] %s %s: %d registers, %.2f s\n", static_cast<long long>(warmed.done),
                static_cast<long long>(warmed.total), warmed.kernel.spec.name, target_name(warmed.target).c_str(),
                warmed.binary.registers, warmed.seconds);
    std::fflush(stdout);
  });
  if (status.code != TESSERA_OK) {
    std::fprintf(stderr, "tessera_aot: %s\n", status.message);
    return 1;
  }
  for (const Cache::Entry& entry : outdated) {
    if (!needed.contains(entry.file)) std::remove((folder + "/" + entry.file).c_str());
  }
  std::printf("%zu kernels, %lld compiled now, %.1f MB in %s\n", needed.size(), static_cast<long long>(compiled),
              static_cast<double>(bytes) / 1e6, folder.c_str());
  return 0;
}

// The first line of each file is what a launch adds to the source.
int write_sources(const std::string& folder, const std::vector<Target>& targets) {
  for (const Target& target : targets) {
    const std::filesystem::path arch_folder = std::filesystem::path(folder) / target_name(target);
    std::filesystem::create_directories(arch_folder);
    int number = 0;
    for (const PrebuiltKernel& kernel : prebuilt_kernels(target)) {
      char file[64];
      std::snprintf(file, sizeof file, "%04d-%s.cu", ++number, kernel.spec.name);
      std::ofstream out(arch_folder / file);
      out << "// launch: " << kernel.spec.threads << " threads, " << kernel.spec.smem_bytes
          << " bytes of dynamic shared memory, clusters of " << kernel.spec.cluster << "\n"
          << source_of(kernel.spec);
      if (!out.flush()) {
        std::fprintf(stderr, "tessera_aot: cannot write %s\n", (arch_folder / file).c_str());
        return 1;
      }
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool sources = argc > 1 && std::strcmp(argv[1], "--sources") == 0;
  const int first = sources ? 2 : 1;
  if (argc <= first || argv[first][0] == '-') {
    std::fprintf(stderr, "usage: tessera_aot [--sources] FOLDER [TARGET...], such as 80 90 ptx\n");
    return 2;
  }
  try {
    return (sources ? write_sources : build)(std::filesystem::absolute(argv[first]).string(),
                                             targets_of(argc - first - 1, argv + first + 1));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera_aot: %s\n", error.what());
    return 1;
  }
}
