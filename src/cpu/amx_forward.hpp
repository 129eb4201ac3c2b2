// Forward with AMX: FlashAttention-2, algorithm 1, for bfloat16, with lanes = queries, as in forward.hpp.
//
//   S^T [keys][queries]        = K Q^T         A: K in place                  B: Q, pairs along d, packed once
//   P = 2^(scale_log2 S - stale_max)           vertical: a query is a lane
//   O^T [head_dim_v][queries] += V^T P^T       A: V, transposed once a block  B: P, pairs of keys
//
// A tile of 32 queries processes 32 keys in a stage, with four tile registers of S, 2 x 2. A job is two or four stages
// of one query tile, followed by P V over all of the job's keys. The softmax of a stage overlaps with the products for
// S of the next stage and for P V of the previous job: a few of its rows follow every step of a product.
//
//   stage        t - 1           t               t + 1
//   products     S(t), P V       S(t + 1), P V   S(t + 2), P V     of the previous job
//   softmax      of S(t - 1)     of S(t)         of S(t + 1)
//
// A tile register is stored only when the next group of products needs it (Accumulators): stores at a group's end would
// delay the products. But S of the next stage is stored within the present one, because a softmax that begins by
// loading what has just been stored would delay everything after it.
//
// The softmax uses the stale max, as in forward.hpp; it is the maximum of the tile's first 32 keys, and no further
// maximum is computed. Scores outside the exponential's range and sums beyond the bound are detected at the job's end;
// the job is then computed again without the stale max, before its P V.
#pragma once

#include "cpu/amx_forward_products.hpp"
#include "cpu/amx_softmax.hpp"

