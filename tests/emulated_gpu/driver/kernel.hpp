// A kernel of a loaded library.
#pragma once

#include <span>
#include <string>

#include "../launch.hpp"
#include "../launch_bounds.hpp"

namespace tessera::emulated {

struct Kernel {
  std::string name;
  EmulatedKernel run = nullptr;
  std::span<const size_t> param_bytes{};
  EmulatedLaunchBounds bounds{};
  unsigned most_smem_bytes = 48 << 10;  // dynamic; the attribute may raise it
};

}  // namespace tessera::emulated
