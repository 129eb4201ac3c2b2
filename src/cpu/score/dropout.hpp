// Dropout: the entries that a call keeps, by Philox4x32-10 in lanes, as defined in core/philox.hpp. It changes weights,
// not scores. AMX's stages: amx_dropout.hpp.
#pragma once

#include "cpu/score/entry.hpp"

namespace tessera::cpu {
namespace {

// The random words for the entries of a vector's lanes, in groups of eight keys. Of a call's four counters only the
// first differs between groups, and it is the same in all lanes. So the first two of ten rounds are computed once for
// all keys, except for a few scalars.
class DropoutWords : WideWords {
  static constexpr uint32_t kFactor0 = 0xD2511F53u, kFactor1 = 0xCD9E8D57u, kStep0 = 0x9E3779B9u, kStep1 = 0xBB67AE85u;
  static constexpr int kRounds = 10, kSharedRounds = 2;

 public:
  // The words of vector c of the tile.
  template <class At>
  TESSERA_INLINE DropoutWords(const Params& p, const At& at, int c)
      : key0_(p.dropout_key[0]),
        key1_(p.dropout_key[1]),
        offset_(p.dropout_offset),
        first_quad_(static_cast<uint32_t>(at.sequence().first_k / 32 * 4)) {
    const VecU query = (VecU)(at.queries(c) + static_cast<int32_t>(at.sequence().first_q));
    const int64_t first_head = (at.batch() + p.first_sequence) * p.heads + p.first_head;
    const VecU sequence_head = (VecU)(at.heads(c) + static_cast<int32_t>(first_head));
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) {
      const auto by_head = product(part(sequence_head, i), kFactor1);
      const auto by_query = product(exclusive_or(high_of(by_head), part(query, i), splat_words(key0_)), kFactor0);
      head_low_[i] = low_of(by_head);
      query_low_[i] = low_of(by_query), query_high_[i] = high_of(by_query);
    }
  }

  // Word w holds, in its low half, the bits for key group + 2 quad + 8 w and, in its high half, those for the next key.
  // `group` is a multiple of 32.
  TESSERA_INLINE void operator()(VecU (&words)[4], int64_t group, int32_t quad) const {
    Words x[4][kParts];
    begin(x, group, quad);
#pragma GCC unroll 8
    for (int i = kSharedRounds; i < kRounds; ++i) round(x, splat_words(round_key0(i)), splat_words(round_key1(i)));
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) words[w] = joined(x[w]);
  }
  // The same for two vectors, round by round: one computes while the other waits.
  TESSERA_INLINE static void of_both(const DropoutWords (&draw)[2], VecU (&words)[2][4], int64_t group, int32_t quad) {
    Words x[2][4][kParts];
    draw[0].begin(x[0], group, quad), draw[1].begin(x[1], group, quad);
#pragma GCC unroll 8
    for (int i = kSharedRounds; i < kRounds; ++i) {
      const Words key0 = splat_words(draw[0].round_key0(i)), key1 = splat_words(draw[0].round_key1(i));
      round(x[0], key0, key1), round(x[1], key0, key1);
    }
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) words[0][w] = joined(x[0][w]), words[1][w] = joined(x[1][w]);
  }

 private:
  TESSERA_INLINE void begin(Words (&x)[4][kParts], int64_t group, int32_t quad) const {
    const uint64_t first = uint64_t{static_cast<uint32_t>(group / 32 * 4 + quad) + first_quad_} * kFactor0;
    const uint64_t second = uint64_t{static_cast<uint32_t>(first >> 32) ^ offset_ ^ key1_} * kFactor1;
    const Words word0 = splat_words(static_cast<uint32_t>(second >> 32) ^ round_key0(1));
    const Words word1 = splat_words(static_cast<uint32_t>(second));
    const Words word2 = splat_words(static_cast<uint32_t>(first) ^ round_key1(1));
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) {
      x[0][i] = word0 ^ head_low_[i], x[1][i] = word1;
      x[2][i] = word2 ^ query_high_[i], x[3][i] = query_low_[i];
    }
  }
  TESSERA_INLINE uint32_t round_key0(int round) const { return key0_ + static_cast<uint32_t>(round) * kStep0; }
  TESSERA_INLINE uint32_t round_key1(int round) const { return key1_ + static_cast<uint32_t>(round) * kStep1; }
  TESSERA_INLINE static void round(Words (&x)[4][kParts], Words key0, Words key1) {
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) {
      const auto a = product(x[0][i], kFactor0), b = product(x[2][i], kFactor1);
      x[0][i] = exclusive_or(high_of(b), x[1][i], key0);
      x[1][i] = low_of(b);
      x[2][i] = exclusive_or(high_of(a), x[3][i], key1);
      x[3][i] = low_of(a);
    }
  }

  uint32_t key0_, key1_, offset_, first_quad_;
  Words head_low_[kParts], query_low_[kParts], query_high_[kParts];
};

struct Dropout {
  static constexpr const char* kName = "dropout";
  static bool asked(const tessera_problem& problem) { return problem.dropout_p > 0; }
  TESSERA_INLINE static bool asked(const Params& p) { return p.dropout_threshold != 0; }

  // out[n][kBlockM] = `kept` if the entry of row n is kept, and 0 if it is dropped, for n = begin ... end - 1. Row 0 is
  // a key that is a multiple of 32.
  template <class At>
  static void factors(const Params& p, const At& at, float* out, int64_t begin, int64_t end, float kept) {
    const VecI threshold = splat(static_cast<int32_t>(p.dropout_threshold));
    for (int c = 0; c < at.vecs(); ++c) {
      const DropoutWords draw(p, at, c);
      for (int64_t group = begin / 32 * 32; group < end; group += 32) {
        for (int32_t quad = 0; quad < 4; ++quad) {
          VecU words[4];
          draw(words, at.key(group), quad);
          for (int w = 0; w < 4; ++w) {
            const int64_t n = group + quad * 2 + w * 8;
            const VecI low = (VecI)(words[w] & 0xffffu), high = (VecI)(words[w] >> 16);
            float* to = out + n * kBlockM + c * kLanes;
            if (n >= begin && n < end) store(to, select(low >= threshold, splat(kept), VecF{}));
            if (n + 1 >= begin && n + 1 < end) {
              store(to + kBlockM, select(high >= threshold, splat(kept), VecF{}));
            }
          }
        }
      }
    }
  }
};

}  // namespace
}  // namespace tessera::cpu