namespace tessera::cpu {
namespace {

// The products that overlap with a stage's softmax: S of stage `next_stage` of job `next`, and some groups of the
// output of job `before`. NULL: none.
struct Beside {
  const Job *next, *before;
  int64_t next_stage;
  float* next_s;
  bool next_bias;  // is added to S
  const uint32_t* before_p;
  int64_t group_begin, group_end;
};

// kSteps, kStages: a full stage with q_steps = v_tiles / 2 = kSteps, a next stage, and jobs of kStages stages, whose
// output groups are evenly distributed over the stages. Everything is then known at compile time.
template <Scores kScores, bool kPairs, int kSteps = 0, int kStages = 0>
TESSERA_OWN_FUNCTION void attend_stage(AmxForward& f, const Tile& tile, JobSums& sums, const float* s, uint32_t* sP,
                                       int64_t key, const Beside& work, const StageOptions* options) {
  StageSoftmax<kScores, kPairs> softmax(f.p, tile, sums, s, sP, key, options);
  if constexpr (kSteps > 0) {
    constexpr int kGroups = kSteps / kStages, kProducts = 4 * (kSteps + kGroups * kStages);
    static_assert(kSteps % kStages == 0 && 2 * kUnits % kProducts == 0, "as much softmax beside each product");
    constexpr int kHalves = 2 * kUnits / kProducts;
    int run = 0;
    const auto beside = [&]() TESSERA_LAMBDA_INLINE {
      softmax.template run_halves<kHalves>();
      if (kScores == Scores::kBiasInScores && ++run * kHalves % 2 == 0) f.bias.prefetch(run * kHalves / 2 - 1);
    };
    f.scores<Pieces::kFour, kSteps>(*work.next, work.next_stage, work.next_s, beside, work.next_bias);
#pragma GCC unroll 4
    for (int group = 0; group < kGroups; ++group) {
      f.output<Pieces::kFour, kStages>(*work.before, work.before_p, work.group_begin + group, beside);
    }
    softmax.finish(sums);
    return;
  }
  // Spread evenly, in fixed point with 16 fractional bits. With dropout bits or options, a piece has much to do at its
  // beginning.
  constexpr bool kLong = kScores == Scores::kDropout || kScores == Scores::kOptions;
  constexpr Pieces kPieces = kLong ? Pieces::kTwo : Pieces::kFour;
  const int64_t pieces =
      (kLong ? 2 : 4) *
      ((work.next ? f.q_steps : 0) + (work.before ? (work.group_end - work.group_begin) * work.before->stages : 0));
  const int64_t units_a_piece = (kUnits << 16) / max_of<int64_t>(1, pieces) + 1;
  int64_t units = 0;
  const auto beside = [&]() TESSERA_LAMBDA_INLINE {
    units += units_a_piece;
    softmax.run_to(static_cast<int>(units >> 16));
    if (kScores == Scores::kBiasInScores && units < kUnits << 16) f.bias.prefetch(units >> 16);
  };
  if (work.next) f.scores<kPieces>(*work.next, work.next_stage, work.next_s, beside, work.next_bias);
  for (int64_t group = work.group_begin; group < work.group_end; ++group) {
    f.output<kPieces>(*work.before, work.before_p, group, beside);
  }
  softmax.finish(sums);
  if (work.group_begin >= work.group_end) f.accumulators.flush();
}

// Without options, the usual head sizes have functions of their own.
template <Scores kScores, bool kPairs>
TESSERA_INLINE void attend_stage_of(AmxForward& f, const Tile& tile, JobSums& sums, const float* s, uint32_t* sP,
                                    int64_t key, const Beside& work) {
  const auto full = [&](int64_t steps, int64_t stages) {
    return f.q_steps == steps && f.v_tiles == 2 * steps && work.next && work.before && work.before->stages == stages &&
           work.group_end - work.group_begin == steps / stages;
  };
  if (full(2, 2)) return attend_stage<kScores, kPairs, 2, 2>(f, tile, sums, s, sP, key, work, nullptr);
  if (full(4, 4)) return attend_stage<kScores, kPairs, 4, 4>(f, tile, sums, s, sP, key, work, nullptr);
  attend_stage<kScores, kPairs>(f, tile, sums, s, sP, key, work, nullptr);
}

// `has_bias`: S includes the bias.
template <bool kPairs>
TESSERA_INLINE void attend_stage_any(AmxForward& f, const Tile& tile, JobSums& sums, const float* s, uint32_t* sP,
                                     int64_t key, const Beside& work, bool has_bias) {
  if (has_bias) {
    sums.seen[0] = sums.seen[1] = splat(~0u);
    attend_stage_of<Scores::kBiasInScores, kPairs>(f, tile, sums, s, sP, key, work);
  } else if (const int64_t keys = min_of(kStageKeys, f.key_begin + f.keys - key);
             f.has_options && stage_has_options(f.p, tile, key, keys)) {
    StageOptions options(f.p, tile, key, keys, s, f.scratch.options);
    sums.seen[0] |= options.seen[0], sums.seen[1] |= options.seen[1];
    with_scores(options.kind, [&]<Scores kScores>() TESSERA_LAMBDA_INLINE {
      if constexpr (kScores == Scores::kOptions) options.generate_kept(f.p, tile, key);
      attend_stage<kScores, kPairs && kScores != Scores::kOptions>(f, tile, sums, s, sP, key, work, &options);
    });
  } else if (seen_by_all(tile, key)) {
    attend_stage_of<Scores::kAllSeen, kPairs>(f, tile, sums, s, sP, key, work);
  } else {
    attend_stage_of<Scores::kMasked, kPairs>(f, tile, sums, s, sP, key, work);
  }
}

// lane_bits: the lanes that are not 0. exact_lanes: the lanes whose stale max is so small that its own score gives
// exactly 2^0, not the rounding of large numbers.
TESSERA_INLINE uint32_t lane_bits(VecI lanes) { return _mm512_movepi32_mask((__m512i)lanes); }
TESSERA_INLINE uint32_t exact_lanes(const Params& p, VecF stale_max) {
  return lane_bits(abs(stale_max) < p.huge_score);
}

// Sets the stale max of a tile that has seen no key: the maximum over what each row sees of one stage. Any number is
// valid, and an unsuitable one is detected at the job's end, so a row that sees nothing in this stage gets the tile's
// maximum. `keys`: of the stage; `options`: those that S does not include yet.
TESSERA_OWN_FUNCTION void take_stale_max(const AmxForward& f, Tile& tile, const float* s, int64_t key, int64_t keys,
                                         bool options) {
  VecF scale = splat(f.p.scale);
  if (options) {
    for (int64_t n = 0; n < keys * kBlockM; n += kLanes) store(f.scratch.sS + n, load(s + n));
    apply_scores(f.p, {tile, key}, f.scratch.sS, 0, keys,
                 {.loaded = f.scratch.options, .tile_floats = kStageKeys * kBlockM});
    s = f.scratch.sS, scale = splat(1.0f);
  }
  // Four maxima at once, since each depends on the previous one.
  VisibleLanes visible[2] = {{tile, 0, key}, {tile, 1, key}};
  VecF most_of[2][2];  // over a vector's even and odd keys
  for (auto& vector : most_of) vector[0] = vector[1] = splat(-infinity());
  for (int64_t n = 0; n < kStageKeys; n += 2) {
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
        const VecF score = load(s + (n + r) * kBlockM + c * kLanes) * scale;
        const __m512 seen = _mm512_mask_mov_ps((__m512)splat(-infinity()), visible[c](r), (__m512)score);
        most_of[c][r] = max((VecF)seen, most_of[c][r]);
      }
      visible[c].distance += 2u;
    }
  }
  const VecF best[2] = {max(most_of[0][0], most_of[0][1]), max(most_of[1][0], most_of[1][1])};
  const VecI unseen[2] = {best[0] == -infinity(), best[1] == -infinity()};
  // Possibly no row sees anything there; 0 is then as good as any other number.
  const float seen = any(unseen[0] | unseen[1]) ? max_lanes(max(best[0], best[1])) : 0.0f;
  const VecF most = splat(seen == -infinity() ? 0.0f : seen);
  bool huge = false;
  for (int c = 0; c < 2; ++c) huge |= is_huge(set_stale_max(f.p, tile, c, select(unseen[c], most, best[c])));
  tile.met_stale_max = exact_lanes(f.p, best[0]) | exact_lanes(f.p, best[1]) << kLanes;
  tile.has_stale_max = !huge;
}

