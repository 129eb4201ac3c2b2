#include "device.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace tessera::emulated {
namespace {

int from_environment(const char* name, int usual) {
  const char* const value = std::getenv(name);
  return value && *value ? std::atoi(value) : usual;
}

// CUDA C++ Programming Guide, compute capabilities: KiB per multiprocessor; a block can use all but one.
int smem_kib() {
  const int arch = compute_capability();
  return arch == 80 || arch == 87 ? 164 : arch == 86 || arch == 89 || arch >= 120 ? 100 : 228;
}

thread_local std::vector<Context*> stack;

}  // namespace

int devices() { return std::clamp(from_environment("EMULATED_GPU_DEVICES", 1), 0, kMostDevices); }
int compute_capability() { return from_environment("EMULATED_GPU_ARCH", 90); }
int multiprocessors() { return from_environment("EMULATED_GPU_MULTIPROCESSORS", 6); }
int smem_bytes_per_block() { return (smem_kib() - 1) << 10; }

Context* context_of_device(int device) {
  static Context contexts[kMostDevices];
  contexts[device].device = device;
  return &contexts[device];
}

Context* current_context() { return stack.empty() ? nullptr : stack.back(); }

CUresult check_context() {
  const Context* const context = current_context();
  return context ? context->lost : kInvalidContext;
}

}  // namespace tessera::emulated

using namespace tessera::emulated;
using tessera::cuda::CUcontext;

namespace {

Context* own(CUcontext context) { return reinterpret_cast<Context*>(context); }
CUcontext handle(Context* context) { return reinterpret_cast<CUcontext>(context); }
bool present(int device) { return device >= 0 && device < devices(); }

}  // namespace

EMULATED_DRIVER cuInit(unsigned flags) { return flags != 0 ? kInvalidValue : devices() > 0 ? kSuccess : kNoDevice; }
EMULATED_DRIVER cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }

EMULATED_DRIVER cuDeviceGetCount(int* count) { return *count = devices(), kSuccess; }
EMULATED_DRIVER cuDeviceGet(int* device, int ordinal) {
  if (!present(ordinal)) return kInvalidDevice;
  return *device = ordinal, kSuccess;
}
EMULATED_DRIVER cuDeviceGetName(char* name, int size, int device) {
  if (!present(device)) return kInvalidDevice;
  return std::snprintf(name, static_cast<size_t>(size), "Emulated GPU"), kSuccess;
}
EMULATED_DRIVER cuDeviceGetAttribute(int* value, tessera::cuda::CUdeviceAttribute attribute, int device) {
  if (!present(device)) return kInvalidDevice;
  switch (attribute) {
    case tessera::cuda::kDeviceMultiprocessors:
      return *value = multiprocessors(), kSuccess;
    case tessera::cuda::kDeviceL2Bytes:
      return *value = 50 << 20, kSuccess;
    case tessera::cuda::kDeviceCapabilityMajor:
      return *value = compute_capability() / 10, kSuccess;
    case tessera::cuda::kDeviceCapabilityMinor:
      return *value = compute_capability() % 10, kSuccess;
    case tessera::cuda::kDeviceSmemPerMultiprocessor:
      return *value = smem_kib() << 10, kSuccess;
    case tessera::cuda::kDeviceSmemPerBlockOptin:
      return *value = smem_bytes_per_block(), kSuccess;
  }
  return kInvalidValue;
}

EMULATED_DRIVER cuDevicePrimaryCtxRetain(CUcontext* context, int device) {
  if (!present(device)) return kInvalidDevice;
  return *context = handle(context_of_device(device)), kSuccess;
}
EMULATED_DRIVER cuCtxGetCurrent(CUcontext* context) { return *context = handle(current_context()), kSuccess; }
EMULATED_DRIVER cuCtxSetCurrent(CUcontext context) {
  if (!stack.empty()) stack.pop_back();
  if (context) stack.push_back(own(context));
  return kSuccess;
}
EMULATED_DRIVER cuCtxPushCurrent_v2(CUcontext context) {
  if (!context) return kInvalidContext;
  return stack.push_back(own(context)), kSuccess;
}
EMULATED_DRIVER cuCtxPopCurrent_v2(CUcontext* context) {
  if (stack.empty()) return kInvalidContext;
  if (context) *context = handle(stack.back());
  return stack.pop_back(), kSuccess;
}
EMULATED_DRIVER cuCtxGetDevice(int* device) {
  if (!current_context()) return kInvalidContext;
  return *device = current_context()->device, kSuccess;
}
