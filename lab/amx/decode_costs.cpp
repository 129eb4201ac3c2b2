// What decoding does to 32 keys of a KV head (K and V: 128 head_dim bytes), part by part, against a loop that reads the same bytes: cycles where
// all lies in the second cache, nanoseconds from memory. Contestants run in turn, so that a ratio is one of neighbours in time.
//
//     g++ $kernel_flags -DTESSERA_AVX512=1 -I lab/amx lab/amx/decode_costs.cpp -o decode_costs    # kernel_flags: run.sh
//     ./decode_costs [seconds for each shape]
#include <functional>
#include <string>

#include "costs.hpp"
#include "cpu/amx_decode.hpp"

namespace tessera::cpu {
namespace {

constexpr int64_t kKeys = 32768, kHotKeys = 128;
constexpr int64_t kBlocks = 32, kHotBlocks = 8;  // in a sample

__attribute__((noinline)) float read_lines(const char* p, int64_t bytes) {
  VecF sum[4] = {};
  for (int64_t i = 0; i < bytes; i += 256) {
    for (int n = 0; n < 4; ++n) sum[n] += load(reinterpret_cast<const float*>(p + i + n * 64));
  }
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}
volatile float sink;

struct Contestant {
  std::string name;
  std::function<void(const DecodeBlock& now, const DecodeBlock& next)> block;
  std::vector<double> hot_cycles, cycles, ns, of_loop;  // samples; the loop's time over this one's
  int full_rate = 0;                                    // of those from memory
};

double quantile(std::vector<double> x, double q) {
  if (x.empty()) return 0;
  std::sort(x.begin(), x.end());
  return x[static_cast<size_t>(q * static_cast<double>(x.size() - 1))];
}

void measure(int64_t heads_q, int64_t heads, int64_t d, double seconds) {
  Call call(1, kKeys, d, 0, heads);
  Params& p = call.p;
  call.sequences[0] = {0, 1, 0, kKeys, kKeys, 0, 0, 0, 0, 0, 0};
  call.sequences[1] = call.sequences[0];
  call.sequences[1].item_begin = 1;
  p.heads_q = heads_q, p.block_n = kAmxDecodeKeys, p.tiles_per_item = heads;
  const DecodePart part(p, 0);
  const AmxDecodeScratch scratch =
      carve_amx_decode(memory<char>(1 << 22), {part.heads, kDecodeRows, p.block_n, d, d, kLanes, sizeof(DecodeRow)});
  DecodeRow* rows = reinterpret_cast<DecodeRow*>(scratch.rows);
  AmxDecode a{p, part, scratch, rows, d / kTileSteps_elems, d / 2, true, true, true, DecodeAhead(p, part, false)};
  init_decode_rows(p, part, rows);
  for (int64_t h = 0; h < heads; ++h) {
    const char* q_rows[kTileSide];
    for (int64_t r = 0; r < part.row_count; ++r) q_rows[r] = decode_query(p, part, rows[h * part.row_count + r]);
    pack_column_pairs(scratch.q + h * a.q_steps * kTileSide * kTileSide, kTileSide, q_rows, part.row_count, kTileSide,
                      d);
  }
  const int64_t row_bytes = heads * d * 2, block_bytes = kAmxDecodeKeys * row_bytes;
  DecodeBlock hot;  // asked for where nothing is to be asked for
  hot.locate(p, part, 0, kKeys);
  const auto each_head = [&](auto f) {
    for (int64_t h = 0; h < heads; ++h) f(h);
  };
  // `bytes` of every row, then the next `bytes`: into the first cache.
  const auto ask_by_heads = [&](const DecodeBlock& b, int64_t bytes) {
    for (const char* tensor : {b.keys[0], b.values[0]}) {
      for (int64_t column = 0; column < row_bytes; column += bytes) {
        for (int64_t r = 0; r < kAmxDecodeKeys; ++r) {
          for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(tensor + r * row_bytes + column + i);
        }
      }
    }
  };
  std::vector<Contestant> list;
  const auto add = [&](const char* name, auto f) { list.push_back({name, f, {}, {}, {}, {}, 0}); };
  add("loop that reads", [&](const DecodeBlock& now, const DecodeBlock&) {
    sink = read_lines(now.keys[0], block_bytes) + read_lines(now.values[0], block_bytes);
  });
  add("asking, as it lies, second cache", [&](const DecodeBlock& now, const DecodeBlock&) {
    for (const char* tensor : {now.keys[0], now.values[0]}) {
      for (int64_t i = 0; i < block_bytes; i += 64) __builtin_prefetch(tensor + i, 0, 2);
    }
  });
  add("asking, as it lies, first cache",
      [&](const DecodeBlock& now, const DecodeBlock&) { ask_by_heads(now, row_bytes); });
  add("asking, head by head", [&](const DecodeBlock& now, const DecodeBlock&) { ask_by_heads(now, d * 2); });
  add("asking, tile by tile", [&](const DecodeBlock& now, const DecodeBlock&) { ask_by_heads(now, 64); });
  add("S", [&](const DecodeBlock& now, const DecodeBlock&) {
    a.ahead.block(hot, hot);
    each_head([&](int64_t h) { a.scores(now, h, [] {}); });
  });
  add("softmax", [&](const DecodeBlock& now, const DecodeBlock&) {
    each_head([&](int64_t h) {
      AmxDecode::Softmax softmax(a, now, h, 0);
      softmax.run(softmax.units);
    });
  });
  add("O", [&](const DecodeBlock& now, const DecodeBlock&) {
    a.ahead.block(hot, hot);
    each_head([&](int64_t h) { a.output<true>(now, h, 0); });
  });
  add("all, other lines asked for", [&](const DecodeBlock& now, const DecodeBlock&) {
    a.ahead.block(hot, hot);
    a.attend(now, false);
  });
  add("all", [&](const DecodeBlock& now, const DecodeBlock& next) {
    a.ahead.block(now, next);
    a.attend(now, false);
  });

  int64_t at = 0;
  const auto sample = [&](Contestant& c, int64_t keys, int64_t blocks) {
    const int64_t all = keys / kAmxDecodeKeys;
    DecodeBlock block[2];
    at %= all;
    block[0].locate(p, part, at * kAmxDecodeKeys, kKeys);
    tiles_configure(a.rows_of_p());
    for (int64_t i = 0; i < blocks; ++i) {
      at = (at + 1) % all;
      block[(i + 1) & 1].locate(p, part, at * kAmxDecodeKeys, kKeys);
      c.block(block[i & 1], block[(i + 1) & 1]);
    }
    gate.configure();
  };
  const auto rounds = [&](double limit, auto f) {
    const double end = now() + limit;
    for (int round = 0; now() < end; ++round) {
      if (round % 5 == 4) gate.at = (gate.at + 1) % gate.cpus.size(), gate.bind();
      for (Contestant& c : list) f(c);
    }
  };
  rounds(0.2 * seconds, [&](Contestant& c) {
    sample(c, kHotKeys, kHotBlocks);
    const double cycle = chain_cycle(), begin = now();
    sample(c, kHotKeys, kHotBlocks);
    c.hot_cycles.push_back((now() - begin) / cycle / (kHotBlocks * heads));
  });
  rounds(0.8 * seconds, [&](Contestant& c) {
    gate.configure();
    const bool before = gate.good();
    const double cycle = chain_cycle(), begin = now();
    sample(c, kKeys, kBlocks);
    const double spent = (now() - begin) / (kBlocks * heads);
    c.full_rate += before && gate.good();
    c.cycles.push_back(spent / cycle);
    c.ns.push_back(spent * 1e9);
    c.of_loop.push_back(list[0].ns.back() * 1e-9 / spent);
  });
  printf(
      "D %ld, %ld/%ld heads, 32 keys of a KV head | second cache: cycles best, median | memory: ns best, median; "
      "cycles, median; "
      "of the loop, median; products at their full rate\n",
      static_cast<long>(d), static_cast<long>(heads_q), static_cast<long>(heads));
  for (const Contestant& c : list) {
    printf("%-34s | %5.0f %5.0f | %5.0f %5.0f  %5.0f  %4.2f  %4.2f\n", c.name.c_str(), quantile(c.hot_cycles, 0),
           quantile(c.hot_cycles, 0.5), quantile(c.ns, 0.02), quantile(c.ns, 0.5), quantile(c.cycles, 0.5),
           quantile(c.of_loop, 0.5), static_cast<double>(c.full_rate) / static_cast<double>(c.ns.size()));
  }
  fflush(stdout);
}

}  // namespace
}  // namespace tessera::cpu

int main(int argc, char** argv) {
  if (!ask_for_amx()) return puts("no AMX"), 3;
  const double seconds = argc > 1 ? atof(argv[1]) : 10;
  for (const int64_t d : {128, 64}) tessera::cpu::measure(32, 8, d, seconds);
  tessera::cpu::measure(64, 8, 128, seconds);
  tessera::cpu::gate.report();
}
