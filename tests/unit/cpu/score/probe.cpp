// Compiled once for each instruction set, as the kernels are: see tests/unit/CMakeLists.txt.
#include "probe.hpp"

#include "cpu/decode_rows.hpp"

#define TESSERA_JOIN_(a, b) a##b
#define TESSERA_JOIN(a, b) TESSERA_JOIN_(a, b)

namespace tessera::cpu {
namespace {

constexpr int64_t kMostKeys = 512, kMostBatch = 8, kMostFloats = int64_t{1} << 18;
alignas(64) float registers[kMostFloats];
alignas(64) float scores[kMostKeys * kBlockM], before[kMostKeys * kBlockM];
alignas(64) float row_scores[kMostKeys + kLanes];

// Rows [key][lane] from and to [query][key].
void read_tile(float* tile, const ScoreProbe& probe, const float* from, const Tile& of) {
  for (int64_t key = 0; key < probe.keys; ++key) {
    for (int64_t lane = 0; lane < kBlockM; ++lane) {
      tile[key * kBlockM + lane] = lane < of.count ? from[of.query[lane] * probe.keys + key] : 0.0f;
    }
  }
}
void write_tile(const float* tile, const ScoreProbe& probe, float* to, const Tile& of) {
  for (int64_t key = 0; key < probe.keys; ++key) {
    for (int64_t lane = 0; lane < of.count; ++lane) {
      to[of.query[lane] * probe.keys + key] = tile[key * kBlockM + lane];
    }
  }
}

}  // namespace

void TESSERA_JOIN(score_probe_, TESSERA_ISA_NAME)(const ScoreProbe& probe) {
  Sequence sequences[kMostBatch] = {};
  Sequence& sequence = sequences[probe.batch];
  sequence.sq = sequence.total_q = probe.queries, sequence.sk = sequence.total_k = probe.keys;
  sequence.bottom_right = sequence.diagonal = probe.keys - probe.queries;
  Params p{};
  p.sequences = sequences;
  p.heads_q = p.heads = probe.heads_q, p.heads_kv = probe.heads_kv, p.group = probe.heads_q / probe.heads_kv;
  p.scale = 1.0f, p.huge_score = infinity();
  p.window_left = p.window_right = -1;
  p.program = probe.code, p.program_gradient = probe.gradient;
  p.program_sums = probe.sums;
  for (int n = 0; probe.sums_begin && n < core::score::kMaxTensors; ++n) {
    p.program_sums_begin[n] = probe.sums_begin[n];
  }
  for (int64_t query = 0; query < probe.queries; query += kBlockM) {
    Tile tile;
    init_tile(tile, p, probe.batch, probe.head, query, min_of<int64_t>(kBlockM, probe.queries - query));
    const QueryLanes at{tile, 0};
    const ScoreScratch scratch{.before = before, .registers = registers};
    read_tile(scores, probe, probe.s, tile);
    apply_scores(p, at, scores, 0, probe.keys, scratch);
    write_tile(scores, probe, probe.by_queries, tile);
    if (!probe.gradient) continue;
    read_tile(scores, probe, probe.g, tile);
    ScoreStep<QueryLanes>::collect(p, at, scores, scratch, nullptr, probe.keys);
    write_tile(scores, probe, probe.d_s, tile);
  }
  for (int64_t query = 0; query < probe.queries; ++query) {
    DecodeRow row{};
    row.query = query, row.head = probe.head, row.high = row.full_high = probe.keys - 1;
    const KeyLanes at{sequences[probe.batch], probe.batch, row, 0, probe.keys};
    for (int64_t key = 0; key < probe.keys; ++key) row_scores[key] = probe.s[query * probe.keys + key];
    ScoreStep<KeyLanes>(p, at, {.registers = registers}).apply(row_scores, 0, probe.keys, [](VecF, int64_t, int) {});
    for (int64_t key = 0; key < probe.keys; ++key) probe.by_keys[query * probe.keys + key] = row_scores[key];
  }
}

}  // namespace tessera::cpu
