// Softcap: score = cap tanh(scale q.k / cap). AMX's stages have tanh in other forms: amx_softcap.hpp.
#pragma once

#include "cpu/score/entry.hpp"

namespace tessera::cpu {
namespace {

// A score before its last multiplication, with which the next addition is fused.
struct Scaled {
  VecF value, factor;
};

struct Softcap {
  static constexpr const char* kName = "softcap";
  static constexpr bool kInAmxStages = true;
  static bool asked(const tessera_problem& problem) { return problem.softcap > 0; }
  TESSERA_INLINE static bool asked(const Params& p) { return p.softcap > 0; }

  template <class At>
  class In {
   public:
    TESSERA_INLINE In(const Params& p, const At&)
        : to_cap_(splat(asked(p) ? p.scale / p.softcap : 0.0f)), cap_(splat(p.softcap)) {}
    TESSERA_INLINE Scaled scaled(VecF product) const { return {tanh(product * to_cap_), cap_}; }

   private:
    VecF to_cap_, cap_;
  };

  // The gradient of the score with respect to scale q.k, from the tanh that `scaled` returns; and the factor of the
  // gradient of the score.
  TESSERA_INLINE static VecF slope(VecF tanh_of_score) { return splat(1.0f) - tanh_of_score * tanh_of_score; }
  TESSERA_INLINE static VecF gradient(VecF d_score, VecF slope) { return d_score * slope; }
};

}  // namespace
}  // namespace tessera::cpu
