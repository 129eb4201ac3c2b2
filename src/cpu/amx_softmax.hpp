// The forward pass's softmax beside AMX's products: a stage of 32 keys x 32 queries, from S to pairs of P, in pieces
// small enough to run between two products.
#pragma once

#include "cpu/amx_scores.hpp"

namespace tessera::cpu {
namespace {

// The sums of a job's softmax with the stale max; a lane is a query.
struct JobSums {
  alignas(64) float sum[kBlockM];
  alignas(64) uint32_t largest[kLanes];  // weights, pairs of bfloat16; sign set: out of range
  VecU seen[2];                          // with options: the keys of the job that rows see, by position and masks
};

// Used without dropout.
struct AllPairs {
  TESSERA_INLINE static int64_t unit(int64_t index) { return index; }
  TESSERA_INLINE AllPairs(const Params&, const QueryLanes&) {}
  TESSERA_INLINE VecU operator()(int64_t, int, VecU pair) const { return pair; }
  TESSERA_INLINE void next(int64_t) const {}
};
template <bool kDropout>
struct PairsOf {
  typedef AllPairs Type;
};
template <>
struct PairsOf<true> {
  typedef KeptPairs Type;
};

// The softmax of one stage: S [32][kBlockM] -> P [16 pairs of keys j, j + 16][kBlockM], some units at a time. Dropped
// entries are 0; kept ones are not scaled, since O is scaled at the end. kPairs: uses PairExp2, and the sums are of the
// rounded weights of P.
template <Scores kScores, bool kPairs>
class StageSoftmax {
  // In a row of few keys, or few that count, the errors of the exponentials are visible in the LSE.
  static constexpr int kDegree = kScores == Scores::kAllSeen || kScores == Scores::kBiasInScores ||
                                         kScores == Scores::kSoftcap || kScores == Scores::kDropout
                                     ? 4
                                     : 5;

 public:
  TESSERA_INLINE StageSoftmax(const Params& p, const Tile& tile, const JobSums& sums, const float* s, uint32_t* p_out,
                              int64_t key, const StageOptions* options)
      : s_(s), p_out_(p_out), exponential_(p, tile, tile.offset, key, options), pairs_(p, {tile, key}) {
    largest_ = kPairs ? VecU{} : load_as<VecU>(sums.largest);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) sum_[c] = load(sums.sum + c * kLanes);
  }

  // Up to unit `end`.
  TESSERA_INLINE void run_to(int end) {
    for (end = min_of(end, kUnits); index_ < end;) {
      half_unit<0>();
      half_unit<1>();
    }
  }
  // The next kCount halves of units, which are known at compile time to exist.
  template <int kCount>
  TESSERA_INLINE void run_halves() {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      if (half_) {
        half_unit<1>();
      } else {
        half_unit<0>();
      }
      // otherwise gcc would postpone the sums of a whole unrolled stage, and spill their operands
      compute_here(sum_[0]), compute_here(sum_[1]), compute_here(largest_);
    }
  }
  // The rest of the stage.
  TESSERA_INLINE void finish(JobSums& sums) {
    run_to(kUnits);
    if constexpr (kPairs) {
      const VecU before = load_as<VecU>(sums.largest);
      largest_ = (VecU)_mm512_max_epu16((__m512i)PairExp2::weights_of(largest_), (__m512i)before);
    }
    store(sums.largest, largest_);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) store(sums.sum + c * kLanes, sum_[c]);
  }

 private:
  // Vector c of the next unit.
  template <int c>
  TESSERA_INLINE void half_unit() {
    const int64_t unit = pairs_.unit(index_);
    VecU pair;
    if constexpr (kPairs) {
      pair = pair_exp2_(exponential_.template argument<false>(s_, unit, c),
                        exponential_.template argument<true>(s_, unit, c), largest_);
      sum_[c] = pair_exp2_.add(sum_[c], pair);
    } else {
      const __m512i low = exponential_.template entry<false>(s_, unit, c).probability;
      const __m512i high = exponential_.template entry<true>(s_, unit, c).probability;
      sum_[c] += (VecF)low + (VecF)high;
      pair = join_(low, high);
      largest_ = (VecU)_mm512_max_epu16((__m512i)largest_, (__m512i)pair);  // before dropout
      if (kScores == Scores::kOptions && exponential_.dropout()) {
        pair = join_((__m512i)exponential_.template kept<false>(unit, c, (VecF)low),
                     (__m512i)exponential_.template kept<true>(unit, c, (VecF)high));
      }
    }
    exponential_.next_unit(c);
    store(p_out_ + unit * kBlockM + c * kLanes, pairs_(index_, c, pair));
    half_ = c == 0;
    if (half_) return;
    pairs_.next(index_);
    exponential_.prefetch_bias(unit);
    ++index_;
  }

  const float* s_;
  uint32_t* p_out_;
  int index_ = 0;      // of the next unit
  bool half_ = false;  // its first half is done
  StageExponential<kScores, kDegree, false, kPairs> exponential_;
  typename PairsOf<kScores == Scores::kDropout>::Type pairs_;
  JoinRounded join_;
  PairExp2 pair_exp2_;
  VecF sum_[2];
  VecU largest_;  // weights; kPairs: exponents
};

}  // namespace
}  // namespace tessera::cpu
