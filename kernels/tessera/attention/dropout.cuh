// Dropout by Philox4x32-10 (Salmon et al., 2011), as core/philox.hpp of the host defines it: for query i, one call
// decides the eight keys {2c, 2c + 1} + {0, 8, 16, 24} of a group of 32, which are those of a lane in four tiles of 16
// x 8.
#pragma once

#include "tessera/attention/problem.hpp"
#include "tessera/attention/sequence.cuh"
#include "tessera/ptx/device.cuh"

namespace tessera {

struct PhiloxWords {
  uint32 word[4];
};

// The rounds' keys and the offset. kState false: they are parameters, because computing each key from the one before
// takes a fifth of the instructions. kState true: they are computed from a tensor that the kernel reads on the device
// (ProblemParams::dropout_state).
template <bool kState>
struct DropoutKeys {
  const ProblemParams& p;
  TESSERA_DEVICE explicit DropoutKeys(const ProblemParams& p) : p(p) {}
  TESSERA_DEVICE uint32 key(int round, int word) const { return p.dropout_keys[round][word]; }
  TESSERA_DEVICE uint32 offset() const { return p.dropout_offset; }
};
template <>
struct DropoutKeys<true> {
  uint32 first[2], low_offset;
  TESSERA_DEVICE explicit DropoutKeys(const ProblemParams& p) {
    const auto seed = static_cast<unsigned long long>(p.dropout_state[0]);
    const auto offset = static_cast<unsigned long long>(p.dropout_state[p.dropout_state_stride]);
    first[0] = static_cast<uint32>(seed),
    first[1] = static_cast<uint32>(seed >> 32) ^ static_cast<uint32>(offset >> 32);
    low_offset = static_cast<uint32>(offset);
  }
  TESSERA_DEVICE uint32 key(int round, int word) const {
    return first[word] + static_cast<uint32>(round) * (word == 0 ? kPhiloxWeyl0 : kPhiloxWeyl1);
  }
  TESSERA_DEVICE uint32 offset() const { return low_offset; }
};

template <class Keys>
TESSERA_DEVICE PhiloxWords philox4x32_10(uint32 x0, uint32 x1, uint32 x2, uint32 x3, const Keys& keys) {
  constexpr uint32 kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint32 high0 = __umulhi(kMultiplier0, x0), low0 = kMultiplier0 * x0;
    const uint32 high1 = __umulhi(kMultiplier1, x2), low1 = kMultiplier1 * x2;
    x0 = high1 ^ x1 ^ keys.key(round, 0);
    x1 = low1;
    x2 = high0 ^ x3 ^ keys.key(round, 1);
    x3 = low0;
  }
  return {{x0, x1, x2, x3}};
}

// The words of query `query` of head b * Hq + h for the keys 32 group + {2 pair, 2 pair + 1} + {0, 8, 16, 24}: keys 8 t
// + 2 pair and the next are the low and the high half of word t.
template <class Keys>
TESSERA_DEVICE PhiloxWords dropout_words(const Keys& keys, int head, int query, int group, int pair) {
  return philox4x32_10(static_cast<uint32>(4 * group + pair), static_cast<uint32>(query), static_cast<uint32>(head),
                       keys.offset(), keys);
}

// Where dropout counts a score's head (b * Hq + h), query and key: in the whole of which the problem may be a part. The
// part's first key is a multiple of 32.
template <ScoreConfig kScore>
TESSERA_DEVICE int dropout_head(const ProblemParams& p, int batch, int head) {
  if constexpr (kScore.places) return batch * p.whole_heads + p.first_head + head;
  return batch * p.heads_q + head;
}
template <ScoreConfig kScore>
TESSERA_DEVICE int dropout_query(const ProblemParams& p, [[maybe_unused]] int batch, int query) {
  if constexpr (kScore.sequence_places) return SequencePlace(p, batch).first_q + query;
  return kScore.places ? p.first_q + query : query;
}
template <ScoreConfig kScore>
TESSERA_DEVICE int dropout_key(const ProblemParams& p, [[maybe_unused]] int batch, int key) {
  if constexpr (kScore.sequence_places) return SequencePlace(p, batch).first_k + key;
  return kScore.places ? p.first_k + key : key;
}

// `threshold` is below 2^16.
TESSERA_DEVICE bool keeps_low(uint32 word, uint32 threshold) { return word << 16 >= threshold << 16; }
TESSERA_DEVICE bool keeps_high(uint32 word, uint32 threshold) { return word >= threshold << 16; }

// Sets the weights of a query that dropout drops to zero: a lane's part of tiles of 8 keys from `key` on, elements 2
// half and 2 half + 1 of each.
template <bool kState, int kN>
TESSERA_DEVICE void drop(float (&weights)[kN][4], int half, const ProblemParams& p, int head, int query, int key) {
  static_assert(kN == 2 || kN % 4 == 0, "a call of Philox decides four tiles of 8 keys");
  const DropoutKeys<kState> keys(p);
#pragma unroll
  for (int n = 0; n < kN; n += 4) {
    const PhiloxWords words = dropout_words(keys, head, query, (key + n * 8) / 32, static_cast<int>(threadIdx.x) % 4);
#pragma unroll
    for (int t = 0; t < (kN < 4 ? kN : 4); ++t) {
      // A tile of 16 keys is either half of a group.
      const uint32 word = kN == 2 && key % 32 != 0 ? words.word[(t + 2) % 4] : words.word[t];
      if (!keeps_low(word, p.dropout_threshold)) weights[n + t][2 * half] = 0.0f;
      if (!keeps_high(word, p.dropout_threshold)) weights[n + t][2 * half + 1] = 0.0f;
    }
  }
}

// ---- dropout bits in shared memory ----------------------------------------------------------------------------------
//
// The layout of a step's dropout bits in the backward kernels for Hopper: one bit for each score. A byte holds the
// result of one call of Philox, which decides eight keys of one query; a word has the bytes of four queries. The words
// of a group of 32 keys and 16 queries are contiguous, so neither the lanes that write nor those that read have bank
// conflicts.

struct DropoutBits {
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
  TESSERA_DEVICE static uint32 generate(const ProblemParams& p, int head, int row0, int key0, uint32 word) {
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
