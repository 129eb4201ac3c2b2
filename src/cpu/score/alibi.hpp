// ALiBi (Press, Smith and Lewis, 2022): score -= slope[batch, head] |query + Sk - Sq - key|. The term does not depend
// on the product, so the gradient passes through unchanged. AMX's stages compute it in the exponential's units:
// StageOptions in amx_scores.hpp.
#pragma once

#include "cpu/score/entry.hpp"

namespace tessera::cpu {
namespace {

struct Alibi {
  static constexpr const char* kName = "alibi_slopes";
  static constexpr bool kInAmxStages = true;
  static bool asked(const tessera_problem& problem) { return problem.alibi_slopes.rank != 0; }
  TESSERA_INLINE static bool asked(const Params& p) { return p.alibi_slopes.data != nullptr; }

  TESSERA_INLINE static float slope(const Params& p, int64_t batch, int64_t head) {
    return *reinterpret_cast<const float*>(score_row(p.alibi_slopes, batch, head, 0));
  }
  // The slopes of vector c's lanes.
  template <class At>
  TESSERA_INLINE static VecF slopes(const Params& p, const At& at, int c) {
    return at.of_heads(c, [&](int64_t head) TESSERA_LAMBDA_INLINE { return slope(p, at.batch(), head); });
  }

  template <class At>
  class In {
   public:
    TESSERA_INLINE In(const Params& p, const At& at) : at_(at) {
      for (int c = 0; asked(p) && c < At::kVecs; ++c) minus_slopes_[c] = -slopes(p, at, c);
    }
    TESSERA_INLINE VecF apply(VecF score, int64_t n, int c) const {
      return fma(minus_slopes_[c], abs(to_float(at_.distance(n, c))), score);
    }

   private:
    const At& at_;
    VecF minus_slopes_[At::kVecs];
  };
};

}  // namespace
}  // namespace tessera::cpu
