// Plans and workspace shared by calls: a call of a tiny problem costs little more than its arithmetic.
#pragma once

#include <string>

#include "options.hpp"
#include "tessera/tessera.h"

namespace tessera::python {

// This machine's CPU, with TESSERA_ISA and TESSERA_NUM_THREADS as they were at the first call.
const tessera_device& cpu();
// The device that computes on arrays at `place`. Throws Error, which begins with `what`, if there is none.
tessera_device device_at(const Place& place, const std::string& what);

// The plan of a call, cached by the problem's content for the last few problems of each thread; valid until the
// thread's next call.
const tessera_plan& plan_of(const Call& call);

// Runs a plan in its direction. Does not need the GIL.
tessera_status run_plan(const tessera_plan& plan, const tessera_buffers& buffers, void* workspace, size_t bytes,
                        const tessera_executor& executor);
// The same on the CPU, with a workspace that the thread keeps. Does not need the GIL.
tessera_status run_on_cpu(const Call& call, const tessera_plan& plan, const tessera_executor& executor);

// Runs forward or backward, with the GIL released. A GPU's work is launched in its stream, without waiting for it.
void execute(const Call& call);

}  // namespace tessera::python