// Slopes whose products with distances lose more in fixed point than the weights' tolerance.
TESSERA_INLINE bool has_steep_slopes(const Params& p, const Tile& tile) {
  constexpr float kMostSlope = 256.0f;
  const QueryLanes at{tile, 0};
  VecI steep = splat(0);
  for (int c = 0; c < QueryLanes::kVecs; ++c) steep |= ~(abs(Alibi::slopes(p, at, c)) <= kMostSlope);
  return any(steep);
}

// ALiBi: a tile's scores rise from key to key up to its diagonal, and would exceed the first keys' maximum again and
// again. So the stale max is computed where the diagonal crosses the tile.
TESSERA_OWN_FUNCTION void take_stale_max_at_diagonals(AmxForward& f, int64_t tile_count, int64_t first_key,
                                                      int64_t key_end) {
  for (int64_t t = 0; t < tile_count; ++t) {
    Tile& tile = f.tiles[t];
    const int64_t low = max_of<int64_t>(first_key, tile.some_low), high = min_of<int64_t>(key_end - 1, tile.some_high);
    if (low > high) continue;
    const int64_t diagonal = tile.query[0] + f.sequence.bottom_right;
    const int64_t key = max_of(low, min_of(high, diagonal)) / kStageKeys * kStageKeys;
    const int64_t keys = min_of(kStageKeys, key_end - key);
    int32_t stage = 0;
    if (packed_ahead(f.sequence)) {
      stage = static_cast<int32_t>(key % f.p.block_n / kStageKeys);
      f.k_packed = packed_keys(f.p, f.sequence, f.head_kv, key / f.p.block_n * f.p.block_n).k_tiles;
    } else {
      pack_key_rows(f.scratch.k_tiles, f.p, f.p.k, f.sequence, f.batch, f.head_kv, {key, 0, keys}, f.p.head_dim);
      f.k_packed = f.scratch.k_tiles;
    }
    f.scores({static_cast<int32_t>(t), stage, 1}, 0, f.scratch.ring, [] {});
    f.accumulators.flush();
    take_stale_max(f, tile, f.scratch.ring, key, keys, true);
  }
}

// Whether -inf in the bias masks all keys of the job for these rows.
TESSERA_COLD_FUNCTION bool masked_by_bias(const AmxForward& f, const Tile& tile, const Job& job, uint32_t rows) {
  uint32_t seeing = 0;
  for (int64_t stage = job.first; stage < job.first + job.stages; ++stage) {
    const int64_t key = f.key_begin + stage * kStageKeys, keys = min_of(kStageKeys, f.keys - stage * kStageKeys);
    const StageOptions options(f.p, tile, key, keys, f.scratch.ring, f.scratch.options);
    for (int64_t n = 0; n < keys; ++n) {
      for (int c = 0; c < 2; ++c) {
        const VecI sees = load(options.bias + n * kBlockM + c * kLanes) != -infinity();
        seeing |= lane_bits(sees & ((options.seen[c] >> static_cast<uint32_t>(n) & 1u) != 0u)) << c * kLanes;
      }
    }
  }
  return (seeing & rows) == 0;
}

