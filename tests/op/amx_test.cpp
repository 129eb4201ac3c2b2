// AMX's promises beyond the case table, on the tiles or, with the library of tests/amx_emulated, on their emulation.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "check.hpp"
#include "execute.hpp"

namespace tessera::testing {
namespace {

// Each hides some keys from some queries of a tile.
constexpr const char* kHiding[] = {
    "dtype=bf16 b=1 sq=200 sk=300 hq=2 hkv=1 d=64 dv=64 causal=1 backward=1",
    "dtype=bf16 b=1 sq=150 sk=150 hq=4 hkv=2 d=128 dv=40 wl=40 wr=7 backward=1",
    "dtype=bf16 b=1 sq=100 sk=600 hq=2 hkv=2 d=40 dv=128 mask=hqk backward=1",
    "dtype=bf16 b=1 sq=90 sk=200 hq=2 hkv=1 d=32 dv=32 bias=hqk causal=1 softcap=9 backward=1",
    "dtype=bf16 b=1 sq=9 sk=700 hq=6 hkv=2 d=64 dv=64 wl=230 wr=0 cores=6 backward=1",
};

class AmxNonfinite : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (cpu_device().isa_limit != TESSERA_ISA_AMX_BF16) GTEST_SKIP() << "skipped: no AMX here, and none emulated";
  }

  static void run_on_amx(Call& call, tessera_direction direction, const Case& c) {
    const RunOptions options{
        .kernel = TESSERA_KERNEL_TILED, .place = {.isa = TESSERA_ISA_AMX_BF16}, .cores = static_cast<int32_t>(c.cores)};
    const RunResult result = run(call, direction, options);
    ASSERT_TRUE(result.ok()) << result.why();
  }

  // Row n of width w, element by element and sign by sign.
  static bool same_row(const std::vector<double>& a, const std::vector<double>& b, int64_t n, int64_t w) {
    return std::memcmp(&a[static_cast<size_t>(n * w)], &b[static_cast<size_t>(n * w)],
                       static_cast<size_t>(w) * sizeof(double)) == 0;
  }
};

// A NaN in V changes no bit of the queries that it is hidden from, and one in dO none of the keys.
TEST_P(AmxNonfinite, LeavesTheBitsOfWhatDoesNotSeeIt) {
  const Case c = legalised(parse_case(GetParam(), nullptr).value());
  const Inputs in = make_inputs(c);
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const int64_t bad_key = in.sk[0] * 2 / 3, bad_query = in.sq[0] / 2;

  Call finite = make_call(in), poisoned = make_call(in);
  std::vector<double> v = in.v;
  for (int64_t h = 0; h < c.hkv; ++h) v[static_cast<size_t>((in.k_row(0, bad_key) * c.hkv + h) * c.dv + 3)] = kNan;
  poisoned.v.store(v);
  run_on_amx(finite, TESSERA_FORWARD, c);
  run_on_amx(poisoned, TESSERA_FORWARD, c);
  const std::vector<double> o = finite.o.load(), o_poisoned = poisoned.o.load();
  int64_t hidden = 0, reached = 0;
  for (int64_t i = 0; i < in.sq[0]; ++i) {
    for (int64_t h = 0; h < c.hq; ++h) {
      const int64_t row = in.q_row(0, i) * c.hq + h;
      const bool sees = in.visible(0, h, i, bad_key);
      (sees ? reached : hidden) += 1;
      EXPECT_EQ(same_row(o, o_poisoned, row, c.dv), !sees) << "query " << i << " of head " << h;
    }
  }
  EXPECT_GT(hidden, 0);
  EXPECT_GT(reached, 0);

  Call gradients = make_call(in);
  gradients.o.store(finite.o.load());
  gradients.lse.store(finite.lse.load());
  std::vector<double> d_o = in.d_o;
  for (int64_t h = 0; h < c.hq; ++h) d_o[static_cast<size_t>((in.q_row(0, bad_query) * c.hq + h) * c.dv + 3)] = kNan;
  gradients.d_o.store(d_o);
  run_on_amx(finite, TESSERA_BACKWARD, c);
  run_on_amx(gradients, TESSERA_BACKWARD, c);
  const std::vector<double> d_v = finite.d_v.load(), d_v_poisoned = gradients.d_v.load();
  const std::vector<double> d_k = finite.d_k.load(), d_k_poisoned = gradients.d_k.load();
  hidden = reached = 0;
  for (int64_t j = 0; j < in.sk[0]; ++j) {
    for (int64_t kv = 0; kv < c.hkv; ++kv) {
      bool seen = false;
      for (int64_t h = kv * (c.hq / c.hkv); h < (kv + 1) * (c.hq / c.hkv); ++h) {
        seen = seen || in.visible(0, h, bad_query, j);
      }
      const int64_t row = in.k_row(0, j) * c.hkv + kv;
      (seen ? reached : hidden) += 1;
      EXPECT_EQ(same_row(d_v, d_v_poisoned, row, c.dv), !seen) << "dV of key " << j << " of head " << kv;
      EXPECT_EQ(same_row(d_k, d_k_poisoned, row, c.d), !seen) << "dK of key " << j << " of head " << kv;
    }
  }
  EXPECT_GT(hidden, 0);
  EXPECT_GT(reached, 0);
}

