// What tile loads, stores and products cost alone, together and beside vector instructions, in cycles.
#include <functional>

#include "gate.hpp"
static char* mem;
static Gate* gate;
static int bads;
template <class F>
static double cycles(int64_t n, F f) {
  n /= 4;  // some 30 us
  const auto r = gate->measure(
      double(n), [&] { f(n); }, 11, 0.2);
  bads = r.good;
  return r.median;
}
static void line(const char* name, double c) {
  printf("%-44s %8.2f  (%d)\n", name, c, bads);
  fflush(stdout);
}
template <int T>
static inline __attribute__((always_inline)) void ld(const char* p) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(64L), "i"(T) : "memory");
}
template <int T>
static inline __attribute__((always_inline)) void ld1(const char* p) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(64L), "i"(T) : "memory");
}
template <int T>
static inline __attribute__((always_inline)) void ldw(const char* p) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(128L), "i"(T) : "memory");
}
template <int T>
static inline __attribute__((always_inline)) void st(char* p) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(128L), "i"(T) : "memory");
}
template <int C, int A, int B>
static inline __attribute__((always_inline)) void dp() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int T>
static inline __attribute__((always_inline)) void zr() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
static inline __attribute__((always_inline)) void zero_results() { zr<0>(), zr<1>(), zr<2>(), zr<3>(); }
static inline __attribute__((always_inline)) void pf(const char* p) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm_prefetch(p + i * 64, _MM_HINT_T0);
}
enum How { kPlain, kT1, kPf };
template <int T, How h>
static inline __attribute__((always_inline)) void la(const char* p, const char* ahead) {
  if (h == kPf) pf(ahead);
  if (h == kT1)
    ld1<T>(p);
  else
    ld<T>(p);
}
// A stream of tiles from `region` bytes, B from the first cache. held: two products in a row have the same B.
template <How h, bool held = false>
static double step22(int64_t region, int64_t dist) {
  return cycles(3000, [&](int64_t n) {
    const char* b = mem;
    const char* a = mem + (1 << 20);
    zero_results();
    for (int64_t i = 0; i < n; ++i) {
      const char* at = a + (i * 2048) % region;
      const char* ah = a + (i * 2048 + dist) % region;
      const char* bb = b + i % 2 * 2048;
      ldw<6>(bb);
      la<4, h>(at, ah);
      dp<0, 4, 6>();
      if (held) {
        la<5, h>(at + 1024, ah + 1024);
        dp<2, 5, 6>();
        ldw<7>(bb + 64);
        dp<3, 5, 7>();
        dp<1, 4, 7>();
        continue;
      }
      ldw<7>(bb + 64);
      dp<1, 4, 7>();
      la<5, h>(at + 1024, ah + 1024);
      dp<2, 5, 6>();
      dp<3, 5, 7>();
    }
  });
}
template <How h>
static double step14(int64_t region, int64_t dist) {
  return cycles(3000, [&](int64_t n) {
    const char* b = mem;
    const char* a = mem + (1 << 20);
    zero_results();
    for (int64_t i = 0; i < n; ++i) {
      const char* at = a + (i * 1024) % region;
      const char* ah = a + (i * 1024 + dist) % region;
      const char* bb = b + i % 2 * 4096;
      la<4, h>(at, ah);
      ldw<6>(bb);
      dp<0, 4, 6>();
      ldw<7>(bb + 64);
      dp<1, 4, 7>();
      ldw<6>(bb + 2048);
      dp<2, 4, 6>();
      ldw<7>(bb + 2112);
      dp<3, 4, 7>();
    }
  });
}
// Groups: steps of 2 x 2, then the four results stored when the next group wants them. add: loaded first.
template <How h, bool add>
static double groups(int steps, int64_t region, int64_t c_bytes, int64_t dist, int pend) {
  return cycles(1500, [&](int64_t n) {
    const char* b = mem;
    const char* a = mem + (1 << 20);
    char* c0 = mem + 65536;
    char* up = nullptr;
    int64_t at = 0, ct = 0;
    for (int64_t i = 0; i < n; ++i) {
      char* c = c0 + ct;
      ct = (ct + 4096) % c_bytes;
      for (int s = 0; s < steps; ++s) {
        const char* aa = a + at;
        const char* ah = a + (at + dist) % region;
        at = (at + 2048) % region;
        const char* bb = b + s * 2048;
        ldw<6>(bb);
        la<4, h>(aa, ah);
        if (s == 0) {
          if (up && pend) st<0>(up);
          if (add)
            ldw<0>(c);
          else
            zr<0>();
        }
        dp<0, 4, 6>();
        ldw<7>(bb + 64);
        if (s == 0) {
          if (up && pend) st<1>(up + 64);
          if (add)
            ldw<1>(c + 64);
          else
            zr<1>();
        }
        dp<1, 4, 7>();
        la<5, h>(aa + 1024, ah + 1024);
        if (s == 0) {
          if (up && pend) st<2>(up + 2048), st<3>(up + 2112);
          if (add)
            ldw<2>(c + 2048);
          else
            zr<2>();
        }
        dp<2, 5, 6>();
        if (s == 0) {
          if (add)
            ldw<3>(c + 2112);
          else
            zr<3>();
        }
        dp<3, 5, 7>();
      }
      if (!pend) {
        st<0>(c);
        st<1>(c + 64);
        st<2>(c + 2048);
        st<3>(c + 2112);
      }
      up = c;
    }
  });
}
#define Z(op, n) op " %zmm30,%zmm31,%zmm" #n "\n\t"
#define FMA(n) Z("vfmadd231ps", n)
#define ADD(n) Z("vaddps", n)
#define MULHI(n) Z("vpmulhuw", n)
#define PADDW(n) Z("vpaddw", n)
#define PSHUFB(n) Z("vpshufb", n)
#define MULTI(n) Z("vpmultishiftqb", n)
#define PERMD(n) Z("vpermd", n)
#define DPB(n) Z("vdpbf16ps", n)
#define NE2(n) Z("vcvtne2ps2bf16", n)
#define CVT(n) "vcvtps2dq %zmm30,%zmm" #n "\n\t"
#define SRLW(n) "vpsrlw $9,%zmm30,%zmm" #n "\n\t"
#define SHLDW(n) "vpshldw $7,%zmm30,%zmm31,%zmm" #n "\n\t"
#define TERN(n) "vpternlogd $0xf8,%zmm30,%zmm31,%zmm" #n "\n\t"
#define LOADZ(n) "vmovups (%rsp),%zmm" #n "\n\t"

