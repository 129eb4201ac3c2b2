// D += A B by one warpgroup, asynchronously: A [64][16] from registers or shared memory, B [16][n] from shared memory,
// D in float32 registers. Warp w holds rows 16 w ... of D, in mma's accumulator layout: with g = lane / 4 and c = lane
// % 4, d[4 t + 0 ... 3] is (g, 8 t + 2c), (g, 8 t + 2c + 1), (g + 8, ...), (g + 8, ...).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma-async
#pragma once

#include "tessera/ptx/device.cuh"
#include "tessera/ptx/layout.hpp"

namespace tessera::ptx {

// Warp specialisation: moves registers from one warpgroup to another.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int kRegisters>
TESSERA_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
TESSERA_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Required before the first wgmma, and after writing registers that a wgmma reads.
TESSERA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TESSERA_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
TESSERA_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Marks registers that a wgmma in flight writes: the compiler moves no access of them across this.
template <int kCount>
TESSERA_DEVICE void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// The same for registers that it reads.
template <int kCount>
TESSERA_DEVICE void wgmma_pin(uint32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}
// Marks registers whose values are dead because a wgmma is about to overwrite them: they are free before this.
template <int kCount>
TESSERA_DEVICE void wgmma_forget(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(d[i]));
}

// ss: A from shared memory; rs: A from registers. kTransposeB: B is stored as [16][n] with n contiguous. `accumulate`
// false: D = A B.
template <Dtype kDtype, int kN, bool kTransposeB>
struct Wgmma;

}  // namespace tessera::ptx

// Every width, for both 16-bit types. An asm statement names each of its registers, and only the preprocessor can count
// them.
// clang-format off
// For n = N / 2: the first n operand numbers, and the first n accumulators.
#define TESSERA_NUMBERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TESSERA_NUMBERS_16 TESSERA_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TESSERA_NUMBERS_24 TESSERA_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TESSERA_NUMBERS_32 TESSERA_NUMBERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_NUMBERS_40 TESSERA_NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TESSERA_NUMBERS_48 TESSERA_NUMBERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TESSERA_NUMBERS_56 TESSERA_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TESSERA_NUMBERS_64 TESSERA_NUMBERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_NUMBERS_72 TESSERA_NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TESSERA_NUMBERS_80 TESSERA_NUMBERS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TESSERA_NUMBERS_88 TESSERA_NUMBERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TESSERA_NUMBERS_96 TESSERA_NUMBERS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TESSERA_NUMBERS_104 TESSERA_NUMBERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TESSERA_NUMBERS_112 TESSERA_NUMBERS_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TESSERA_NUMBERS_120 TESSERA_NUMBERS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TESSERA_NUMBERS_128 TESSERA_NUMBERS_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TESSERA_REGISTERS_FROM(i)                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
  "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define TESSERA_REGISTERS_8 TESSERA_REGISTERS_FROM(0)
#define TESSERA_REGISTERS_16 TESSERA_REGISTERS_8, TESSERA_REGISTERS_FROM(8)
#define TESSERA_REGISTERS_24 TESSERA_REGISTERS_16, TESSERA_REGISTERS_FROM(16)
#define TESSERA_REGISTERS_32 TESSERA_REGISTERS_24, TESSERA_REGISTERS_FROM(24)
#define TESSERA_REGISTERS_40 TESSERA_REGISTERS_32, TESSERA_REGISTERS_FROM(32)
#define TESSERA_REGISTERS_48 TESSERA_REGISTERS_40, TESSERA_REGISTERS_FROM(40)
#define TESSERA_REGISTERS_56 TESSERA_REGISTERS_48, TESSERA_REGISTERS_FROM(48)
#define TESSERA_REGISTERS_64 TESSERA_REGISTERS_56, TESSERA_REGISTERS_FROM(56)
#define TESSERA_REGISTERS_72 TESSERA_REGISTERS_64, TESSERA_REGISTERS_FROM(64)
#define TESSERA_REGISTERS_80 TESSERA_REGISTERS_72, TESSERA_REGISTERS_FROM(72)
#define TESSERA_REGISTERS_88 TESSERA_REGISTERS_80, TESSERA_REGISTERS_FROM(80)
#define TESSERA_REGISTERS_96 TESSERA_REGISTERS_88, TESSERA_REGISTERS_FROM(88)
#define TESSERA_REGISTERS_104 TESSERA_REGISTERS_96, TESSERA_REGISTERS_FROM(96)
#define TESSERA_REGISTERS_112 TESSERA_REGISTERS_104, TESSERA_REGISTERS_FROM(104)
#define TESSERA_REGISTERS_120 TESSERA_REGISTERS_112, TESSERA_REGISTERS_FROM(112)
#define TESSERA_REGISTERS_128 TESSERA_REGISTERS_120, TESSERA_REGISTERS_FROM(120)

// The operands after the accumulators. `count`: the number of accumulators, and the first of these operands' numbers.
#define TESSERA_WGMMA(name, type, n, count, o1, o2, o3, o4, o5, o6)                                                    \
  template <bool kTransposeB>                                                                                          \
  struct Wgmma<Dtype::name, n, kTransposeB> {                                                                          \
    TESSERA_DEVICE static void ss(float (&d)[count], unsigned long long a, unsigned long long b, int accumulate) {     \
      asm volatile(                                                                                                    \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type                                                       \
          "." type " {" TESSERA_NUMBERS_##count "}, %" #count ", %"                                                    \
          #o1 ", p, 1, 1, 0, %" #o3 ";\n}"                                                                             \
          : TESSERA_REGISTERS_##count                                                                                  \
          : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB ? 1 : 0));                                                \
    }                                                                                                                  \
    TESSERA_DEVICE static void rs(float (&d)[count], const uint32 (&a)[4], unsigned long long b, int accumulate) {     \
      asm volatile(                                                                                                    \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5 ", 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type                                                       \
          "." type " {" TESSERA_NUMBERS_##count "}, {%" #count ", %"                                                   \
          #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, %" #o6 ";\n}"                                                 \
          : TESSERA_REGISTERS_##count                                                                                  \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposeB ? 1 : 0));            \
    }                                                                                                                  \
  };
#define TESSERA_WGMMA_F16(n, ...) TESSERA_WGMMA(kFloat16, "f16", n, __VA_ARGS__)
#define TESSERA_WGMMA_BF16(n, ...) TESSERA_WGMMA(kBFloat16, "bf16", n, __VA_ARGS__)
// clang-format on

namespace tessera::ptx {

TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_F16)
TESSERA_WGMMA_WIDTHS(TESSERA_WGMMA_BF16)

}  // namespace tessera::ptx
