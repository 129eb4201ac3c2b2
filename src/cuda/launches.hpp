// What one call puts into its stream. It is gathered first and goes there at once, as a CUDA graph whose parameters the call
// sets: for the host that is a half of the launches one by one, and less lies between two kernels (docs/cuda.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda/driver.hpp"
#include "cuda/jit.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

struct Grid {
  uint32_t x = 1, y = 1, z = 1;
};

class Launches {
 public:
  Launches(const tessera_device& device, void* stream) : device_(device), stream_(static_cast<CUstream>(stream)) {}
  Launches(const Launches&) = delete;
  Launches& operator=(const Launches&) = delete;

  // Makes the stream's context current for as long as this lives. Before anything else.
  tessera_status begin();

  const tessera_device& device() const { return device_; }
  // Null while kernels are only prepared or collected (prepare.hpp): nothing reaches a stream, addresses are not known.
  const Driver* driver() const { return driver_; }

  // A word of memory becomes 0, before the kernels. At most one.
  void clear(void* word) { cleared_ = reinterpret_cast<CUdeviceptr>(word); }

  // A kernel behind those before it. `params`: its one argument, of which a copy is kept.
  template <class Params>
  void add(const Kernel& kernel, const Grid& grid, const Params& params) {
    static_assert(sizeof(Params) <= kMaxParamsBytes && alignof(Params) <= kParamsAlignment);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    Node& node = nodes_[count_++];
    node.kernel = kernel, node.grid = grid;
    std::memcpy(node.params, &params, sizeof params);
  }

  // Into the stream with all of it. Nothing is kept: whatever the next call's is, it sets anew.
  tessera_status run();

  static constexpr int kMaxKernels = 3;  // of a call: the backward pass's

 private:
  static constexpr size_t kMaxParamsBytes = 1280, kParamsAlignment = 64;
  struct Node {
    Kernel kernel;
    Grid grid;
    alignas(kParamsAlignment) char params[kMaxParamsBytes];  // as much of it as the kernel's are
  };

  bool run_as_graph();
  tessera_status run_one_by_one();

  const tessera_device& device_;
  CUstream stream_;
  ContextScope context_;
  const Driver* driver_ = nullptr;
  CUdeviceptr cleared_ = 0;
  int count_ = 0;
  Node nodes_[kMaxKernels];
};

}  // namespace tessera::cuda
