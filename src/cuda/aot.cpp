// tessera_aot FOLDER [ARCH...]: the prebuilt kernels into FOLDER, of every architecture or of those given (90 is sm_90a), and
// nothing else there.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "cuda/nvrtc.hpp"
#include "cuda/prebuilt.hpp"

namespace {

using namespace tessera::cuda;

int build(const std::string& folder, std::vector<int32_t> archs) {
  if (archs.empty()) archs = prebuilt_archs();
  Writers writers;
  writers.add_installation(folder);
  Cache cache(folder, writers);
  if (const std::string reason = cache.unwritable(); !reason.empty()) {
    std::fprintf(stderr, "tessera_aot: %s\n", reason.c_str());
    return 1;
  }
  // Kernels of older sources serve nobody here.
  const auto outdated = cache.list();
  std::set<std::string> wanted;
  int64_t bytes = 0, compiled = 0;
  const tessera_status status = warm(cache, archs, [&](const Warmed& warmed) {
    bytes += static_cast<int64_t>(warmed.binary.cubin.size());
    compiled += warmed.origin == Origin::kCompiled;
    wanted.insert(warmed.key.file_name());
    std::printf("[%lld/%lld] %s %s: %d registers, %.2f s\n", static_cast<long long>(warmed.done),
                static_cast<long long>(warmed.total), warmed.kernel.spec.name, arch_name(warmed.arch).c_str(),
                warmed.binary.registers, warmed.seconds);
    std::fflush(stdout);
  });
  if (status.code != TESSERA_OK) {
    std::fprintf(stderr, "tessera_aot: %s\n", status.message);
    return 1;
  }
  for (const Cache::Entry& entry : outdated) {
    if (!wanted.contains(entry.file)) std::remove((folder + "/" + entry.file).c_str());
  }
  std::printf("%zu kernels, %lld compiled now, %.1f MB in %s\n", wanted.size(), static_cast<long long>(compiled),
              static_cast<double>(bytes) / 1e6, folder.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: tessera_aot FOLDER [ARCH...], such as 80 90 120\n");
    return 2;
  }
  std::vector<int32_t> archs;
  for (int i = 2; i < argc; ++i) archs.push_back(std::atoi(argv[i]));
  try {
    return build(std::filesystem::absolute(argv[1]).string(), archs);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera_aot: %s\n", error.what());
    return 1;
  }
}
