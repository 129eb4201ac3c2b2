// From raw products to scores, for the tiles that need more than a multiplication by the scale: softcap, bias, ALiBi
// and every mask, in the order that tessera.h defines, in natural units. And dropout's factors.
#pragma once

#include "cpu/tile.hpp"
#include "cpu/transpose.hpp"

namespace tessera::cpu {
namespace {

// True when a score is more than scale * (q . k) under a positional mask and a block mask.
TESSERA_INLINE bool has_options_beside_block_mask(const Params& p) {
  return p.softcap > 0 || p.bias.data || p.mask.data || p.alibi_slopes || p.dropout_threshold;
}
// The same under a positional mask alone.
TESSERA_INLINE bool has_score_options(const Params& p) { return has_options_beside_block_mask(p) || p.block_mask.data; }

// Keys that a block mask shows to none of a tile's rows, to all of them, or to neither.
struct KeyRun {
  int64_t end;
  bool visible;  // to some row, as far as the block mask goes
  bool options;  // a score is more than scale * (q . k) under a positional mask
};

// The first run of keys begin ... end - 1 from block_key on. All of them are one where there is no block mask, where its blocks are no
// multiple of 32 keys (a group of dropout's), and where the tile has rows of several heads.
inline KeyRun key_run(const Params& p, const Tile& tile, int64_t block_key, int64_t begin, int64_t end) {
  constexpr int64_t kAlign = 32;
  const bool options = has_options_beside_block_mask(p);
  if (!p.block_mask.data) return {end, true, options};
  if (p.mask_block_k % kAlign != 0 || !tile.consecutive) return {end, true, true};
  const int64_t first = tile.query[0] / p.mask_block_q, last = tile.query[tile.count - 1] / p.mask_block_q;
  int64_t col = (block_key + begin) / p.mask_block_k;
  const auto rows_that_see = [&]() TESSERA_LAMBDA_INLINE {
    int64_t rows = 0;
    for (int64_t row = first; row <= last; ++row) {
      rows += *(score_row_at(p.block_mask, tile, 0, row) + p.block_mask.col * col) != 0;
    }
    return rows == 0 ? 0 : rows == last - first + 1 ? 2 : 1;  // none, all, some
  };
  const int sees = rows_that_see();
  int64_t to;
  do {
    to = ++col * p.mask_block_k - block_key;
  } while (to < end && rows_that_see() == sees);
  return {min_of(to, end), sees != 0, options || sees == 1};
}

// out[n][kBlockM] = tensor[batch, head, query, key + n] as float32 for the lanes of the tile (0 past the end) and n <
// count.
inline void gather_scores(float* out, const ScoreTensor& tensor, int32_t dtype, const Tile& tile, int64_t key,
                          int64_t count) {
  const char* rows[kBlockM];
  for (int64_t lane = 0; lane < tile.count; ++lane) {
    rows[lane] = score_row_at(tensor, tile, lane, tile.query[lane]) + tensor.col * key;
  }
  with_elem(dtype, [&](auto elem) {
    using Elem = decltype(elem);
    if (tensor.col == Elem::kBytes) return pack_transposed<Elem>(out, rows, tile.count, count);
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t lane = 0; lane < kBlockM; ++lane) {
        out[n * kBlockM + lane] = lane < tile.count ? Elem::read(rows[lane] + tensor.col * n, 1)[0] : 0.0f;
      }
    }
  });
}

// Lanes whose entry of the block mask for key `key` is set, all ones or 0, into visible[kBlockM].
inline void gather_block_mask(int32_t* visible, const Params& p, const Tile& tile, int64_t key) {
  for (int64_t lane = 0; lane < kBlockM; ++lane) {
    const int64_t row = min_of<int64_t>(lane, tile.count - 1);
    const char* entry = score_row_at(p.block_mask, tile, row, tile.query[row] / p.mask_block_q) +
                        p.block_mask.col * (key / p.mask_block_k);
    visible[lane] = *entry ? -1 : 0;
  }
}

// Lanes that see key `key` by the tree mask, all ones or 0, into visible[kBlockM].
inline void gather_tree_mask(int32_t* visible, const Params& p, const Tile& tile, int64_t key) {
  const int64_t bit = key - (tile.sequence->sk - tile.sequence->sq);
  for (int64_t lane = 0; lane < kBlockM; ++lane) {
    const char* row = tree_row(p, *tile.sequence, tile.batch, tile.query[min_of<int64_t>(lane, tile.count - 1)]);
    visible[lane] = tree_bits(p, row, bit) & 1 ? -1 : 0;
  }
}

