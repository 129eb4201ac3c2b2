// Dropout in AMX's stages of 32 keys: bits of the kept entries, generated beside the softmax.
#pragma once

#include "cpu/amx_pack.hpp"
#include "cpu/score/coordinates.hpp"

namespace tessera::cpu {
namespace {

// The bit of key n in a lane's word of 32 kept keys is kept_bit(n), an order in which both halves of a word stay in
// place.
constexpr uint32_t kept_bit(uint32_t n) { return n % 2 * 16 + n % 8 / 2 * 4 + n / 8; }
TESSERA_INLINE void keys_kept(VecU (&kept)[2], const Params& p, const QueryLanes& at) {
  const __m512i threshold = _mm512_set1_epi16(static_cast<int16_t>(p.dropout_threshold));
  const DropoutWords random[2] = {DropoutWords(p, at, 0), DropoutWords(p, at, 1)};
  kept[0] = kept[1] = VecU{};
  for (int32_t quad = 0; quad < 4; ++quad) {
    VecU words[2][4];
    DropoutWords::of_both(random, words, at.first_key, quad);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        const VecU all = (VecU)_mm512_movm_epi16(_mm512_cmpge_epu16_mask((__m512i)words[c][w], threshold));
        kept[c] |= all & (0x10001u << (quad * 4 + w));
      }
    }
  }
}

// The pairs of keys n, n + 16 of a stage that dropout keeps, one bit for each half of a pair. Bits are generated when
// they are needed, for four units and one vector at a time, so that this work runs between products like the rest of
// the softmax.
class KeptPairs {
 public:
  // The order of units, in which four that are generated together are consecutive.
  TESSERA_INLINE static int64_t unit(int64_t index) { return index / 4 * 2 + index % 2 + index % 4 / 2 * 8; }

  TESSERA_INLINE KeptPairs(const Params& p, const QueryLanes& at)
      : key_(at.first_key),
        threshold_(_mm512_set1_epi16(static_cast<int16_t>(p.dropout_threshold))),
        random_{DropoutWords(p, at, 0), DropoutWords(p, at, 1)} {
    generate(0);
  }
  TESSERA_INLINE VecU operator()(int64_t index, int c, VecU pair) const {
    return (VecU)_mm512_maskz_mov_epi16(kept_[index / 4 % 2][c][index % 4], (__m512i)pair);
  }
  // After unit `index`.
  TESSERA_INLINE void next(int64_t index) {
    if (index % 4 == 1 && index / 4 + 1 < kUnits / 4) generate(index / 4 + 1);
  }

 private:
  TESSERA_OWN_FUNCTION void generate(int64_t quad) {
    VecU words[2][4];
    DropoutWords::of_both(random_, words, key_, static_cast<int32_t>(quad));
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      uint32_t* kept = kept_[quad % 2][c];
#pragma GCC unroll 2
      for (int w = 0; w < 2; ++w) {
        kept[2 * w] = _mm512_cmpge_epu16_mask((__m512i)join_low(words[c][w], words[c][w + 2]), threshold_);
        kept[2 * w + 1] = _mm512_cmpge_epu16_mask((__m512i)join_high(words[c][w], words[c][w + 2]), threshold_);
      }
    }
  }

  int64_t key_;
  __m512i threshold_;
  DropoutWords random_[2];
  uint32_t kept_[2][2][4];
};

}  // namespace
}  // namespace tessera::cpu
