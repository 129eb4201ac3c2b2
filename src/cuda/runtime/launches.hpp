// What one call puts into its stream. It is gathered first, so that what must be compiled is compiled at once, and so that all
// of it can go there as a CUDA graph whose parameters the call sets: for the host that is a half of the launches one by one,
// and less lies between two kernels (docs/reference/cuda.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/jit.hpp"
#include "cuda/runtime/prepare.hpp"
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

  // Null while kernels are only prepared or collected (prepare.hpp): nothing reaches a stream, addresses are not known.
  const Driver* driver() const { return driver_; }

  // A word of memory becomes 0, before the kernels. At most one.
  void clear(void* word) { cleared_ = reinterpret_cast<CUdeviceptr>(word); }

  // A kernel behind those before it, by its name, a literal, and its config's values. `make_spec` is called where it is not in
  // memory. `params`: its one argument, of which a copy is kept.
  template <class MakeSpec, class Params>
  void add(const char* name, const ConfigValues& config, MakeSpec&& make_spec, const Grid& grid, const Params& params) {
    if (CollectScope::active()) {
      CollectScope::active()->push_back(make_spec());
      return;
    }
    Kernel kernel;
    const bool found = find_kernel(name, config, device_, kernel);
    if (add(kernel, grid, params) && !found) missing_.push_back({count_ - 1, make_spec(), config, {}});
  }
  // One that is in memory. False: without blocks, there is nothing to launch.
  template <class Params>
  bool add(const Kernel& kernel, const Grid& grid, const Params& params) {
    static_assert(sizeof(Params) <= kMaxParamsBytes && alignof(Params) <= kParamsAlignment);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return false;
    Node& node = nodes_[count_++];
    node.kernel = kernel, node.grid = grid;
    std::memcpy(node.params, &params, sizeof params);
    return true;
  }

  // What is missing, compiled at once and loaded; then all of it into the stream.
  tessera_status run();

  static constexpr int kMaxKernels = 3;  // of a call: the backward pass's
  // Making a graph costs the host about as much as the graph saves in this many calls: some hundred microseconds, at 1.6 a call
  // of one kernel to 8 of three (docs/lab/2026-11-22-compile-time-and-launches.md). A form's calls go one by one as often
  // first, and what is called less never pays for a graph.
  static constexpr int kCallsBeforeGraph = 64;

 private:
  static constexpr size_t kMaxParamsBytes = 1280, kParamsAlignment = 64;
  struct Node {
    Kernel kernel;
    Grid grid;
    alignas(kParamsAlignment) char params[kMaxParamsBytes];  // as much of it as the kernel's are
  };
  struct Missing {
    int node;
    KernelSpec spec;
    ConfigValues config;
    tessera_status status;
  };

  tessera_status load_missing();
  bool run_as_graph();
  tessera_status run_one_by_one();

  const tessera_device& device_;
  CUstream stream_;
  ContextScope context_;
  const Driver* driver_ = nullptr;
  CUdeviceptr cleared_ = 0;
  int count_ = 0;
  Node nodes_[kMaxKernels];
  std::vector<Missing> missing_;
};

}  // namespace tessera::cuda
