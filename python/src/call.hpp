// Plans and workspace that calls share: a tiny problem's call costs little more than its arithmetic.
#pragma once

#include <string>

#include "options.hpp"
#include "tessera/tessera.h"

namespace tessera::python {

// This machine's CPU, and TESSERA_ISA and TESSERA_NUM_THREADS as they were at the first call.
const tessera_device& cpu();
// What computes on arrays that are at `place`. Throws Error, which begins with `what`, if nothing does.
tessera_device device_at(const Place& place, const std::string& what);

// The plan of a call. Remembered by the problem's content, for the last few problems of each thread; valid until the
// thread's next call.
const tessera_plan& plan_of(const Call& call);

// Runs a plan in its direction. Needs no Python.
tessera_status run_plan(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace, size_t bytes,
                        const tessera_executor& executor);
// The same on the CPU, in the workspace that a thread keeps. Needs no Python.
tessera_status run_on_cpu(const Call& call, const tessera_plan& plan, const tessera_executor& executor);

// Runs forward or backward, with the GIL released. A GPU's work is put into its stream, and not waited for.
void execute(const Call& call);

}  // namespace tessera::python
