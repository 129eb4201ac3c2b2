// What a GPU has.
#include "core/status.hpp"
#include "cuda/cuda.hpp"

namespace tessera::cuda {

tessera_status detect(int32_t ordinal, tessera_device& device) {
  (void)device;
  return unsupported("GPU %d: no CUDA backend in this build", ordinal);
}

}  // namespace tessera::cuda
