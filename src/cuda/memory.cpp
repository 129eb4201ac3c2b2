// Whether pointers are the GPU's, and index tensors brought to the host.
#include "core/status.hpp"
#include "cuda/cuda.hpp"

namespace tessera::cuda {

tessera_status check_memory(const tessera_plan&, const tessera_buffers&, const void*) {
  return unsupported("device: no CUDA backend in this build");
}

tessera_status fetch_indices(const tessera_plan&, const tessera_buffers&, void*, HostIndices&) {
  return unsupported("device: no CUDA backend in this build");
}

}  // namespace tessera::cuda
