// The corrected version of every call in the other files.
#include <cstddef>
#include <span>

#include "tessera/tessera.hpp"

bool attend(const tessera::Plan& plan, const float* q, float* o, float* lse, std::span<std::byte> workspace) {
  const tessera::Layout layout = tessera::layout(tessera::float32, {1, 2, 3, 4});
  const tessera::TensorView<float> writable(o, layout);
  const tessera::TensorView<const float> readable = writable;
  const tessera::Buffers buffers{.q = q, .k = readable.data(), .v = q, .o = writable.data(), .lse = lse};
  const tessera::Status status = tessera::try_forward(plan, buffers, workspace);
  const bool ok = status.ok();
  return ok;
}
