#include <initializer_list>

#include "peers/loops.hpp"

namespace tessera::peers {

extern const Loops loops_baseline;
#if defined(__x86_64__)
extern const Loops loops_avx2;
extern const Loops loops_avx512;
extern const Loops loops_avx512_bf16;
#endif

const Loops* loops_for(tessera_isa isa) {
  if (isa == TESSERA_ISA_BASELINE) return &loops_baseline;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == TESSERA_ISA_AVX2 && avx2) return &loops_avx2;
  if (isa == TESSERA_ISA_AVX512 && avx512) return &loops_avx512;
  // For everything that AMX does not serve.
  if (isa == TESSERA_ISA_AMX_BF16) isa = TESSERA_ISA_AVX512_BF16;
  if (isa == TESSERA_ISA_AVX512_BF16 && avx512 && __builtin_cpu_supports("avx512bf16")) return &loops_avx512_bf16;
#elif defined(__aarch64__)
  if (isa >= TESSERA_ISA_NEON) return &loops_baseline;  // whose vectors are NEON's
#endif
  return nullptr;
}

const Loops& best_loops() {
  for (const tessera_isa isa : {TESSERA_ISA_AVX512_BF16, TESSERA_ISA_AVX512, TESSERA_ISA_AVX2}) {
    if (const Loops* loops = loops_for(isa)) return *loops;
  }
  return loops_baseline;
}

}  // namespace tessera::peers
