// Runs a call as a careful caller would: outputs are poisoned, the workspace is guarded, and only outputs may be
// written.
#pragma once

#include <string>
#include <vector>

#include "inputs.hpp"
#include "place.hpp"

namespace tessera::testing {

struct NamedTensor {
  std::string name;
  const Tensor* tensor;
};

// A direction's outputs, present tensors only.
std::vector<NamedTensor> outputs(const Call& call, tessera_direction direction);

struct RunOptions {
  tessera_kernel kernel = TESSERA_KERNEL_AUTO;
  Place place = {};
  int32_t threads = 1;
  int32_t cores = 2;
  unsigned char workspace_fill = 0xFF;  // the workspace's initial bytes
  const tessera_executor* executor = nullptr;
};

struct RunResult {
  tessera_status status{};
  std::string harm{};  // forbidden writes; "" if none
  int32_t kernel = 0;  // the plan's kernel
  bool ok() const { return status.code == TESSERA_OK && harm.empty(); }
  std::string why() const { return status.code == TESSERA_OK ? harm : status.message; }
};

// The problem of one direction: the forward pass has no gradients.
tessera_problem problem_of(const Call& call, tessera_direction direction);

// The plan of one direction for a place. A GPU splits work for all of its multiprocessors, unless the case says how
// many.
tessera_status make_plan(const Call& call, tessera_direction direction, const RunOptions& options, tessera_plan& plan);

// A GPU's kernels of a direction; each is requested by name for cases that it supports and a plan would give to
// another.
std::vector<tessera_kernel> gpu_kernels(tessera_direction direction);

// The kernels for comparison with them, forward and backward.
struct ComparisonKernels {
  tessera_kernel forward, backward;
  bool stores_scores;  // in the case's dtype
};
inline constexpr ComparisonKernels kComparisonKernels[] = {
    {TESSERA_KERNEL_FWD_FA1, TESSERA_KERNEL_BWD_FA1, false},
    {TESSERA_KERNEL_FWD_STANDARD, TESSERA_KERNEL_BWD_STANDARD, true}};

// Plans and runs one direction, on a GPU with copies in its memory. Backward reads call.o and call.lse.
RunResult run(Call& call, tessera_direction direction, const RunOptions& options);

// The bytes of all outputs of a direction, gaps and guards included.
std::vector<std::vector<std::byte>> output_bytes(const Call& call, tessera_direction direction);

}  // namespace tessera::testing
