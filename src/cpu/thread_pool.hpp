// The library's own threads, for callers that bring no executor.
#pragma once

#include <cstdint>

namespace tessera::cpu {

// Runs task(argument, w) for w in 0 .. workers - 1 and returns when all are done. Threads are started on first use,
// kept, and started anew in a forked child. When the pool is in use by another caller, this one does all the work
// itself.
void run_on_pool(int32_t workers, void (*task)(void* argument, int32_t worker), void* argument);

}  // namespace tessera::cpu