// ALiBi's slopes of the tile's lanes.
inline void alibi_slopes(float* slopes, const Params& p, const Tile& tile) {
  const auto of_lane = [&](int64_t lane) TESSERA_LAMBDA_INLINE {
    const char* entry =
        reinterpret_cast<const char*>(p.alibi_slopes) + p.alibi_batch * tile.batch + p.alibi_head * tile.head[lane];
    return *reinterpret_cast<const float*>(entry);
  };
  if (!p.pack_gqa) {
    for (int64_t lane = 0; lane < kBlockM; lane += kLanes) store(slopes + lane, splat(of_lane(0)));
    return;
  }
  for (int64_t lane = 0; lane < kBlockM; ++lane) slopes[lane] = of_lane(lane);
}

// scores[n][kBlockM], n = begin ... end - 1 for keys block_key + n: raw products become scores in natural units, -inf
// where the key is not visible. `slope`: 1 - tanh^2 of every entry, for the gradient through the softcap, or NULL.
// `scratch`: two tiles of the size of `scores`.
inline void apply_scores(const Params& p, const Tile& tile, float* scores, int64_t block_key, int64_t begin,
                         int64_t end, float* slope, float* scratch, int64_t tile_floats) {
  float* bias = scratch;
  float* mask = scratch + tile_floats;
  if (p.bias.data) gather_scores(bias + begin * kBlockM, p.bias, p.bias_dtype, tile, block_key + begin, end - begin);
  if (p.mask.data) gather_scores(mask + begin * kBlockM, p.mask, TESSERA_BOOL, tile, block_key + begin, end - begin);

  const bool by_position = block_key + begin < tile.all_low || block_key + end - 1 > tile.all_high;
  const int vecs = tile.vecs;
  alignas(64) float alibi[kBlockM];
  if (p.alibi_slopes) alibi_slopes(alibi, p, tile);
  const int32_t diagonal = static_cast<int32_t>(tile.sequence->sk - tile.sequence->sq);
  alignas(64) int32_t block_visible[kBlockM];
  alignas(64) int32_t in_tree[kBlockM];
  int64_t block_column = -1;
  const VecF minus_infinity = splat(-infinity());

  for (int64_t n = begin; n < end; ++n) {
    const int32_t key = static_cast<int32_t>(block_key + n);
    if (p.block_mask.data && key / p.mask_block_k != block_column) {
      block_column = key / p.mask_block_k;
      gather_block_mask(block_visible, p, tile, key);
    }
    if (p.tree_mask && by_position) gather_tree_mask(in_tree, p, tile, key);
    for (int c = 0; c < vecs; ++c) {
      float* at = scores + n * kBlockM + c * kLanes;
      VecF s = load(at), factor = splat(p.scale);
      if (p.softcap > 0) {
        s = tanh(s * splat(p.scale / p.softcap)), factor = splat(p.softcap);
        if (slope) store(slope + n * kBlockM + c * kLanes, splat(1.0f) - s * s);
      }
      // As written, whatever the compiler would fuse: forward and backward must make the same bits of a score.
      s = p.bias.data ? fma(s, factor, load(bias + n * kBlockM + c * kLanes)) : s * factor;
      if (p.alibi_slopes) {
        const VecI distance = load_as<VecI>(tile.query + c * kLanes) + (diagonal - key);
        s = fma(-load(alibi + c * kLanes), abs(to_float(distance)), s);
      }
      if (by_position) {
        const VecI visible =
            (load_as<VecI>(tile.low + c * kLanes) <= key) & (load_as<VecI>(tile.high + c * kLanes) >= key);
        s = select(visible, s, minus_infinity);
        if (p.tree_mask) s = select(load_as<VecI>(in_tree + c * kLanes), s, minus_infinity);
      }
      if (p.mask.data) s = select(load(mask + n * kBlockM + c * kLanes) != 0.0f, s, minus_infinity);
      if (p.block_mask.data) s = select(load_as<VecI>(block_visible + c * kLanes), s, minus_infinity);
      store(at, s);
    }
  }
}

// ---- dropout: Philox4x32-10 in lanes, core/philox.hpp has the definition ----

