// This machine's best rates, measured now: the peaks that kernels are compared with.
#pragma once

#include <cstdint>

#include "tessera/tessera.h"

namespace tessera::peers {

// float32 multiply-adds from registers with `isa`'s vectors, two FLOPs each, all threads together. 0 if this CPU lacks
// it. Takes about 60 ms: the best of several short rounds.
double fma_gflops(tessera_isa isa, int threads);

// The bf16 dot product of AVX-512 (vdpbf16ps), four FLOPs a lane. 0 if this CPU lacks it.
double bf16_dot_gflops(int threads);

// AMX's bfloat16 products with operands from the first cache, of zeros, which flatters, or of all kinds of numbers,
// which draws more power and clocks lower. 0 if this process may not use AMX.
double amx_gflops(int threads, bool zeros);

// The peak for attention in `dtype` by `isa`: AMX's product (on zeros) or the bf16 dot product where they apply,
// otherwise the FMA.
double peak_gflops(tessera_dtype dtype, tessera_isa isa, int threads);

// Sequential reads, every thread through its own `bytes_per_thread`, again and again: choose a size within L1, L2, L3
// or far beyond for that level's bandwidth. GB/s (10^9), all threads together.
double read_gbps(std::int64_t bytes_per_thread, int threads);

}  // namespace tessera::peers