// Adds the job's sums to the tile's. false: the sums are not reliable. If a row's stale max comes from keys that the
// row does not see and is far above its scores, the weights come near the denormals, which AMX treats as zeros.
TESSERA_INLINE bool accept_sums(const AmxForward& f, Tile& tile, const Job& job, const JobSums& sums) {
  constexpr float kLeastSum = 0x1p-40f;
  // The bits of weights have the same order as the weights; out of range has its sign set, and compares as the largest.
  constexpr uint32_t kMost = __builtin_bit_cast(uint32_t, StaleMax<true>::kMostWeight) >> 16;
  const VecU most = splat(kMost << 16 | kMost);
  VecI above = (VecU)_mm512_max_epu16((__m512i)load_as<VecU>(sums.largest), (__m512i)most) != most;
  VecF total[2];
  uint32_t small = 0, zero = 0, unseen = 0;
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    const VecF sum = load(sums.sum + c * kLanes);
    total[c] = load(tile.sum + c * kLanes) + sum;
    above |= ~(sum < infinity());
    small |= lane_bits(~(total[c] >= kLeastSum)) << c * kLanes;
    zero |= lane_bits(total[c] == 0.0f) << c * kLanes;
    unseen |= lane_bits(sums.seen[c] == 0u) << c * kLanes;
  }
  if (any(above)) return false;
  small &= ~tile.met_stale_max & ~(zero & unseen);
  if (small != 0 && ((small & ~zero) != 0 || !Bias::asked(f.p) || !masked_by_bias(f, tile, job, small))) return false;
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) store(tile.sum + c * kLanes, total[c]);
  return true;
}

// P of a full job with its own maximum and every option of the scores; the content of O is rescaled.
TESSERA_OWN_FUNCTION void attend_plain(AmxForward& f, const Job& job, uint32_t* sP) {
  const Params& p = f.p;
  Tile& tile = f.tiles[job.tile];
  tile.passed_bound = true;
  float* sS = f.scratch.sS;
  for (int64_t stage = 0; stage < job.stages; ++stage) {
    f.scores(job, stage, sS + stage * kStageKeys * kBlockM, [] {});
  }
  f.accumulators.flush();
  const int64_t first = job.first * kStageKeys, rows = job.stages * kStageKeys;
  const int64_t count = min_of(rows, f.keys - first), key = f.key_begin + first;
  const QueryLanes lanes{tile, key};
  apply_scores(p, lanes, sS, 0, count, {.loaded = f.scratch.options, .tile_floats = kJobKeys * kBlockM});
  for (int64_t n = count * kBlockM; n < rows * kBlockM; n += kLanes) store(sS + n, splat(-infinity()));

  VecF best[2] = {splat(-infinity()), splat(-infinity())};
  for (int64_t n = 0; n < count; ++n)
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) best[c] = max(best[c], load(sS + n * kBlockM + c * kLanes));

  VecF alpha[2], sum[2];
  Against to[2];
  VecI rescale = splat(0), unset = splat(0);
  bool huge = false;
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    // With a stale max by which nothing has been summed yet, perhaps another row's, all weights might underflow.
    const VecF given = load(tile.stale_max + c * kLanes);
    const VecF old = select(load(tile.sum + c * kLanes) == 0.0f, splat(-infinity()), given);
    const VecI moves = best[c] > old;
    const VecF next = select(moves, best[c], given);
    const Against from = against(tile, c);
    to[c] = set_stale_max(p, tile, c, next);
    const uint32_t moved = lane_bits(moves) << c * kLanes;
    tile.met_stale_max = (tile.met_stale_max & ~moved) | (exact_lanes(p, next) << c * kLanes & moved);
    alpha[c] = select(moves, rescale_of(old, from, to[c]), splat(1.0f));
    rescale |= moves;
    unset |= next == -infinity();
    huge |= is_huge(to[c]);
    sum[c] = load(tile.sum + c * kLanes) * alpha[c];
  }
  tile.has_stale_max = !any(unset) && !huge;
  if (tile.started && any(rescale)) {
    float* sO = reinterpret_cast<float*>(f.o_of(job));
    for (int64_t d = 0; d < p.head_dim_v; ++d)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        float* at = sO + d * kBlockM + c * kLanes;
        store(at, load(at) * alpha[c]);
      }
  }

  float* factors = f.scratch.options;
  const bool dropout = Dropout::asked(p);
  if (dropout) Dropout::factors(p, lanes, factors, 0, count, 1.0f);
  const Exp2 exponential;
  for (int64_t stage = 0; stage < job.stages; ++stage) {
    for (int64_t j = 0; j < kTileSide; ++j)
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        VecF pair[2];
#pragma GCC unroll 2
        for (int64_t r = 0; r < 2; ++r) {
          const int64_t at = (stage * kStageKeys + j + r * kTileSide) * kBlockM + c * kLanes;
          pair[r] = exponential(exponent_of(load(sS + at), to[c], huge));
          sum[c] += pair[r];
          // There are no factors past the last key.
          if (dropout && at < count * kBlockM) pair[r] *= load(factors + at);
        }
        store(sP + (stage * kTileSide + j) * kBlockM + c * kLanes, pair_bf16(pair[0], pair[1]));
      }
  }
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) store(tile.sum + c * kLanes, sum[c]);
}

