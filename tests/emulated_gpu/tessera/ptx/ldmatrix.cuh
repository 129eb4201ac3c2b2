#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera::ptx {

template <bool kTransposed>
void emulated_ldmatrix_x4(uint32 (&r)[4], uint32 shared) {
  struct Four {
    uint32 word[4];
  };
  const int lane = emulated_lane();
  const Four four = emulated::Block::current()->exchange(shared, [&](auto of) {
    Four all;
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto element = [&](int row, int col) {
        unsigned short bits;
        std::memcpy(&bits, shared_memory + of(matrix * 8 + row) + col * 2, sizeof bits);
        return static_cast<uint32>(bits);
      };
      const int a = lane / 4, b = lane % 4 * 2;
      all.word[matrix] =
          kTransposed ? element(b, a) | element(b + 1, a) << 16 : element(a, b) | element(a, b + 1) << 16;
    }
    return all;
  });
  std::copy(four.word, four.word + 4, r);
}
inline void ldmatrix_x4(uint32 (&r)[4], uint32 shared) { emulated_ldmatrix_x4<false>(r, shared); }
inline void ldmatrix_x4_trans(uint32 (&r)[4], uint32 shared) { emulated_ldmatrix_x4<true>(r, shared); }

inline void st_shared_zero_16(uint32 shared) { std::memset(shared_memory + shared, 0, 16); }

// A lane has elements 2 (l % 4), + 1 of row l / 4, and receives those of column l / 4.
inline uint32 movmatrix_trans(uint32 pair) {
  const int lane = emulated_lane();
  return emulated::Block::current()->exchange(pair, [&](auto of) {
    const auto element = [&](int row, int col) { return of(row * 4 + col / 2) >> (col % 2 * 16) & 0xffffu; };
    return element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
  });
}

}  // namespace tessera::ptx
