// The variants, by the tile registers or, with TESSERA_AMX_EMULATED, in plain C++; PROBE names the table.
#include "inner_loop.hpp"
namespace tessera::cpu {
using Run = void (*)(const Pass&);
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
struct Named {
  const char* name;
  Run run;
  int q_steps, v_groups, job_stages, exp;
  bool right;
};
#define V(name, ...)                                                                          \
  {#name,                                                                                     \
   Kernel<Traits{__VA_ARGS__}>::run,                                                          \
   Traits{__VA_ARGS__}.q_steps,                                                               \
   Traits{__VA_ARGS__}.v_groups,                                                              \
   Traits{__VA_ARGS__}.job_stages,                                                            \
   Traits{__VA_ARGS__}.exp,                                                                   \
   Traits{__VA_ARGS__}.products && Traits{__VA_ARGS__}.loads && Traits{__VA_ARGS__}.stores && \
       Traits{__VA_ARGS__}.o_memory && !Traits{__VA_ARGS__}.near && Traits{__VA_ARGS__}.exp != kNoExp},
extern const Named CAT(probe_, PROBE)[] = {
#include "inner_loop_variants.inc"
    {nullptr, nullptr, 0, 0, 0, 0, false}};
void CAT(probe_pack_, PROBE)(const uint16_t* q, const uint16_t* k, const uint16_t* v, int64_t d, int64_t tiles,
                             int64_t stages, uint32_t* sq, char* sk, char* sv) {
  for (int64_t t = 0; t < tiles; ++t) {
    const char* rows[32];
    for (int i = 0; i < 32; ++i) rows[i] = (const char*)(q + (t * 32 + i) * d);
    pack_column_pairs(sq + t * d / 2 * 32, 32, rows, 32, 32, d);
  }
  for (int64_t n = 0; n < stages * 2; ++n) {
    const char* rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = (const char*)(k + (n * 16 + i) * d);
    pack_rows(sk + n * d / 32 * 1024, rows, 16, d);
  }
  for (int64_t n = 0; n < stages; ++n) {
    const char* rows[32];
    for (int i = 0; i < 32; ++i) rows[i] = (const char*)(v + (n * 32 + i) * d);
    pack_transposed_rows(sv + n * 2048, stages * 2048, rows, 32, d);
  }
}
}  // namespace tessera::cpu