// All jobs of a super-block, in order; the softmax of each stage overlaps with the products of its neighbours.
TESSERA_INLINE void attend_jobs(AmxForward& f, const Job* jobs, int64_t job_count) {
  constexpr int64_t kRing = kStageKeys * kBlockM;
  const int64_t probabilities = stages_of_a_job(f.p) * kTileSide * kBlockM;
  float* ring = f.scratch.ring;                              // [2] S of a stage
  int64_t buffer = 0;                                        // the index of the buffer that holds the present stage
  bool has_bias = job_count > 0 && f.take_bias(jobs[0], 0);  // S of the present stage includes it
  if (job_count > 0)
    f.scores(
        jobs[0], 0, ring, [] {}, has_bias);
  f.accumulators.flush();
  for (int64_t j = 0; j < job_count; ++j) {
    const Job& job = jobs[j];
    Tile& tile = f.tiles[job.tile];
    const Job* before = j > 0 ? &jobs[j - 1] : nullptr;
    const Job* after = j + 1 < job_count ? &jobs[j + 1] : nullptr;
    const uint32_t* before_p = f.scratch.sP + (j + 1) % 2 * probabilities;
    uint32_t* sP = f.scratch.sP + j % 2 * probabilities;
    const bool first = !tile.started && !tile.passed_bound && !tile.has_stale_max;
    bool done = false;
    if (first) {
      const int64_t begin = job.first * kStageKeys;
      take_stale_max(f, tile, ring + buffer * kRing, f.key_begin + begin, min_of(kStageKeys, f.keys - begin),
                     f.has_options && !has_bias);
    }
    if (tile.has_stale_max) {
      JobSums sums{};
      const int64_t groups = before ? f.output_groups() : 0;
      for (int64_t stage = 0; stage < job.stages; ++stage) {
        const float* s = ring + buffer * kRing;
        buffer ^= 1;
        f.ahead.step();
        Beside work;
        work.next = stage + 1 < job.stages ? &job : after;
        work.next_stage = stage + 1 < job.stages ? stage + 1 : 0;
        work.next_s = ring + buffer * kRing;
        work.next_bias = work.next && f.take_bias(*work.next, work.next_stage);
        work.before = before, work.before_p = before_p;
        work.group_begin = groups * stage / job.stages, work.group_end = groups * (stage + 1) / job.stages;
        const int64_t key = f.key_begin + (job.first + stage) * kStageKeys;
        uint32_t* stage_p = sP + stage * kTileSide * kBlockM;
        if (f.rounded_sums) {
          attend_stage_any<true>(f, tile, sums, s, stage_p, key, work, has_bias);
        } else {
          attend_stage_any<false>(f, tile, sums, s, stage_p, key, work, has_bias);
        }
        has_bias = work.next_bias;
      }
      if (before) f.finish_output(*before, before_p);
      done = accept_sums(f, tile, job, sums);
      if (!done) f.accumulators.flush();
    } else {
      if (before) f.whole_output(*before, before_p);
      buffer ^= 1;
      has_bias = after && f.take_bias(*after, 0);
      if (after)
        f.scores(
            *after, 0, ring + buffer * kRing, [] {}, has_bias);
      f.accumulators.flush();
    }
    if (!done) {
      if (first) forget_softmax(tile), tile.met_stale_max = 0;
      attend_plain(f, job, sP);
    }
  }
  if (job_count > 0) f.whole_output(jobs[job_count - 1], f.scratch.sP + (job_count - 1) % 2 * probabilities);
  f.accumulators.flush();
}