INSTANTIATE_TEST_SUITE_P(Case, AmxNonfinite, ::testing::ValuesIn(kHiding));

// A single option on stages that every row sees has a loop of its own, in both directions, and another one without an
// LSE; there are enough keys for several jobs.
constexpr const char* kOneOption[] = {
    "dtype=bf16 b=1 sq=100 sk=700 hq=2 hkv=1 d=64 dv=64 alibi=h backward=1",
    "dtype=bf16 b=1 sq=400 sk=400 hq=4 hkv=4 d=16 dv=16 alibi=h backward=1",  // keys on both sides of the diagonal
    "dtype=bf16 b=2 sq=300 sk=300 hq=4 hkv=2 d=32 dv=40 alibi=bh causal=1 backward=1",
    "dtype=bf16 b=1 sq=40 sk=900 hq=2 hkv=2 d=40 dv=24 alibi=h wl=500 wr=3 backward=1 cores=6",
    "dtype=bf16 b=1 sq=100 sk=600 hq=2 hkv=1 d=64 dv=64 softcap=30 backward=1",   // every score is small
    "dtype=bf16 b=1 sq=100 sk=600 hq=2 hkv=1 d=64 dv=64 softcap=5 backward=1",    // in some stages
    "dtype=bf16 b=1 sq=100 sk=600 hq=2 hkv=1 d=64 dv=64 softcap=0.3 backward=1",  // in none
    "dtype=bf16 b=1 sq=90 sk=600 hq=2 hkv=1 d=64 dv=64 bias=hqk backward=1",
    "dtype=bf16 b=1 sq=90 sk=621 hq=2 hkv=1 d=64 dv=64 bias=hqk bias_f32=1 backward=1",
    "dtype=bf16 b=1 sq=90 sk=600 hq=2 hkv=1 d=64 dv=64 bias=hqk d_bias=1 softcap=4 backward=1",
    "dtype=bf16 b=1 sq=90 sk=600 hq=2 hkv=1 d=64 dv=64 bias=hqk data=inf_bias",
    // A step of the products of S, with 1 / scale in two terms; beside stages that a mask cuts; of few head dimensions;
    // with a negative scale and with 0, which has no inverse.
    "dtype=bf16 b=1 sq=200 sk=640 hq=2 hkv=1 d=128 dv=128 bias=hqk",
    "dtype=bf16 b=1 sq=300 sk=450 hq=2 hkv=2 d=96 dv=64 bias=hqk causal=1 wl=260 cores=6",
    "dtype=bf16 b=2 sq=130 sk=333 hq=2 hkv=1 d=24 dv=40 bias=bhqk",
    "dtype=bf16 b=1 sq=100 sk=512 hq=2 hkv=1 d=64 dv=64 bias=hqk scale=-0.3",
    "dtype=bf16 b=1 sq=100 sk=512 hq=2 hkv=1 d=64 dv=64 bias=hqk scale=0",
    // No option: whole stages, few queries and keys, scores that outgrow the stale max, and NaN and infinities.
    "dtype=bf16 b=2 sq=300 sk=640 hq=2 hkv=1 d=64 dv=64",
    "dtype=bf16 b=1 sq=333 sk=333 hq=2 hkv=2 d=128 dv=128 causal=1",
    "dtype=bf16 b=1 sq=130 sk=700 hq=2 hkv=2 d=40 dv=72 wl=100 wr=40",
    "dtype=bf16 b=1 sq=200 sk=1500 hq=2 hkv=1 d=64 dv=64 data=growing",
    "dtype=bf16 b=1 sq=200 sk=700 hq=2 hkv=1 d=64 dv=64 data=outlier cores=6",
    "dtype=bf16 b=1 sq=140 sk=300 hq=4 hkv=2 d=64 dv=64 data=nan_key",
    "dtype=bf16 b=1 sq=140 sk=300 hq=4 hkv=2 d=64 dv=64 causal=1 data=inf_value",
    "dtype=bf16 b=1 sq=100 sk=600 hq=2 hkv=1 d=64 dv=64 dropout=0.3 backward=1",
    "dtype=bf16 b=1 sq=100 sk=600 hq=2 hkv=1 d=64 dv=64 mask=hqk dropout=0.3 alibi=h bias=hqk backward=1",
    // Block masks: stages that are hidden from some tiles, whole super-blocks, and blocks that are not multiples of a
    // stage.
    "dtype=bf16 b=1 sq=200 sk=640 hq=4 hkv=2 d=64 dv=64 block_mask=hqk block_q=32 block_k=64 backward=1",
    "dtype=bf16 b=1 sq=160 sk=1100 hq=6 hkv=2 d=128 dv=128 block_mask=hqk block_q=160 block_k=512 backward=1",
    "dtype=bf16 b=1 sq=300 sk=1100 hq=4 hkv=2 d=64 dv=64 block_mask=hqk block_q=64 block_k=256 causal=1 backward=1",
    "dtype=bf16 b=1 sq=100 sk=600 hq=2 hkv=1 d=64 dv=64 block_mask=hqk block_q=40 block_k=24 dropout=0.3 backward=1",
};

