// Puts a plan's kernels into a stream.
#include "core/status.hpp"
#include "cuda/cuda.hpp"

namespace tessera::cuda {

tessera_status forward(const tessera_plan&, const tessera_buffers&, void*, void*) {
  return unsupported("device: no CUDA backend in this build");
}

tessera_status backward(const tessera_plan&, const tessera_buffers&, void*, void*) {
  return unsupported("device: no CUDA backend in this build");
}

}  // namespace tessera::cuda
