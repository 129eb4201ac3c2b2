// Tree mask: key Sk - Sq + n is visible to a query if bit n of the query's words is set; keys before these, and bits
// past the last word, are visible. It counts as a positional mask, which cuts only the tiles that reach the keys with
// bits.
#pragma once

#include "cpu/score/entry.hpp"

namespace tessera::cpu {
namespace {

struct TreeMask {
  static constexpr const char* kName = "tree_mask";
  static constexpr bool kInAmxStages = true;
  static bool asked(const tessera_problem& problem) { return problem.tree_mask.rank != 0; }
  TESSERA_INLINE static bool asked(const Params& p) { return p.tree_mask.data != nullptr; }

  // The last key that has no bit and is therefore visible to all queries that see it by position.
  TESSERA_INLINE static int64_t last_full_key(const Sequence& sequence) {
    return max_of<int64_t>(sequence.sk - sequence.sq, 0) - 1;
  }

  // Bits of a query for key `key` and the next 31; a key without a bit has 1.
  TESSERA_INLINE static uint32_t bits(const Params& p, const ScoreEntry& at) {
    const char* row = score_row(p.tree_mask, at.batch, 0, at.sequence.q_begin + at.query);
    const int64_t bit = at.key - (at.sequence.sk - at.sequence.sq), first = bit >> 5;
    const auto word = [&](int64_t n) TESSERA_LAMBDA_INLINE {
      return n >= 0 && n < p.tree_mask.cols ? *reinterpret_cast<const uint32_t*>(row + p.tree_mask.col * n) : ~0u;
    };
    return static_cast<uint32_t>((uint64_t{word(first + 1)} << 32 | word(first)) >> (bit & 31));
  }
  TESSERA_INLINE static bool sees(const Params& p, const ScoreEntry& at) { return bits(p, at) & 1; }

  template <class At>
  class In {
   public:
    TESSERA_INLINE In(const Params& p, const At& at) : p_(p), at_(at) {}
    TESSERA_INLINE void begin_row(int64_t n) {
      if constexpr (kLanesAreKeys<At>) {
        bits_ = bits(p_, at_.entry(0, at_.key(n)));
      } else {
        for (int64_t lane = 0; lane < At::kVecs * kLanes; ++lane) {
          visible_[lane] = sees(p_, at_.entry(min_of<int64_t>(lane, at_.count() - 1), at_.key(n))) ? -1 : 0;
        }
      }
    }
    TESSERA_INLINE VecI visible(int64_t, int c) const {
      if constexpr (kLanesAreKeys<At>) {
        return ((splat(static_cast<int32_t>(bits_)) >> iota<VecI>()) & 1) != 0;
      } else {
        return load_as<VecI>(visible_ + c * kLanes);
      }
    }

   private:
    const Params& p_;
    const At& at_;
    uint32_t bits_ = 0;
    alignas(64) int32_t visible_[At::kVecs * kLanes];
  };

#if defined(TESSERA_COMPILE_AMX_BF16)
  // AMX's stages: clears bit n of a lane if the lane does not see key + n, n < keys <= 32.
  template <class At>
  TESSERA_INLINE static void hide(uint32_t* lanes, const Params& p, const At& at, int64_t key, int64_t) {
    for (int64_t lane = 0; lane < at.count(); ++lane) lanes[lane] &= bits(p, at.entry(lane, key));
  }
#endif
};

}  // namespace
}  // namespace tessera::cpu
