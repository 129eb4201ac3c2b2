// The forward pass's softmax beside AMX's products: the exponential, what the options make of the scores, and a stage of 32
// keys x 32 queries, from S to pairs of P, in pieces small enough to stand between two products.
#pragma once

#include "cpu/amx_pack.hpp"
#include "cpu/forward.hpp"

namespace tessera::cpu {
namespace {

static_assert(kBlockM == 2 * kTileSide, "two tile registers of queries");
static_assert(kLanes == kTileSide, "a row of a tile is a vector");

constexpr int64_t kStageKeys = 2 * kTileSide;
constexpr int kUnits = kTileSide;             // of a stage's softmax: keys j and j + 16
constexpr float kFixedPointOne = 8388608.0f;  // 2^23

// 2^x by what floats are made of: x in fixed point with 23 fractional bits holds the exponent in its upper bits and, as a
// mantissa, 1 + the fraction, whose power of two is a polynomial of degree 4 (3.0e-6 relative, far below P's rounding to
// bfloat16) or 5 (1.9e-7), exact at integers. Out of range (x < -127, x >= 129, NaN) the sign comes out set, or an infinity
// or NaN. Of its operations seven or eight want the ports of multiply-adds, of which beside AMX's products there is one.
template <int kDegree>
class FixedPointExp2 {
  static_assert(kDegree == 4 || kDegree == 5);

 public:
  TESSERA_INLINE FixedPointExp2() {
    static constexpr float kCoefficients[2][6] = {
        {0.50941962f, 0.31350508f, 0.16511291f, -0.0014642763f, 0.013426687f},
        {0.4983631f, 0.3534897f, 0.10819555f, 0.038403124f, -0.00031863153f, 0.0018671317f}};
    const float* c = opaque(kCoefficients[kDegree - 4]);
#pragma GCC unroll 6
    for (int i = 0; i <= kDegree; ++i) c_[i] = splat(c[i]);
  }
  // 2^x, x in units of 2^-23.
  TESSERA_INLINE __m512i operator()(VecF units) const {
    const __m512i x = _mm512_cvtps_epi32((__m512)units);
    const __m512i mantissa = _mm512_set1_epi32(0x007fffff), one = _mm512_set1_epi32(0x3f800000);
    const VecF m = (VecF)_mm512_ternarylogic_epi32(x, mantissa, one, 0xea);  // (x & mantissa) | one
    VecF q = c_[kDegree];
#pragma GCC unroll 5
    for (int i = kDegree - 1; i >= 0; --i) q = fma(q, m, c_[i]);
    return _mm512_add_epi32((__m512i)q, _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xff800000u))));
  }

 private:
  VecF c_[kDegree + 1];
};

// Two vectors of float32 as pairs of bfloat16, low and high half of a word: half a unit added, the lower half dropped.
struct Rounded {
  __m512i bits;
  TESSERA_INLINE explicit Rounded(__m512i v) : bits(_mm512_add_epi32(v, _mm512_set1_epi32(0x8000))) {}
};
TESSERA_INLINE VecU join_words(Rounded low, Rounded high) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return (VecU)_mm512_ternarylogic_epi32(high.bits, upper, _mm512_srli_epi32(low.bits, 16), 0xea);
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

// What the options make of a stage of 32 keys: bits for what is seen and kept, and what is added to the scores.
struct StageOptions {
  VecU seen[2], kept[2];        // bit n of a lane: key + n
  const float* bias = nullptr;  // [32][kBlockM]
  VecF slope[2], distance[2];   // ALiBi: in the exponential's units; |query - key|, for the first key
  VecF dropout_scale, cap;      // 1 / (1 - p); scale / softcap
  bool alibi, dropout, softcap;

  // `keys`: of the stage. `scratch`: a bias's [32][kBlockM].
  TESSERA_INLINE StageOptions(const Params& p, const Tile& tile, int64_t key, int64_t keys, float* scratch)
      : alibi(p.alibi_slopes != nullptr), dropout(p.dropout_threshold != 0), softcap(p.softcap > 0) {
    alignas(64) uint32_t lanes[kBlockM];
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) store(lanes + c * kLanes, seen_by_position(tile, c, key));
    for (int64_t lane = tile.count; lane < kBlockM; ++lane) lanes[lane] = 0;  // a bias has nothing there
    if (p.mask.data) apply_mask(lanes, p, tile, key, keys);
    if (p.block_mask.data) apply_block_mask(lanes, p, tile, key, keys);
    if (p.bias.data) gather_scores(scratch, p.bias, p.bias_dtype, tile, key, keys), bias = scratch;
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      seen[c] = load_as<VecU>(lanes + c * kLanes);
      if (dropout) kept[c] = kept_keys(p, tile, c, key);
    }
    dropout_scale = splat(p.dropout_scale);
    cap = splat(softcap ? p.scale / p.softcap : 0.0f);
    if (alibi) {
      alignas(64) float slopes[kBlockM];
      alibi_slopes(slopes, p, tile);
      const int32_t diagonal = static_cast<int32_t>(tile.sequence->sk - tile.sequence->sq);
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        slope[c] = load(slopes + c * kLanes) * -kFixedPointOne;
        distance[c] = to_float(load_as<VecI>(tile.query + c * kLanes) + (diagonal - static_cast<int32_t>(key)));
      }
    }
  }

 private:
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

