// Bias: score += bias[batch, head, query, key]; -inf hides the key. d_bias = dS, summed over the broadcast dimensions.
// AMX's stages gather it in their own way, or add it within a product: amx_bias.hpp.
#pragma once

#include "cpu/score/softcap.hpp"
#include "cpu/transpose.hpp"

namespace tessera::cpu {
namespace {

// out[n][kBlockM] = tensor[batch, head, query, key + n] as float32 for the lanes of the tile (0 past the end) and n <
// count.
template <class At>
inline void gather_scores(float* out, const ScoreTensor& tensor, int32_t dtype, const At& at, int64_t key,
                          int64_t count) {
  const char* rows[kBlockM];
  for (int64_t lane = 0; lane < at.count(); ++lane) {
    rows[lane] = score_row(tensor, at.batch(), at.head(lane), at.query(lane)) + tensor.col * key;
  }
  with_elem(dtype, [&](auto elem) {
    using Elem = decltype(elem);
    if (tensor.col == Elem::kBytes) return pack_transposed<Elem>(out, rows, at.count(), count);
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t lane = 0; lane < kBlockM; ++lane) {
        out[n * kBlockM + lane] = lane < at.count() ? Elem::read(rows[lane] + tensor.col * n, 1)[0] : 0.0f;
      }
    }
  });
}

struct Bias {
  static constexpr const char* kName = "bias";
  static constexpr bool kInAmxStages = true;
  static bool asked(const tessera_problem& problem) { return problem.bias.rank != 0; }
  TESSERA_INLINE static bool asked(const Params& p) { return p.bias.data != nullptr; }
  // The number of tiles of scratch that `load` fills.
  static constexpr int64_t kLoadedTiles = 1;

  template <class At>
  requires(!kLanesAreKeys<At>) class In {
   public:
    TESSERA_INLINE In(const Params& p, const At& at) : p_(p), at_(at) {}
    TESSERA_INLINE void load(int64_t begin, int64_t end, ScoreTiles& tiles) {
      bias_ = tiles.take();
      gather_scores(bias_ + begin * kBlockM, p_.bias, p_.bias.dtype, at_, at_.key(begin), end - begin);
    }
    TESSERA_INLINE VecF add(const Scaled& score, int64_t n, int c) const {
      return fma(score.value, score.factor, ::tessera::cpu::load(bias_ + n * kBlockM + c * kLanes));
    }

   private:
    const Params& p_;
    const At& at_;
    float* bias_ = nullptr;
  };

  TESSERA_INLINE static bool sees(const Params& p, const ScoreEntry& at) {
    const char* entry = score_row(p.bias, at.batch, at.head, at.query) + p.bias.col * at.key;
    bool sees = true;
    with_elem(p.bias.dtype, [&](auto elem) { sees = decltype(elem)::read(entry, 1)[0] != -infinity(); });
    return sees;
  }

  static bool collects(const Params& p) { return p.d_bias != nullptr; }
  // d_bias[batch, head, query, key] += dS, for the tile's queries and `count` keys from `key`. dS [count][kBlockM].
  // `rows`: scratch, [kBlockM][kKeyBlock].
  template <class At>
  static inline void collect(const Params& p, const At& at, const float* dS, float* rows, int64_t key, int64_t count) {
    const auto row_of = [&](int64_t lane) {
      return reinterpret_cast<float*>(p.d_bias + p.d_bias_batch * at.batch() + p.d_bias_head * at.head(lane) +
                                      p.d_bias_row * at.query(lane)) +
             key;
    };
    if (p.d_bias_row == 0) {
      float* out = row_of(0);
      for (int64_t n = 0; n < count; ++n) {
        VecF sum{};
        for (int c = 0; c < at.vecs(); ++c) sum += load(dS + n * kBlockM + c * kLanes);
        out[n] += sum_lanes(sum);
      }
      return;
    }
    alignas(64) float ones[kBlockM];
    char* row_pointers[kBlockM];
    for (int64_t lane = 0; lane < kBlockM; ++lane) {
      ones[lane] = 1.0f;
      row_pointers[lane] = reinterpret_cast<char*>(rows + lane * kKeyBlock);
    }
    unpack_transposed<Float32Elem>(row_pointers, dS, ones, at.count(), count);
    for (int64_t lane = 0; lane < at.count(); ++lane) {
      float* out = row_of(lane);
      for (int64_t n = 0; n < count; ++n) out[n] += rows[lane * kKeyBlock + n];
    }
  }
};

}  // namespace
}  // namespace tessera::cpu
