// What is done with a plan as a whole.
#include "cuda/cuda.hpp"
#include "cuda/prepare.hpp"

namespace tessera::cuda {

tessera_status prepare(const tessera_plan& plan) {
  const PrepareScope scope;
  // The data's addresses are not known: the kernels are those for rows that are aligned wherever the strides allow it.
  const auto run = plan.problem.direction == TESSERA_BACKWARD ? backward : forward;
  return run(plan, tessera_buffers{}, nullptr, nullptr);
}

}  // namespace tessera::cuda