class AmxOptions : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (cpu_device().isa_limit != TESSERA_ISA_AMX_BF16) GTEST_SKIP() << "skipped: no AMX here, and none emulated";
  }
  static void match_the_oracle(const Case& c) {
    const CheckOptions options{.places = {{.isa = TESSERA_ISA_AMX_BF16}}, .check_oracle = false};
    for (const std::string& failure : check_case(legalised(c), options)) ADD_FAILURE() << failure;
  }
};

TEST_P(AmxOptions, MatchTheOracle) { match_the_oracle(parse_case(GetParam(), nullptr).value()); }

// Without an LSE the forward pass sums rounded weights.
TEST_P(AmxOptions, MatchTheOracleWithoutLse) {
  Case c = parse_case(GetParam(), nullptr).value();
  c.lse = c.backward = 0;
  match_the_oracle(c);
}

INSTANTIATE_TEST_SUITE_P(Case, AmxOptions, ::testing::ValuesIn(kOneOption));

// Several items of a KV head read the same keys, which are then packed once for all of them (on one core even in calls
// as short as these): lengths, pages, windows, few queries in one tile, a mixed batch, and every option that checks the
// keys for NaN.
constexpr const char* kSharedKeys[] = {
    "dtype=bf16 b=2 sq=300 sk=700 hq=4 hkv=2 d=64 dv=64 causal=1 cores=1",
    "dtype=bf16 b=3 sq=150 sk=600 hq=4 hkv=1 d=128 dv=128 q=packed k=packed used=1 causal=1 data=nan_value cores=1",
    "dtype=bf16 b=3 sq=100 sk=530 hq=2 hkv=1 d=40 dv=72 k=paged page=16 used=1 wl=90 wr=20 data=inf_value cores=1",
    "dtype=bf16 b=2 sq=90 sk=400 hq=4 hkv=2 d=64 dv=64 k=paged page=16 csr=1 used=1 causal=1 cores=1",
    "dtype=bf16 b=1 sq=40 sk=2600 hq=4 hkv=1 d=64 dv=64 causal=1 cores=1",
    "dtype=bf16 b=1 sq=150 sk=1500 hq=2 hkv=1 d=64 dv=64 wl=30 wr=0 cores=1",
    "dtype=bf16 b=1 sq=700 sk=90 hq=2 hkv=1 d=64 dv=64 causal=1 top_left=1 data=nan_value cores=1",
    "dtype=bf16 b=1 sq=9 sk=700 hq=16 hkv=1 d=64 dv=64 causal=1 cores=1",
    "dtype=bf16 b=6 sq=200 sk=300 hq=6 hkv=2 d=64 dv=64 q=packed k=packed few=9 causal=1 cores=1",
    "dtype=bf16 b=1 sq=200 sk=600 hq=2 hkv=1 d=64 dv=64 mask=hqk data=nan_value cores=1",
    "dtype=bf16 b=1 sq=200 sk=600 hq=4 hkv=1 d=64 dv=64 alibi=h bias=hqk causal=1 sink=1 cores=1",
    "dtype=bf16 b=1 sq=300 sk=560 hq=2 hkv=1 d=64 dv=64 alibi=h cores=1",
    "dtype=bf16 b=1 sq=1100 sk=900 hq=1 hkv=1 d=128 dv=128 causal=1 invariant=1 cores=1",
};

