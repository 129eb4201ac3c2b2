// AMX's tile registers: eight of 16 rows x 64 bytes. Configure, release, load, store, zero and the bfloat16 product,
//
//   C[m][n] += sum_k A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1],      C float32, A and B bfloat16, m, n, k < 16
//
// so a row of A holds 32 neighbours along k, and a row of B 16 pairs of neighbours along k. Denormals count as zeros.
//
// With TESSERA_AMX_EMULATED, the same in plain C++, with the additions in the order that Intel's manual specifies: two
// chains of fused multiply-adds over k, even and odd; their sum is added to C.
//
// The instructions are inline assembly, because gcc 12's tile intrinsics do not declare that they read and write
// memory, and the compiler moves stores across them.
#pragma once

#include <cstdint>

#include "cpu/simd.hpp"

namespace tessera::cpu {
namespace {

constexpr int kTileSide = 16;             // rows of a tile, float32 or pairs of bfloat16 in a row
constexpr int64_t kTileRow_bytes = 64;    // a row of a tile
constexpr int64_t kTile_bytes = 1024;     // a tile whose rows are neighbours
constexpr int64_t kTileSteps_elems = 32;  // bfloat16 along k in one product
constexpr int kLowTiles = 4;              // registers 0 ... 3, which may be configured with fewer rows

#if defined(TESSERA_AMX_EMULATED)

struct EmulatedTile {
  alignas(64) uint32_t rows[kTileSide][kTileSide];
};
inline thread_local EmulatedTile emulated_tiles[8];
inline thread_local int emulated_low_rows = kTileSide;

TESSERA_INLINE int emulated_rows(int tile) { return tile < kLowTiles ? emulated_low_rows : kTileSide; }
TESSERA_INLINE void tiles_configure(int64_t low_rows = kTileSide) { emulated_low_rows = static_cast<int>(low_rows); }
TESSERA_INLINE void tiles_release() {
  // NaN: no code may rely on old contents
  for (EmulatedTile& tile : emulated_tiles) __builtin_memset(&tile, 0xff, sizeof tile);
}
template <int kTile>
TESSERA_INLINE void tile_zero() {
  __builtin_memset(&emulated_tiles[kTile], 0, sizeof(EmulatedTile));
}
template <int kTile>
TESSERA_INLINE void tile_load(const void* rows, int64_t stride_bytes) {
  for (int m = 0; m < emulated_rows(kTile); ++m) {
    __builtin_memcpy(emulated_tiles[kTile].rows[m], static_cast<const char*>(rows) + m * stride_bytes, kTileRow_bytes);
  }
}
template <int kTile>
TESSERA_INLINE void tile_load_streamed(const void* rows, int64_t stride_bytes) {
  tile_load<kTile>(rows, stride_bytes);
}
template <int kTile>
TESSERA_INLINE void tile_store(void* rows, int64_t stride_bytes) {
  for (int m = 0; m < emulated_rows(kTile); ++m) {
    __builtin_memcpy(static_cast<char*>(rows) + m * stride_bytes, emulated_tiles[kTile].rows[m], kTileRow_bytes);
  }
}

// Denormals become zeros: a number without an exponent keeps only its sign.
TESSERA_INLINE VecF flush_denormals(VecF v) {
  const VecU u = (VecU)v;
  return (VecF)((u & 0x7f800000u) == 0u ? u & 0x80000000u : u);
}

// Not inlined: inlined into each of the kernels' products, it took more than half of the compile time of their
// emulation.
[[gnu::noinline]] inline void emulate_product(EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b, int rows) {
  const auto low = [](VecU pairs) { return flush_denormals((VecF)(pairs << 16)); };
  const auto high = [](VecU pairs) { return flush_denormals((VecF)(pairs & 0xffff0000u)); };
  VecF b_low[kTileSide], b_high[kTileSide];
  for (int k = 0; k < kTileSide; ++k) {
    const VecU pairs = load_as<VecU>(b.rows[k]);
    b_low[k] = low(pairs), b_high[k] = high(pairs);
  }
  for (int m = 0; m < rows; ++m) {
    alignas(64) float a_low[kTileSide], a_high[kTileSide];
    store(a_low, low(load_as<VecU>(a.rows[m])));
    store(a_high, high(load_as<VecU>(a.rows[m])));
    VecF even{}, odd{};
    for (int k = 0; k < kTileSide; ++k) {
      even = flush_denormals(fma(splat(a_low[k]), b_low[k], even));
      odd = flush_denormals(fma(splat(a_high[k]), b_high[k], odd));
    }
    const VecF sum = flush_denormals(even + odd);
    store(c.rows[m], flush_denormals(flush_denormals(load_as<VecF>(c.rows[m])) + sum));
  }
}
template <int kC, int kA, int kB>
TESSERA_INLINE void tile_product() {
  static_assert(kB >= kLowTiles, "all 16 rows of B");
  if (emulated_rows(kC) != emulated_rows(kA)) __builtin_trap();  // the processor refuses this
  emulate_product(emulated_tiles[kC], emulated_tiles[kA], emulated_tiles[kB], emulated_rows(kC));
}

#else

// Palette 1: 16 rows of 64 bytes, but `low_rows` rows in the low tiles. A product takes as many cycles as A has rows.
TESSERA_INLINE void tiles_configure(int64_t low_rows = kTileSide) {
  struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(TileConfig) == 64, "ldtilecfg reads 64 bytes");
  const uint8_t low = static_cast<uint8_t>(low_rows);
  alignas(64)
      const TileConfig config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {low, low, low, low, 16, 16, 16, 16}};
  asm volatile("ldtilecfg %0" ::"m"(config));
}
TESSERA_INLINE void tiles_release() { asm volatile("tilerelease"); }
template <int kTile>
TESSERA_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
TESSERA_INLINE void tile_load(const void* rows, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}
// The same with a hint that the lines need not stay in the first cache.
template <int kTile>
TESSERA_INLINE void tile_load_streamed(const void* rows, int64_t stride_bytes) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}
template <int kTile>
TESSERA_INLINE void tile_store(void* rows, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}
// C += A B
template <int kC, int kA, int kB>
TESSERA_INLINE void tile_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

#endif

}  // namespace
}  // namespace tessera::cpu
