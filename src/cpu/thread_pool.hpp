// The library's own threads, for callers without an executor.
#pragma once

#include <cstdint>

namespace tessera::cpu {

// Runs task(argument, w) for w in 0 .. workers - 1 and returns when all are done. Threads are started on first use,
// kept, and started again in a forked child. If another caller is using the pool, the calling thread does all the work
// itself.
void run_on_pool(int32_t workers, void (*task)(void* argument, int32_t worker), void* argument);

}  // namespace tessera::cpu
