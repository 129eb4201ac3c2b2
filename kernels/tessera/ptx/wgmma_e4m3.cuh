// wgmma of 8-bit elements, e4m3 (ptx/wgmma.cuh): D += A B, A [64][32] from registers or shared memory, B [32][n] from
// shared memory, both with the inner dimension contiguous; the accumulator is that of 16-bit elements. In registers,
// lane 4g + c of a warp holds rows g and g + 8 of A: a[0] is (g, 4c ... 4c + 3), a[1] the same columns of row g + 8,
// a[2] and a[3] the columns 16 further.
//
// The tensor cores do not add in float32: about 14 bits of a sum survive each instruction. A caller that adds many
// products keeps the sum in registers of its own and gives each few instructions a fresh accumulator.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma-async
#pragma once

#include "tessera/ptx/wgmma.cuh"

namespace tessera::ptx {

template <int kN>
struct WgmmaE4m3;

}  // namespace tessera::ptx

// clang-format off
#define TESSERA_WGMMA_E4M3(n, count, o1, o2, o3, o4, o5, o6)                                                           \
  template <>                                                                                                          \
  struct WgmmaE4m3<n> {                                                                                                \
    TESSERA_DEVICE static void ss(float (&d)[count], unsigned long long a, unsigned long long b, int accumulate) {     \
      asm volatile(                                                                                                    \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" TESSERA_NUMBERS_##count "}, %" #count ", %"     \
          #o1 ", p, 1, 1;\n}"                                                                                          \
          : TESSERA_REGISTERS_##count                                                                                  \
          : "l"(a), "l"(b), "r"(accumulate));                                                                          \
    }                                                                                                                  \
    TESSERA_DEVICE static void rs(float (&d)[count], const uint32 (&a)[4], unsigned long long b, int accumulate) {     \
      asm volatile(                                                                                                    \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5 ", 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" TESSERA_NUMBERS_##count "}, {%" #count ", %"    \
          #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1;\n}"                                                           \
          : TESSERA_REGISTERS_##count                                                                                  \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                      \
    }                                                                                                                  \
  };
// clang-format on

namespace tessera::ptx {

TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_E4M3)

}  // namespace tessera::ptx
