// Launches kernels that are in memory: one by one, or as a CUDA graph whose parameters each call sets. A graph takes
// half of the host's time of launching one by one, and shortens the gap between two kernels (docs/reference/cuda.md).
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

  // Makes the stream's context current for the lifetime of this object. Must be called first.
  tessera_status begin();

  const tessera_device& device() const { return device_; }
  const Driver* driver() const { return driver_; }  // valid after begin()

  // Sets a word of memory to 0 before the kernels. At most one.
  void clear(void* word) { cleared_ = reinterpret_cast<CUdeviceptr>(word); }

  // Appends a kernel. `params` is its only argument, and must live until run() returns.
  void add(const Kernel& kernel, const Grid& grid, const void* params) {
    nodes_[count_++] = {kernel, grid, const_cast<void*>(params)};
  }

  // Launches everything in the stream.
  tessera_status run();

  // Per call: at most nine, in a backward pass with a score program's lists and gradients.
  static constexpr int kMaxKernels = 9;
  // Making a graph costs the host about as much as the graph saves in this many calls: a few hundred microseconds, at
  // savings of 1.6 per call of one kernel to 8 per call of three (docs/lab/runtime.md). So that many calls of a form
  // are launched one by one first, and a form that is called less often never pays for a graph.
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
