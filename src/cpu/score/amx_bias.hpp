// Bias in AMX's stages of 32 keys: its rows are gathered by transpositions of words and added to the scores, or are
// added to S as one more step of the products.
#pragma once

#include "cpu/amx_pack.hpp"
#include "cpu/score/coordinates.hpp"

namespace tessera::cpu {
namespace {

// A stage's rows of the bias. The rows of the stage after next are prefetched one by one, since all at once would fill
// the L1 cache's miss buffers. The hardware does not predict so many rows, and rows that are a power of two of bytes
// apart map to a few cache sets.
struct BiasRows {
  const char* rows[kBlockM];
  int64_t ahead_bytes;
  bool second_line;

  TESSERA_INLINE void locate(const Params& p, const Tile& tile, int64_t key) {
    const ScoreTensor& bias = p.bias;
    const __m512i first =
        _mm512_set1_epi64(reinterpret_cast<int64_t>(bias.data) + bias.batch * tile.batch + bias.col * key);
    const __m512i head_bytes = _mm512_set1_epi64(bias.head), row_bytes = _mm512_set1_epi64(bias.row);
    constexpr int64_t kPointers = 8;  // pointers in a vector
    for (int64_t lane = 0; lane < kBlockM; lane += kPointers) {
      const auto wide = [lane](const int32_t* numbers) TESSERA_LAMBDA_INLINE {
        return _mm512_cvtepi32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + lane)));
      };
      const __m512i offset = _mm512_add_epi64(_mm512_mullo_epi64(wide(tile.head), head_bytes),
                                              _mm512_mullo_epi64(wide(tile.query), row_bytes));
      _mm512_storeu_si512(rows + lane, _mm512_add_epi64(first, offset));
    }
    ahead_bytes = 2 * kStageKeys * bias.col;
    second_line = p.bias.dtype == TESSERA_FLOAT32;
  }
  // The same rows' next 32 keys.
  TESSERA_INLINE void next_stage() {
    const __m512i step = _mm512_set1_epi64(ahead_bytes / 2);
    constexpr int64_t kPointers = 8;
#pragma GCC unroll 4
    for (int64_t lane = 0; lane < kBlockM; lane += kPointers) {
      _mm512_storeu_si512(rows + lane, _mm512_add_epi64(_mm512_loadu_si512(rows + lane), step));
    }
  }
  TESSERA_INLINE void prefetch(int64_t unit) const {
    constexpr int kIntoSecondCache = 2;
    for (int64_t lane = 2 * unit; lane < 2 * unit + 2; ++lane) {
      __builtin_prefetch(rows[lane] + ahead_bytes, 0, kIntoSecondCache);
      if (second_line) __builtin_prefetch(rows[lane] + ahead_bytes + kCacheLine_bytes, 0, kIntoSecondCache);
    }
  }
};
static_assert(kBlockM == 2 * kUnits);

// out[n][kBlockM] = bias[query of the lane][key + n] as float32, zeros past the last row and key. false: some entry is
// -inf, or may be.
TESSERA_INLINE bool gather_bias(float* out, const BiasRows& bias, const Params& p, const Tile& tile, int64_t key,
                                int64_t keys) {
  const bool bf16 = p.bias.dtype == TESSERA_BFLOAT16 && p.bias.col == 2;
  const bool f32 = p.bias.dtype == TESSERA_FLOAT32 && p.bias.col == 4;
  if (!bf16 && !f32) {
    gather_scores(out, p.bias, p.bias.dtype, QueryLanes{tile, key}, key, keys);
    return false;
  }
  // Transposes 32-bit words: pairs of bfloat16, which are split by a shift and a mask, or float32. As unsigned numbers,
  // -inf and the NaNs with a sign are the largest.
  __m512i largest = _mm512_setzero_si512();
  for (int64_t r = 0; r < kBlockM; r += kTileSide) {
    VecU words[kTileSide];
    if (bf16) {
      transpose_rows(words, SixteenRows(bias.rows + r, tile.count - r, 0, keys));
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i) {
        largest = _mm512_max_epu16(largest, (__m512i)words[i]);
        store(out + 2 * i * kBlockM + r, words[i] << 16);
        store(out + (2 * i + 1) * kBlockM + r, words[i] & 0xffff0000u);
      }
      continue;
    }
    for (int64_t n = 0; n < kStageKeys; n += kTileSide) {
      transpose_rows(words, SixteenRows(bias.rows + r, tile.count - r, 2 * n, 2 * keys));
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i) {
        largest = (__m512i)((VecU)largest > words[i] ? (VecU)largest : words[i]);
        store(out + (n + i) * kBlockM + r, words[i]);
      }
    }
  }
  constexpr uint16_t kMinusInfinity = 0xff80;  // the upper half of float32's -inf
  const __m512i upper = bf16 ? largest : _mm512_srli_epi32(largest, 16);
  return _mm512_cmpge_epu16_mask(upper, _mm512_set1_epi16(static_cast<int16_t>(kMinusInfinity))) == 0;
}

