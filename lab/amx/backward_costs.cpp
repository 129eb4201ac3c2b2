// backward_costs: what the parts of a head's backward pass take, in cycles of the core, on the same data again and again (in the
// caches) and on data of many heads in turn; and what a stage's products and vectors take alone. D = 64 and 128, 512 and 2048 queries
// and keys, 8 heads.
#include <string>

#include "costs.hpp"
#include "cpu/amx_backward.hpp"

namespace tessera::cpu {
namespace {

void measure(int64_t d, int64_t rows, int32_t causal) {
  const int64_t batch = rows > 512 ? 4 : 10, heads = batch * kHeads, tiles = rows / kBlockM;
  Call call(batch, rows, d, causal);
  Params& p = call.p;
  p.d_o = call.numbers(rows, d), p.d_q = call.numbers(rows, d), p.d_k = call.numbers(rows, d);
  p.d_v = call.numbers(rows, d);
  p.row_lse = memory<float>(heads * rows), p.row_delta = memory<float>(heads * rows);
  p.acc_dq = memory<float>(heads * rows * d), p.acc_dq_ld = d;
  p.groups_batch = p.groups_head = 1;
  p.block_n = d > 64 ? 384 : 512;  // what the plan takes
  const AmxBackwardShape shape{p.block_n, d, d, false, sizeof(Tile)};
  char* base = memory<char>(carve_amx_backward(nullptr, shape).bytes);
  const AmxBackwardScratch s = carve_amx_backward(base, shape);
  const std::string suffix = " " + std::to_string(rows) + (causal ? " causal" : "");
  const double stages = static_cast<double>(tiles * tiles);
  int64_t item = 0;
  const auto all = [&](int64_t head) {
    const int64_t b = head / kHeads, h = head % kHeads, at = h * batch * tiles + b * tiles;
    for (int64_t t = 0; t < tiles; ++t) backward_preprocess_item(p, at + t, base);
    amx_backward_item(p, head, base);
    for (int64_t t = 0; t < tiles; ++t) backward_postprocess_item(p, at + t, base);
  };
  for (int64_t head = 0; head < heads; ++head) all(head);
  for (const bool turn : {false, true}) {
    const char* where = turn ? "in turn" : "one";
    const auto head = [&] { return turn ? ++item % heads : 0; };
    const auto part = [&](const char* name, auto f) { report((name + suffix).c_str(), d, where, f); };
    report(("item, a stage" + suffix).c_str(), d, where, [&] { amx_backward_item(p, head(), base); }, stages);
    const auto rows_of = [&](auto process) {
      const int64_t n = head(), at = n % kHeads * batch * tiles + n / kHeads * tiles;
      for (int64_t t = 0; t < tiles; ++t) process(at + t);
    };
    part("delta and LSE", [&] { rows_of([&](int64_t i) { backward_preprocess_item(p, i, base); }); });
    part("dQ's sums to bfloat16", [&] { rows_of([&](int64_t i) { backward_postprocess_item(p, i, base); }); });
    if (causal) continue;
    part("dQ's sums cleared", [&] {
      const int64_t n = head();
      for (int64_t i = 0; i < rows; ++i) {
        __builtin_memset(dq_row(p, p.sequences[n / kHeads], n / kHeads, n % kHeads, 0, i), 0,
                         static_cast<size_t>(d) * sizeof(float));
      }
    });
    const int64_t keys = min_of<int64_t>(rows, p.block_n);
    const KeyRows packed{0, 0, keys};
    const auto of_super_block = [&](const char* name, auto f) {
      part(name, [&] {
        const int64_t n = head();
        f(p.sequences[n / kHeads], n / kHeads, n % kHeads);
      });
    };
    of_super_block("K of a super-block", [&](const Sequence& sequence, int64_t b, int64_t h) {
      pack_key_rows(s.k_tiles, p, p.k, sequence, b, h, packed, d);
    });
    of_super_block("K and its columns", [&](const Sequence& sequence, int64_t b, int64_t h) {
      pack_key_rows(s.k_tiles, p, p.k, sequence, b, h, packed, d);
      pack_key_columns(s.k_transposed, nullptr, p, p.k, sequence, b, h, packed, d);
    });
    of_super_block("V of a super-block", [&](const Sequence& sequence, int64_t b, int64_t h) {
      pack_key_rows(s.v_tiles, p, p.v, sequence, b, h, packed, d);
    });
    AmxBackward f{p, s, reinterpret_cast<Tile*>(s.tiles), d / 32, d / 32, {}, false, 0, 0, 0, {}, {}, {}, {}, {}};
    f.keys = keys, f.tile_count = kAmxBackwardTiles;
    for (bool& started : f.keys_started) started = true;
    of_super_block("dK and dV of a super-block", [&](const Sequence&, int64_t b, int64_t h) {
      write_gradient(f, p.d_k, s.sdK, b, h, 0, keys, d);
      write_gradient(f, p.d_v, s.sdV, b, h, 0, keys, d);
    });
    const auto tiles_of = [&](int64_t n) {
      for (int64_t t = 0; t < kAmxBackwardTiles; ++t) {
        init_tile(f.tiles[t], p, n / kHeads, n % kHeads, t * kBlockM, kBlockM);
        f.dq_started[t] = false, f.dq_sums[t] = s.sdQ + t * d * kBlockM;
      }
    };
    part("4 tiles' positions", [&] { tiles_of(head()); });
    part("Q and dO of 4 tiles", [&] {
      const int64_t n = head();
      tiles_of(n);
      for (int64_t t = 0; t < kAmxBackwardTiles; ++t) load_queries(f, t, n % kHeads, t * kBlockM);
    });
    part("dQ of 4 tiles", [&] {
      const int64_t n = head(), b = n / kHeads;
      tiles_of(n);
      for (int64_t t = 0; t < kAmxBackwardTiles; ++t) {
        add_dq(f, t, dq_row(p, p.sequences[b], b, n % kHeads, 0, t * kBlockM), p.acc_dq_ld);
      }
    });
    if (turn) continue;

    // Stages, of operands that lie where the item has them.
    tiles_configure();
    const int64_t pairs = keys / kStageKeys * kAmxBackwardTiles;
    const auto a_stage = [&](const char* name, auto g) {
      report((name + suffix).c_str(), d, where,
             [&] {
               g();
               f.accumulators.flush();
             },
             static_cast<double>(pairs));
    };
    const auto each_pair = [&](auto g) {
      for (int64_t i = 0; i < pairs; ++i) {
        const int64_t stage = i / kAmxBackwardTiles;
        g(StagePair{stage, stage % kJobStages, i % kAmxBackwardTiles}, i);
      }
    };
    a_stage("stage: all", [&] {
      for (int64_t n = 0; n < keys / kStageKeys; n += kJobStages) backward_job(f, n, kJobStages);
    });
    a_stage("stage: all of one job", [&] {
      for (int64_t n = 0; n < keys / kStageKeys; n += kJobStages) backward_job(f, 0, kJobStages);
    });
    a_stage("stage: S and dP",
            [&] { each_pair([&](const StagePair& at, int64_t i) { score_products(f, at, f.ring(i % 2), [] {}); }); });
    a_stage("stage: P and dS alone", [&] {
      each_pair([&](const StagePair& at, int64_t i) { gradients(f, {&at, nullptr, f.ring(i % 2), nullptr}); });
    });
    a_stage("stage: P and dS beside S and dP", [&] {
      each_pair([&](const StagePair& at, int64_t i) { gradients(f, {&at, &at, f.ring(i % 2), f.ring((i + 1) % 2)}); });
    });
    const auto none = [] {};
    const auto of_rows = [&](float* out, const char* a, const char* b) {
      for (int64_t n = 0; n < keys / kStageKeys; n += kJobStages) {
        for (int64_t g = 0; g < d / 32; ++g) {
          for (int64_t i = n; i < n + kJobStages; ++i) {
            f.accumulators.multiply<true, false, Pieces::kTwo>(
                reinterpret_cast<char*>(out + (g * p.block_n + i * kStageKeys) * kBlockM), true,
                a + i % kJobStages * kAmxBackwardTiles * kSteps_bytes, kTile_bytes, kSteps_bytes,
                b + g * kAmxBackwardTiles * kSteps_bytes, kAmxBackwardTiles, none);
          }
        }
      }
    };
    a_stage("stage: dV", [&] { of_rows(s.sdV, s.sP, s.do_rows); });
    a_stage("stage: dV and dK", [&] { of_rows(s.sdV, s.sP, s.do_rows), of_rows(s.sdK, s.sdS, s.q_rows); });
    a_stage("stage: dQ", [&] {
      for (int64_t n = 0; n < keys / kStageKeys; n += kJobStages) {
        for (int64_t t = 0; t < kAmxBackwardTiles; ++t) {
          for (int64_t g = 0; g < d / 32; ++g) {
            f.accumulators.multiply<true, false, Pieces::kTwo>(
                reinterpret_cast<char*>(s.sdQ) + (t * d / 32 + g) * 2 * kTwoTiles_bytes, true,
                s.k_transposed + (g * (p.block_n / kStageKeys) + n) * kSteps_bytes, kTile_bytes, kSteps_bytes,
                f.ds_pairs_of(0, t), kJobStages, none);
          }
        }
      }
    });
    // The same products from a few KiB: what loads that miss the first cache cost.
    a_stage("stage: dV and dK, operands near", [&] {
      for (int64_t i = 0; i < 2 * pairs / kAmxBackwardTiles * (d / 32); ++i) {
        f.accumulators.multiply<true, false, Pieces::kTwo>(
            reinterpret_cast<char*>(s.sdV + i % 2 * 2 * kTileSide * kBlockM), true, s.sP, kTile_bytes, kSteps_bytes,
            s.do_rows, kAmxBackwardTiles, none);
      }
    });
    a_stage("stage: S and dP, operands near", [&] {
      each_pair([&](const StagePair&, int64_t i) { score_products(f, {0, 0, 0}, f.ring(i % 2), [] {}); });
    });
    tiles_release();
  }
}

}  // namespace
}  // namespace tessera::cpu

int main() {
  if (!ask_for_amx()) return puts("no AMX"), 3;
  for (const int64_t d : {64, 128}) {
    for (const int64_t rows : {512, 2048}) {
      for (const int causal : {0, 1}) tessera::cpu::measure(d, rows, causal);
    }
  }
}
