// What AMX's stages of 32 keys x 32 queries make of scores, forward and backward: the options, masks, exponentiation.
#pragma once

#include "cpu/amx_exponential.hpp"
#include "cpu/amx_pack.hpp"
#include "cpu/forward.hpp"

namespace tessera::cpu {
namespace {

static_assert(kBlockM == 2 * kTileSide, "two tile registers of queries");
static_assert(kLanes == kTileSide, "a row of a tile is a vector");

constexpr int64_t kStageKeys = 2 * kTileSide;
constexpr int kUnits = kTileSide;  // of a stage's softmax: keys j and j + 16

// Whether the block mask shows keys of a stage to some of the tile's rows. `keys`: of the stage.
TESSERA_INLINE bool shows_stage(const Params& p, const Tile& tile, int64_t key, int64_t keys) {
  return key_run(p, tile, key, 0, keys).visible;
}
// Whether the scores of a stage that it shows need more than the scale and a mask by position.
TESSERA_INLINE bool stage_has_options(const Params& p, const Tile& tile, int64_t key, int64_t keys) {
  return p.tree_mask || key_run(p, tile, key, 0, keys).options;
}

// Which lanes see a key, by position: 0 <= key - low <= high - low, as one unsigned comparison.
struct VisibleLanes {
  VecU span, distance;
  // `key`: the first that is asked for. A row that sees nothing starts after all keys.
  TESSERA_INLINE VisibleLanes(const Tile& tile, int c, int64_t key) {
    const VecI low = load_as<VecI>(tile.low + c * kLanes), high = load_as<VecI>(tile.high + c * kLanes);
    const VecI first = low > high ? splat(0x7fffffff) : low;
    span = (VecU)(low > high ? splat(0) : high - low);
    distance = (VecU)(static_cast<int32_t>(key) - first);
  }
  TESSERA_INLINE __mmask16 operator()(uint32_t ahead) const {
    return _mm512_cmple_epu32_mask((__m512i)(distance + ahead), (__m512i)span);
  }
  TESSERA_INLINE void next_key() { distance += 1u; }
};

// Bit n of a lane: its row sees key + n, by position.
TESSERA_INLINE VecU seen_by_position(const Tile& tile, int c, int64_t key) {
  const VecI first = load_as<VecI>(tile.low + c * kLanes) - static_cast<int32_t>(key);
  const VecI last = load_as<VecI>(tile.high + c * kLanes) - static_cast<int32_t>(key);
  const __m512i all = _mm512_set1_epi32(-1);  // shifted by 32 or more: 0
  const __m512i from = _mm512_sllv_epi32(all, (__m512i)(first > 0 ? first : splat(0)));
  const __m512i to = _mm512_srlv_epi32(all, (__m512i)(last < 31 ? 31 - last : splat(0)));
  return (VecU)_mm512_and_si512(from, to);
}

// tanh as in simd.hpp, with a reciprocal and a Newton step in place of the division, which alone would take 16 cycles.
TESSERA_INLINE VecF tanh_by_reciprocal(VecF x) {
  x = min(splat(9.0f), max(splat(-9.0f), x));
  const TanhRatio ratio(x);
  const VecF estimate = (VecF)_mm512_rcp14_ps((__m512)ratio.denominator);
  const VecF reciprocal = estimate * fma(-ratio.denominator, estimate, splat(2.0f));
  return select(x * x == 81.0f, x * splat(1.0f / 9.0f), ratio.numerator * reciprocal);
}

// tanh(x) = x T(x^2) for |x| <= 0.4, minimax (9.8e-8 relative): no division, no bounds. x = cap s, and the cap is in the
// coefficients.
constexpr float kSmallTanh = 0.4f;
constexpr float kLeastCap = 1e-5f;  // whose seventh power is a normal number
class TanhOfSmall {
  static constexpr int kTerms = 4;

 public:
  TESSERA_INLINE TanhOfSmall(float factor, float cap) {
    static constexpr float kCoefficients[kTerms] = {0.99999988f, -0.33331361f, 0.13270977f, -0.047553603f};
    const float* c = opaque(kCoefficients);
    float power = factor * cap;
#pragma GCC unroll 4
    for (int i = 0; i < kTerms; ++i, power *= cap * cap) c_[i] = splat(c[i] * power);
  }
  // factor tanh(cap s) / s
  TESSERA_INLINE VecF ratio(VecF s) const {
    const VecF z = s * s;
    VecF t = fma(c_[3], z, c_[2]);
    t = fma(t, z, c_[1]);
    return fma(t, z, c_[0]);
  }