inline void amx_forward_item(const Params& p, int64_t item, char* scratch_base) {
  ForwardPlace at;
  if (!place_item(p, item, at)) return;
  const int64_t batch = at.batch, head_kv = at.head_kv, tile_count = at.tile_count;
  const Sequence& sequence = p.sequences[batch];
  const bool options = has_score_options(p) || hides_by_position(p);

  const AmxForwardScratch scratch = carve_amx_forward(
      scratch_base, {p.block_n, p.tiles_per_item, p.head_dim, p.head_dim_v, options ? kScoreTiles : 0, sizeof(Tile)});
  AmxForward f{p,
               scratch,
               reinterpret_cast<Tile*>(scratch.tiles),
               padded_to(p.head_dim, kTileSteps_elems) / kTileSteps_elems,
               padded_to(p.head_dim_v, kTileSide) / kTileSide,
               sequence,
               batch,
               head_kv,
               options,
               p.lse == nullptr,
               BiasStep(p, scratch.bias_diagonals, scratch.bias_words),
               KeysAhead(p, sequence, batch, head_kv)};

  // 1. Decode the tile index; Q: global -> scratch, pairs along d.
  const auto [first_key, key_end] = init_tiles(p, at, f.tiles, kStageKeys);
  int64_t key =
      first_key / p.block_n * p.block_n;  // so that jobs, and a row's bits, do not depend on the item's other tiles
  // Keys that an item packs itself are prefetched there.
  if (packed_ahead(sequence)) {
    f.ahead.begin(first_key, min_of<int64_t>(key + p.block_n, key_end) - first_key, tile_count);
  }
  const char* rows[2][kBlockM];  // of this tile and the next
  rows_of(rows[0], p.q, f.tiles[0]);
  for (int64_t t = 0; t < tile_count; ++t) {
    NextLines next;
    if (t + 1 < tile_count) {
      next = {rows[(t + 1) % 2], f.tiles[t + 1].count, 0};
      rows_of(rows[(t + 1) % 2], p.q, f.tiles[t + 1]);
    }
    f.ahead.step();
    pack_column_pairs(scratch.sQ + t * f.q_steps * kTileSide * kBlockM, kBlockM, rows[t % 2], f.tiles[t].count, kBlockM,
                      p.head_dim, next);
  }

  // 2. For every super-block of visible keys: pack K and V if necessary, then S, softmax, O += P V for each tile.
  tiles_configure();
  if (Alibi::asked(p)) {
    take_stale_max_at_diagonals(f, tile_count, first_key, key_end);
    for (int64_t t = 0; t < tile_count; ++t) {
      if (has_steep_slopes(p, f.tiles[t])) f.tiles[t].has_stale_max = false, f.tiles[t].passed_bound = true;
    }
  }
  for (; key < key_end; key += p.block_n) {
    if (p.cancelled && p.cancelled(p.cancel)) break;
    f.key_begin = key;
    f.keys = min_of<int64_t>(p.block_n, key_end - key);
    const int64_t job_count = list_jobs(p, reinterpret_cast<Job*>(scratch.jobs), f.tiles, tile_count, key, f.keys);
    if (job_count == 0) continue;  // a block mask hides it from all of the item's rows
    f.pack_super_block(max_of<int64_t>(0, first_key - key), hides_keys(p, f.tiles, tile_count, key, f.keys));
    const Job* jobs = reinterpret_cast<const Job*>(scratch.jobs);
    int64_t stages = 0;
    for (int64_t j = 0; j < job_count; ++j) stages += jobs[j].stages;
    const int64_t next = key + p.block_n;
    f.ahead.begin(next, min_of<int64_t>(p.block_n, key_end - next), stages);
    attend_jobs(f, jobs, job_count);
  }
  tiles_release();

  // 3. O / l and LSE: scratch -> global.
  finish_tiles(p, f.tiles, tile_count, scratch.sO, f.v_tiles * kTileSide * kBlockM, at.split, p.dropout_scale);
}

}  // namespace
}  // namespace tessera::cpu
