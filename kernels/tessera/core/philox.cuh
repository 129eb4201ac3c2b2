// Philox4x32-10 (Salmon et al., 2011) as core/philox.hpp of the host defines dropout by it: one call decides, of query i,
// the eight keys {2c, 2c + 1} + {0, 8, 16, 24} of a group of 32, which is what a lane owns of four tiles of 16 x 8.
#pragma once

#include "tessera/ptx/device.cuh"

namespace tessera {

struct PhiloxWords {
  uint32 word[4];
};

TESSERA_DEVICE PhiloxWords philox4x32_10(uint32 x0, uint32 x1, uint32 x2, uint32 x3, uint32 key0, uint32 key1) {
  constexpr uint32 kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32 kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;  // golden ratio, sqrt(3) - 1
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32 high0 = __umulhi(kMultiplier0, x0), low0 = kMultiplier0 * x0;
    const uint32 high1 = __umulhi(kMultiplier1, x2), low1 = kMultiplier1 * x2;
    x0 = high1 ^ x1 ^ key0;
    x1 = low1;
    x2 = high0 ^ x3 ^ key1;
    x3 = low0;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {{x0, x1, x2, x3}};
}

// Words of query `query` of head b * Hq + h for the keys 32 group + {2 pair, 2 pair + 1} + {0, 8, 16, 24}: keys 8 t + 2
// pair and the next one are the low and the high half of word t.
TESSERA_DEVICE PhiloxWords dropout_words(const ProblemParams& p, int head, int query, int group, int pair) {
  return philox4x32_10(static_cast<uint32>(4 * group + pair), static_cast<uint32>(query), static_cast<uint32>(head),
                       p.dropout_offset, p.dropout_key[0], p.dropout_key[1]);
}

TESSERA_DEVICE bool keeps_low(uint32 word, uint32 threshold) { return (word & 0xffffu) >= threshold; }
TESSERA_DEVICE bool keeps_high(uint32 word, uint32 threshold) { return (word >> 16) >= threshold; }

}  // namespace tessera
