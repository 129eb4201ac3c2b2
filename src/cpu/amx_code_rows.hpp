// Rows of 8 bits as rows of AMX's tiles: 64 codes of a row become the bfloat16 of a row of two tiles, the even columns
// in one and the odd ones in the other. The other operand or the result has the columns in that order (code_place).
#pragma once

#include "cpu/amx_pack.hpp"
#include "cpu/simd/avx512_vbmi.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kTileCodes = 2 * kTileSteps_elems;  // codes of a row that are converted at a time

// Where column d is.
TESSERA_INLINE int64_t code_place(int64_t d) {
  return d / kTileCodes * kTileCodes + d % 2 * kTileSteps_elems + d % kTileCodes / 2;
}

// out[place] = the row's column, for `cols` columns of bfloat16; zeros up to the next multiple of kTileCodes.
TESSERA_INLINE void copy_to_code_places(char* out, const char* row, int64_t cols) {
  alignas(64) static constexpr auto kColumnAt = [] {
    std::array<uint16_t, kTileCodes> at{};
    for (int n = 0; n < kTileCodes; ++n) at[static_cast<size_t>(n)] = static_cast<uint16_t>(n % 32 * 2 + n / 32);
    return at;
  }();
  for (int64_t d = 0; d < cols; d += kTileCodes, out += 2 * kTileRow_bytes) {
    const __m512i first = (__m512i)load_bf16(row, d, cols);
    const __m512i second = (__m512i)load_bf16(row, d + kTileSteps_elems, cols);
    for (int half = 0; half < 2; ++half) {
      const __m512i at = _mm512_load_si512(kColumnAt.data() + half * kTileSteps_elems);
      store(out + half * kTileRow_bytes, (VecU)_mm512_permutex2var_epi16(first, at, second));
    }
  }
}

// As pack_column_pairs, for 16 lanes, of rows with their columns in that order.
TESSERA_INLINE void pack_code_column_pairs(uint32_t* out, const char* const* rows, int64_t count, int64_t cols) {
  alignas(64) char places[kTileSide][padded_to(kMaxRowFloats, kTileCodes) * 2];
  const char* at[kTileSide];
  for (int64_t r = 0; r < count; ++r) copy_to_code_places(places[r], rows[r], cols), at[r] = places[r];
  pack_column_pairs(out, kTileSide, at, count, kTileSide, padded_to(cols, kTileCodes));
}

// Two neighbouring tiles = 64 columns from `first` of 16 rows, each `offset` bytes after rows[r]; zeros past the last
// column. beside(r) is called for each row.
template <class Beside>
TESSERA_INLINE void codes_to_tiles(int32_t dtype, char* tiles, const char* const* rows, int64_t offset, int64_t first,
                                   int64_t cols, const Beside& beside) {
  const int64_t left = cols - first;
  with_codes_to_bf16(dtype, [&](const auto& convert) TESSERA_LAMBDA_INLINE {
    const auto convert_row = [&](int r, VecU codes) TESSERA_LAMBDA_INLINE {
      VecU even, odd;
      convert(codes, even, odd);
      store(tiles + r * kTileRow_bytes, even);
      store(tiles + kTile_bytes + r * kTileRow_bytes, odd);
      beside(r);
    };
    if (left >= kTileCodes) {
#pragma GCC unroll 4
      for (int r = 0; r < kTileSide; ++r) convert_row(r, load_as<VecU>(rows[r] + offset + first));
    } else {
      for (int r = 0; r < kTileSide; ++r) convert_row(r, load_first_bytes(rows[r] + offset + first, left));
    }
  });
}

}  // namespace
}  // namespace tessera::cpu