// What a job's optimistic softmax has summed, a lane a query.
struct JobSums {
  alignas(64) float sum[kBlockM];
  alignas(64) uint32_t out_of_range[kLanes];  // bits 15 and 31
  __mmask16 seen[2];                          // with options: rows that see a key of the job
};

enum class Scores { kAllSeen, kMasked, kOptions };

// The softmax of one stage: S [32][kBlockM] -> P [16 pairs of keys j, j + 16][kBlockM], some units at a time.
template <Scores kScores>
class StageSoftmax {
  static constexpr bool kOptions = kScores == Scores::kOptions;

 public:
  TESSERA_INLINE StageSoftmax(const Params& p, const Tile& tile, const JobSums& sums, const float* s, uint32_t* p_out,
                              int64_t key, const StageOptions* options)
      : s_(s),
        p_out_(p_out),
        options_(options),
        scale_(splat((kOptions && options->softcap ? p.softcap * kLog2e : p.scale_log2) * kFixedPointOne)),
        visible_{VisibleLanes(tile, 0, key), VisibleLanes(tile, 1, key)} {
    out_of_range_ = load_as<VecU>(sums.out_of_range);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      offset_[c] = load(tile.ref + c * kLanes) * -kFixedPointOne;
      sum_[c] = load(sums.sum + c * kLanes);
      seen_[c] = sums.seen[c];
    }
  }

  TESSERA_INLINE void run(int count) {
    const int end = min_of(unit_ + count, kUnits);
    for (; unit_ < end; ++unit_) {
      uint32_t* out = p_out_ + unit_ * kBlockM;
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        __m512i low = probability(unit_, c), high = probability(unit_ + kTileSide, c);
        if constexpr (kScores == Scores::kMasked) {
          low = _mm512_maskz_mov_epi32(visible_[c](0), low);
          high = _mm512_maskz_mov_epi32(visible_[c](kTileSide), high);
          visible_[c].next_key();
        }
        sum_[c] += (VecF)low + (VecF)high;
        if constexpr (kOptions) {
          out_of_range_ |= ((VecU)low | (VecU)high) & 0x80000000u;
          if (options_->dropout) low = kept(low, unit_, c), high = kept(high, unit_ + kTileSide, c);
        }
        const VecU pair = join_words(Rounded(low), Rounded(high));
        if constexpr (!kOptions) out_of_range_ |= pair;
        store(out + c * kLanes, pair);
      }
    }
  }
  // The rest of the stage.
  TESSERA_INLINE void finish(JobSums& sums) {
    run(kUnits);
    store(sums.out_of_range, out_of_range_);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      store(sums.sum + c * kLanes, sum_[c]);
      sums.seen[c] = seen_[c];
    }
  }

 private:
  // Of key n of the stage. What no key of the stage's options shows is 0.
  TESSERA_INLINE __m512i probability(int64_t n, int c) {
    VecF s = load(s_ + n * kBlockM + c * kLanes);
    if constexpr (!kOptions) return exp2_(fma(s, scale_, offset_[c]));
    VecF offset = offset_[c];
    __mmask16 sees = bit_of(options_->seen[c], n);
    if (options_->softcap) s = tanh_by_reciprocal(s * options_->cap);
    if (options_->bias) {
      const VecF bias = load(options_->bias + n * kBlockM + c * kLanes);
      sees &= _mm512_cmpneq_ps_mask((__m512)bias, _mm512_set1_ps(-infinity()));
      offset = fma(bias, splat(kLog2e * kFixedPointOne), offset);
    }
    if (options_->alibi) {
      offset = fma(options_->slope[c], abs(options_->distance[c] - splat(static_cast<float>(n))), offset);
    }
    seen_[c] |= sees;
    // Scores far below the reference (a bias of -1e30) are zeros, not a reason to do the job again.
    const VecF x = fma(s, scale_, offset);
    sees &= _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f * kFixedPointOne), _CMP_NLE_UQ);
    return _mm512_maskz_mov_epi32(sees, exp2_(x));
  }
  TESSERA_INLINE __m512i kept(__m512i e, int64_t n, int c) const {
    return _mm512_maskz_mov_epi32(bit_of(options_->kept[c], n), (__m512i)((VecF)e * options_->dropout_scale));
  }
  TESSERA_INLINE static __mmask16 bit_of(VecU lanes, int64_t n) {
    return _mm512_test_epi32_mask((__m512i)lanes, _mm512_set1_epi32(static_cast<int>(1u << n)));
  }

  const float* s_;
  uint32_t* p_out_;
  const StageOptions* options_;
  int unit_ = 0;
  FixedPointExp2<kScores == Scores::kAllSeen ? 4 : 5>
      exp2_;  // a row of few keys has its exponentials' errors in its LSE
  VecF scale_, offset_[2], sum_[2];
  VecU out_of_range_;
  VisibleLanes visible_[2];
  __mmask16 seen_[2];
};

}  // namespace
}  // namespace tessera::cpu
