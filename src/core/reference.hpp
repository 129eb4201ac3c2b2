// The oracle: attention and its gradients straight from their definition, in float64, O(S^2) time, O(S) memory.
// It shares nothing with the fast kernels but the sizes of a sequence.
#pragma once

#include <cstdint>

#include "core/cancel.hpp"
#include "core/score/bound.hpp"
#include "tessera/tessera.h"

namespace tessera::core {

// Workspace of a plan whose sizes are set, into shared_bytes.
int64_t reference_workspace_bytes(const tessera_plan& plan);

// Both end early if `cancel` requests it, which is checked once a row. `bound`: the plan's score program with the
// buffers; NULL if it has none.
void reference_forward(const tessera_plan& plan, const tessera_buffers& buffers, const score::Bound* bound,
                       void* workspace, Cancel& cancel);

// Recomputes o and lse in float64 rather than reading their rounded values: it does not read buffers.o, buffers.lse.
void reference_backward(const tessera_plan& plan, const tessera_buffers& buffers, const score::Bound* bound,
                        void* workspace, Cancel& cancel);

}  // namespace tessera::core
