// The exports of amx_tile_probe.cpp, once for the real tile registers and once for their emulation.
#pragma once

#include <cstdint>

namespace tessera::test {

struct AmxProbe {
  void (*load_and_store)(const void* in, std::int64_t in_stride, void* out, std::int64_t out_stride);  // bytes
  void (*zero)(void* out);                                                                             // [16][64 bytes]
  void (*multiply_add)(float* c, const std::uint16_t* a, const std::uint16_t* b);  // [16][16] += [16][32] [16][16][2]
  // The same of `rows` rows of C and A.
  void (*multiply_add_rows)(float* c, const std::uint16_t* a, const std::uint16_t* b, std::int64_t rows);
  // Packing; `rows`: pointers to rows of `cols` bfloat16.
  void (*column_pairs)(std::uint16_t* out, const std::uint16_t* const* rows, std::int64_t count, std::int64_t cols);
  void (*transposed_rows)(std::uint16_t* out, const std::uint16_t* const* rows, std::int64_t count, std::int64_t cols);
  void (*row_pairs)(std::uint16_t* out, const std::uint16_t* const* rows, std::int64_t count, std::int64_t cols);
};

}  // namespace tessera::test

extern const tessera::test::AmxProbe amx_probe_real, amx_probe_emulated;
