// The vector work of AMX's backward pass: P and dS of 32 keys x 32 queries from S and dP, in pieces that overlap with
// the products of the next pair.
#pragma once

#include "cpu/amx_forward.hpp"
#include "cpu/amx_rows_ahead.hpp"
#include "cpu/backward.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kStage_floats = kStageKeys * kBlockM;
constexpr int64_t kSteps_bytes = kTwoTiles_bytes;  // 16 pairs x 32: a step of B, and two tiles of A

struct AmxBackward {
  const Params& p;
  const AmxBackwardScratch& s;
  Tile* tiles;
  int64_t q_steps, v_steps;  // of 32 along head_dim, head_dim_v
  Accumulators accumulators;
  bool options;

  int64_t key_begin, keys;  // of the super-block
  int64_t tile_count;
  bool dq_started[kAmxBackwardTiles];
  // [head_dim][kBlockM]: of this super-block or, with summed_in_place, of all so far
  float* dq_sums[kAmxBackwardTiles];
  bool keys_started[kAmxMaxBlockKeys / kStageKeys];  // stages of the super-block whose dK and dV have been initialised

  // Rows that hold NaN or infinities, of K and of the tiles' Q and dO, if something may be masked.
  NonfiniteKeys nonfinite_k;
  uint32_t nonfinite_q[kAmxBackwardTiles], nonfinite_do[kAmxBackwardTiles];
  RowsAhead ahead;

  TESSERA_INLINE float* ring(int64_t buffer) const { return s.ring + buffer * 2 * kStage_floats; }
  // Buffers of a pair of a job's stage and a tile.
  TESSERA_INLINE char* p_of(int64_t stage, int64_t tile) const {
    return s.sP + (stage * kAmxBackwardTiles + tile) * kSteps_bytes;
  }
  TESSERA_INLINE char* ds_of(int64_t stage, int64_t tile) const {
    return s.sdS + (stage * kAmxBackwardTiles + tile) * kSteps_bytes;
  }
  TESSERA_INLINE char* ds_pairs_of(int64_t stage, int64_t tile) const {
    return reinterpret_cast<char*>(s.dS_pairs) + (tile * kJobStages + stage) * kSteps_bytes;
  }
};

// A pair of a stage (its index in the super-block and, `in_job`, in the job) and a tile.
struct StagePair {
  int64_t stage, in_job, tile;
};

// S and dP of the pair into the ring; dP stays pending. kSteps: of both, if known. `beside` runs after every product or
// every two; with kSteps not in the first step, which stores what is pending.
template <Pieces kPieces = Pieces::kTwo, int kSteps = 0, class Beside>
TESSERA_INLINE void score_products(AmxBackward& f, const StagePair& at, float* ring, Beside&& beside) {
  const int64_t q = kSteps > 0 ? kSteps : f.q_steps, v = kSteps > 0 ? kSteps : f.v_steps;
  f.accumulators.multiply<true, false, kPieces, kSteps, (kSteps > 0)>(
      reinterpret_cast<char*>(ring), false, f.s.k_tiles + at.stage * 2 * q * kTile_bytes, q * kTile_bytes, kTile_bytes,
      reinterpret_cast<char*>(f.s.sQ) + at.tile * q * kSteps_bytes, q, beside);
  f.accumulators.multiply<true, false, kPieces, kSteps>(
      reinterpret_cast<char*>(ring + kStage_floats), false, f.s.v_tiles + at.stage * 2 * v * kTile_bytes,
      v * kTile_bytes, kTile_bytes, reinterpret_cast<char*>(f.s.sdO) + at.tile * v * kSteps_bytes, v, beside);
}

// P and dS of a pair in one pass, in the three forms that the products need, some units at a time. dS of the bias,
// unscaled, is written to `d_bias` [32][kBlockM] if it is given.
template <Scores kScores>
class FusedGradients {
  using Exponential = StageExponential<kScores, 4, true>;

