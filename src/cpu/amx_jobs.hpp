// The jobs of AMX's forward pass: the stages of 32 keys that a tile of queries processes before its P V.
#pragma once

#include "cpu/amx_scores.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kJobKeys = kAmxJobKeys;  // at most
constexpr int64_t kJobStages = kJobKeys / kStageKeys;
// Long jobs load and store O less often. But with few head dimensions, O has few groups of products, and every stage
// should have one to overlap with its softmax. GFLOP/s with jobs of 64 and of 128 keys, N = 2048: D = 64 665 and 582, D
// = 128 743 and 818.
TESSERA_INLINE int64_t stages_of_a_job(const Params& p) { return p.head_dim_v <= 64 ? kJobStages / 2 : kJobStages; }

// Keys of one query tile: `stages` stages, from stage `first` of the super-block on.
struct Job {
  int32_t tile, first, stages;
};

// Lists the jobs of `tile_count` tiles against `count` keys from `key`, tile by tile, without the stages that a block
// mask hides from all of a tile's rows. There are never more jobs than without the mask.
TESSERA_INLINE int64_t list_jobs(const Params& p, Job* jobs, const Tile* tiles, int64_t tile_count, int64_t key,
                                 int64_t count) {
  const int64_t job_stages = stages_of_a_job(p);
  int64_t job_count = 0;
  for (int64_t t = 0; t < tile_count; ++t) {
    if (tiles[t].some_low > tiles[t].some_high) continue;
    int64_t begin = max_of<int64_t>(0, tiles[t].some_low - key) / kStageKeys;
    const int64_t last =
        padded_to(max_of<int64_t>(0, min_of<int64_t>(count, tiles[t].some_high + 1 - key)), kStageKeys) / kStageKeys;
    const auto shown = [&](int64_t stage) TESSERA_LAMBDA_INLINE {
      const int64_t first = stage * kStageKeys;
      return shows_stage(p, tiles[t], key + first, min_of(kStageKeys, count - first));
    };
    while (begin < last) {
      int64_t end = begin;
      while (end < last && shown(end)) ++end;
      const int64_t parts = (end - begin + job_stages - 1) / job_stages;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t from = begin + (end - begin) * part / parts, to = begin + (end - begin) * (part + 1) / parts;
        jobs[job_count++] = {static_cast<int32_t>(t), static_cast<int32_t>(from), static_cast<int32_t>(to - from)};
      }
      begin = end + 1;  // skips the hidden stage, if there is one
    }
  }
  return job_count;
}

// Whether every row of the tile sees every key of the stage.
TESSERA_INLINE bool seen_by_all(const Tile& tile, int64_t key) {
  return key >= tile.all_low && key + kStageKeys - 1 <= tile.all_high;
}

// Whether there is a key that one row of a tile sees and another does not.
TESSERA_INLINE bool hides_keys(const Params& p, const Tile* tiles, int64_t tile_count, int64_t key, int64_t count) {
  if (may_mask_entries(p)) return true;
  for (int64_t t = 0; t < tile_count; ++t) {
    const bool meets = tiles[t].some_low < key + count && tiles[t].some_high >= key;
    if (meets && (tiles[t].all_low > key || tiles[t].all_high < key + count - 1)) return true;
  }
  return false;
}

}  // namespace
}  // namespace tessera::cpu
