// fixed_costs: what an item of the forward pass does besides its stages, in cycles of the core, one after the other on the same data (in
// the caches) and on data of many heads in turn. D = 64 and 128, 512 queries and keys, 8 heads.
#include <string>

#include "cpu/amx_forward.hpp"
#include "gate.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kRows = 512, kHeads = 8;

template <class T>
T* memory(int64_t count) {
  char* p = static_cast<char*>(aligned_alloc(4096, (count * sizeof(T) + 8191) / 4096 * 4096));
  memset(p, 0, count * sizeof(T));
  return reinterpret_cast<T*>(p);
}

// The best and the median of 60 times, in cycles.
template <class F>
void report(const char* name, int64_t d, const char* where, F f) {
  f();
  std::vector<double> cycles;
  for (int i = 0; i < 60; ++i) {
    const double c0 = chain_cycle(), t = now();
    f();
    cycles.push_back((now() - t) / (0.5 * (c0 + chain_cycle())));
  }
  std::sort(cycles.begin(), cycles.end());
  printf("D %ld %-28s %-9s %9.0f best %9.0f median cycles\n", static_cast<long>(d), name, where, cycles[0], cycles[30]);
  fflush(stdout);
}

void measure(int64_t d, int32_t causal) {
  constexpr int64_t kBatch = 10;
  const int64_t elems = kBatch * kRows * kHeads * d;
  uint16_t* data[4];
  std::mt19937 g(3);
  std::normal_distribution<float> normal;
  for (auto& tensor : data) {
    tensor = memory<uint16_t>(elems);
    for (int64_t i = 0; i < elems; ++i) {
      const float x = i < 1 << 20 ? normal(g) : 0;
      uint32_t u;
      memcpy(&u, &x, 4);
      tensor[i] = i < 1 << 20 ? (u + 0x8000) >> 16 : tensor[i - (1 << 20)];
    }
  }
  float* lse = memory<float>(kBatch * kHeads * kRows);
  std::vector<Sequence> sequences(kBatch + 1);
  for (int64_t b = 0; b <= kBatch; ++b) {
    sequences[b] = {0, kRows, 0, kRows, kRows, b * kRows, b * 16, b, 0, causal, 0};
  }
  Params p{};
  p.batch = kBatch, p.heads_q = p.heads_kv = kHeads, p.head_dim = p.head_dim_v = d;
  p.dtype = TESSERA_BFLOAT16, p.elem_bytes = 2, p.sequences = sequences.data();
  RowTensor* tensors[] = {&p.q, &p.k, &p.v, &p.o};
  for (int i = 0; i < 4; ++i)
    *tensors[i] = {reinterpret_cast<char*>(data[i]), kRows * kHeads * d * 2, kHeads * d * 2, d * 2};
  p.lse = reinterpret_cast<char*>(lse), p.lse_batch = kHeads * kRows * 4, p.lse_head = kRows * 4, p.lse_row = 4;
  p.scale = 1 / __builtin_sqrtf(static_cast<float>(d)), p.scale_log2 = p.scale * kLog2e;
  p.causal = causal, p.window_left = p.window_right = -1, p.dropout_scale = 1;
  p.block_n = 256, p.tiles_per_item = 16, p.num_splits = 1, p.rows_total = kBatch * kRows;
  const AmxForwardShape shape{p.block_n, p.tiles_per_item, d, d, false, sizeof(Tile)};
  char* base = memory<char>(carve_amx_forward(nullptr, shape).bytes);
  const AmxForwardScratch scratch = carve_amx_forward(base, shape);
  Tile* tiles = reinterpret_cast<Tile*>(scratch.tiles);
  const std::string name = causal ? "item, causal" : "item";
  report(name.c_str(), d, "one", [&] { amx_forward_item(p, 0, base); });
  int64_t item = 0;
  report(name.c_str(), d, "in turn", [&] { amx_forward_item(p, ++item % (kBatch * kHeads), base); });
  if (causal) return;
  ForwardPlace at;
  for (const bool turn : {false, true}) {
    const char* where = turn ? "in turn" : "one";
    const auto next = [&] { place_item(p, turn ? ++item % (kBatch * kHeads) : 0, at); };
    report("init_tiles, 16", d, where, [&] { next(), init_tiles(p, at, tiles, kStageKeys); });
    report("Q of 16 tiles", d, where, [&] {
      next(), init_tiles(p, at, tiles, kStageKeys);
      for (int64_t t = 0; t < 16; ++t) {
        const char* rows[kBlockM];
        for (int64_t lane = 0; lane < kBlockM; ++lane) rows[lane] = row_at(p.q, tiles[t], lane);
        pack_column_pairs(scratch.sQ + t * d / 2 * kBlockM, kBlockM, rows, kBlockM, kBlockM, d);
      }
    });
    report("K of 256 keys", d, where, [&] {
      next(), pack_key_rows(scratch.k_tiles, p, p.k, sequences[at.batch], at.batch, at.head_kv, {0, 0, 256}, d);
    });
    report("V of 256 keys", d, where, [&] {
      next(),
          pack_key_columns(scratch.v_tiles, p, p.v, sequences[at.batch], at.batch, at.head_kv, {0, 0, 256}, d, false);
    });
    report("finish_tile, 16", d, where, [&] {
      next(), init_tiles(p, at, tiles, kStageKeys);
      for (int64_t t = 0; t < 16; ++t) {
        tiles[t].started = true;
        for (int i = 0; i < kBlockM; ++i) tiles[t].sum[i] = 3, tiles[t].stale_max[i] = 1;
        finish_tile(p, tiles[t], scratch.sO + t * d * kBlockM, 0, 1.0f);
      }
    });
  }
  AmxForward f{p, scratch, tiles, d / 32, d / 16, sequences[0], 0, 0, false, BiasStep(p, nullptr, nullptr)};
  report("stale max, 16", d, "one", [&] {
    for (int64_t t = 0; t < 16; ++t) take_stale_max(f, tiles[t], scratch.ring, 0, kStageKeys, false);
  });
  tiles_configure();
  report("whole output, 16", d, "one", [&] {
    for (int32_t t = 0; t < 16; ++t) f.whole_output({t, 0, stages_of_a_job(p) == 2 ? 2 : 4}, scratch.sP);
    f.accumulators.flush();
  });
  report("scores of a stage, 16", d, "one", [&] {
    for (int32_t t = 0; t < 16; ++t) f.scores({t, 0, 1}, 0, scratch.ring, [] {});
    f.accumulators.flush();
  });
  // A super-block's jobs, whose stages are the usual ones.
  const int64_t count = list_jobs(reinterpret_cast<Job*>(scratch.jobs), stages_of_a_job(p), tiles, 16, 0, 256);
  f.keys = 256;
  report("super-block, 128 stages", d, "one", [&] { attend_jobs(f, reinterpret_cast<Job*>(scratch.jobs), count); });
  tiles_release();
}

}  // namespace
}  // namespace tessera::cpu

int main() {
  if (!ask_for_amx()) return puts("no AMX"), 3;
  for (const int64_t d : {64, 128}) {
    for (const int causal : {0, 1}) tessera::cpu::measure(d, causal);
  }
}
