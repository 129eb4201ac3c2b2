#include "cuda/runtime/prepare.hpp"

#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/jit.hpp"

namespace tessera::cuda {
namespace {

thread_local bool preparing = false;
thread_local std::vector<KernelSpec>* collected = nullptr;

}  // namespace

PrepareScope::PrepareScope() { preparing = true; }

PrepareScope::~PrepareScope() { preparing = false; }

bool PrepareScope::active() { return preparing; }

CollectScope::CollectScope(std::vector<KernelSpec>& specs) { collected = &specs; }

CollectScope::~CollectScope() { collected = nullptr; }

std::vector<KernelSpec>* CollectScope::active() { return collected; }

bool launches_run() { return !PrepareScope::active() && !CollectScope::active(); }

bool is_here(const tessera_device& device) {
  if (device.ordinal < 0) return false;
  const Driver* driver = nullptr;
  if (open_driver(driver).code != TESSERA_OK || device.ordinal >= driver->devices) return false;
  CUdevice gpu = 0;
  int major = 0, minor = 0;
  return driver->cuDeviceGet(&gpu, device.ordinal) == kCudaSuccess &&
         driver->cuDeviceGetAttribute(&major, kDeviceCapabilityMajor, gpu) == kCudaSuccess &&
         driver->cuDeviceGetAttribute(&minor, kDeviceCapabilityMinor, gpu) == kCudaSuccess &&
         10 * major + minor == device.arch;
}

tessera_status prepare_binary(const KernelSpec& spec, const tessera_device& device) {
  Binary binary;
  return find_binary(spec, device.arch, default_cache(), binary);
}

}  // namespace tessera::cuda