#define NOP8 "nop\n\tnop\n\tnop\n\tnop\n\tnop\n\tnop\n\tnop\n\tnop\n\t"
template <int N8>
static inline __attribute__((always_inline)) void nops() {
#pragma GCC unroll 32
  for (int i = 0; i < N8; ++i) asm volatile(NOP8);
}
template <int N8>
static void beside_nops() {
  char s[64];
  sprintf(s, "%d nops", N8 * 8);
  line(s, cycles(4000, [](int64_t n) {
         for (int64_t i = 0; i < n; ++i) nops<N8>();
       }));
  sprintf(s, "tileloadd + %d nops", N8 * 8);
  line(s, cycles(4000, [](int64_t n) {
         for (int64_t i = 0; i < n; ++i) ld<4>(mem + i % 4 * 1024), nops<N8>();
       }));
  sprintf(s, "tileloaddt1 + %d nops", N8 * 8);
  line(s, cycles(4000, [](int64_t n) {
         for (int64_t i = 0; i < n; ++i) ld1<4>(mem + i % 4 * 1024), nops<N8>();
       }));
  sprintf(s, "tilestored + %d nops", N8 * 8);
  line(s, cycles(4000, [](int64_t n) {
         for (int64_t i = 0; i < n; ++i) st<0>(mem + 8192 + i % 2 * 2048), nops<N8>();
       }));
  sprintf(s, "tilezero + product + %d nops", N8 * 8);
  line(s, cycles(4000, [](int64_t n) {
         for (int64_t i = 0; i < n; ++i) zr<0>(), dp<0, 4, 6>(), nops<N8>();
       }));
}
#define OPS(NAME, INS)                                                                                 \
  {                                                                                                    \
    auto run = [&](int tile, int many) {                                                               \
      return cycles(2000,                                                                              \
                    [&](int64_t n) {                                                                   \
                      for (int64_t i = 0; i < n; ++i) {                                                \
                        if (tile) {                                                                    \
                          dp<0, 4, 6>();                                                               \
                        }                                                                              \
                        for (int m = 0; m < many; ++m) {                                               \
                          asm volatile(INS(0) INS(1) INS(2) INS(3) INS(4) INS(5) INS(6) INS(7));       \
                        }                                                                              \
                        if (tile) {                                                                    \
                          dp<1, 4, 7>();                                                               \
                        }                                                                              \
                        for (int m = 0; m < many; ++m) {                                               \
                          asm volatile(INS(8) INS(9) INS(10) INS(11) INS(12) INS(13) INS(14) INS(15)); \
                        }                                                                              \
                      }                                                                                \
                    }) /                                                                               \
             2;                                                                                        \
    };                                                                                                 \
    printf("op %-16s", NAME);                                                                          \
    for (int many : {2, 3, 4, 6}) {                                                                    \
      printf("  %d: alone %5.1f, beside a product %5.1f;", many * 8, run(0, many), run(1, many));      \
    }                                                                                                  \
    printf(" (%d)\n", bads);                                                                           \
    fflush(stdout);                                                                                    \
  }

