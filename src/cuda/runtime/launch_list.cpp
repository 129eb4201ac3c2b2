#include "cuda/runtime/launch_list.hpp"

#include <array>
#include <exception>
#include <system_error>
#include <thread>

#include "core/status.hpp"
#include "cuda/runtime/jit.hpp"

namespace tessera::cuda {
namespace {

// True if `device` is a GPU of this machine, not one that is only planned for.
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

// A list's kernels, as far as they are in memory.
class Found {
 public:
  Found(const LaunchList& list, const tessera_device& device) : list_(list), device_(device) {
    for (int i = 0; i < list.size(); ++i) {
      if (!find_kernel(list[i].name, list[i].values, device, kernels_[i])) missing_[count_++] = i;
    }
  }

  const Kernel& operator[](int index) const { return kernels_[index]; }

  // Loads the missing kernels, each in its own thread except the first: compilations run in parallel, and a call waits
  // for the longest. `here`: the GPU is in this machine, and the kernels are loaded into it.
  tessera_status load(bool here) {
    if (count_ == 0) return ok();
    const Driver* cu = nullptr;
    CUcontext context = nullptr;  // the context into which they are loaded: this thread's
    if (here && open_driver(cu).code == TESSERA_OK) cu->cuCtxGetCurrent(&context);
    const auto load_one = [&](int index) {
      try {
        answers_[index] = make(list_[missing_[index]], kernels_[missing_[index]], here);
      } catch (const std::exception& error) {
        answers_[index] = internal("%s: %s", list_[missing_[index]].name, error.what());
      }
    };
    std::array<std::thread, LaunchList::kMaxLaunches> threads;
    int next = 1;
    try {
      for (; next < count_; ++next) {
        threads[static_cast<size_t>(next)] = std::thread([&load_one, cu, context, next] {
          if (context) cu->cuCtxPushCurrent(context);
          load_one(next);
        });
      }
    } catch (const std::system_error&) {  // no more threads: this thread loads the rest
    }
    load_one(0);
    for (; next < count_; ++next) load_one(next);
    for (std::thread& thread : threads) {
      if (thread.joinable()) thread.join();
    }
    for (int i = 0; i < count_; ++i) TESSERA_RETURN_IF_ERROR(answers_[i]);
    return ok();
  }

 private:
  tessera_status make(const Launch& launch, Kernel& kernel, bool here) const {
    if (here) return load_kernel(launch.spec(), launch.values, device_, kernel);
    Binary binary;
    return find_binary(launch.spec(), device_.arch, default_cache(), binary);
  }

  const LaunchList& list_;
  const tessera_device& device_;
  Kernel kernels_[LaunchList::kMaxLaunches];
  int missing_[LaunchList::kMaxLaunches];
  tessera_status answers_[LaunchList::kMaxLaunches]{};
  int count_ = 0;
};

}  // namespace

KernelSpec Launch::spec() const {
  KernelSpec spec = spec_of(config);
  if (program) spec.program = program->text(), spec.program_params_bytes = program_params_bytes;
  return spec;
}

tessera_status submit(const LaunchList& list, Launches& launches) {
  Found kernels(list, launches.device());
  TESSERA_RETURN_IF_ERROR(kernels.load(true));
  if (list.cleared()) launches.clear(list.cleared());
  for (int i = 0; i < list.size(); ++i) launches.add(kernels[i], list[i].grid, list[i].params);
  return launches.run();
}

tessera_status prepare(const LaunchList& list, const tessera_device& device) {
  return Found(list, device).load(is_here(device));
}

std::vector<KernelSpec> collect(const LaunchList& list) {
  std::vector<KernelSpec> specs;
  for (const Launch& launch : list) {
    if (!launch.program) specs.push_back(launch.spec());
  }
  return specs;
}

}  // namespace tessera::cuda