// Adds a bias as one more step of the products of S in the forward pass: S^T += (I / scale) B, where B is the bias of a
// stage in pairs of keys, so that its 32-bit words need only a transposition. The softmax's scale then multiplies both,
// and the stage has no option. This is used for a bias in bfloat16 that is the only option, if every row of the tile
// sees every key of the stage and no entry is far below; otherwise the bias is added to the scores.
class BiasStep {
  TESSERA_INLINE static uint16_t rounded_to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }

 public:
  // 1 / scale as a sum of this many bfloat16 terms; 0: there is no such sum, or the bias is added to the scores.
  TESSERA_INLINE static int64_t terms_of(const Params& p, uint16_t (&terms)[kAmxBiasTerms]) {
    if (!Bias::asked(p) || !asks_for_nothing_but<Bias>(p) || p.bias.dtype != TESSERA_BFLOAT16 || p.bias.col != 2 ||
        p.scale == 0) {
      return 0;
    }
    const float inverse = 1.0f / p.scale;
    float left = inverse;
    for (int64_t term = 0; term < kAmxBiasTerms; ++term) {
      terms[term] = rounded_to_bf16(left);
      left -= float_of_bf16(terms[term]);
      if (__builtin_fabsf(left) < __builtin_fabsf(inverse) * 0x1p-22f) return term + 1;
    }
    return kAmxBiasTerms;
  }

  BiasStep(const Params& p, char* diagonals, uint32_t* words) : p_(p), diagonals_(diagonals), words_(words) {
    uint16_t values[kAmxBiasTerms];
    terms_ = terms_of(p, values);
    __builtin_memset(diagonals, 0, static_cast<size_t>(2 * terms_ * kTile_bytes));
    for (int64_t term = 0; term < terms_; ++term) {
      for (int64_t n = 0; n < kStageKeys; ++n) {  // row n % 16 of tile n / 16
        __builtin_memcpy(diagonals + (2 * term * kTileSide + n) * kTileRow_bytes + 2 * n, &values[term], 2);
      }
    }
  }
  TESSERA_INLINE bool serves() const { return terms_ > 0; }

  // Loads the bias of a stage of 32 keys; false: it must be added to the scores.
  TESSERA_OWN_FUNCTION bool take(const Tile& tile, int64_t key) {
    if (tile_ == &tile && key == key_ + kStageKeys) {
      rows_.next_stage();
    } else {
      rows_.locate(p_, tile, key);
    }
    tile_ = &tile, key_ = key;
    __m512i largest = _mm512_setzero_si512();  // as unsigned numbers: the most negative
    for (int64_t r = 0; r < kBlockM; r += kTileSide) {
      VecU words[kTileSide];
      transpose_rows(words, SixteenRows(rows_.rows + r, tile.count - r, 0, kStageKeys));
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i) {
        largest = _mm512_max_epu16(largest, (__m512i)words[i]);
        store(words_ + i * kBlockM + r, words[i]);
      }
    }
    constexpr int16_t kFarBelow = static_cast<int16_t>(0xc280);  // -64
    return _mm512_cmpgt_epu16_mask(largest, _mm512_set1_epi16(kFarBelow)) == 0;
  }
  // Prefetches two rows of a later stage.
  TESSERA_INLINE void prefetch(int64_t unit) const { rows_.prefetch(unit); }

  TESSERA_INLINE int64_t terms() const { return terms_; }
  TESSERA_INLINE const char* diagonal(int64_t term) const { return diagonals_ + 2 * term * kTile_bytes; }
  TESSERA_INLINE const char* words() const { return reinterpret_cast<const char*>(words_); }

 private:
  const Params& p_;
  char* diagonals_;  // [terms][2 tile registers]
  uint32_t* words_;  // [16 pairs of keys][kBlockM]
  int64_t terms_;
  const Tile* tile_ = nullptr;
  int64_t key_ = 0;
  BiasRows rows_;
};

}  // namespace
}  // namespace tessera::cpu
