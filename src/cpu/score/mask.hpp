// Mask: a key is visible if mask[batch, head, query, key] is not 0.
#pragma once

#include "cpu/score/bias.hpp"

namespace tessera::cpu {
namespace {

struct Mask {
  static constexpr const char* kName = "mask";
  static bool asked(const tessera_problem& problem) { return problem.mask.rank != 0; }
  TESSERA_INLINE static bool asked(const Params& p) { return p.mask.data != nullptr; }
  static constexpr int64_t kLoadedTiles = 1;

  template <class At>
  requires(!kLanesAreKeys<At>) class In {
   public:
    TESSERA_INLINE In(const Params& p, const At& at) : p_(p), at_(at) {}
    TESSERA_INLINE void load(int64_t begin, int64_t end, ScoreTiles& tiles) {
      mask_ = tiles.take();
      gather_scores(mask_ + begin * kBlockM, p_.mask, TESSERA_BOOL, at_, at_.key(begin), end - begin);
    }
    TESSERA_INLINE VecI visible(int64_t n, int c) const {
      return ::tessera::cpu::load(mask_ + n * kBlockM + c * kLanes) != 0.0f;
    }

   private:
    const Params& p_;
    const At& at_;
    float* mask_ = nullptr;
  };

  TESSERA_INLINE static bool sees(const Params& p, const ScoreEntry& at) {
    return *(score_row(p.mask, at.batch, at.head, at.query) + p.mask.col * at.key) != 0;
  }

#if defined(TESSERA_COMPILE_AMX_BF16)
  // AMX's stages: clears bit n of a lane if the lane does not see key + n, n < keys <= 32.
  template <class At>
  TESSERA_INLINE static void hide(uint32_t* lanes, const Params& p, const At& at, int64_t key, int64_t keys) {
    for (int64_t lane = 0; lane < at.count(); ++lane) {
      const char* row = score_row(p.mask, at.batch(), at.head(lane), at.query(lane)) + p.mask.col * key;
      uint32_t bits = 0;
      if (p.mask.col == 1) {
        bits = nonzero_bytes(row, keys);
      } else {
        for (int64_t n = 0; n < keys; ++n) bits |= uint32_t{row[p.mask.col * n] != 0} << n;
      }
      lanes[lane] &= bits;
    }
  }
#endif
};

}  // namespace
}  // namespace tessera::cpu
