// The kernel table that serves an instruction set.
#pragma once

#include "cpu/params.hpp"

namespace tessera::cpu {

// `isa`: a tessera_isa that this machine has.
const KernelTable& kernel_table(int32_t isa);

// The kernels that take a tiled plan by AMX, or NULL: another ISA, or not bfloat16.
const AmxKernelTable* amx_kernels(const tessera_plan& plan);

}  // namespace tessera::cpu