 private:
  VecF c_[kTerms];
};

// Whether no number of a stage's S is above `bound` in magnitude, or NaN.
TESSERA_INLINE bool all_within(const float* s, float bound) {
  __mmask16 within = 0xffff;
  const __m512 limit = _mm512_set1_ps(bound);
  for (int64_t n = 0; n < kStageKeys * kBlockM; n += 4 * kLanes) {
    const auto at = [&](int i) TESSERA_LAMBDA_INLINE { return (__m512)load(s + n + i * kLanes); };
    constexpr int kLargerMagnitude = 0x0b;  // of both, without its sign
    const __m512 ab = _mm512_range_ps(at(0), at(1), kLargerMagnitude);
    const __m512 cd = _mm512_range_ps(at(2), at(3), kLargerMagnitude);
    within &= _mm512_cmp_ps_mask(_mm512_range_ps(ab, cd, kLargerMagnitude), limit, _CMP_LE_OQ);
  }
  return within == 0xffff;
}

// What a stage's softmax has to look at: everything seen and no option, a mask by position, one option alone and everything
// seen, or anything. kSoftcap: of small scores; kAlibi: all keys on one side of the diagonal. kBiasInScores: everything seen, and S
// has the bias in it.
enum class Scores { kAllSeen, kBiasInScores, kMasked, kSoftcap, kBias, kAlibi, kDropout, kOptions };

// with.operator()<kind>(), of a kind that a stage with options has.
template <class With>
TESSERA_INLINE auto with_scores(Scores kind, const With& with) {
  switch (kind) {
    case Scores::kAllSeen:
      return with.template operator()<Scores::kAllSeen>();
    case Scores::kSoftcap:
      return with.template operator()<Scores::kSoftcap>();
    case Scores::kBias:
      return with.template operator()<Scores::kBias>();
    case Scores::kAlibi:
      return with.template operator()<Scores::kAlibi>();
    case Scores::kDropout:
      return with.template operator()<Scores::kDropout>();
    default:
      return with.template operator()<Scores::kOptions>();
  }
}

// A stage's rows of the bias. Those two stages on are asked for one by one, since all at once they would fill the first
// cache's miss buffers. The hardware does not foresee so many rows, and of a power of two of bytes they share a few sets.
struct BiasRows {
  const char* rows[kBlockM];
  int64_t ahead_bytes;
  bool second_line;

