// What this machine can do at best, measured now: what a kernel's share of the peak is a share of.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::peers {

// float32 multiply-adds from registers with `isa`'s vectors, two FLOPs each, all threads together. 0 if this CPU lacks
// it. Takes about 60 ms: the best of several short rounds.
double fma_gflops(tessera_isa isa, int threads);

// The bf16 dot product of AVX-512 (vdpbf16ps), four FLOPs a lane. 0 if this CPU lacks it.
double bf16_dot_gflops(int threads);

// The peak that attention in `dtype` by `isa` is held against: the bf16 dot product where it applies, else the FMA.
double peak_gflops(tessera_dtype dtype, tessera_isa isa, int threads);

// Sequential reads, every thread through its own `bytes_per_thread`, again and again: choose a size within L1, L2, L3
// or far beyond for that level's bandwidth. GB/s (10^9), all threads together.
double read_gbps(std::int64_t bytes_per_thread, int threads);

}  // namespace tessera::peers