class AmxSharedKeys : public AmxOptions {};
TEST_P(AmxSharedKeys, MatchTheOracle) { match_the_oracle(parse_case(GetParam(), nullptr).value()); }
INSTANTIATE_TEST_SUITE_P(Case, AmxSharedKeys, ::testing::ValuesIn(kSharedKeys));

// With a KV head for every query head each KV head has one item, which packs for itself.
constexpr const char* kSharedBits[] = {
    "dtype=bf16 b=1 sq=1100 sk=1100 hq=2 hkv=1 d=64 dv=64 causal=1 data=nan_value",
    "dtype=bf16 b=1 sq=300 sk=1050 hq=4 hkv=2 d=128 dv=128",
    "dtype=bf16 b=2 sq=200 sk=620 hq=4 hkv=2 d=40 dv=72 wl=300 wr=30 data=inf_value",
    "dtype=bf16 b=3 sq=200 sk=700 hq=2 hkv=1 d=64 dv=64 q=packed k=packed used=1 causal=1",
    "dtype=bf16 b=2 sq=130 sk=600 hq=4 hkv=1 d=64 dv=128 k=paged page=16 used=1 causal=1",
    "dtype=bf16 b=1 sq=200 sk=700 hq=2 hkv=1 d=64 dv=64 mask=qk data=nan_value softcap=5",
};

class AmxSharedBits : public ::testing::TestWithParam<const char*> {};
TEST_P(AmxSharedBits, AreThoseOfKeysThatEachItemPacks) {
  if (cpu_device().isa_limit != TESSERA_ISA_AMX_BF16) GTEST_SKIP() << "skipped: no AMX here, and none emulated";
  const Case shared_case = legalised(parse_case(GetParam(), nullptr).value());
  Case own_case = shared_case;
  own_case.hkv = own_case.hq;
  const Inputs shared_in = make_inputs(shared_case);
  Inputs own_in = make_inputs(own_case);
  own_in.q = shared_in.q, own_in.mask = shared_in.mask;
  const int64_t group = shared_case.hq / shared_case.hkv;
  const auto expand = [&](std::vector<double>& out, const std::vector<double>& heads, int64_t width) {
    for (size_t i = 0; i < out.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i), row = at / width / own_case.hkv, head = at / width % own_case.hkv;
      out[i] = heads[static_cast<size_t>((row * shared_case.hkv + head / group) * width + at % width)];
    }
  };
  expand(own_in.k, shared_in.k, shared_case.d), expand(own_in.v, shared_in.v, shared_case.dv);

  Call shared = make_call(shared_in), own = make_call(own_in);
  const RunOptions options{
      .kernel = TESSERA_KERNEL_TILED, .place = {.isa = TESSERA_ISA_AMX_BF16}, .threads = 2, .cores = 1};
  tessera_plan shared_plan{}, own_plan{};
  ASSERT_EQ(make_plan(shared, TESSERA_FORWARD, options, shared_plan).code, TESSERA_OK);
  ASSERT_EQ(make_plan(own, TESSERA_FORWARD, options, own_plan).code, TESSERA_OK);
  ASSERT_EQ(shared_plan.steps[0].num_splits, 1);
  ASSERT_EQ(own_plan.steps[0].num_splits, 1);
  const int64_t keys_bytes = shared_case.hkv * shared_in.sk[0] * (shared_case.d + shared_case.dv) * 2;
  EXPECT_GE(shared_plan.shared_bytes, keys_bytes) << "packed ahead";
  EXPECT_LT(own_plan.shared_bytes, keys_bytes) << "packed by the items";

  const RunResult ran = run(shared, TESSERA_FORWARD, options);
  ASSERT_TRUE(ran.ok()) << ran.why();
  const RunResult ran_own = run(own, TESSERA_FORWARD, options);
  ASSERT_TRUE(ran_own.ok()) << ran_own.why();
  EXPECT_EQ(output_bytes(shared, TESSERA_FORWARD), output_bytes(own, TESSERA_FORWARD));
}
INSTANTIATE_TEST_SUITE_P(Case, AmxSharedBits, ::testing::ValuesIn(kSharedBits));