  TESSERA_INLINE void locate(const Params& p, const Tile& tile, int64_t key) {
    const ScoreTensor& bias = p.bias;
    const __m512i first =
        _mm512_set1_epi64(reinterpret_cast<int64_t>(bias.data) + bias.batch * tile.batch + bias.col * key);
    const __m512i head_bytes = _mm512_set1_epi64(bias.head), row_bytes = _mm512_set1_epi64(bias.row);
    constexpr int64_t kPointers = 8;  // a vector
    for (int64_t lane = 0; lane < kBlockM; lane += kPointers) {
      const auto wide = [lane](const int32_t* numbers) TESSERA_LAMBDA_INLINE {
        return _mm512_cvtepi32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + lane)));
      };
      const __m512i offset = _mm512_add_epi64(_mm512_mullo_epi64(wide(tile.head), head_bytes),
                                              _mm512_mullo_epi64(wide(tile.query), row_bytes));
      _mm512_storeu_si512(rows + lane, _mm512_add_epi64(first, offset));
    }
    ahead_bytes = 2 * kStageKeys * bias.col;
    second_line = p.bias_dtype == TESSERA_FLOAT32;
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

// out[n][kBlockM] = bias[query of the lane][key + n] as float32, zeros past the last row and key. False: there is a -inf among
// them, or there may be.
TESSERA_INLINE bool gather_bias(float* out, const BiasRows& bias, const Params& p, const Tile& tile, int64_t key,
                                int64_t keys) {
  const bool bf16 = p.bias_dtype == TESSERA_BFLOAT16 && p.bias.col == 2;
  const bool f32 = p.bias_dtype == TESSERA_FLOAT32 && p.bias.col == 4;
  if (!bf16 && !f32) {
    gather_scores(out, p.bias, p.bias_dtype, tile, key, keys);
    return false;
  }
  // A transposition of 32-bit words: of pairs of bfloat16, which a shift and a mask split, or of float32. As unsigned numbers
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
  constexpr uint16_t kMinusInfinity = 0xff80;  // of float32 the upper half
  const __m512i upper = bf16 ? largest : _mm512_srli_epi32(largest, 16);
  return _mm512_cmpge_epu16_mask(upper, _mm512_set1_epi16(static_cast<int16_t>(kMinusInfinity))) == 0;
}

// Which of 32 keys dropout keeps, by lanes of both vectors: key n is bit kept_bit(n), so that both halves of a word stay where they
// are.
constexpr uint32_t kept_bit(uint32_t n) { return n % 2 * 16 + n % 8 / 2 * 4 + n / 8; }
TESSERA_INLINE void keys_kept(VecU (&kept)[2], const Params& p, const Tile& tile, int64_t key) {
  const __m512i threshold = _mm512_set1_epi16(static_cast<int16_t>(p.dropout_threshold));
  const DropoutWords draw[2] = {DropoutWords(p, tile, 0), DropoutWords(p, tile, 1)};
  kept[0] = kept[1] = VecU{};
  for (int32_t quad = 0; quad < 4; ++quad) {
    VecU words[2][4];
    DropoutWords::of_both(draw, words, key, quad);
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

// What the options make of a stage of 32 keys: bits for what is seen and kept, and what is added to the scores.
struct StageOptions {
  VecU seen[2];                 // bit n of a lane: key + n
  VecU kept[2];                 // draw_kept: likewise, bit kept_bit(n)
  const float* bias = nullptr;  // [32][kBlockM]
  BiasRows bias_rows;
  VecF slope[2],
      distance[2];  // ALiBi: in the exponential's units, kAlibi: times the sign of query - key; that, first key
  VecF cap;         // scale / softcap
  bool alibi, dropout, softcap, finite_bias = true;
  Scores kind;

  // `keys`: of the stage. `s`: its S. `scratch`: a bias's [32][kBlockM].
  TESSERA_INLINE StageOptions(const Params& p, const Tile& tile, int64_t key, int64_t keys, const float* s,
                              float* scratch)
      : alibi(p.alibi_slopes != nullptr), dropout(p.dropout_threshold != 0), softcap(p.softcap > 0) {
    alignas(64) uint32_t lanes[kBlockM];
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) store(lanes + c * kLanes, seen_by_position(tile, c, key));
    for (int64_t lane = tile.count; lane < kBlockM; ++lane) lanes[lane] = 0;  // a bias has nothing there
    if (p.tree_mask && key + keys - 1 > tile.all_high) apply_tree_mask(lanes, p, tile, key);
    if (p.mask.data) apply_mask(lanes, p, tile, key, keys);
    if (p.block_mask.data) apply_block_mask(lanes, p, tile, key, keys);
    if (p.bias.data) {
      bias_rows.locate(p, tile, key);
      finite_bias = gather_bias(scratch, bias_rows, p, tile, key, keys), bias = scratch;
    }
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) seen[c] = load_as<VecU>(lanes + c * kLanes);
    cap = splat(softcap ? p.scale / p.softcap : 0.0f);
    if (alibi) {
      alignas(64) float slopes[kBlockM];
      alibi_slopes(slopes, p, tile);
      const int32_t diagonal = static_cast<int32_t>(tile.sequence->sk - tile.sequence->sq);
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        slope[c] = load(slopes + c * kLanes) * (-kLog2e * kFixedPointOne);
        distance[c] = to_float(load_as<VecI>(tile.query + c * kLanes) + (diagonal - static_cast<int32_t>(key)));
      }
    }
    kind = kind_of(p, s);
    if (kind == Scores::kAlibi && any(distance[0] <= 0.0f)) slope[0] = -slope[0], slope[1] = -slope[1];
  }

  // What StageExponential::kept asks for.
  TESSERA_INLINE void draw_kept(const Params& p, const Tile& tile, int64_t key) {
    if (dropout) keys_kept(kept, p, tile, key);
  }

