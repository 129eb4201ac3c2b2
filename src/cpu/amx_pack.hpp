// Packs rows of bfloat16 into the operands of AMX's product.
//
//   A in place          16 rows x 32 columns: a row of the tensor is a row of the tile
//   B, pairs of columns [column / 2][row]: a transposition of 32-bit pairs                 (Q for S^T = K Q^T)
//   A transposed        16 columns x 32 rows: the transposition again, and pairs split      (V for O^T = V^T P^T)
//   B, pairs of rows    [row / 2][column]: two rows interleaved                             (dO for dV = P^T dO)
//
// The order along k is arbitrary, as long as it is the same in both operands. Pair j of a transposed tile holds the
// rows j and j + 16, so that pairs are joined and split by shifts and masks, which have more ports than shuffles.
#pragma once

#include "cpu/amx_tile.hpp"
#include "cpu/kv_block.hpp"
#include "cpu/nonfinite.hpp"

namespace tessera::cpu {
namespace {

static_assert(kBlockM == 2 * kTileSide, "two tile registers of queries");
static_assert(kLanes == kTileSide, "a row of a tile is a vector");

constexpr int64_t kStageKeys = 2 * kTileSide;
constexpr int kUnits = kTileSide;  // units of a stage's softmax: keys j and j + 16

TESSERA_INLINE VecU load_bf16(const char* row, int64_t column, int64_t cols) {
  return (VecU)_mm512_maskz_loadu_epi16(first_elems(cols - column), row + column * 2);
}

// Sixteen rows of 64 bytes; parts past the last row or column are copied as zeros.
class SixteenRows {
 public:
  // Columns `column` ... of `cols` of the `count` rows.
  TESSERA_INLINE SixteenRows(const char* const* rows, int64_t count, int64_t column, int64_t cols) {
    if (count >= kTileSide && cols - column >= kTileSteps_elems) {
#pragma GCC unroll 16
      for (int r = 0; r < kTileSide; ++r) rows_[r] = rows[r] + column * 2;
      return;
    }
    for (int r = 0; r < kTileSide; ++r) {
      store(copy_[r], r < count ? load_bf16(rows[r], column, cols) : VecU{});
      rows_[r] = copy_[r];
    }
  }
  TESSERA_INLINE const char* operator()(int r) const { return rows_[r]; }

 private:
  const char* rows_[kTileSide];
  alignas(64) char copy_[kTileSide][kTileRow_bytes];
};

// Join the lanes of low and high as pairs.
TESSERA_INLINE VecU join_low(VecU low, VecU high) {  // of their lower halves
  return (VecU)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)low, _mm512_slli_epi32((__m512i)high, 16));
}
TESSERA_INLINE VecU join_high(VecU low, VecU high) {  // of their upper halves
  return (VecU)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)low, 16), (__m512i)high);
}

// Lines of the 16 rows that are transposed next, prefetched before the present ones: shuffles that wait for their rows
// fill the core's scheduler, so that few lines would be in flight. If they were prefetched further ahead and rows are a
// power of two apart, they would be evicted from the L1 cache's sets again.
struct NextLines {
  const char* const* rows = nullptr;
  int64_t count = 0, column = 0;
  TESSERA_INLINE void ask() const {
    constexpr int kIntoFirstCache = 3;
    for (int64_t r = 0; r < min_of<int64_t>(count, kTileSide); ++r) {
      __builtin_prefetch(rows[r] + column * 2, 0, kIntoFirstCache);
    }
  }
};

// out[c / 2][ld]: lane r of row c / 2 = (rows[r][c], rows[r][c + 1]), for c < cols padded to 32 and r < `lanes`, a
// multiple of 16; zeros past the last row and column. `next`: rows that are read after these.
TESSERA_OWN_FUNCTION void pack_column_pairs(uint32_t* out, int64_t ld, const char* const* rows, int64_t count,
                                            int64_t lanes, int64_t cols, const NextLines& next = {}) {
  for (int64_t r = 0; r < lanes; r += kTileSide) {
    for (int64_t c = 0; c < cols; c += kTileSteps_elems) {
      if (c + kTileSteps_elems < cols) {
        NextLines{rows + r, count - r, c + kTileSteps_elems}.ask();
      } else if (r + kTileSide < lanes) {
        NextLines{rows + r + kTileSide, count - r - kTileSide, 0}.ask();
      } else {
        next.ask();
      }
      VecU pairs[kTileSide];
      transpose_rows(pairs, SixteenRows(rows + r, count - r, c, cols));
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i) store(out + (c / 2 + i) * ld + r, pairs[i]);
    }
  }
}

