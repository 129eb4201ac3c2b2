// What is done with a plan as a whole.
#include "core/status.hpp"
#include "cuda/cuda.hpp"
#include "cuda/forward.hpp"
#include "cuda/prepare.hpp"

namespace tessera::cuda {

tessera_status forward(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace, void* stream) {
  switch (plan.kernel) {
    case TESSERA_KERNEL_FWD_SM90:
      return forward_sm90(plan, buffers, stream);
    case TESSERA_KERNEL_FWD_SM80:
      return forward_sm80(plan, buffers, workspace, stream);
    default:
      return invalid("plan: kernel %d, accepted what tessera_make_plan fills in", plan.kernel);
  }
}

tessera_status prepare(const tessera_plan& plan) {
  const PrepareScope scope;
  // The data's addresses are not known: the kernels are those for rows that are aligned wherever the strides allow it.
  const auto run = plan.problem.direction == TESSERA_BACKWARD ? backward : forward;
  return run(plan, tessera_buffers{}, nullptr, nullptr);
}

}  // namespace tessera::cuda