 private:
  TESSERA_INLINE Scores kind_of(const Params& p, const float* s) const {
    const int count = alibi + dropout + softcap + (bias != nullptr);
    if (count > 1 || any((VecI)(seen[0] & seen[1]) != -1)) return Scores::kOptions;
    if (count == 0) return Scores::kAllSeen;
    if (bias) return finite_bias ? Scores::kBias : Scores::kOptions;
    if (dropout) return Scores::kDropout;
    if (softcap) {
      const float cap_of_scores = p.softcap / __builtin_fabsf(p.scale);
      const bool small = cap_of_scores < 1 / kLeastCap && all_within(s, kSmallTanh * cap_of_scores);
      return small ? Scores::kSoftcap : Scores::kOptions;
    }
    const VecI before = (distance[0] >= kStageKeys - 1.0f) & (distance[1] >= kStageKeys - 1.0f);
    const VecI after = (distance[0] <= 0.0f) & (distance[1] <= 0.0f);
    return any(~before) && any(~after) ? Scores::kOptions : Scores::kAlibi;
  }
  TESSERA_INLINE static void apply_tree_mask(uint32_t* lanes, const Params& p, const Tile& tile, int64_t key) {
    const int64_t bit = key - (tile.sequence->sk - tile.sequence->sq);
    for (int64_t lane = 0; lane < tile.count; ++lane) {
      lanes[lane] &= tree_bits(p, tree_row(p, *tile.sequence, tile.batch, tile.query[lane]), bit);
    }
  }
  TESSERA_INLINE static void apply_mask(uint32_t* lanes, const Params& p, const Tile& tile, int64_t key, int64_t keys) {
    for (int64_t lane = 0; lane < tile.count; ++lane) {
      const char* row = score_row_at(p.mask, tile, lane, tile.query[lane]) + p.mask.col * key;
      uint32_t bits = 0;
      if (p.mask.col == 1) {
        const __m256i bytes = _mm256_maskz_loadu_epi8(first_elems(keys), row);
        bits = _mm256_test_epi8_mask(bytes, bytes);
      } else {
        for (int64_t n = 0; n < keys; ++n) bits |= uint32_t{row[p.mask.col * n] != 0} << n;
      }
      lanes[lane] &= bits;
    }
  }
  TESSERA_INLINE static void apply_block_mask(uint32_t* lanes, const Params& p, const Tile& tile, int64_t key,
                                              int64_t keys) {
    alignas(64) int32_t visible[kBlockM];
    for (int64_t n = 0; n < keys;) {
      const int64_t end = min_of(keys, ((key + n) / p.mask_block_k + 1) * p.mask_block_k - key);
      const uint32_t block = first_elems(end) & ~first_elems(n);
      gather_block_mask(visible, p, tile, key + n);
      for (int64_t lane = 0; lane < kBlockM; ++lane) lanes[lane] &= static_cast<uint32_t>(visible[lane]) | ~block;
      n = end;
    }
  }
};

constexpr float kRowNumbers[kStageKeys] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                           16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
constexpr uint32_t kBits[kStageKeys] = {1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                        1u << 8,  1u << 9,  1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
                                        1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
                                        1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};

// A stage's scores, exponentiated against `against` (a row's stale max or LSE, none of them huge, log2 units). kSlope: with the softcap's slope.
// kPairs: arguments alone, those of PairExp2.
template <Scores kScores, int kDegree, bool kSlope, bool kPairs = false>
class StageExponential {
  // Arguments are kOne x + kZero, at least kLeast where scores may be far below.
  static constexpr float kOne = kPairs ? PairExp2::kOne : kFixedPointOne, kZero = kPairs ? PairExp2::kZero : 0.0f,
                         kLeast = kPairs ? PairExp2::kLeast : -127.0f * kFixedPointOne;
  static constexpr bool kAny = kScores == Scores::kOptions;
  static constexpr bool kSmallSoftcap = kScores == Scores::kSoftcap;

