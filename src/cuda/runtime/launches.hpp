// Kernels that are in memory, put into a stream: one by one, or as a CUDA graph whose parameters the call sets. For the host that
// is a half of the launches one by one, and less lies between two kernels (docs/reference/cuda.md).
#pragma once

#include <cstdint>

#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/jit.hpp"
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
  const Driver* driver() const { return driver_; }  // since begin()

  // A word of memory becomes 0, before the kernels. At most one.
  void clear(void* word) { cleared_ = reinterpret_cast<CUdeviceptr>(word); }

  // A kernel after those before it. `params`: its one argument, which lives until run() is over.
  void add(const Kernel& kernel, const Grid& grid, const void* params) {
    nodes_[count_++] = {kernel, grid, const_cast<void*>(params)};
  }

  // All of it into the stream.
  tessera_status run();

  static constexpr int kMaxKernels = 6;  // of a call: three to five of the backward pass, six of standard attention
  // Making a graph costs the host about as much as the graph saves in this many calls: some hundred microseconds, at 1.6 a call
  // of one kernel to 8 of three (docs/lab/runtime.md). A form's calls go one by one as often
  // first, and what is called less never pays for a graph.
  static constexpr int kCallsBeforeGraph = 64;

 private:
  struct Node {
    Kernel kernel;
    Grid grid;
    void* params = nullptr;
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
