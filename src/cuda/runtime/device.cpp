// Properties of a GPU.
#include <cstdio>
#include <string>

#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/runtime/driver.hpp"

namespace tessera::cuda {
namespace {

// Typical properties of an architecture, used if no GPU of it is present. Shared memory per block: CUDA C++ Programming
// Guide, compute capabilities.
struct UsualGpu {
  int32_t arch;
  const char* name;
  int32_t multiprocessors;
  int64_t smem_kib;
};
constexpr UsualGpu kUsualGpus[] = {
    {80, "A100", 108, 163},           {86, "A40", 84, 99},
    {87, "Jetson AGX Orin", 16, 163}, {89, "L40S", 142, 99},
    {90, "H100", 132, 227},           {100, "B200", 148, 227},
    {103, "B300", 148, 227},          {110, "Jetson T5000", 20, 227},
    {120, "RTX 5090", 170, 99},       {121, "GB10", 48, 99},
};

}  // namespace

tessera_status describe(int32_t arch, tessera_device& device) {
  std::string known;
  for (const UsualGpu& gpu : kUsualGpus) {
    known += (known.empty() ? "" : ", ") + std::to_string(gpu.arch);
    if (gpu.arch != arch) continue;
    tessera_device found{};
    found.backend = TESSERA_BACKEND_CUDA;
    found.kernel = TESSERA_KERNEL_AUTO;
    found.isa = found.isa_limit = TESSERA_ISA_BASELINE;
    found.cores = gpu.multiprocessors;
    found.threads = 1;
    found.ordinal = -1;
    found.arch = arch;
    found.smem_bytes = gpu.smem_kib << 10;
    std::snprintf(found.name, sizeof found.name, "%s", gpu.name);
    device = found;
    return ok();
  }
  return invalid("arch: %d, accepted %s", arch, known.c_str());
}

tessera_status detect(int32_t ordinal, tessera_device& device) {
  const Driver* driver = nullptr;
  TESSERA_RETURN_IF_ERROR(open_driver(driver));
  const Driver& cu = *driver;
  if (ordinal < 0 || ordinal >= cu.devices) {
    return unsupported("ordinal: %d, accepted 0 .. %d: this process sees %d GPU%s", ordinal, cu.devices - 1, cu.devices,
                       cu.devices == 1 ? "" : "s");
  }
  CUdevice gpu = 0;
  TESSERA_RETURN_IF_ERROR(check(cu, cu.cuDeviceGet(&gpu, ordinal), "cuDeviceGet"));
  int major = 0, minor = 0, multiprocessors = 0, l1_bytes = 0, l2_bytes = 0, smem_bytes = 0;
  const struct {
    CUdeviceAttribute attribute;
    int& value;
  } needed[] = {
      {kDeviceCapabilityMajor, major},
      {kDeviceCapabilityMinor, minor},
      {kDeviceMultiprocessors, multiprocessors},
      {kDeviceSmemPerMultiprocessor, l1_bytes},
      {kDeviceL2Bytes, l2_bytes},
      {kDeviceSmemPerBlockOptin, smem_bytes},
  };
  for (const auto& [attribute, value] : needed) {
    TESSERA_RETURN_IF_ERROR(check(cu, cu.cuDeviceGetAttribute(&value, attribute, gpu), "cuDeviceGetAttribute"));
  }
  tessera_device found{};
  TESSERA_RETURN_IF_ERROR(check(cu, cu.cuDeviceGetName(found.name, sizeof found.name, gpu), "cuDeviceGetName"));
  constexpr int kOldestMajor = 8;
  if (major < kOldestMajor) {
    return unsupported("GPU %d: %s has compute capability %d.%d, accepted 8.0 (Ampere) and newer", ordinal, found.name,
                       major, minor);
  }
  found.backend = TESSERA_BACKEND_CUDA;
  found.kernel = TESSERA_KERNEL_AUTO;
  found.isa = found.isa_limit = TESSERA_ISA_BASELINE;
  found.cores = multiprocessors;
  found.threads = 1;
  found.l1_bytes = l1_bytes;
  found.l2_bytes = l2_bytes;
  found.ordinal = ordinal;
  found.arch = 10 * major + minor;
  found.smem_bytes = smem_bytes;
  device = found;
  return ok();
}

}  // namespace tessera::cuda
