// The layout of a step's dropout bits in shared memory: one bit for each score. A byte holds the result of one call of
// Philox, which decides eight keys of one query; a word has the bytes of four queries. The words of a group of 32 keys
// and 16 queries are contiguous, so neither the lanes that write nor those that read have bank conflicts.
#pragma once

#include "tessera/attention/dropout.cuh"

namespace tessera {

struct DrawnBits {
  // Queries of which a lane's four words, or the lanes of a call, have one byte each.
  static constexpr int kQueries = 16;
  static constexpr int kGroupWords = 16, kGroups = 4;  // 4 pairs of keys x 4 pairs of queries; groups of 32 keys
  // Bytes from one word of a lane to its next, 16 queries later.
  static constexpr int kWordStep = kGroups * kGroupWords * 4;

  // The word of keys 32 group + {2 pair, 2 pair + 1} + {0, 8, 16, 24} and of queries 2 column, 2 column + 1 and those 8
  // later.
  TESSERA_DEVICE static int word_offset(int group, int pair, int column) {
    return (group * kGroupWords + pair * 4 + column) * 4;
  }
  // The byte of query 8 m + 2 column + e.
  TESSERA_DEVICE static constexpr int byte(int m, int e) { return m + 2 * e; }
  // The bit of key 8 t + 2 pair + odd.
  TESSERA_DEVICE static constexpr int bit(int t, int odd) { return t % 2 + t / 2 * 4 + odd * 2; }

  // From a lane's word, shifted to its first bit: the sign bits of a pair of P, of queries 8 m + 2 column and the next,
  // key 8 half.
  TESSERA_DEVICE static uint32 signs(uint32 word, int m, int half) {
    return word << (15 - 8 * byte(m, 0) - bit(half, 0)) & 0x80008000u;
  }

  // Generates one word of a step whose queries and keys begin at row0 and key0.
  template <bool kState>
  TESSERA_DEVICE static uint32 draw(const ProblemParams& p, int head, int row0, int key0, uint32 word) {
    const int column = static_cast<int>(word % 4), pair = static_cast<int>(word / 4 % 4);
    const int group = key0 / 32 + static_cast<int>(word / kGroupWords % kGroups);
    const int query = row0 + static_cast<int>(word / (kGroupWords * kGroups)) * kQueries + column * 2;
    const DropoutKeys<kState> keys(p);
    uint32 drops = 0;
#pragma unroll
    for (int call = 3; call >= 0; --call) {  // the keys of the Philox rounds are read once, and calls overlap
      const PhiloxWords words = dropout_words(keys, head, query + call % 2 * 8 + call / 2, group, pair);
      drops = drops << 8 | of(words, p.dropout_threshold);
    }
    return drops;
  }

 private:
  // The byte of one call of Philox.
  TESSERA_DEVICE static uint32 of(const PhiloxWords& words, uint32 threshold) {
    uint32 drops = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (!keeps_low(words.word[t], threshold)) drops |= 1u << bit(t, 0);
      if (!keeps_high(words.word[t], threshold)) drops |= 1u << bit(t, 1);
    }
    return drops;
  }
};

}  // namespace tessera
