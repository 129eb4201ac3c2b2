#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

struct EmulatedMatrices {
  uint32 word[4];
};
// Lane l has of each 8 x 8 matrix elements 2 (l % 4), + 1 of row l / 4, or transposed of column l / 4.
struct EmulatedPlace {
  int row[2], col[2];
  EmulatedPlace(int lane, bool transposed) {
    const int a = lane / 4, b = lane % 4 * 2;
    for (int n = 0; n < 2; ++n) row[n] = transposed ? b + n : a, col[n] = transposed ? a : b + n;
  }
};
inline constexpr size_t kEmulatedMatrixRow = 16;  // bytes

inline void emulated_ldmatrix(const char* what, uint32 (&r)[4], uint32 shared, bool transposed) {
  emulated::Block& block = emulated::here();
  const auto got = block.meet<uint32, EmulatedMatrices>(what, shared, [&](const uint32* rows, EmulatedMatrices* out) {
    for (int m = 0; m < 4; ++m) {
      unsigned short element[8][8];
      for (int row = 0; row < 8; ++row) {
        std::memcpy(element[row], block.own_shared(rows[m * 8 + row], kEmulatedMatrixRow, kEmulatedMatrixRow),
                    sizeof element[row]);
      }
      for (int lane = 0; lane < emulated::kWarpThreads; ++lane) {
        const EmulatedPlace at(lane, transposed);
        out[lane].word[m] = element[at.row[0]][at.col[0]] | uint32{element[at.row[1]][at.col[1]]} << 16;
      }
    }
  });
  for (int m = 0; m < 4; ++m) r[m] = got.word[m];
}
inline void ldmatrix_x4(uint32 (&r)[4], uint32 shared) { emulated_ldmatrix("ldmatrix", r, shared, false); }
inline void ldmatrix_x4_trans(uint32 (&r)[4], uint32 shared) { emulated_ldmatrix("ldmatrix.trans", r, shared, true); }

inline void emulated_stmatrix(const char* what, uint32 shared, const uint32 (&r)[4], bool transposed) {
  struct Rows {
    uint32 shared, word[4];
  };
  emulated::Block& block = emulated::here();
  block.meet<Rows, char>(what, Rows{shared, {r[0], r[1], r[2], r[3]}}, [&](const Rows* in, char*) {
    for (int m = 0; m < 4; ++m) {
      unsigned short element[8][8];
      for (int lane = 0; lane < emulated::kWarpThreads; ++lane) {
        const EmulatedPlace at(lane, transposed);
        for (int n = 0; n < 2; ++n) {
          element[at.row[n]][at.col[n]] = static_cast<unsigned short>(in[lane].word[m] >> 16 * n);
        }
      }
      for (int row = 0; row < 8; ++row) {
        std::memcpy(block.own_shared(in[m * 8 + row].shared, kEmulatedMatrixRow, kEmulatedMatrixRow), element[row],
                    sizeof element[row]);
      }
    }
  });
}
inline void stmatrix_x4(uint32 shared, const uint32 (&r)[4]) { emulated_stmatrix("stmatrix", shared, r, false); }
inline void stmatrix_x4_trans(uint32 shared, const uint32 (&r)[4]) {
  emulated_stmatrix("stmatrix.trans", shared, r, true);
}

inline uint32 movmatrix_trans(uint32 pair) {
  return emulated::of_warp<uint32>("movmatrix", emulated::kAllLanes, pair, [](const uint32* in, int lane) {
    const EmulatedPlace at(lane, true);
    const auto element = [&](int n) { return in[at.row[n] * 4 + at.col[n] / 2] >> at.col[n] % 2 * 16 & 0xffffu; };
    return element(0) | element(1) << 16;
  });
}

template <class T>
T emulated_ld_shared(uint32 shared) {
  T x;
  std::memcpy(static_cast<void*>(&x), emulated::here().own_shared(shared, sizeof x, sizeof x), sizeof x);
  return x;
}
template <class T>
void emulated_st_shared(uint32 shared, const T& x) {
  std::memcpy(emulated::here().own_shared(shared, sizeof x, sizeof x), &x, sizeof x);
}
inline uint4 ld_shared_16(uint32 shared) { return emulated_ld_shared<uint4>(shared); }
inline int ld_shared_s32(uint32 shared) { return emulated_ld_shared<int>(shared); }
inline float2 ld_shared_f32x2(uint32 shared) { return emulated_ld_shared<float2>(shared); }
inline void st_shared_s32(uint32 shared, int a) { emulated_st_shared(shared, a); }
inline void st_shared_s32x2(uint32 shared, int a, int b) { emulated_st_shared(shared, make_int2(a, b)); }
inline void st_shared_f32x4(uint32 shared, float a, float b, float c, float d) {
  emulated_st_shared(shared, make_float4(a, b, c, d));
}
inline void st_shared_zero_16(uint32 shared) { emulated_st_shared(shared, make_uint4(0, 0, 0, 0)); }

}  // namespace tessera::ptx