 public:
  TESSERA_INLINE FusedGradients(const AmxBackward& f, const StagePair& at, const float* ring, int64_t key,
                                const StageOptions* options, float* d_bias)
      : sS_(ring),
        sdP_(ring + kStage_floats),
        delta_(f.s.delta + at.tile * kBlockM),
        p_rows_(f.p_of(at.in_job, at.tile)),
        ds_rows_(f.ds_of(at.in_job, at.tile)),
        pairs_(f.ds_pairs_of(at.in_job, at.tile)),
        d_bias_(d_bias),
        dp_scale_(splat(f.p.dropout_scale)),
        scale_(splat(f.p.scale * f.p.dropout_scale)),
        exponential_(f.p, f.tiles[at.tile], f.s.lse + at.tile * kBlockM, key, options) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) minus_delta_[c] = load(delta_ + c * kLanes) * -f.p.scale;
  }

  // Up to unit `end`.
  TESSERA_INLINE void run_to(int end) {
    for (end = min_of(end, kUnits); index_ < end;) {
      half_unit<0>();
      half_unit<1>();
    }
  }
  // The next half of a unit, which is known at compile time to exist.
  TESSERA_INLINE void run_half() {
    if (half_) {
      half_unit<1>();
    } else {
      half_unit<0>();
    }
    compute_here(out_of_range_);  // otherwise gcc would postpone the ORs of an unrolled pair
  }
  // The rest. False: a score out of the exponential's range.
  TESSERA_INLINE bool finish() {
    run_to(kUnits);
    return !any((VecI)(out_of_range_ & 0x80000000u));
  }

 private:
  // Vector c of the next unit: keys index_ and index_ + 16.
  template <int c>
  TESSERA_INLINE void half_unit() {
    const int64_t j = index_;
    VecF probability[2], ds[2];
    const auto gradient = [&]<bool kUpper>() TESSERA_LAMBDA_INLINE {
      const int64_t n = j + (kUpper ? kTileSide : 0);
      const auto entry = exponential_.template entry<kUpper>(sS_, j, c);
      out_of_range_ |= (VecU)entry.probability;
      const VecF e = (VecF)entry.probability;
      VecF dp = load(sdP_ + n * kBlockM + c * kLanes), kept = e;
      if (exponential_.dropout()) {
        dp = exponential_.template kept<kUpper>(j, c, dp), kept = exponential_.template kept<kUpper>(j, c, kept);
      }
      VecF d = e * fma(dp, scale_, minus_delta_[c]);
      // An entry that is not visible has P = 0, but its dP and slope are arbitrary.
      if constexpr (Exponential::masks()) d = (VecF)_mm512_maskz_mov_ps(entry.seen, (__m512)d);
      if (kScores == Scores::kOptions && d_bias_) {
        const VecF unscaled = e * (dp * dp_scale_ - load(delta_ + c * kLanes));
        store(d_bias_ + n * kBlockM + c * kLanes, (VecF)_mm512_maskz_mov_ps(entry.seen, (__m512)unscaled));
      }
      if (exponential_.softcap()) {
        d *= entry.slope;
        if constexpr (Exponential::masks()) d = (VecF)_mm512_maskz_mov_ps(entry.seen, (__m512)d);
      }
      probability[kUpper] = kept, ds[kUpper] = d;
    };
    gradient.template operator()<false>();
    gradient.template operator()<true>();
    exponential_.next_unit(c);
    store(pairs_ + j * kRow_bytes + c * kTileRow_bytes, join_((__m512i)ds[0], (__m512i)ds[1]));
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      if constexpr (c == 0) {
        first_p_[r] = probability[r], first_ds_[r] = ds[r];
        continue;
      }
      const int64_t row = j * kTileRow_bytes + r * kTile_bytes;
      store(p_rows_ + row, join_((__m512i)first_p_[r], (__m512i)probability[r]));
      store(ds_rows_ + row, join_((__m512i)first_ds_[r], (__m512i)ds[r]));
    }
    half_ = c == 0;
    if (half_) return;
    exponential_.prefetch_bias(j);
    ++index_;
  }

  const float *sS_, *sdP_, *delta_;
  char *p_rows_, *ds_rows_, *pairs_;
  float* d_bias_;
  VecF dp_scale_, scale_, minus_delta_[2];
  VecF first_p_[2], first_ds_[2];  // of a unit whose first half is done
  VecU out_of_range_{};
  Exponential exponential_;
  JoinRounded join_;
  int index_ = 0;  // of the next unit
  bool half_ = false;
};

