// A bias as one more step of the products of S, for the forward pass: S^T += (I / scale) B, where B is the bias of a stage in
// pairs of keys, 32-bit words transposed and nothing else. The softmax's scale then multiplies both, and a stage has no option.
// For a bias in bfloat16 that is the only option, where every row of the tile sees every key of the stage, and no entry lies far
// below; else the bias is added to the scores (amx_scores.hpp).
#pragma once

#include "cpu/amx_scores.hpp"

namespace tessera::cpu {
namespace {

class BiasStep {
  TESSERA_INLINE static uint16_t rounded_to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }

 public:
  // 1 / scale in bfloat16, as a sum of so many terms; 0: it has none, or the bias goes the other way.
  TESSERA_INLINE static int64_t terms_of(const Params& p, uint16_t (&terms)[kAmxBiasTerms]) {
    if (!p.bias.data || p.bias_dtype != TESSERA_BFLOAT16 || p.bias.col != 2 || p.softcap > 0 || p.mask.data ||
        p.block_mask.data || p.tree_mask || p.alibi_slopes || p.dropout_threshold || p.scale == 0) {
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

  // The bias of a stage of 32 keys; false: it is to be added to the scores.
  TESSERA_OWN_FUNCTION bool take(const Tile& tile, int64_t key) {
    if (tile_ == &tile && key == key_ + kStageKeys) {
      rows_.next_stage();
    } else {
      rows_.locate(p_, tile, key);
    }
    tile_ = &tile, key_ = key;
    __m512i largest = _mm512_setzero_si512();  // as unsigned numbers: the furthest below
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
  // Asks for two rows of a later stage.
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
