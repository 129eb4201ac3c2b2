// fixed_costs: what an item of the forward pass does besides its stages, in cycles of the core, one after the other on the same data (in
// the caches) and on data of many heads in turn. D = 64 and 128, 512 queries and keys, 8 heads, and as many as put rows 4 KiB apart.
#include <string>

#include "costs.hpp"
#include "cpu/amx_forward.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kRows = 512;

template <class F>
void report_of(const std::string& name, int64_t heads, int64_t d, const char* where, F f) {
  report((std::to_string(heads) + " heads: " + name).c_str(), d, where, f);
}

void measure(int64_t heads, int64_t d, int32_t causal) {
  constexpr int64_t kBatch = 10;
  Call call(kBatch, kRows, d, causal, heads);
  Params& p = call.p;
  const std::vector<Sequence>& sequences = call.sequences;
  p.block_n = 256, p.tiles_per_item = 16;
  const AmxForwardShape shape{p.block_n, p.tiles_per_item, d, d, false, sizeof(Tile)};
  char* base = memory<char>(carve_amx_forward(nullptr, shape).bytes);
  const AmxForwardScratch scratch = carve_amx_forward(base, shape);
  Tile* tiles = reinterpret_cast<Tile*>(scratch.tiles);
  const std::string name = causal ? "item, causal" : "item";
  report_of(name, heads, d, "one", [&] { amx_forward_item(p, 0, base); });
  int64_t item = 0;
  report_of(name, heads, d, "in turn", [&] { amx_forward_item(p, ++item % (kBatch * heads), base); });
  if (causal) return;
  ForwardPlace at;
  for (const bool turn : {false, true}) {
    const char* where = turn ? "in turn" : "one";
    const auto next = [&] { place_item(p, turn ? ++item % (kBatch * heads) : 0, at); };
    report_of("init_tiles, 16", heads, d, where, [&] { next(), init_tiles(p, at, tiles, kStageKeys); });
    report_of("Q of 16 tiles", heads, d, where, [&] {
      next(), init_tiles(p, at, tiles, kStageKeys);
      for (int64_t t = 0; t < 16; ++t) {
        const char* rows[kBlockM];
        for (int64_t lane = 0; lane < kBlockM; ++lane) rows[lane] = row_at(p.q, tiles[t], lane);
        pack_column_pairs(scratch.sQ + t * d / 2 * kBlockM, kBlockM, rows, kBlockM, kBlockM, d);
      }
    });
    report_of("K of 256 keys", heads, d, where, [&] {
      next(), pack_key_rows(scratch.k_tiles, p, p.k, sequences[at.batch], at.batch, at.head_kv, {0, 0, 256}, d);
    });
    report_of("V of 256 keys", heads, d, where, [&] {
      next(),
          pack_key_columns(scratch.v_tiles, nullptr, p, p.v, sequences[at.batch], at.batch, at.head_kv, {0, 0, 256}, d);
    });
    report_of("finish_tile, 16", heads, d, where, [&] {
      next(), init_tiles(p, at, tiles, kStageKeys);
      for (int64_t t = 0; t < 16; ++t) {
        tiles[t].started = true;
        for (int i = 0; i < kBlockM; ++i) tiles[t].sum[i] = 3, tiles[t].stale_max[i] = 1;
      }
      finish_tiles(p, tiles, 16, scratch.sO, d * kBlockM, 0, 1.0f);
    });
  }
  AmxForward f{p,
               scratch,
               tiles,
               d / 32,
               d / 16,
               sequences[0],
               0,
               0,
               false,
               false,
               BiasStep(p, nullptr, nullptr),
               KeysAhead(p, sequences[0], 0, 0)};
  f.k_packed = scratch.k_tiles, f.v_packed = scratch.v_tiles;
  report_of("stale max, 16", heads, d, "one", [&] {
    for (int64_t t = 0; t < 16; ++t) take_stale_max(f, tiles[t], scratch.ring, 0, kStageKeys, false);
  });
  tiles_configure();
  report_of("whole output, 16", heads, d, "one", [&] {
    for (int32_t t = 0; t < 16; ++t) f.whole_output({t, 0, stages_of_a_job(p) == 2 ? 2 : 4}, scratch.sP);
    f.accumulators.flush();
  });
  report_of("scores of a stage, 16", heads, d, "one", [&] {
    for (int32_t t = 0; t < 16; ++t) f.scores({t, 0, 1}, 0, scratch.ring, [] {});
    f.accumulators.flush();
  });
  // A super-block's jobs, whose stages are the usual ones.
  const int64_t count = list_jobs(p, reinterpret_cast<Job*>(scratch.jobs), tiles, 16, 0, 256);
  f.keys = 256;
  report_of("super-block, 128 stages", heads, d, "one",
            [&] { attend_jobs(f, reinterpret_cast<Job*>(scratch.jobs), count); });
  tiles_release();
}

}  // namespace
}  // namespace tessera::cpu

int main() {
  if (!ask_for_amx()) return puts("no AMX"), 3;
  for (const int64_t d : {64, 128}) {
    for (const int64_t heads : {int64_t{8}, 2048 / d}) {
      for (const int causal : {0, 1}) tessera::cpu::measure(heads, d, causal);
    }
  }
}
