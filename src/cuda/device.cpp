// What a GPU has.
#include <algorithm>

#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/driver.hpp"

namespace tessera::cuda {

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
  } wanted[] = {
      {kDeviceCapabilityMajor, major},
      {kDeviceCapabilityMinor, minor},
      {kDeviceMultiprocessors, multiprocessors},
      {kDeviceSmemPerMultiprocessor, l1_bytes},
      {kDeviceL2Bytes, l2_bytes},
      {kDeviceSmemPerBlockOptin, smem_bytes},
  };
  for (const auto& [attribute, value] : wanted) {
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
