// Kernels without launches: what a plan needs, compiled before its first call.
#pragma once

#include <vector>

#include "cuda/runtime/codegen.hpp"
#include "tessera/tessera.h"

namespace tessera::cuda {

// While one exists, its thread's launches see to their kernels and put nothing into a stream.
class PrepareScope {
 public:
  PrepareScope();
  ~PrepareScope();
  PrepareScope(const PrepareScope&) = delete;
  PrepareScope& operator=(const PrepareScope&) = delete;
  static bool active();
};

// While one exists, its thread's launches only tell which kernels they would launch.
class CollectScope {
 public:
  explicit CollectScope(std::vector<KernelSpec>& specs);
  ~CollectScope();
  CollectScope(const CollectScope&) = delete;
  CollectScope& operator=(const CollectScope&) = delete;
  static std::vector<KernelSpec>* active();  // null: there is none
};

// Whether this thread's launches reach a stream: neither of these scopes exists.
bool launches_run();

// Whether `device` is a GPU of this machine, and not one that is only planned for.
bool is_here(const tessera_device& device);

// The kernel's binary, into the cache on disk. No GPU is needed.
tessera_status prepare_binary(const KernelSpec& spec, const tessera_device& device);

}  // namespace tessera::cuda
