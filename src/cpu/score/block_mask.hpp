// Block mask: a key is visible if block_mask[batch, head, query / mask_block_q, key / mask_block_k] is not 0. Blocks
// that are the same for all of a tile's rows form runs of keys: hidden runs are skipped, visible ones need no mask.
#pragma once

#include "cpu/score/entry.hpp"

namespace tessera::cpu {
namespace {

struct BlockMask {
  static constexpr const char* kName = "block_mask";
  static constexpr bool kInAmxStages = true;
  static bool asked(const tessera_problem& problem) { return problem.block_mask.rank != 0; }
  TESSERA_INLINE static bool asked(const Params& p) { return p.block_mask.data != nullptr; }

  // Writes the lanes whose entry for key `key` is set to visible[kBlockM], as all ones or 0.
  template <class At>
  static void gather(int32_t* visible, const Params& p, const At& at, int64_t key) {
    for (int64_t lane = 0; lane < kBlockM; ++lane) {
      const int64_t row = min_of<int64_t>(lane, at.count() - 1);
      visible[lane] = sees(p, at.entry(row, key)) ? -1 : 0;
    }
  }

  template <class At>
  requires(!kLanesAreKeys<At>) class In {
   public:
    TESSERA_INLINE In(const Params& p, const At& at) : p_(p), at_(at) {}
    TESSERA_INLINE void begin_row(int64_t n) {
      const int64_t key = at_.key(n);
      if (key / p_.mask_block_k == column_) return;
      column_ = key / p_.mask_block_k;
      gather(visible_, p_, at_, key);
    }
    TESSERA_INLINE VecI visible(int64_t, int c) const { return load_as<VecI>(visible_ + c * kLanes); }

   private:
    const Params& p_;
    const At& at_;
    int64_t column_ = -1;
    alignas(64) int32_t visible_[kBlockM];
  };

  TESSERA_INLINE static bool sees(const Params& p, const ScoreEntry& at) {
    return *(score_row(p.block_mask, at.batch, at.head, at.query / p.mask_block_q) +
             p.block_mask.col * (at.key / p.mask_block_k)) != 0;
  }

  // The first run of rows begin ... end - 1 of the scores. They form a single run if the block size is not a multiple
  // of 32 keys (a group of dropout's), or if the tile has rows of several heads.
  template <class At>
  static KeyRun range(const Params& p, const At& at, int64_t begin, int64_t end) {
    constexpr int64_t kAlign = 32;
    if (p.mask_block_k % kAlign != 0 || !at.consecutive()) return {end, true, true};
    const int64_t first = at.query(0) / p.mask_block_q, last = at.query(at.count() - 1) / p.mask_block_q;
    int64_t col = at.key(begin) / p.mask_block_k;
    const auto rows_that_see = [&]() TESSERA_LAMBDA_INLINE {
      int64_t rows = 0;
      for (int64_t row = first; row <= last; ++row) {
        rows += *(score_row(p.block_mask, at.batch(), at.head(0), row) + p.block_mask.col * col) != 0;
      }
      return rows == 0 ? 0 : rows == last - first + 1 ? 2 : 1;  // none, all, some
    };
    const int sees = rows_that_see();
    int64_t to;
    do {
      to = ++col * p.mask_block_k - at.key(0);
    } while (to < end && rows_that_see() == sees);
    return {min_of(to, end), sees != 0, sees == 1};
  }

#if defined(TESSERA_COMPILE_AMX_BF16)
  // AMX's stages: clears bit n of a lane if the lane does not see key + n, n < keys <= 32.
  template <class At>
  TESSERA_INLINE static void hide(uint32_t* lanes, const Params& p, const At& at, int64_t key, int64_t keys) {
    alignas(64) int32_t visible[kBlockM];
    for (int64_t n = 0; n < keys;) {
      const int64_t end = min_of(keys, ((key + n) / p.mask_block_k + 1) * p.mask_block_k - key);
      const uint32_t block = first_elems(end) & ~first_elems(n);
      gather(visible, p, at, key + n);
      for (int64_t lane = 0; lane < kBlockM; ++lane) lanes[lane] &= static_cast<uint32_t>(visible[lane]) | ~block;
      n = end;
    }
  }
#endif
};

}  // namespace
}  // namespace tessera::cpu
