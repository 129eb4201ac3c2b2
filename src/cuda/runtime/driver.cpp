#include "cuda/runtime/driver.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <map>
#include <mutex>

#include "core/status.hpp"

namespace tessera::cuda {
namespace {

constexpr int kOldestDriver = 12000;
constexpr const char* kLibrary = "libcuda.so.1";

struct Symbol {
  const char* name;
  size_t offset;
};
#define TESSERA_SYMBOL(function, exported) \
  Symbol { exported, offsetof(Driver, function) }
constexpr Symbol kSymbols[] = {
    TESSERA_SYMBOL(cuInit, "cuInit"),
    TESSERA_SYMBOL(cuDriverGetVersion, "cuDriverGetVersion"),
    TESSERA_SYMBOL(cuGetErrorName, "cuGetErrorName"),
    TESSERA_SYMBOL(cuGetErrorString, "cuGetErrorString"),
    TESSERA_SYMBOL(cuDeviceGetCount, "cuDeviceGetCount"),
    TESSERA_SYMBOL(cuDeviceGet, "cuDeviceGet"),
    TESSERA_SYMBOL(cuDeviceGetName, "cuDeviceGetName"),
    TESSERA_SYMBOL(cuDeviceGetAttribute, "cuDeviceGetAttribute"),
    TESSERA_SYMBOL(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"),
    TESSERA_SYMBOL(cuCtxGetCurrent, "cuCtxGetCurrent"),
    TESSERA_SYMBOL(cuCtxGetDevice, "cuCtxGetDevice"),
    TESSERA_SYMBOL(cuCtxPushCurrent, "cuCtxPushCurrent_v2"),
    TESSERA_SYMBOL(cuCtxPopCurrent, "cuCtxPopCurrent_v2"),
    TESSERA_SYMBOL(cuStreamCreate, "cuStreamCreate"),
    TESSERA_SYMBOL(cuStreamDestroy, "cuStreamDestroy_v2"),
    TESSERA_SYMBOL(cuStreamWaitEvent, "cuStreamWaitEvent"),
    TESSERA_SYMBOL(cuEventCreate, "cuEventCreate"),
    TESSERA_SYMBOL(cuEventDestroy, "cuEventDestroy_v2"),
    TESSERA_SYMBOL(cuEventRecord, "cuEventRecord"),
    TESSERA_SYMBOL(cuStreamGetCtx, "cuStreamGetCtx"),
    TESSERA_SYMBOL(cuStreamGetId, "cuStreamGetId"),
    TESSERA_SYMBOL(cuStreamGetPriority, "cuStreamGetPriority"),
    TESSERA_SYMBOL(cuStreamIsCapturing, "cuStreamIsCapturing"),
    TESSERA_SYMBOL(cuStreamSynchronize, "cuStreamSynchronize"),
    TESSERA_SYMBOL(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode"),
    TESSERA_SYMBOL(cuPointerGetAttribute, "cuPointerGetAttribute"),
    TESSERA_SYMBOL(cuPointerGetAttributes, "cuPointerGetAttributes"),
    TESSERA_SYMBOL(cuMemAlloc, "cuMemAlloc_v2"),
    TESSERA_SYMBOL(cuMemFree, "cuMemFree_v2"),
    TESSERA_SYMBOL(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2"),
    TESSERA_SYMBOL(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2"),
    TESSERA_SYMBOL(cuMemsetD32Async, "cuMemsetD32Async"),
    TESSERA_SYMBOL(cuLibraryLoadData, "cuLibraryLoadData"),
    TESSERA_SYMBOL(cuLibraryUnload, "cuLibraryUnload"),
    TESSERA_SYMBOL(cuLibraryGetKernel, "cuLibraryGetKernel"),
    TESSERA_SYMBOL(cuKernelGetFunction, "cuKernelGetFunction"),
    TESSERA_SYMBOL(cuKernelSetAttribute, "cuKernelSetAttribute"),
    TESSERA_SYMBOL(cuLaunchKernel, "cuLaunchKernel"),
    TESSERA_SYMBOL(cuLaunchKernelEx, "cuLaunchKernelEx"),
    TESSERA_SYMBOL(cuGraphCreate, "cuGraphCreate"),
    TESSERA_SYMBOL(cuGraphDestroy, "cuGraphDestroy"),
    TESSERA_SYMBOL(cuGraphAddKernelNode, "cuGraphAddKernelNode_v2"),
    TESSERA_SYMBOL(cuGraphAddMemsetNode, "cuGraphAddMemsetNode"),
    TESSERA_SYMBOL(cuGraphKernelNodeSetAttribute, "cuGraphKernelNodeSetAttribute"),
    TESSERA_SYMBOL(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags"),
    TESSERA_SYMBOL(cuGraphUpload, "cuGraphUpload"),
    TESSERA_SYMBOL(cuGraphExecKernelNodeSetParams, "cuGraphExecKernelNodeSetParams_v2"),
    TESSERA_SYMBOL(cuGraphExecMemsetNodeSetParams, "cuGraphExecMemsetNodeSetParams"),
    TESSERA_SYMBOL(cuGraphExecDestroy, "cuGraphExecDestroy"),
    TESSERA_SYMBOL(cuGraphLaunch, "cuGraphLaunch"),
    TESSERA_SYMBOL(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled"),
};
#undef TESSERA_SYMBOL

// Loads every function. Returns false, with the name of the first missing one, if the library is older.
bool load_symbols(void* library, Driver& driver, const char*& missing) {
  for (const Symbol& symbol : kSymbols) {
    void* address = dlsym(library, symbol.name);
    if (!address) {
      missing = symbol.name;
      return false;
    }
    *reinterpret_cast<void**>(reinterpret_cast<char*>(&driver) + symbol.offset) = address;
  }
  return true;
}

tessera_status too_old(int version) {
  return unsupported("CUDA: the driver serves CUDA %d.%d, accepted 12.0 and newer (driver 525)", version / 1000,
                     version % 1000 / 10);
}

tessera_status forked() {
  return internal("CUDA: cannot be used in a process forked from one that used it; start it by exec ('spawn')");
}

tessera_status initialise(void* library, Driver& driver) {
  // Checked first, because an old driver lacks functions of the table.
  const auto version = reinterpret_cast<CUresult (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  if (!version || version(&driver.version) != kCudaSuccess) {
    return unsupported("CUDA: %s does not answer which version it is", kLibrary);
  }
  if (driver.version < kOldestDriver) return too_old(driver.version);
  const char* missing = nullptr;
  if (!load_symbols(library, driver, missing)) return unsupported("CUDA: %s has no %s", kLibrary, missing);
  const CUresult started = driver.cuInit(0);
  if (started == kCudaErrorNoDevice) return unsupported("CUDA: there is a driver (%s) and no GPU", kLibrary);
  if (started == kCudaErrorNotInitialized) return forked();
  if (started != kCudaSuccess) {
    const char *name = nullptr, *text = nullptr;
    driver.cuGetErrorName(started, &name);
    driver.cuGetErrorString(started, &text);
    return unsupported("CUDA: the driver cannot be started: %s, %s", name ? name : "unknown error",
                       text ? text : "no description");
  }
  TESSERA_RETURN_IF_ERROR(check(driver, driver.cuDeviceGetCount(&driver.devices), "cuDeviceGetCount"));
  return driver.devices > 0 ? ok() : unsupported("CUDA: there is a driver (%s) and no GPU", kLibrary);
}

// Never destroyed: threads may still launch while the process ends.
Driver& opened() {
  static Driver& driver = *new Driver{};
  return driver;
}
std::mutex& opening() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}
std::atomic<bool> is_open{false};
std::atomic<bool> in_forked_child{false};  // of a process in which the driver was open

// NULL and the legacy and per-thread default streams belong to the current context.
bool default_stream(const void* stream) { return reinterpret_cast<uintptr_t>(stream) <= 2; }

// A primary context is retained once and never released: releasing it would destroy it for a caller who does not retain
// it.
tessera_status primary_context(const Driver& driver, CUdevice device, CUcontext& context) {
  static std::mutex& mutex = *new std::mutex;
  static std::map<CUdevice, CUcontext>& contexts = *new std::map<CUdevice, CUcontext>;
  const std::lock_guard lock(mutex);
  CUcontext& kept = contexts[device];
  if (!kept) {
    TESSERA_RETURN_IF_ERROR(check(driver, driver.cuDevicePrimaryCtxRetain(&kept, device), "cuDevicePrimaryCtxRetain"));
  }
  context = kept;
  return ok();
}

}  // namespace

tessera_status open_driver(const Driver*& driver) {
  if (!is_open.load(std::memory_order_acquire)) {
    const std::lock_guard lock(opening());
    if (!is_open.load(std::memory_order_relaxed)) {
      void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
      if (!library) return unsupported("CUDA: no driver: %s", dlerror());
      TESSERA_RETURN_IF_ERROR(initialise(library, opened()));
      pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true, std::memory_order_relaxed); });
      is_open.store(true, std::memory_order_release);
    }
  }
  if (in_forked_child.load(std::memory_order_relaxed)) return forked();
  driver = &opened();
  return ok();
}

tessera_status check(const Driver& driver, CUresult result, const char* what) {
  if (result == kCudaSuccess) return ok();
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  return internal("%s: %s (%d), %s", what, name ? name : "unknown error", result, text ? text : "no description");
}

ContextScope::~ContextScope() {
  CUcontext ours = nullptr;
  if (pushed_) driver_->cuCtxPopCurrent(&ours);
}

tessera_status ContextScope::enter(int32_t ordinal, void* stream) {
  TESSERA_RETURN_IF_ERROR(open_driver(driver_));
  const Driver& cu = *driver_;
  CUcontext current = nullptr, needed = nullptr;
  TESSERA_RETURN_IF_ERROR(check(cu, cu.cuCtxGetCurrent(&current), "cuCtxGetCurrent"));
  const bool by_default = default_stream(stream);
  if (by_default) {
    needed = current;
  } else {
    TESSERA_RETURN_IF_ERROR(check(cu, cu.cuStreamGetCtx(static_cast<CUstream>(stream), &needed), "executor.stream"));
  }
  const auto push = [&]() -> tessera_status {
    current_ = needed;
    if (needed == current) return ok();
    TESSERA_RETURN_IF_ERROR(check(cu, cu.cuCtxPushCurrent(needed), "cuCtxPushCurrent"));
    pushed_ = true;
    return ok();
  };
  CUdevice device = -1, asked = 0;
  TESSERA_RETURN_IF_ERROR(check(cu, cu.cuDeviceGet(&asked, ordinal), "device.ordinal"));
  if (needed) {
    TESSERA_RETURN_IF_ERROR(push());
    TESSERA_RETURN_IF_ERROR(check(cu, cu.cuCtxGetDevice(&device), "cuCtxGetDevice"));
  }
  if (device == asked) return ok();
  if (!by_default) {
    return invalid("executor.stream: belongs to GPU %d, must be the plan's, GPU %d", device, ordinal);
  }
  TESSERA_RETURN_IF_ERROR(primary_context(cu, asked, needed));
  return push();
}

}  // namespace tessera::cuda