// Decoding: rows of K and V in place and copied, tails of keys and of columns, 1 to 16 rows a KV head, several blocks
// of keys, scores that outgrow the stale max, and NaN in masked data.
constexpr const char* kDecoding[] = {
    "dtype=bf16 b=1 sq=1 sk=700 hq=8 hkv=2 d=128 dv=128",
    "dtype=bf16 b=2 sq=1 sk=333 hq=32 hkv=2 d=64 dv=96 cores=6",
    "dtype=bf16 b=1 sq=1 sk=640 hq=3 hkv=3 d=256 dv=32 order=bhsd",
    "dtype=bf16 b=2 sq=3 sk=517 hq=10 hkv=2 d=40 dv=24 causal=1 wl=100",
    "dtype=bf16 b=1 sq=2 sk=500 hq=4 hkv=1 d=72 dv=200 softcap=9 alibi=h sink=1",
    "dtype=bf16 b=3 sq=1 sk=400 hq=8 hkv=4 d=128 dv=128 k=paged page=16 used=1",
    "dtype=bf16 b=1 sq=1 sk=2500 hq=4 hkv=1 d=64 dv=64 data=growing",
    "dtype=bf16 b=1 sq=1 sk=900 hq=8 hkv=2 d=64 dv=64 data=outlier",
    "dtype=bf16 b=1 sq=4 sk=300 hq=4 hkv=2 d=64 dv=64 causal=1 data=nan_value",
    "dtype=bf16 b=1 sq=4 sk=300 hq=4 hkv=2 d=64 dv=64 wl=90 data=inf_value",
    "dtype=bf16 b=1 sq=1 sk=300 hq=4 hkv=2 d=64 dv=64 data=nan_key",
};

class AmxDecoding : public AmxOptions {};
TEST_P(AmxDecoding, MatchesTheOracle) { match_the_oracle(parse_case(GetParam(), nullptr).value()); }
INSTANTIATE_TEST_SUITE_P(Case, AmxDecoding, ::testing::ValuesIn(kDecoding));

// A bias of -inf before the first real token, as models pad on the left: whole jobs in which no row sees anything.
TEST(AmxBias, HidesWholeJobs) {
  if (cpu_device().isa_limit != TESSERA_ISA_AMX_BF16) GTEST_SKIP() << "skipped: no AMX here, and none emulated";
  const Case c =
      legalised(parse_case("dtype=bf16 b=1 sq=70 sk=700 hq=2 hkv=1 d=64 dv=64 bias=k bias_f32=1", nullptr).value());
  const Inputs in = make_inputs(c);
  constexpr int64_t kPadding = 390;
  Call tiles = make_call(in), reference = make_call(in);
  std::vector<double> bias = in.bias;
  for (int64_t j = 0; j < kPadding; ++j) bias[static_cast<size_t>(j)] = -std::numeric_limits<double>::infinity();
  tiles.bias.store(bias), reference.bias.store(bias);
  const RunResult ran =
      run(tiles, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_TILED, .place = {.isa = TESSERA_ISA_AMX_BF16}});
  ASSERT_TRUE(ran.ok()) << ran.why();
  const RunResult expected = run(reference, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_REFERENCE});
  ASSERT_TRUE(expected.ok()) << expected.why();
  const std::vector<double> o = tiles.o.load(), exact = reference.o.load();
  const std::vector<double> lse = tiles.lse.load(), exact_lse = reference.lse.load();
  for (size_t i = 0; i < o.size(); ++i) ASSERT_NEAR(o[i], exact[i], 0x1p-7) << "element " << i;
  for (size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(lse[i], exact_lse[i], 1e-5) << "row " << i;
}

}  // namespace
}  // namespace tessera::testing