// Tiles 0 ... 5, C and A, of `rows` rows; 0 ... 3, 6 and 7, C and B, of `row_bytes` bytes a row.
static void configure_small(int rows, int row_bytes) {
  struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } c;
  for (int i : {0, 1, 2, 3, 4, 5}) c.rows[i] = rows;
  for (int i : {0, 1, 2, 3, 6, 7}) c.row_bytes[i] = row_bytes;
  asm volatile("ldtilecfg %0" ::"m"(c));
}

// "quick": without what stands beside products.
int main(int argc, char**) {
  const bool quick = argc > 1;
  if (!ask_for_amx()) {
    puts("no AMX");
    return 3;
  }
  Gate g;
  gate = &g;
  g.configure();
  mem = (char*)mmap(nullptr, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  madvise(mem, 8 << 20, MADV_HUGEPAGE);
  memset(mem, 0, 8 << 20);
  {
    std::mt19937 r(3);
    std::normal_distribution<float> d;
    for (int64_t i = 0; i < (4 << 20) / 2; ++i) {
      float x = d(r);
      uint32_t u;
      memcpy(&u, &x, 4);
      ((uint16_t*)mem)[i] = u >> 16;
    }
  }
  line("product, registers, numbers", cycles(2000, [&](int64_t n) {
                                        ld<4>(mem);
                                        ld<5>(mem + 1024);
                                        ld<6>(mem + 2048);
                                        ld<7>(mem + 3072);
                                        zero_results();
                                        for (int64_t i = 0; i < n; ++i)
                                          dp<0, 4, 6>(), dp<1, 4, 7>(), dp<2, 5, 6>(), dp<3, 5, 7>();
                                      }) / 4);
  line("product, one accumulator (latency)", cycles(4000, [&](int64_t n) {
         zr<0>();
         for (int64_t i = 0; i < n; ++i) dp<0, 4, 6>();
       }));
  const auto registers = [&](const char* what, auto body) {
    line(what, cycles(2000, [&](int64_t n) {
                 ld<4>(mem);
                 ld<5>(mem + 1024);
                 ld<6>(mem + 2048);
                 ld<7>(mem + 3072);
                 zero_results();
                 for (int64_t i = 0; i < n; ++i) body();
               }) / 4);
  };
  registers("the same B in two in a row", [] { dp<0, 4, 6>(), dp<2, 5, 6>(), dp<3, 5, 7>(), dp<1, 4, 7>(); });
  registers("the same B in all", [] { dp<0, 4, 6>(), dp<1, 5, 6>(), dp<2, 4, 6>(), dp<3, 5, 6>(); });
  registers("the same A in all", [] { dp<0, 4, 6>(), dp<1, 4, 7>(), dp<2, 4, 6>(), dp<3, 4, 7>(); });
  for (int64_t region : {8192L, 262144L}) {
    printf("-- A from %ld KiB\n", region / 1024);
    line("2x2 step, A plain", step22<kPlain>(region, 0) / 4);
    line("2x2 step, A plain, B held", step22<kPlain, true>(region, 0) / 4);
    line("2x2 step, A t1", step22<kT1>(region, 0) / 4);
    line("2x2 step, A t1, B held", step22<kT1, true>(region, 0) / 4);
    line("2x2 step, A prefetched 4 KiB ahead", step22<kPf>(region, 4096) / 4);
    line("2x2 step, A prefetched 4 KiB ahead, B held", step22<kPf, true>(region, 4096) / 4);
  }
  // Smaller tiles: as decoding's, which has few rows.
  line("ldtilecfg", cycles(400, [&](int64_t n) {
         for (int64_t i = 0; i < n; ++i) g.configure();
       }));
  line("ldtilecfg, product, tile store", cycles(400, [&](int64_t n) {
         for (int64_t i = 0; i < n; ++i) g.configure(), dp<0, 4, 6>(), st<0>(mem + 8192);
       }));
  for (int rows : {1, 4, 8}) {
    char s[80];
    const auto small = [&](const char* what, auto body) {
      sprintf(s, "%d rows of A and C: %s", rows, what);
      line(s, cycles(2000, [&](int64_t n) {
             configure_small(rows, 64);
             zero_results();
             for (int64_t i = 0; i < n; ++i) body(i);
             g.configure();
           }));
    };
    small("product, four accumulators", [](int64_t) { dp<0, 4, 6>(), dp<1, 4, 7>(), dp<2, 5, 6>(), dp<3, 5, 7>(); });
    small("product, one accumulator", [](int64_t) { dp<0, 4, 6>(); });
    small("load of A", [](int64_t i) { ld<4>(mem + i % 4 * 1024); });
    small("A, A, B, two products", [](int64_t i) {
      ld<4>(mem + i % 4 * 1024), ld<6>(mem + 4096 + i % 4 * 1024), dp<0, 4, 6>();
      ld<5>(mem + 8192 + i % 4 * 1024), dp<1, 5, 6>();
    });
    sprintf(s, "%d columns of B and C: product", rows);
    line(s, cycles(2000, [&](int64_t n) {
           configure_small(16, rows * 4);
           zero_results();
           for (int64_t i = 0; i < n; ++i) dp<0, 4, 6>(), dp<1, 4, 7>(), dp<2, 5, 6>(), dp<3, 5, 7>();
           g.configure();
         }));
    sprintf(s, "%d columns of B and C: load of B", rows);
    line(s, cycles(2000, [&](int64_t n) {
           configure_small(16, rows * 4);
           for (int64_t i = 0; i < n; ++i) ld<6>(mem + i % 4 * 1024);
           g.configure();
         }));
  }
  if (quick) {
    g.report();
    return 0;
  }
  beside_nops<2>();
  beside_nops<6>();
  beside_nops<12>();
  for (int64_t region : {8192L, 262144L}) {
    printf("-- A from %ld KiB\n", region / 1024);
    line("tileloadd", cycles(4000, [&](int64_t n) {
           for (int64_t i = 0; i < n; i += 2)
             ld<4>(mem + (1 << 20) + i * 1024 % region), ld<5>(mem + (1 << 20) + (i + 1) * 1024 % region);
         }));
    line("tileloaddt1", cycles(4000, [&](int64_t n) {
           for (int64_t i = 0; i < n; i += 2)
             ld1<4>(mem + (1 << 20) + i * 1024 % region), ld1<5>(mem + (1 << 20) + (i + 1) * 1024 % region);
         }));
    line("tilestored", cycles(4000, [&](int64_t n) {
           for (int64_t i = 0; i < n; ++i)
             asm volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(mem + (1 << 20) + i * 1024 % region), "r"(64L)
                          : "memory");
         }));
    line("tilestored + tileloadd of other lines", cycles(4000, [&](int64_t n) {
           for (int64_t i = 0; i < n; ++i)
             st<0>(mem + 65536 + i % 2 * 2048), ld<4>(mem + (1 << 20) + i * 1024 % region);
         }));
    line("1x4 step, A t1", step14<kT1>(region, 0) / 4);
    for (int steps : {2, 4}) {
      char s[80];
      sprintf(s, "S groups, %d steps, pending stores, t1", steps);
      line(s, groups<kT1, false>(steps, region, 8192, 0, 1) / 4 / steps);
      sprintf(s, "S groups, %d steps, pending stores, plain", steps);
      line(s, groups<kPlain, false>(steps, region, 8192, 0, 1) / 4 / steps);
      sprintf(s, "S groups, %d steps, own stores, t1", steps);
      line(s, groups<kT1, false>(steps, region, 8192, 0, 0) / 4 / steps);
      sprintf(s, "O groups, %d steps, pending stores, O 8 KiB, t1", steps);
      line(s, groups<kT1, true>(steps, region, 8192, 0, 1) / 4 / steps);
      sprintf(s, "O groups, %d steps, pending stores, O 8 KiB, prefetched", steps);
      line(s, groups<kPf, true>(steps, region, 8192, 4096, 1) / 4 / steps);
      sprintf(s, "O groups, %d steps, pending stores, O 16 KiB, t1", steps);
      line(s, groups<kT1, true>(steps, region, 16384, 0, 1) / 4 / steps);
    }
  }
  char* z = (char*)aligned_alloc(4096, 1 << 16);
  memset(z, 0, 1 << 16);
  zero_results();
  asm volatile("vpxord %zmm30,%zmm30,%zmm30\n\tvpxord %zmm31,%zmm31,%zmm31\n\tkxnord %k1,%k1,%k1");
  OPS("vfmadd ps", FMA);
  OPS("vaddps", ADD);
  OPS("vcvtps2dq", CVT);
  OPS("vpsrlw", SRLW);
  OPS("vpshldw", SHLDW);
  OPS("vpmulhuw", MULHI);
  OPS("vpaddw", PADDW);
  OPS("vpternlogd", TERN);
  OPS("vpshufb", PSHUFB);
  OPS("vpmultishiftqb", MULTI);
  OPS("vpermd", PERMD);
  OPS("vdpbf16ps", DPB);
  OPS("vcvtne2ps2bf16", NE2);
  OPS("load", LOADZ);
  g.report();
  asm volatile("tilerelease");
}
