// The kernel table that serves an instruction set.
#pragma once

#include "cpu/params.hpp"

namespace tessera::cpu {

// `isa`: a tessera_isa that this machine has.
const KernelTable& kernel_table(int32_t isa);

}  // namespace tessera::cpu
