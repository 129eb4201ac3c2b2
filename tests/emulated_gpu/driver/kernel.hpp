// A kernel of a loaded library.
#pragma once

#include <string>

#include "../kernel_info.hpp"
#include "../launch.hpp"

namespace tessera::emulated {

struct Kernel {
  std::string name;
  EmulatedKernel run = nullptr;
  EmulatedKernelInfo info{};
  unsigned most_smem_bytes = 48 << 10;  // dynamic; more where the attribute says so
};

}  // namespace tessera::emulated