// S and dP of a pair are in `ring`, with dP perhaps still pending; the products of the next pair write next_ring. NULL:
// there is no next pair.
struct PairStep {
  const StagePair *at, *next;
  float *ring, *next_ring;
};

// A pair's gradients, overlapped with the products of the next pair. The first four products store what is pending, and
// the gradients begin after them. kSteps: q_steps and v_steps of a pair that has a next one; every step is then known
// at compile time.
template <Scores kScores, int kSteps = 0>
TESSERA_OWN_FUNCTION bool fused_gradients(AmxBackward& f, const PairStep& step, int64_t key,
                                          const StageOptions* options, float* d_bias) {
  FusedGradients<kScores> gradients(f, *step.at, step.ring, key, options, d_bias);
  if (!step.next) {
    f.accumulators.flush();
    return gradients.finish();
  }
  if constexpr (kSteps > 0) {
    static_assert(2 * (8 * kSteps - 4) <= 2 * kUnits, "two halves of units beside each product but the first four");
    score_products<Pieces::kFour, kSteps>(f, *step.next, step.next_ring, [&]() TESSERA_LAMBDA_INLINE {
      gradients.run_half();
      gradients.run_half();
    });
    return gradients.finish();
  }
  constexpr int64_t kStoring = 2;  // pieces
  const int64_t pieces = 2 * (f.q_steps + f.v_steps) - kStoring;
  const int64_t units_a_piece = (kUnits << 16) / pieces + 1;  // 16 fractional bits
  int64_t units = -kStoring * units_a_piece;
  score_products(f, *step.next, step.next_ring, [&]() TESSERA_LAMBDA_INLINE {
    units += units_a_piece;
    gradients.run_to(static_cast<int>(units >> 16));
  });
  return gradients.finish();
}

// Stores P and dS of keys j and j + 16, [row][vector of queries], in the three forms that the products need. A NaN may
// have any bits, so adding half a unit, as JoinRounded does, might carry into the sign.
TESSERA_INLINE void store_steps(const AmxBackward& f, const StagePair& at, int64_t j, const VecF (&probability)[2][2],
                                const VecF (&ds)[2][2]) {
  char* p_row = f.p_of(at.in_job, at.tile) + j * kTileRow_bytes;
  char* ds_row = f.ds_of(at.in_job, at.tile) + j * kTileRow_bytes;
  char* pair = f.ds_pairs_of(at.in_job, at.tile) + j * kRow_bytes;
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r) {
    store(p_row + r * kTile_bytes, pair_bf16(probability[r][0], probability[r][1]));
    store(ds_row + r * kTile_bytes, pair_bf16(ds[r][0], ds[r][1]));
    store(pair + r * kTileRow_bytes, pair_bf16(ds[0][r], ds[1][r]));
  }
}

