#include "place.hpp"

#include <cstdio>
#include <cstdlib>

namespace tessera::testing {
namespace {

struct FoundGpu {
  tessera_device device{};
  std::string missing;
  FoundGpu() {
    const tessera_status status = tessera_device_cuda(0, &device);
    if (status.code != TESSERA_OK) missing = status.message;
  }
};

const FoundGpu& found_gpu() {
  static const FoundGpu found;
  return found;
}

}  // namespace

std::string place_name(const Place& place) {
  return place.backend == TESSERA_BACKEND_CUDA ? "cuda" : tessera_isa_name(place.isa);
}

tessera_device cpu_device() {
  tessera_device device;
  const tessera_status status = tessera_device_cpu(&device);
  if (status.code != TESSERA_OK) {
    std::fprintf(stderr, "%s\n", status.message);
    std::exit(1);
  }
  return device;
}

std::vector<Place> cpu_places() {
  const tessera_device device = cpu_device();
  if (std::getenv("TESSERA_ISA")) return {{.isa = device.isa}};
  std::vector<Place> all;
  const bool neon = device.isa_limit >= TESSERA_ISA_NEON;  // which has the baseline's before it, and none of x86-64's
  for (int32_t isa = TESSERA_ISA_BASELINE; isa <= device.isa_limit; ++isa) {
    if (isa == TESSERA_ISA_BASELINE || neon == (isa >= TESSERA_ISA_NEON)) all.push_back({.isa = isa});
  }
  return all;
}

const std::string& gpu_missing() { return found_gpu().missing; }

const tessera_device& gpu_device() { return found_gpu().device; }

tessera_device imagined_gpu(int32_t arch) {
  constexpr int64_t kKiB = 1024;
  const bool small = arch == 86 || arch == 89 || arch == 120;
  tessera_device device{};
  device.backend = TESSERA_BACKEND_CUDA;
  device.arch = arch;
  device.cores = 132;
  device.threads = 1;
  device.smem_bytes = (small ? 99 : arch == 80 ? 163 : 227) * kKiB;  // CUDA C++ Programming Guide, compute capabilities
  std::snprintf(device.name, sizeof device.name, "imagined GPU");
  return device;
}

std::optional<std::vector<Place>> places_of(std::string_view backend, std::string* error) {
  const char* environment = std::getenv("TESSERA_TEST_BACKEND");
  if (backend.empty()) backend = environment ? environment : "cpu";
  if (backend != "cpu" && backend != "cuda" && backend != "all") {
    *error = "backend: '" + std::string(backend) + "', accepted cpu, cuda, all";
    return std::nullopt;
  }
  std::vector<Place> places;
  if (backend != "cuda") places = cpu_places();
  if (backend == "cpu") return places;
  if (!gpu_missing().empty()) {
    *error = "skipped: " + gpu_missing();
    return std::nullopt;
  }
  places.push_back(kGpu);
  return places;
}

}  // namespace tessera::testing
