// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1,
// 2, 3" (SC 2011), and the definition of dropout by it.
//
// Entry (b, h, i, j), with i and j counted within sequence b and h a query head, is decided by one 16-bit value:
//   g = j / 32, r = j % 32
//   counter = (4 g + (r % 8) / 2,  i,  b * Hq + h,  low 32 bits of offset)
//   key     = (low 32 bits of seed,  high 32 bits of seed xor high 32 bits of offset)
//   n       = 2 (r / 8) + r % 2       of the 8 values in the 4 output words, value n being half n % 2 of word n / 2,
//                                     the low half first
// The entry is dropped iff value < round(p * 65536); a kept entry is scaled by 1 / (1 - p). The eight values of a call
// are thus for columns {2 c, 2 c + 1} + {0, 8, 16, 24} of a group of 32: the columns that one thread of a GPU's mma
// fragment holds in a row. On a CPU, a vector of calls covers whole groups.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace tessera::core {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

inline constexpr int kPhiloxRounds = 10;
inline constexpr int64_t kDropoutKeys = 32;  // of a group

// The key of the next round.
constexpr PhiloxKey next_key(PhiloxKey key) {
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;  // golden ratio, sqrt(3) - 1
  return {key[0] + kWeyl0, key[1] + kWeyl1};
}

constexpr PhiloxCounter philox4x32_10(PhiloxCounter counter, PhiloxKey key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key = next_key(key);
  }
  return counter;
}

// p in units of 2^-16: an entry is dropped iff its 16-bit value is below this.
inline uint32_t dropout_threshold(double p) { return static_cast<uint32_t>(std::lround(p * 65536.0)); }

constexpr PhiloxKey dropout_key(uint64_t seed, uint64_t offset) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32)};
}

struct Dropout {
  uint64_t seed, offset;
  uint32_t threshold;  // 0: nothing is dropped

  // head = b * Hq + h
  constexpr bool keeps(uint32_t head, uint32_t i, uint32_t j) const {
    const uint32_t group = j / 32, r = j % 32;
    const PhiloxCounter words =
        philox4x32_10({4 * group + r % 8 / 2, i, head, static_cast<uint32_t>(offset)}, dropout_key(seed, offset));
    const uint32_t n = 2 * (r / 8) + r % 2;
    const uint32_t value = words[n / 2] >> (16 * (n % 2)) & 0xFFFFu;
    return value >= threshold;
  }
};

}  // namespace tessera::core