// tiles[cols / 32][16 rows][32], zeros past the last row and column. A row's lines are read together, in memory order.
// The lines of the tiles are prefetched a few rows before they are stored, at the end those of the next tiles: stores
// retire in order, and each would wait for its line.
TESSERA_INLINE void pack_rows(char* tiles, const char* const* rows, int64_t count, int64_t cols) {
  constexpr int64_t kAhead = 4;
  const bool whole = count >= kTileSide && cols % kTileSteps_elems == 0;
  const int64_t tiles_bytes = padded_to(cols, kTileSteps_elems) / kTileSteps_elems * kTile_bytes;
  for (int64_t r = 0; r < kTileSide; ++r, tiles += kTileRow_bytes) {
    char* out = tiles;
    const int64_t ahead = kAhead * kTileRow_bytes + (r + kAhead < kTileSide ? 0 : tiles_bytes - kTile_bytes);
    for (int64_t c = 0; c < cols; c += kTileSteps_elems, out += kTile_bytes) {
      prefetch_write(out + ahead);
      store(out, whole ? load_as<VecU>(rows[r] + c * 2) : r < count ? load_bf16(rows[r], c, cols) : VecU{});
    }
  }
}

// Of 32 rows, for every 32 columns two tiles, `group_bytes` apart: [2][16 columns][16 pairs], pair j = rows j and j +
// 16; zeros past the last row and column. `next`: rows that are read after these.
TESSERA_OWN_FUNCTION void pack_transposed_rows(char* tiles, int64_t group_bytes, const char* const* rows, int64_t count,
                                               int64_t cols, const NextLines& next = {}) {
  for (int64_t c = 0; c < cols; c += kTileSteps_elems) {
    VecU low[kTileSide], high[kTileSide];
    NextLines{rows + kTileSide, count - kTileSide, c}.ask();
    transpose_rows(low, SixteenRows(rows, count, c, cols));
    (c + kTileSteps_elems < cols ? NextLines{rows, count, c + kTileSteps_elems} : next).ask();
    transpose_rows(high, SixteenRows(rows + kTileSide, count - kTileSide, c, cols));
    char* out = tiles + c / kTileSteps_elems * group_bytes;
#pragma GCC unroll 2
    for (int64_t g = 0; g < 2; ++g) {
#pragma GCC unroll 8
      for (int i = 0; i < kTileSide / 2; ++i) {
        store(out + g * kTile_bytes + 2 * i * kTileRow_bytes, join_low(low[8 * g + i], high[8 * g + i]));
        store(out + g * kTile_bytes + (2 * i + 1) * kTileRow_bytes, join_high(low[8 * g + i], high[8 * g + i]));
      }
    }
  }
}

// Of 32 rows, for every 32 columns: out[16 pairs][32 columns], pair j = rows j and j + 16, `group_bytes` apart; zeros
// past the last row and column.
TESSERA_OWN_FUNCTION void pack_row_pairs(char* out, int64_t group_bytes, const char* const* rows, int64_t count,
                                         int64_t cols) {
  const auto pairs = [](__m256i low, __m256i high) TESSERA_LAMBDA_INLINE {
    return (VecU)_mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
  };
  for (int64_t c = 0; c < cols; c += kTileSteps_elems, out += group_bytes) {
    const bool whole = count >= 2 * kTileSide && cols - c >= kTileSteps_elems;
    for (int64_t j = 0; whole && j < kTileSide; ++j) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const auto words = [&](int64_t r) TESSERA_LAMBDA_INLINE {
          return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[r] + (c + half * kTileSide) * 2));
        };
        store(out + (j * 2 + half) * kTileRow_bytes, pairs(words(j), words(j + kTileSide)));
      }
    }
    for (int64_t j = 0; !whole && j < kTileSide; ++j) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const auto words = [&](int64_t r) TESSERA_LAMBDA_INLINE {
          const int64_t column = c + half * kTileSide;
          const __mmask16 mask = static_cast<__mmask16>(r < count ? first_elems(cols - column) : 0);
          return _mm256_maskz_loadu_epi16(mask, mask ? rows[r] + column * 2 : nullptr);
        };
        store(out + (j * 2 + half) * kTileRow_bytes, pairs(words(j), words(j + kTileSide)));
      }
    }
  }
}

// ---- NaN and infinities ----
//
// If a row of the tile has a masked entry, its weight is 0, and a product of full tiles would compute 0 x NaN. So an
// operand that the products sum over (V and K along keys, Q and dO along queries) is checked before it is packed if
// something may be masked, which costs an AND and a maximum for 64 bytes. Rows that hold NaN or an infinity are packed
// as zeros, and their products are added afterwards to the rows that see them. All other results keep their bits.

