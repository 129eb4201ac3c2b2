// wgmma's descriptors of matrices in shared memory, of 16-bit or e4m3 elements, swizzled over 128 bytes.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout-matrix-descriptor
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "core/float8.hpp"
#include "core/half.hpp"
#include "runner/swizzle_bits.hpp"
#include "shared_window.hpp"

namespace tessera::emulated {

inline float e4m3_to_float(uint32_t code) { return core::float8_to_float(core::kE4M3, static_cast<uint8_t>(code)); }

class MatrixDescriptor {
 public:
  explicit MatrixDescriptor(uint64_t bits)
      : start_(static_cast<uint32_t>(bits & 0x3fff) << 4),
        leading_(static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4),
        stride_(static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4) {
    const unsigned base = bits >> 49 & 7, swizzle = static_cast<unsigned>(bits >> 62);
    const uint64_t unused = bits & 0x3ff1c000c000c000u;
    wrong_ = unused               ? "a matrix descriptor with bits that mean nothing"
             : swizzle != kBy128B ? "a matrix descriptor whose swizzle is not emulated, other than 128 bytes"
             : base != 0          ? "a matrix descriptor with a base offset, not emulated"
                                  : "";
  }

  // Reads rows of 16 contiguous inner columns: `to` [64][16]. All functions return "" or the error.
  const char* read_inner_major(float (&to)[64][32], bool bfloat16, const SharedWindow& shared) const {
    return inner_major(64, shared, [&to, bfloat16](int row, int word, const char* from) {
      float x[8];
      eight(x, from, bfloat16);
      std::memcpy(to[row] + word * 8, x, sizeof x);
    });
  }
  // The same, transposed: `to` [16][count].
  const char* read_inner_major_turned(float (&to)[32][256], int count, bool bfloat16,
                                      const SharedWindow& shared) const {
    return inner_major(count, shared, [&to, bfloat16](int row, int word, const char* from) {
      float x[8];
      eight(x, from, bfloat16);
      for (int i = 0; i < 8; ++i) to[word * 8 + i][row] = x[i];
    });
  }
  // Both, of 32 columns of e4m3.
  const char* read_inner_major_e4m3(float (&to)[64][32], const SharedWindow& shared) const {
    return inner_major(64, shared, [&to](int row, int word, const char* from) {
      for (int i = 0; i < 16; ++i) to[row][word * 16 + i] = e4m3_to_float(static_cast<uint8_t>(from[i]));
    });
  }
  const char* read_inner_major_turned_e4m3(float (&to)[32][256], int count, const SharedWindow& shared) const {
    return inner_major(count, shared, [&to](int row, int word, const char* from) {
      for (int i = 0; i < 16; ++i) to[word * 16 + i][row] = e4m3_to_float(static_cast<uint8_t>(from[i]));
    });
  }
  // Reads 16 inner rows of `count` contiguous columns, in chunks of 64: `to` [16][count].
  const char* read_outer_major(float (&to)[32][256], int count, bool bfloat16, const SharedWindow& shared) const {
    if (*wrong_) return wrong_;
    if (start_ % kRowBytes + static_cast<uint32_t>(count < kChunkCols ? count : kChunkCols) * 2 > kRowBytes) {
      return "columns of a matrix descriptor that leave their row of 128 bytes";
    }
    for (int k = 0; k < 16; ++k)
      for (int col = 0; col < count; col += 8) {
        const uint32_t at = start_ + static_cast<uint32_t>(col / kChunkCols) * leading_ +
                            static_cast<uint32_t>(k / 8) * stride_ + static_cast<uint32_t>(k % 8) * kRowBytes +
                            static_cast<uint32_t>(col % kChunkCols) * 2;
        const char* const from = shared.at(swizzled_128b(at), 16);
        if (!from) return kOutside;
        float x[8];
        eight(x, from, bfloat16);
        std::memcpy(to[k] + col, x, sizeof x);
      }
    return "";
  }

 private:
  static constexpr unsigned kBy128B = 1;
  static constexpr uint32_t kRowBytes = 128;
  static constexpr int kChunkCols = 64;
  static constexpr const char* kOutside = "a matrix descriptor of what lies outside of the block's shared memory";

  static void eight(float (&to)[8], const char* from, bool bfloat16) {
    uint16_t bits[8];
    std::memcpy(bits, from, sizeof bits);
    if (bfloat16) {
      for (int i = 0; i < 8; ++i) to[i] = std::bit_cast<float>(uint32_t{bits[i]} << 16);
    } else {
      halves(to, bits);
    }
  }
#if defined(__F16C__) && defined(__x86_64__)
  static void halves(float (&to)[8], const uint16_t (&bits)[8]) {
    typedef short Eight __attribute__((vector_size(16)));
    Eight from;
    std::memcpy(&from, bits, sizeof bits);
    const auto floats = __builtin_ia32_vcvtph2ps256(from);
    std::memcpy(to, &floats, sizeof to);
  }
#else
  static void halves(float (&to)[8], const uint16_t (&bits)[8]) {
    for (int i = 0; i < 8; ++i) to[i] = core::float16_to_float(bits[i]);
  }
#endif

  // Calls put(row, word, from) for both 16-byte words of each row.
  template <class Put>
  const char* inner_major(int rows, const SharedWindow& shared, const Put& put) const {
    if (*wrong_) return wrong_;
    if (start_ % kRowBytes + 32 > kRowBytes) return "columns of a matrix descriptor that leave their row of 128 bytes";
    for (int row = 0; row < rows; ++row)
      for (int word = 0; word < 2; ++word) {
        const uint32_t at = start_ + static_cast<uint32_t>(row / 8) * stride_ +
                            static_cast<uint32_t>(row % 8) * kRowBytes + static_cast<uint32_t>(word) * 16;
        const char* const from = shared.at(swizzled_128b(at), 16);
        if (!from) return kOutside;
        put(row, word, from);
      }
    return "";
  }

  uint32_t start_, leading_, stride_;
  const char* wrong_;
};

}  // namespace tessera::emulated
