// The inputs of the kernel that writes shared prefixes' index tensors: from a call, and in tests on the host.
#pragma once

#include "core/shared_prefix.hpp"
#include "tessera/shared_prefix/config.hpp"

namespace tessera {

PrefixIndicesParams prefix_index_params(const tessera_plan& plan, const tessera_buffers& buffers,
                                        const core::PrefixMemory& memory);

}  // namespace tessera
