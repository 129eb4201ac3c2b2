// What AMX's stages of 32 keys x 32 queries make of scores, forward and backward: the options, masks, exponentiation.
#pragma once

#include "cpu/amx_exponential.hpp"
#include "cpu/forward.hpp"
#include "cpu/score/amx_bias.hpp"
#include "cpu/score/amx_dropout.hpp"
#include "cpu/score/amx_softcap.hpp"

namespace tessera::cpu {
namespace {

// Whether some of the tile's rows may see keys of a stage. `keys`: of the stage.
TESSERA_INLINE bool shows_stage(const Params& p, const Tile& tile, int64_t key, int64_t keys) {
  return ScoreStep<QueryLanes>::range(p, {tile, key}, 0, keys).visible;
}
// Whether the scores of a stage that it shows need more than the scale and a mask by position.
TESSERA_INLINE bool stage_has_options(const Params& p, const Tile& tile, int64_t key, int64_t keys) {
  return hides_by_position(p) || ScoreStep<QueryLanes>::range(p, {tile, key}, 0, keys).options;
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

// What a stage's softmax has to look at: everything seen and no option, a mask by position, one option alone and
// everything seen, or anything. kSoftcap: of small scores; kAlibi: all keys on one side of the diagonal. kBiasInScores:
// everything seen, and S has the bias in it.
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
      : alibi(Alibi::asked(p)), dropout(Dropout::asked(p)), softcap(Softcap::asked(p)) {
    alignas(64) uint32_t lanes[kBlockM];
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) store(lanes + c * kLanes, seen_by_position(tile, c, key));
    for (int64_t lane = tile.count; lane < kBlockM; ++lane) lanes[lane] = 0;  // a bias has nothing there
    hide(ScoreOptions{}, lanes, p, {tile, key}, keys);
    if (Bias::asked(p)) {
      bias_rows.locate(p, tile, key);
      finite_bias = gather_bias(scratch, bias_rows, p, tile, key, keys), bias = scratch;
    }
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) seen[c] = load_as<VecU>(lanes + c * kLanes);
    cap = splat(softcap ? p.scale / p.softcap : 0.0f);
    if (alibi) {
      const QueryLanes at{tile, key};
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        slope[c] = Alibi::slopes(p, at, c) * (-kLog2e * kFixedPointOne);
        distance[c] = to_float(at.distance(0, c));
      }
    }
    kind = kind_of(p, s);
    if (kind == Scores::kAlibi && any(distance[0] <= 0.0f)) slope[0] = -slope[0], slope[1] = -slope[1];
  }

  // What StageExponential::kept asks for.
  TESSERA_INLINE void draw_kept(const Params& p, const Tile& tile, int64_t key) {
    if (dropout) keys_kept(kept, p, {tile, key});
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
  template <class... Option>
  TESSERA_INLINE static void hide(OptionList<Option...>, uint32_t* lanes, const Params& p, const QueryLanes& at,
                                  int64_t keys) {
    const auto of = [&]<class One>() TESSERA_LAMBDA_INLINE {
      if constexpr (requires { One::hide(lanes, p, at, at.key(0), keys); }) {
        if (One::asked(p) && !(HidesAfter<One> && at.key(keys) - 1 <= at.tile.all_high)) {
          One::hide(lanes, p, at, at.key(0), keys);
        }
      }
    };
    (of.template operator()<Option>(), ...);
  }
};

constexpr float kRowNumbers[kStageKeys] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                           16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
constexpr uint32_t kBits[kStageKeys] = {1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                        1u << 8,  1u << 9,  1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
                                        1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
                                        1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};

// A stage's scores, exponentiated against `against` (a row's stale max or LSE, none of them huge, log2 units). kSlope:
// with the softcap's slope. kPairs: arguments alone, those of PairExp2.
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
