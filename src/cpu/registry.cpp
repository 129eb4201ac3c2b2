// The kernels that a plan for the CPU may name.
#include <algorithm>

#include "core/reference.hpp"
#include "core/status.hpp"
#include "cpu/cpu.hpp"

namespace tessera::cpu {
namespace {

void run_tiled(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
               const tessera_executor& executor, core::Cancel& cancel) {
  (plan.problem.direction == TESSERA_BACKWARD ? backward : forward)(plan, buffers, workspace, executor, cancel);
}

std::string refuse_reference(const tessera_plan& plan) {
  const bool asked_for = plan.device.kernel == TESSERA_KERNEL_REFERENCE || plan.problem.q.dtype == TESSERA_FLOAT64;
  return asked_for ? "" : "slow: only on request or for float64";
}

// On the calling thread.
void run_reference(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                   const tessera_executor& /*executor*/, core::Cancel& cancel) {
  const bool backward = plan.problem.direction == TESSERA_BACKWARD;
  (backward ? core::reference_backward : core::reference_forward)(plan, buffers, workspace, cancel);
}

constexpr Kernel kKernels[] = {
    {{TESSERA_KERNEL_DECODE, refuse_decode, configure_decode}, forward},
    {{TESSERA_KERNEL_TILED, refuse_tiled, configure_tiled}, run_tiled},
    {{TESSERA_KERNEL_SHARED_PREFIX, refuse_shared_prefix, configure_shared_prefix}, forward_shared_prefix},
    {{TESSERA_KERNEL_REFERENCE, refuse_reference, core::configure_reference}, run_reference},
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

tessera_status run(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                   const tessera_executor& executor, core::Cancel& cancel) {
  const auto named = [&plan](const Kernel& kernel) { return kernel.kernel == plan.kernel; };
  const auto found = std::ranges::find_if(kKernels, named);
  if (found == std::end(kKernels)) {
    return invalid("plan: kernel %d, accepted what tessera_make_plan fills in", plan.kernel);
  }
  found->run(plan, buffers, workspace, executor, cancel);
  return ok();
}

}  // namespace tessera::cpu
