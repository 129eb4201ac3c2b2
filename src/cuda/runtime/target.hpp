// What a kernel is compiled for, and which of the prebuilt kernels a GPU runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cuda {

// A GPU's own architecture, or PTX of a virtual one: text that the driver compiles for its GPU, whichever that is.
struct Target {
  int32_t arch = 0;  // 90
  bool ptx = false;

  Target(int32_t of = 0, bool as_ptx = false) : arch(of), ptx(as_ptx) {}
  bool operator==(const Target&) const = default;
};

// "sm_90a": Hopper's wgmma and setmaxnreg need the architecture-specific target. PTX: "compute_90".
std::string target_name(const Target& target);

// Every target that `make aot` compiles for: architectures in ascending order, then PTX.
std::vector<Target> prebuilt_targets();

// Those whose code a GPU of an architecture runs, the best first. Beside its own code this is that of older GPUs of
// its family, except that integrated GPUs (Jetson) and others run none of each other's
// (https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#binary-compatibility). PTX of compute_80 serves no
// GPU from 9.0 on: there a kernel may begin before its predecessor has ended, and only code of compute_90 waits for it
// (ptx/synchronization.cuh).
std::vector<Target> prebuilt_targets_for(int32_t arch);

// The architectures whose prebuilt kernels are compiled as PTX of a virtual architecture: of each kind of GPU that may
// depend on that PTX, by shared memory, one.
std::vector<int32_t> ptx_users(int32_t virtual_arch);

}  // namespace tessera::cuda
