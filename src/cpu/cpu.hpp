// The CPU backend, as the core sees it: detect, refuse or configure, run.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/buffers.hpp"
#include "core/cancel.hpp"
#include "core/candidate.hpp"
#include "tessera/tessera.h"

namespace tessera::cpu {

// This machine's CPU, with TESSERA_ISA and TESSERA_NUM_THREADS applied.
tessera_status detect(tessera_device& device);
// The same as the first of these calls found it.
tessera_status detect_once(tessera_device& device);
// The best instruction set that this machine has.
int32_t best_isa();
// The CPU has AMX, which the operating system does not let this process use.
bool refused_amx();
// Why AMX's tiles do not serve a plan, whose device has them ("" when they do).
std::string refuse_tiles(const tessera_plan& plan);

// Why a kernel does not take a validated plan's problem ("" when it does). `plan` has its sizes filled in.
std::string refuse_decode(const tessera_plan& plan);
std::string refuse_tiled(const tessera_plan& plan);
std::string refuse_shared_prefix(const tessera_plan& plan);

// Fill in tiles, splits and workspace of a plan whose kernel and sizes are set.
void configure_decode(tessera_plan& plan);
void configure_tiled(tessera_plan& plan);
void configure_shared_prefix(tessera_plan& plan);

// Run a plan whose buffers have been checked, until `cancel` says no. Throw core::ExecutorError.
using Run = void(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                 const tessera_executor& executor, core::Cancel& cancel);

// What may carry out a plan on the CPU.
struct Kernel : core::Candidate {
  Run* run;
};
// Of those that take as long as another, the first is chosen.
std::span<const Kernel> kernels();
// The one of that name. NULL: there is none.
const Kernel* find_kernel(std::string_view name);

// By the kernel that the plan names.
tessera_status run(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace,
                   const tessera_executor& executor, core::Cancel& cancel);

Run forward, forward_shared_prefix, backward;

// Merges validated partial results on the calling thread, until `cancel` says no: tessera_combine.
void combine(const tessera_combine_call& call, const tessera_device& device, core::Cancel& cancel);

// Turns and writes the tokens of a checked tessera_append, until `cancel` says no. Throws core::ExecutorError.
void append(const tessera_append_call& call, const tessera_device& device, const tessera_executor& executor,
            core::Cancel& cancel);

}  // namespace tessera::cpu
