// The kernel table that serves an instruction set.
#pragma once

#include "core/buffers.hpp"
#include "cpu/params.hpp"

namespace tessera::cpu {

// `isa`: a tessera_isa that this machine supports.
const KernelTable& kernel_table(int32_t isa);

// The table that decodes sequences of few queries: the vectors', even if AMX tiles serve the other sequences.
const KernelTable& decode_table(const tessera_plan& plan);

// Whether this machine has the instructions of code_products.hpp.
bool can_multiply_codes();

// Whether q, k and v are bfloat16, as the dot product and AMX's tiles read them.
bool is_bfloat16(const tessera_problem& problem);
// Whether q is bfloat16, and k and v have 8 bits.
bool has_codes_for_bfloat16(const tessera_problem& problem);
// The AMX kernels for a tiled plan, or NULL: another ISA, or not bfloat16.
const AmxKernelTable* amx_kernels(const tessera_plan& plan);
// Those that decode, also from 8 bits, or NULL.
const AmxKernelTable* amx_decoder(const tessera_plan& plan);

// The parameters of a merge for a kernel of the table.
CombineParams combine_params(const tessera_combine_call& call);

}  // namespace tessera::cpu