 public:
  TESSERA_INLINE StageExponential(const Params& p, const Tile& tile, const float* against, int64_t key,
                                  const StageOptions* options)
      : options_(options),
        tanh_(kSmallSoftcap && !kSlope ? p.softcap * kLog2e * kOne : 1.0f, kSmallSoftcap ? p.scale / p.softcap : 0.0f),
        scale_(splat((kSmallSoftcap || (kAny && options->softcap) ? p.softcap * kLog2e : p.scale_log2) * kOne)),
        visible_{VisibleLanes(tile, 0, key), VisibleLanes(tile, 1, key)} {
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      offset_[c] = fma(load(against + c * kLanes), splat(-kOne), splat(kZero));
      if constexpr (kScores == Scores::kAlibi || kAny) slope_[c] = options->slope[c] * (kOne / kFixedPointOne);
      if constexpr (kScores == Scores::kAlibi) offset_[c] = fma(slope_[c], options->distance[c], offset_[c]);
    }
  }

  struct Entry {
    __m512i probability;  // 0 where the entry is masked; the sign is set where it is out of range
    __mmask16 seen;
    VecF slope;  // kSlope: of the softcap
  };
  TESSERA_INLINE static constexpr bool masks() { return kScores == Scores::kMasked || kAny; }
  TESSERA_INLINE bool softcap() const { return kSmallSoftcap || (kAny && options_->softcap); }
  TESSERA_INLINE bool dropout() const { return kScores == Scores::kDropout || (kAny && options_->dropout); }

  // The exponential's argument, of key n = unit or, kUpper, unit + 16 of vector c; `out`: what else the entry is.
  template <bool kUpper>
  TESSERA_INLINE VecF argument(const float* stage, int64_t unit, int c, Entry& out) const {
    const int64_t n = unit + (kUpper ? kTileSide : 0);
    VecF s = load(stage + n * kBlockM + c * kLanes);
    VecF offset = offset_[c];
    if constexpr (kSmallSoftcap && !kSlope) return fma(s, tanh_.ratio(s), offset);
    if (softcap()) {
      if constexpr (kSmallSoftcap) {
        s = s * tanh_.ratio(s);
      } else {
        s = tanh_by_reciprocal(s * options_->cap);
      }
      if constexpr (kSlope) out.slope = fma(-s, s, splat(1.0f));
    }
    if (kScores == Scores::kBias || (kAny && options_->bias)) {
      const VecF bias = load(options_->bias + n * kBlockM + c * kLanes);
      if constexpr (kAny) out.seen &= _mm512_cmpneq_ps_mask((__m512)bias, _mm512_set1_ps(-infinity()));
      offset = fma(bias, splat(kLog2e * kOne), offset);
    }
    if constexpr (kScores == Scores::kAlibi) offset = fma(-slope_[c], row_number(n), offset);
    if (kAny && options_->alibi) offset = fma(slope_[c], abs(options_->distance[c] - row_number(n)), offset);
    VecF x = fma(s, scale_, offset);
    // Scores far below (a bias of -1e30) are zeros, as the least weight comes out, no reason to do the job again.
    if constexpr (kAny || kScores == Scores::kBias || kScores == Scores::kAlibi) x = max(splat(kLeast), x);
    return x;
  }
  // That of a pair's half: kPairs. 0 where the entry is masked, whose weight is 0.
  template <bool kUpper>
  TESSERA_INLINE VecF argument(const float* stage, int64_t unit, int c) const {
    Entry unused{};
    const VecF x = argument<kUpper>(stage, unit, c, unused);
    if constexpr (!masks()) return x;
    return (VecF)_mm512_maskz_mov_ps(visible_[c](kUpper ? kTileSide : 0), (__m512)x);
  }

  // Of key n = unit or, kUpper, unit + 16 of vector c.
  template <bool kUpper>
  TESSERA_INLINE Entry entry(const float* stage, int64_t unit, int c) const {
    Entry out{{}, 0xffff, splat(1.0f)};
    if constexpr (kScores == Scores::kMasked) out.seen = visible_[c](kUpper ? kTileSide : 0);
    if constexpr (kAny) out.seen = bit(options_->seen[c], static_cast<uint32_t>(unit) + (kUpper ? kTileSide : 0));
    out.probability = exp2_(argument<kUpper>(stage, unit, c, out));
    if constexpr (masks()) out.probability = _mm512_maskz_mov_epi32(out.seen, out.probability);
    return out;
  }
  // After a unit: masks by position are told key by key.
  TESSERA_INLINE void next_unit(int c) {
    if constexpr (kScores == Scores::kMasked) visible_[c].next_key();
  }
  // Of a number of the entry: itself where dropout keeps the entry, else 0.
  template <bool kUpper>
  TESSERA_INLINE VecF kept(int64_t unit, int c, VecF number) const {
    const uint32_t n = static_cast<uint32_t>(unit) + (kUpper ? kTileSide : 0);
    return (VecF)_mm512_maskz_mov_ps(bit(options_->kept[c], kept_bit(n)), (__m512)number);
  }
  // Asks for the rows of a later stage's bias.
  TESSERA_INLINE void prefetch_bias(int64_t unit) const {
    if (kScores == Scores::kBias || (kAny && options_->bias)) options_->bias_rows.prefetch(unit);
  }

 private:
  TESSERA_INLINE static VecF row_number(int64_t n) { return splat(*opaque(kRowNumbers + n)); }
  TESSERA_INLINE static __mmask16 bit(VecU lanes, uint32_t n) {
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)splat(*opaque(kBits + n)));
  }

  const StageOptions* options_;
  FixedPointExp2<kDegree> exp2_;
  TanhOfSmall tanh_;
  VecF scale_, offset_[2], slope_[2];
  VisibleLanes visible_[2];
};

}  // namespace
}  // namespace tessera::cpu
