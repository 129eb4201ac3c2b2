// The forward pass with AMX: one item's state and its products, S of a stage and O += P V of a job.
#pragma once

#include "cpu/amx_accumulators.hpp"
#include "cpu/amx_jobs.hpp"
#include "cpu/amx_packed_keys.hpp"
#include "cpu/score/amx_bias.hpp"

namespace tessera::cpu {
namespace {

// One item's state.
struct AmxForward {
  const Params& p;
  const AmxForwardScratch& scratch;
  Tile* tiles;
  int64_t q_steps;  // of 32 along head_dim
  int64_t v_tiles;  // of 16 along head_dim_v
  const Sequence& sequence;
  int64_t batch, head_kv;
  bool has_options;
  bool rounded_sums;  // sums are of the rounded weights of P; used if no LSE is requested
  BiasStep bias;
  KeysAhead ahead;                  // keys of the next super-block
  int64_t key_begin = 0, keys = 0;  // of the super-block
  // K and V of the super-block, packed in scratch, or packed ahead.
  const char *k_packed = nullptr, *v_packed = nullptr;
  NonfiniteKeys nonfinite{};  // of its values, if something may be masked
  Accumulators accumulators{};

  // Packs the super-block's keys from `from` on, a multiple of 32; its first key is key_begin. `look`: checks for
  // values that are not finite.
  TESSERA_INLINE void pack_super_block(int64_t from, bool look) {
    if (packed_ahead(sequence)) {
      const AmxPackedKeys packed = packed_keys(p, sequence, head_kv, key_begin);
      k_packed = packed.k_tiles, v_packed = packed.v_tiles, nonfinite = *packed.nonfinite;
      return;
    }
    const KeyRows rows{key_begin, from, keys};
    pack_key_rows(scratch.k_tiles, p, p.k, sequence, batch, head_kv, rows, p.head_dim);
    nonfinite = {};
    pack_key_columns(scratch.v_tiles, look ? &nonfinite : nullptr, p, p.v, sequence, batch, head_kv, rows,
                     p.head_dim_v);
    k_packed = scratch.k_tiles, v_packed = scratch.v_tiles;
  }

  TESSERA_INLINE char* q_of(const Job& job) const {
    return reinterpret_cast<char*>(scratch.sQ) + job.tile * q_steps * kTwoTiles_bytes;
  }
  TESSERA_INLINE char* o_of(const Job& job) const {
    return reinterpret_cast<char*>(scratch.sO) + job.tile * v_tiles * kTwoTiles_bytes;
  }
  TESSERA_INLINE int64_t output_groups() const { return (v_tiles + 1) / 2; }

  // S of one stage of the job: C [32][kBlockM], including the bias if take_bias has loaded it. kSteps: q_steps, if
  // known.
  template <Pieces kPieces = Pieces::kTwo, int kSteps = 0, class Beside>
  TESSERA_INLINE void scores(const Job& job, int64_t stage, float* s, Beside&& beside, bool with_bias = false) {
    const int64_t steps = kSteps > 0 ? kSteps : q_steps;
    accumulators.multiply<true, true, kPieces, kSteps>(reinterpret_cast<char*>(s), false,
                                                       k_packed + (job.first + stage) * 2 * steps * kTile_bytes,
                                                       steps * kTile_bytes, kTile_bytes, q_of(job), steps, beside);
    if (!with_bias) return;
    for (int64_t term = 0; term < bias.terms(); ++term) accumulators.add_step(bias.diagonal(term), bias.words());
  }
  // Loads the bias of a stage, if it can be added to S.
  TESSERA_INLINE bool take_bias(const Job& job, int64_t stage) {
    if (!bias.serves()) return false;
    const Tile& tile = tiles[job.tile];
    const int64_t first = (job.first + stage) * kStageKeys;
    return first + kStageKeys <= keys && seen_by_all(tile, key_begin + first) && bias.take(tile, key_begin + first);
  }

  // Group `group` of 32 rows of O^T += V^T P^T over the job's keys. kStages: the job's stages, if known.
  template <Pieces kPieces = Pieces::kTwo, int kStages = 0, class Beside>
  TESSERA_INLINE void output(const Job& job, const uint32_t* sP, int64_t group, Beside&& beside) {
    char* o = o_of(job) + group * 2 * kTwoTiles_bytes;
    const char* v = v_packed + (group * (p.block_n / kStageKeys) + job.first) * 2 * kTile_bytes;
    const char* probabilities = reinterpret_cast<const char*>(sP);
    constexpr int64_t step_bytes = 2 * kTile_bytes;
    const bool add = tiles[job.tile].started;
    if (kStages > 0 || group * 2 + 1 < v_tiles) {
      accumulators.multiply<true, true, kPieces, kStages>(o, add, v, kTile_bytes, step_bytes, probabilities, job.stages,
                                                          beside);
    } else {
      accumulators.multiply<false, true, kPieces>(o, add, v, 0, step_bytes, probabilities, job.stages, beside);
    }
  }
  // All groups.
  TESSERA_OWN_FUNCTION void whole_output(const Job& job, const uint32_t* sP) {
    for (int64_t group = 0; group < output_groups(); ++group) output(job, sP, group, [] {});
    finish_output(job, sP);
  }
  // After the last group.
  TESSERA_INLINE void finish_output(const Job& job, const uint32_t* sP) {
    tiles[job.tile].started = true;
    if (nonfinite.any) add_nonfinite_values(job, sP);
  }

  // O += P V of the keys that were packed as zeros, over what each lane sees.
  TESSERA_COLD_FUNCTION void add_nonfinite_values(const Job& job, const uint32_t* sP) {
    accumulators.flush();
    const Tile& tile = tiles[job.tile];
    float* sO = reinterpret_cast<float*>(o_of(job));
    alignas(64) int32_t visible[kBlockM];
    alignas(64) float value[kMaxRowFloats];
    for (int64_t stage = 0; stage < job.stages; ++stage) {
      for (uint32_t bits = nonfinite.rows[job.first + stage]; bits; bits &= bits - 1) {
        const int64_t n = __builtin_ctz(bits), key = key_begin + (job.first + stage) * kStageKeys + n;
        visible_lanes(visible, p, tile, key);
        read_row<Bfloat16Elem>(value, key_row(p, p.v, sequence, batch, head_kv, key), p.head_dim_v);
        for (int c = 0; c < 2; ++c) {
          const VecU pair = load_as<VecU>(sP + (stage * kTileSide + n % kTileSide) * kBlockM + c * kLanes);
          const VecF weight = (VecF)(n < kTileSide ? pair << 16 : pair & 0xffff0000u);
          const VecI sees = load_as<VecI>(visible + c * kLanes);
          for (int64_t d = 0; d < p.head_dim_v; ++d) {
            float* o = sO + d * kBlockM + c * kLanes;
            const VecF old = load(o);
            store(o, select(sees, fma(weight, splat(value[d]), old), old));
          }
        }
      }
    }
  }
};

}  // namespace
}  // namespace tessera::cpu