// Bit r is set if row r of at most 32 holds NaN or an infinity.
TESSERA_INLINE uint32_t nonfinite_rows(const char* const* rows, int64_t count, int64_t cols) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  const auto largest = [&](int64_t r, __m512i best) TESSERA_LAMBDA_INLINE {
    for (int64_t c = 0; c < cols; c += kTileSteps_elems) {
      best = _mm512_max_epu16(best, _mm512_and_si512((__m512i)load_bf16(rows[r], c, cols), magnitude));
    }
    return best;
  };
  const auto finite = [](__m512i best) TESSERA_LAMBDA_INLINE {
    return _mm512_cmpge_epu16_mask(best, _mm512_set1_epi16(0x7f80)) == 0;
  };
  __m512i best = _mm512_setzero_si512();
  for (int64_t r = 0; r < min_of<int64_t>(count, 2 * kTileSide); ++r) best = largest(r, best);
  if (finite(best)) return 0;
  uint32_t bits = 0;
  for (int64_t r = 0; r < min_of<int64_t>(count, 2 * kTileSide); ++r) {
    if (!finite(largest(r, _mm512_setzero_si512()))) bits |= uint32_t{1} << r;
  }
  return bits;
}

// Replaces the rows of `bits` by zeros.
TESSERA_INLINE void blank_rows(const char** rows, uint32_t bits) {
  alignas(64) static constexpr char kZeros[kMaxRowFloats * 2] = {};
  for (; bits; bits &= bits - 1) rows[__builtin_ctz(bits)] = kZeros;
}

// ---- keys and values of a super-block ----

// Rows first ... count - 1 of those from key `key` on; `first` is a multiple of 32.
struct KeyRows {
  int64_t key, first, count;
};

// [keys / 16][cols / 32] tiles of A, in the rows' order.
inline void pack_key_rows(char* tiles, const Params& p, const RowTensor& tensor, const Sequence& sequence,
                          int64_t batch, int64_t head_kv, const KeyRows& keys, int64_t cols) {
  const int64_t key = keys.key, count = keys.count;
  const int64_t tiles_a_row = padded_to(cols, kTileSteps_elems) / kTileSteps_elems;
  tiles += keys.first / kTileSide * tiles_a_row * kTile_bytes;
  for (int64_t n = keys.first; n < padded_to(count, 2 * kTileSide);
       n += kTileSide, tiles += tiles_a_row * kTile_bytes) {
    const char* rows[kTileSide];
    key_rows(rows, p, tensor, sequence, batch, head_kv, key + n, min_of<int64_t>(kTileSide, count - n));
    pack_rows(tiles, rows, count - n, cols);
  }
}

// [cols / 32][block_n / 32][2] tiles of A, transposed: keys that are multiplied into the same two rows of C are
// adjacent. `nonfinite`: keys with NaN or infinities are added to it and packed as zeros; NULL: no check.
inline void pack_key_columns(char* tiles, NonfiniteKeys* nonfinite, const Params& p, const RowTensor& tensor,
                             const Sequence& sequence, int64_t batch, int64_t head_kv, const KeyRows& keys,
                             int64_t cols) {
  const int64_t key = keys.key, count = keys.count;
  const int64_t group_bytes = p.block_n / (2 * kTileSide) * 2 * kTile_bytes;
  constexpr int64_t kStage_keys = 2 * kTileSide;
  tiles += keys.first / kStage_keys * 2 * kTile_bytes;
  const char* rows[2][kStage_keys];  // of this stage and the next
  const auto locate = [&](int64_t n) TESSERA_LAMBDA_INLINE {
    const int64_t here = max_of<int64_t>(0, min_of(kStage_keys, count - n));
    key_rows(rows[n / kStage_keys % 2], p, tensor, sequence, batch, head_kv, key + n, here);
    return here;
  };
  locate(keys.first);
  for (int64_t n = keys.first; n < count; n += kStage_keys, tiles += 2 * kTile_bytes) {
    const char** here = rows[n / kStage_keys % 2];
    const NextLines next{rows[(n / kStage_keys + 1) % 2], locate(n + kStage_keys), 0};
    if (nonfinite) {
      const uint32_t bits = nonfinite_rows(here, count - n, cols);
      nonfinite->rows[n / kStage_keys] = bits;
      nonfinite->any |= bits != 0;
      blank_rows(here, bits);
    }
    pack_transposed_rows(tiles, group_bytes, here, count - n, cols, next);
  }
}

}  // namespace
}  // namespace tessera::cpu
