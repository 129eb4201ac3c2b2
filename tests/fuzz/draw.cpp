#include "fuzz/draw.hpp"

#include <algorithm>
#include <array>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/score/definitions.hpp"
#include "core/score/drawn.hpp"

namespace tessera::testing {
namespace {

class Random {
 public:
  Random(uint64_t seed, uint64_t index) {
    std::seed_seq sequence{seed, seed >> 32, index, index >> 32};
    engine_.seed(sequence);
  }
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int64_t n) { return between(1, n) == 1; }
  template <class T, size_t N>
  T of(const T (&values)[N]) {
    return values[between(0, N - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

// Around the edges of tiles as often as anywhere.
int64_t draw_length(Random& random, int64_t longest) {
  constexpr int64_t kEdges[] = {0, 1, 2, 8, 16, 24, 32, 48, 64, 96, 128, 144, 192, 256, 384};
  const int64_t length = random.one_in(2) ? random.of(kEdges) + random.between(-1, 1) : random.between(0, longest);
  return std::clamp<int64_t>(length, 0, longest);
}

int64_t draw_head_dim(Random& random) {
  constexpr int64_t kUsual[] = {16, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 512};
  return random.one_in(2) ? random.of(kUsual) : random.between(1, 140);
}

// A program of the table, or a drawn one, whose scores are bounded: a rounding error of a large score is a large one of
// its weight.
void draw_program(Random& random, Case& c) {
  if (random.one_in(2)) {
    const auto& all = definitions();
    const Definition& definition = all[static_cast<size_t>(random.between(0, std::ssize(all) - 1))];
    c.score_mod = definition.score, c.mask_mod = definition.mask;
  } else {
    std::mt19937_64 of_text(static_cast<uint64_t>(random.between(0, 1'000'000'000)));
    const int depth = static_cast<int>(random.between(1, 3));
    const bool has_score = !random.one_in(4), has_mask = !has_score || random.one_in(4);
    const std::vector<core::score::Name> names = World(1).names();
    const auto is_tensor_of_case = [&c](const core::score::Name& name) {
      return name.is_tensor && (mentions(c.score_mod, name.text) || mentions(c.mask_mod, name.text));
    };
    do {
      if (has_score) c.score_mod = "9 * tanh((" + smooth_expression(depth, of_text) + ") / 9)";
      if (has_mask) c.mask_mod = exact_condition(depth, of_text);
    } while (std::ranges::count_if(names, is_tensor_of_case) > core::score::kMaxTensors);
  }
  c.captured = random.between(TESSERA_FLOAT32, TESSERA_BFLOAT16);
  c.d_captured = random.one_in(2);
}

void draw_options(Random& random, Case& c) {
  constexpr int64_t kOneIn = 4;  // an option is set this rarely: several at a time are usual, all of them are not
  constexpr Data kHard[] = {kOutlier, kGrowing, kFalling,  kHuge,    kNanQuery, kNanKey, kInfKey,
                            kNanOnce, kInfOnce, kInfValue, kInfBias, kHugeBias, kShared};
  c.causal = random.one_in(3);
  c.causal_seqs = random.one_in(6);
  if (random.one_in(6)) c.tree = random.between(1, 5);
  if (!c.backward && random.one_in(6)) c.prefix = random.between(1, std::max<int64_t>(1, c.sk));
  if (random.one_in(kOneIn)) c.wl = random.between(0, 2 * c.sk / 3 + 1);
  if (random.one_in(kOneIn)) c.wr = random.between(0, 2 * c.sk / 3 + 1);
  c.top_left = random.one_in(kOneIn);
  if (random.one_in(kOneIn)) {
    c.first_q = random.between(0, 300), c.first_k = random.between(0, 300);
    c.after_q = random.between(0, 300), c.after_k = random.between(0, 300);
    c.first_kv = random.between(0, 2), c.first_b = random.between(0, 2);
    c.places = random.one_in(3);
  }
  if (random.one_in(kOneIn)) c.mask = random.between(0, 7);
  if (random.one_in(kOneIn)) {
    c.block_mask = random.between(0, 7);
    c.block_q = random.between(1, 70);
    c.block_k = random.between(1, 70);
  }
  if (random.one_in(kOneIn)) {
    c.bias = random.between(0, 7);
    c.bias_f32 = random.one_in(2);
    c.d_bias = random.one_in(2);
  }
  if (random.one_in(kOneIn)) c.alibi = random.between(1, 2);
  if (random.one_in(kOneIn)) c.softcap = 0.5 * static_cast<double>(random.between(1, 80));
  if (random.one_in(kOneIn)) c.dropout = static_cast<double>(random.between(1, 99)) / 100;
  if (random.one_in(kOneIn)) c.scale = static_cast<double>(random.between(-20, 20)) / 40;
  if (random.one_in(kOneIn)) {
    c.sink = random.between(1, 2);
    c.d_sink = random.one_in(2);
  }
  c.d_lse = random.one_in(kOneIn);
  c.lse = !random.one_in(kOneIn);
  c.low = random.one_in(2);
  if (c.dropout > 0) c.state = random.one_in(2);
  c.invariant = random.one_in(kOneIn);
  if (random.one_in(kOneIn)) draw_program(random, c);
  if (random.one_in(8)) c.data = random.of(kHard);
  if (c.data == kHugeBias && c.bias == kAbsent) c.bias = random.between(0, 7);
}

}  // namespace

Case draw_case(uint64_t seed, uint64_t index) {
  Random random(seed, index);
  Case c;
  c.dtype = random.between(0, 2);
  c.backward = random.one_in(2);
  const bool decode = !c.backward && random.one_in(3);
  c.b = random.one_in(20) ? 0 : random.between(1, 4);
  c.sq = decode ? random.between(1, 4) : draw_length(random, 400);
  c.sk = decode ? random.between(1, 3000) : draw_length(random, 400);
  c.hkv = random.between(1, 3);
  c.hq = c.hkv * random.between(1, 4);
  c.d = draw_head_dim(random);
  c.dv = random.one_in(3) ? draw_head_dim(random) : c.d;
  // Most of the time is spent in the reference kernel: multiply-adds of one forward pass.
  constexpr int64_t kMostWork = 8'000'000;
  const auto work = [&c] { return c.b * c.hq * c.sq * c.sk * (c.d + c.dv); };
  while (work() > kMostWork && c.hq > 1) c.hq = c.hkv = 1;
  while (work() > kMostWork && c.b > 1) --c.b;
  while (work() > kMostWork) (c.sq > c.sk ? c.sq : c.sk) /= 2;

  if (random.one_in(3)) c.q_form = kPacked;
  if (random.one_in(2)) c.few = random.between(1, 20);
  if (random.one_in(3)) c.k_form = random.one_in(2) || c.backward ? kPacked : kPaged;
  c.page = random.one_in(2) ? 16 * random.between(1, 8) : random.between(1, 50);
  c.csr = random.one_in(3);
  c.used = random.one_in(4);
  c.order = random.between(kBshd, kSbhd);
  if (random.one_in(3)) c.gap = random.between(1, 9);
  c.reversed = random.one_in(6);
  c.shared_kv = random.one_in(10);
  draw_options(random, c);
  c.cores = random.one_in(2) ? 2 : random.between(1, 20);
  c.seed = random.between(1, 1'000'000);
  c.deterministic = random.one_in(2);
  if (random.one_in(4)) c.lead = random.between(1, 300);
  if (random.one_in(4)) c.tail = random.between(0, 300);
  if (random.one_in(8)) {
    constexpr int64_t kKvDtypes[] = {TESSERA_FLOAT8_E4M3, TESSERA_FLOAT8_E5M2, TESSERA_INT8};
    if (random.one_in(3)) c.dtype = random.one_in(2) ? TESSERA_FLOAT8_E4M3 : TESSERA_FLOAT8_E5M2;
    c.kv = random.of(kKvDtypes);
    c.scales = random.between(kNoScales, kScalesFine);
  }
  return legalised(c);
}

}  // namespace tessera::testing