// The same with every option and mask. Overwrites S and dP.
TESSERA_OWN_FUNCTION void plain_gradients(const AmxBackward& f, const StagePair& at, float* ring, int64_t key) {
  const Params& p = f.p;
  const Tile& tile = f.tiles[at.tile];
  float *sS = ring, *sdP = ring + kStage_floats;
  float *slope = f.s.options, *factors = slope + kStage_floats, *rest = factors + kStage_floats;
  const float *shift = f.s.shift + at.tile * kBlockM, *lse = f.s.lse + at.tile * kBlockM;
  const float* delta = f.s.delta + at.tile * kBlockM;
  const int64_t count = min_of(kStageKeys, f.key_begin + f.keys - key);
  const QueryLanes lanes{tile, key};
  const bool needs_product = gradient_needs_product(p), dropout = Dropout::asked(p);
  const ScoreScratch scratch{.loaded = rest, .tile_floats = kStage_floats, .slope = needs_product ? slope : nullptr};
  apply_scores(p, lanes, sS, 0, count, scratch);
  if (dropout) Dropout::factors(p, lanes, factors, 0, count, 1.0f);
  const Exp2 exponential;
  for (int64_t n = 0; n < kStageKeys; ++n)
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const int64_t i = n * kBlockM + c * kLanes;
      if (n >= count || c >= tile.vecs) {
        store(sS + i, VecF{});
        store(sdP + i, VecF{});
        continue;
      }
      const VecF score = load(sS + i);
      const VecF probability =
          exponential(exponent_of(score, {load(shift + c * kLanes), load(lse + c * kLanes)}, tile.huge));
      VecF dp = load(sdP + i), kept = probability;
      if (dropout) {
        const VecF factor = load(factors + i);
        dp *= factor * p.dropout_scale;
        kept *= factor;
      }
      // The LSE, dP and delta of an invisible entry are arbitrary, and so is a score past the last query.
      const VecI visible = (score != -infinity()) & (iota<VecI>() < tile.count - c * kLanes);
      store(sdP + i, select(visible, probability * (dp - load(delta + c * kLanes)), VecF{}));
      store(sS + i, select(visible, kept, VecF{}));
    }
  ScoreStep<QueryLanes>::collect(p, lanes, sdP, scratch, rest, count);
  for (int64_t j = 0; j < kTileSide; ++j) {
    VecF probability[2][2], ds[2][2];
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        const int64_t i = (j + r * kTileSide) * kBlockM + c * kLanes;
        probability[r][c] = load(sS + i);
        ds[r][c] = load(sdP + i);
        const VecF scaled = ds[r][c] * splat(p.scale);
        if (!needs_product || j + r * kTileSide >= count || c >= tile.vecs) {
          ds[r][c] = scaled;
        } else {  // the slope of an invisible entry is arbitrary
          ds[r][c] = select(scaled == 0.0f, VecF{}, ScoreStep<QueryLanes>::gradient(p, ds[r][c], slope + i));
        }
      }
    store_steps(f, at, j, probability, ds);
  }
}

TESSERA_INLINE void gradients(AmxBackward& f, const PairStep& step) {
  const int64_t key = f.key_begin + step.at->stage * kStageKeys;
  const Tile& tile = f.tiles[step.at->tile];
  if (tile.huge) {
    f.accumulators.flush();
    plain_gradients(f, *step.at, step.ring, key);
    if (step.next) score_products(f, *step.next, step.next_ring, [] {});
    return;
  }
  const auto fused = [&]<Scores kScores>(const StageOptions* options, float* d_bias)
                         TESSERA_LAMBDA_INLINE { return fused_gradients<kScores>(f, step, key, options, d_bias); };
  const int64_t keys = min_of(kStageKeys, f.key_begin + f.keys - key);
  bool done = false;
  if (!f.options || (!collects_gradients(f.p) && !stage_has_options(f.p, tile, key, keys))) {
    // Head sizes of 33 to 64 have a function of their own. At 128 such a function was 1.04 of the generic one at 512
    // keys and 0.94 from 2048 on.
    const auto of = [&]<Scores kScores>() TESSERA_LAMBDA_INLINE {
      const bool known = step.next && f.q_steps == 2 && f.v_steps == 2;
      return known ? fused_gradients<kScores, 2>(f, step, key, nullptr, nullptr)
                   : fused_gradients<kScores>(f, step, key, nullptr, nullptr);
    };
    done =
        seen_by_all(tile, key) ? of.template operator()<Scores::kAllSeen>() : of.template operator()<Scores::kMasked>();
  } else {
    float *bias = f.s.options, *d_bias = collects_gradients(f.p) ? bias + kStage_floats : nullptr,
          *rest = bias + 2 * kStage_floats;
    StageOptions options(f.p, tile, key, keys, step.ring, bias);
    options.generate_kept(f.p, tile, key);
    done = with_scores(d_bias ? Scores::kOptions : options.kind, [&]<Scores kScores>() TESSERA_LAMBDA_INLINE {
      return fused.template operator()<kScores>(&options, kScores == Scores::kOptions ? d_bias : nullptr);
    });
    if (done) ScoreStep<QueryLanes>::collect(f.p, {tile, key}, d_bias, {}, rest, keys);
  }
  if (!done) plain_gradients(f, *step.at, step.ring, key);
}

}  // namespace
}  // namespace tessera::cpu
