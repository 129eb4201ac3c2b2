#pragma once

#include "tessera/ptx/math.cuh"

namespace tessera::ptx {

// m16n8k16, row by column: with g = lane / 4 and c = lane % 4 a lane has of A (g, 2c), (g + 8, 2c), (g, 2c + 8), (g + 8, 2c + 8), each
// with its right neighbour, of B (2c, g), (2c + 8, g), each with the one below it.
template <class ToFloat>
void emulated_mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, ToFloat to_float) {
  struct Words {
    uint32 a[4], b[2];
  };
  struct Sums {
    float d[4];
  };
  const int g = emulated_lane() / 4, c = emulated_lane() % 4;
  const Sums sums = emulated::Block::current()->exchange(Words{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](auto of) {
    const auto half = [&](uint32 pair, int k) { return to_float(static_cast<unsigned short>(pair >> (k % 2 * 16))); };
    Sums all{{d[0], d[1], d[2], d[3]}};
    for (int e = 0; e < 4; ++e) {
      const int row = g + e / 2 * 8, col = 2 * c + e % 2;
      double sum = d[e];
      for (int k = 0; k < 16; ++k) {
        const float x = half(of(row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2], k);
        const float y = half(of(col * 4 + k % 8 / 2).b[k / 8], k);
        sum += static_cast<double>(x) * y;
      }
      all.d[e] = static_cast<float>(sum);
    }
    return all;
  });
  std::copy(sums.d, sums.d + 4, d);
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  emulated_mma(d, a, b0, b1, cvt_f32_f16);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  emulated_mma(d, a, b0, b1, [](unsigned short bits) { return __uint_as_float(static_cast<uint32>(bits) << 16); });
}
inline void mma_m16n8k8_tf32(float (&)[4], const uint32 (&)[4], uint32, uint32) {}  // of float32 kernels, not run here

}  // namespace tessera::ptx
