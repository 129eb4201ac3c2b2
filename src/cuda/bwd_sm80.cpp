#include "cuda/cuda.hpp"

namespace tessera::cuda {

std::string refuse_bwd_sm80(const tessera_plan&) { return "not in this build"; }

void configure_bwd_sm80(tessera_plan&) {}

}  // namespace tessera::cuda
