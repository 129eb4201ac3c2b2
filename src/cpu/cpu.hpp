// The CPU back end's interface to the core: detect, refuse or configure, run.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/buffers.hpp"
#include "core/cancel.hpp"
#include "core/candidate.hpp"
#include "core/score/bound.hpp"
#include "tessera/tessera.h"

namespace tessera::cpu {

// This machine's CPU, with TESSERA_ISA and TESSERA_NUM_THREADS applied.
tessera_status detect(tessera_device& device);
// The same, as the first of these calls found it.
tessera_status detect_once(tessera_device& device);
// The best instruction set that this machine supports.
int32_t best_isa();
// True if the CPU has AMX but the operating system does not let this process use it.
bool refused_amx();
// Why AMX tiles do not serve a plan whose device has them; "" if they do.
std::string refuse_tiles(const tessera_plan& plan);

// Why a kernel does not support a validated plan's problem; "" if it does. `plan` has its sizes filled in.
std::string refuse_decode(const tessera_plan& plan);
std::string refuse_tiled(const tessera_plan& plan);
std::string refuse_shared_prefix(const tessera_plan& plan);

// Fill in tiles, splits and workspace of a plan whose kernel and sizes are set.
void configure_decode(tessera_plan& plan);
void configure_tiled(tessera_plan& plan);
void configure_shared_prefix(tessera_plan& plan);

// Run a plan whose buffers have been checked, until `cancel` stops it. Throw core::ExecutorError. `bound`: the plan's
// score program with the buffers; NULL if it has none.
using Run = void(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound,
                 void* workspace, const tessera_executor& executor, core::Cancel& cancel);

// A kernel that can execute a plan on the CPU.
struct Kernel : core::Candidate {
  Run* run;
};
// Of those with equal estimates, the first is chosen.
std::span<const Kernel> kernels();
// The kernel of that name. NULL: there is none.
const Kernel* find_kernel(std::string_view name);

// Runs the kernel that the plan names.
tessera_status run(const tessera_plan& plan, const tessera_buffers& buffers, const core::score::Bound* bound,
                   void* workspace, const tessera_executor& executor, core::Cancel& cancel);

Run forward, forward_shared_prefix, backward;

// tessera_combine: merges validated partial results on the calling thread, until `cancel` stops it.
void combine(const tessera_combine_call& call, const tessera_device& device, core::Cancel& cancel);

// tessera_append: rotates and writes the tokens of a checked call, until `cancel` stops it. Throws core::ExecutorError.
void append(const tessera_append_call& call, const tessera_device& device, const tessera_executor& executor,
            core::Cancel& cancel);

}  // namespace tessera::cpu
