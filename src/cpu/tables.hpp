// The kernel table that serves an instruction set.
#pragma once

#include "core/buffers.hpp"
#include "cpu/params.hpp"

namespace tessera::cpu {

// `isa`: a tessera_isa that this machine has.
const KernelTable& kernel_table(int32_t isa);

// Of what sequences of few queries are decoded by: the vectors, where AMX's tiles serve the others.
const KernelTable& decode_table(const tessera_plan& plan);

// The kernels that take a tiled plan by AMX, or NULL: another ISA, or not bfloat16.
const AmxKernelTable* amx_kernels(const tessera_plan& plan);

// What a kernel of the table reads of a merge.
CombineParams combine_params(const tessera_combine_call& call);

}  // namespace tessera::cpu