// What decides the entries of a vector's lanes, in groups of eight keys. Of a call's four counters, only the first
// differs between groups, and it is the same in all lanes; so the first two of ten rounds are, but for a few scalars, done
// once for all keys.
class DropoutWords {
  static constexpr uint32_t kFactor0 = 0xD2511F53u, kFactor1 = 0xCD9E8D57u, kStep0 = 0x9E3779B9u, kStep1 = 0xBB67AE85u;
  static constexpr int kRounds = 10, kSharedRounds = 2;

#if defined(TESSERA_AVX512)
  // Even and odd lanes apart, each in the lower half of 64 bits: a product is the low word where it lies and the high
  // word above it, and what stands in an operand's upper half is of no account.
  static constexpr int kParts = 2;
  typedef __m512i Words;
  TESSERA_INLINE static Words splat_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  TESSERA_INLINE static Words high(Words v) { return _mm512_shuffle_epi32(v, _MM_PERM_CDAB); }
  TESSERA_INLINE static Words product(Words v, uint32_t factor) {
    return _mm512_mul_epu32(v, _mm512_set1_epi64(factor));
  }
  TESSERA_INLINE static Words low_of(Words product) { return product; }
  TESSERA_INLINE static Words high_of(Words product) { return high(product); }
  TESSERA_INLINE static Words exclusive_or(Words a, Words b, Words c) {
    constexpr int kOfAllThree = 0x96;
    return _mm512_ternarylogic_epi32(a, b, c, kOfAllThree);
  }
  TESSERA_INLINE static Words part(VecU v, int odd) { return odd ? high((Words)v) : (Words)v; }
  TESSERA_INLINE static VecU joined(const Words (&parts)[kParts]) {
    return (VecU)_mm512_mask_shuffle_epi32(parts[0], 0xaaaa, parts[1], _MM_PERM_CDAB);
  }
#else
  static constexpr int kParts = 1;
  typedef VecU Words;
  struct HighLow {
    VecU high, low;
  };
  TESSERA_INLINE static Words splat_words(uint32_t x) { return splat(x); }
  TESSERA_INLINE static HighLow product(VecU a, uint32_t factor) {
#if defined(TESSERA_AVX2)
    const __m256i f = _mm256_set1_epi64x(factor);
    const __m256i even = _mm256_mul_epu32((__m256i)a, f);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), f);
    return {(VecU)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa),
            (VecU)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)};
#else
    HighLow r{};
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t wide = uint64_t{a[i]} * factor;
      r.high[i] = static_cast<uint32_t>(wide >> 32);
      r.low[i] = static_cast<uint32_t>(wide);
    }
    return r;
#endif
  }
  TESSERA_INLINE static VecU low_of(HighLow product) { return product.low; }
  TESSERA_INLINE static VecU high_of(HighLow product) { return product.high; }
  TESSERA_INLINE static VecU exclusive_or(VecU a, VecU b, VecU c) { return a ^ b ^ c; }
  TESSERA_INLINE static VecU part(VecU v, int) { return v; }
  TESSERA_INLINE static VecU joined(const Words (&parts)[kParts]) { return parts[0]; }
#endif

 public:
  // Of vector c of the tile.
  TESSERA_INLINE DropoutWords(const Params& p, const Tile& tile, int c)
      : key0_(p.dropout_key[0]), key1_(p.dropout_key[1]), offset_(p.dropout_offset) {
    const VecU query = load_as<VecU>(tile.query + c * kLanes);
    const VecU sequence_head = (VecU)(load_as<VecI>(tile.head + c * kLanes) +
                                      static_cast<int32_t>(tile.batch) * static_cast<int32_t>(p.heads_q));
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) {
      const auto by_head = product(part(sequence_head, i), kFactor1);
      const auto by_query = product(exclusive_or(high_of(by_head), part(query, i), splat_words(key0_)), kFactor0);
      head_low_[i] = low_of(by_head);
      query_low_[i] = low_of(by_query), query_high_[i] = high_of(by_query);
    }
  }

  // Word w holds what decides keys group + 2 quad + 8 w, in its low half, and the one after, in its high half. `group`: a
  // multiple of 32.
  TESSERA_INLINE void operator()(VecU (&words)[4], int64_t group, int32_t quad) const {
    Words x[4][kParts];
    begin(x, group, quad);
#pragma GCC unroll 8
    for (int i = kSharedRounds; i < kRounds; ++i) round(x, splat_words(round_key0(i)), splat_words(round_key1(i)));
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) words[w] = joined(x[w]);
  }
  // The same of two vectors, round by round: one waits where the other works.
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
    const uint64_t first = uint64_t{static_cast<uint32_t>(group / 32 * 4 + quad)} * kFactor0;
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

  uint32_t key0_, key1_, offset_;
  Words head_low_[kParts], query_low_[kParts], query_high_[kParts];
};

// factors[n][kBlockM] = `kept` where entry (tile's lane, block_key + n) is kept and 0 where it is dropped, for n = begin ...
// end - 1. block_key is a multiple of 32.
inline void dropout_factors(const Params& p, const Tile& tile, float* factors, int64_t block_key, int64_t begin,
                            int64_t end, float kept) {
  const VecI threshold = splat(static_cast<int32_t>(p.dropout_threshold));
  for (int c = 0; c < tile.vecs; ++c) {
    const DropoutWords draw(p, tile, c);
    for (int64_t group = begin / 32 * 32; group < end; group += 32) {
      for (int32_t quad = 0; quad < 4; ++quad) {
        VecU words[4];
        draw(words, block_key + group, quad);
        for (int w = 0; w < 4; ++w) {
          const int64_t n = group + quad * 2 + w * 8;
          const VecI low = (VecI)(words[w] & 0xffffu), high = (VecI)(words[w] >> 16);
          float* at = factors + n * kBlockM + c * kLanes;
          if (n >= begin && n < end) store(at, select(low >= threshold, splat(kept), VecF{}));
          if (n + 1 >= begin && n + 1 < end) {
            store(at + kBlockM, select(high >= threshold, splat(kept), VecF{}));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::cpu
