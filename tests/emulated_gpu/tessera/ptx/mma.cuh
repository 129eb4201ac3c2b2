#pragma once

#include "tessera/ptx/math.cuh"

namespace tessera::ptx {

// By all lanes of a warp: D [16][8] += A [16][k] B [k][8]. put_a(float [16][16], a lane's four words, its row g and column c) and put_b(float
// [16][8], a lane's two, c, g) say where they stand.
template <class PutA, class PutB>
void emulated_mma(const char* what, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, int inner,
                  const PutA& put_a, const PutB& put_b) {
  struct Operands {
    float d[4];
    uint32 a[4], b[2];
  };
  struct Sums {
    float d[4];
  };
  const Operands mine{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  const Sums sums = emulated::here().meet<Operands, Sums>(what, mine, [&](const Operands* in, Sums* out) {
    alignas(64) float ra[16][16], rb[16][8];
    typedef float Row __attribute__((vector_size(32)));
    for (int lane = 0; lane < emulated::kWarpThreads; ++lane) {
      put_a(ra, in[lane].a, lane / 4, lane % 4);
      put_b(rb, in[lane].b, lane % 4, lane / 4);
    }
    for (int row = 0; row < 16; ++row) {
      Row sum{};
      for (int c = 0; c < 4; ++c) {
        const Operands& from = in[row % 8 * 4 + c];
        sum[2 * c] = from.d[row / 8 * 2], sum[2 * c + 1] = from.d[row / 8 * 2 + 1];
      }
      for (int k = 0; k < inner; ++k) sum += ra[row][k] * *reinterpret_cast<const Row*>(rb[k]);
      for (int c = 0; c < 4; ++c) {
        Sums& to = out[row % 8 * 4 + c];
        to.d[row / 8 * 2] = sum[2 * c], to.d[row / 8 * 2 + 1] = sum[2 * c + 1];
      }
    }
  });
  for (int e = 0; e < 4; ++e) d[e] = sums.d[e];
}

// m16n8k16, row by column: with g = lane / 4 and c = lane % 4 a lane has of A (g, 2c), (g + 8, 2c), (g, 2c + 8), (g + 8, 2c + 8), each
// with its right neighbour, of B (2c, g), (2c + 8, g), each with the one below it.
template <class ToFloat>
void emulated_mma_16bit(const char* what, float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
                        const ToFloat& to_float) {
  emulated_mma(
      what, d, a, b0, b1, 16,
      [&](float(&to)[16][16], const uint32(&words)[4], int g, int c) {
        for (int n = 0; n < 4; ++n)
          for (int half = 0; half < 2; ++half) {
            to[g + n % 2 * 8][2 * c + n / 2 * 8 + half] = to_float(static_cast<unsigned short>(words[n] >> 16 * half));
          }
      },
      [&](float(&to)[16][8], const uint32(&words)[2], int c, int g) {
        for (int n = 0; n < 2; ++n)
          for (int half = 0; half < 2; ++half) {
            to[2 * c + n * 8 + half][g] = to_float(static_cast<unsigned short>(words[n] >> 16 * half));
          }
      });
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  emulated_mma_16bit("mma.f16", d, a, b0, b1, cvt_f32_f16);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  emulated_mma_16bit("mma.bf16", d, a, b0, b1,
                     [](unsigned short bits) { return __uint_as_float(static_cast<uint32>(bits) << 16); });
}

// m16n8k8: of A (g, c), (g + 8, c), (g, c + 4), (g + 8, c + 4), of B (c, g), (c + 4, g). Bits beyond the 10 of the mantissa count for
// nothing.
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  const auto to_float = [](uint32 bits) { return __uint_as_float(bits & 0xffffe000u); };
  emulated_mma(
      "mma.tf32", d, a, b0, b1, 8,
      [&](float(&to)[16][16], const uint32(&words)[4], int g, int c) {
        for (int n = 0; n < 4; ++n) to[g + n % 2 * 8][c + n / 2 * 4] = to_float(words[n]);
      },
      [&](float(&to)[16][8], const uint32(&words)[2], int c, int g) {
        for (int n = 0; n < 2; ++n) to[c + n * 4][g] = to_float(words[n]);
      });
}

}  // namespace tessera::ptx
