// Weights in bfloat16: O's error is that of a softmax in float32 whose P is rounded once, with any maximum that a
// kernel subtracts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <vector>

#include "execute.hpp"
#include "numbers.hpp"

namespace tessera::testing {
namespace {

struct RoundedCase {
  const char* name;
  tessera_kernel kernel;
  const char* text;
};
void PrintTo(const RoundedCase& c, std::ostream* out) { *out << c.name; }

// One element in a thousand is large: one key, which may come late, holds most of some rows. There are enough heads for
// hundreds of such rows.
constexpr RoundedCase kRounded[] = {
    {"d64", TESSERA_KERNEL_TILED, "dtype=bf16 b=1 sq=192 sk=640 hq=16 hkv=16 d=64 dv=64 data=outlier seed=3"},
    {"d128", TESSERA_KERNEL_TILED, "dtype=bf16 b=1 sq=128 sk=640 hq=16 hkv=16 d=128 dv=128 data=outlier seed=4"},
    {"causal", TESSERA_KERNEL_TILED,
     "dtype=bf16 b=1 sq=320 sk=320 hq=16 hkv=16 d=64 dv=64 causal=1 data=outlier seed=5"},
    {"d64_without_lse", TESSERA_KERNEL_TILED,
     "dtype=bf16 b=1 sq=192 sk=640 hq=16 hkv=16 d=64 dv=64 data=outlier lse=0 seed=3"},
    {"causal_without_lse", TESSERA_KERNEL_TILED,
     "dtype=bf16 b=1 sq=320 sk=320 hq=16 hkv=16 d=64 dv=64 causal=1 data=outlier lse=0 seed=5"},
    {"decode_d64", TESSERA_KERNEL_DECODE, "dtype=bf16 b=8 sq=1 sk=800 hq=64 hkv=4 d=64 dv=64 data=outlier seed=6"},
    {"decode_d128", TESSERA_KERNEL_DECODE, "dtype=bf16 b=8 sq=1 sk=800 hq=64 hkv=4 d=128 dv=128 data=outlier seed=7"},
};

// O of every row, exact and with P = 2^(s - the row's maximum) rounded to bfloat16 before its product with V, and
// stored in bfloat16.
struct Expected {
  std::vector<double> exact, rounded_once;
};

Expected expected(const Inputs& in) {
  const Case& c = in.c;
  Expected out{std::vector<double>(static_cast<size_t>(in.rows_q * c.hq * c.dv)), {}};
  out.rounded_once = out.exact;
  std::vector<double> s;
  for (int64_t b = 0; b < c.b; ++b)
    for (int64_t h = 0; h < c.hq; ++h)
      for (int64_t i = 0; i < in.sq[b]; ++i) {
        const int64_t row = in.q_row(b, i) * c.hq + h, kv = h * c.hkv / c.hq;
        s.assign(in.sk[b], -std::numeric_limits<double>::infinity());
        for (int64_t j = 0; j < in.sk[b]; ++j) {
          if (!in.visible(b, h, i, j)) continue;
          const double *q = &in.q[row * c.d], *k = &in.k[(in.k_row(b, j) * c.hkv + kv) * c.d];
          double sum = 0;
          for (int64_t x = 0; x < c.d; ++x) sum += q[x] * k[x];
          s[j] = sum * in.scale();
        }
        const double max = *std::ranges::max_element(s);
        double total = 0;
        double *exact = &out.exact[row * c.dv], *once = &out.rounded_once[row * c.dv];
        for (int64_t j = 0; j < in.sk[b]; ++j) {
          const double p = std::exp(s[j] - max), rounded = round_to(TESSERA_BFLOAT16, p);
          const double* v = &in.v[(in.k_row(b, j) * c.hkv + kv) * c.dv];
          total += p;
          for (int64_t x = 0; x < c.dv; ++x) exact[x] += p * v[x], once[x] += rounded * v[x];
        }
        for (int64_t x = 0; x < c.dv; ++x) {
          exact[x] /= total, once[x] = round_to(TESSERA_BFLOAT16, once[x] / total);
        }
      }
  return out;
}

double rms_error(const std::vector<double>& value, const std::vector<double>& exact) {
  double squares = 0;
  for (size_t n = 0; n < exact.size(); ++n) squares += (value[n] - exact[n]) * (value[n] - exact[n]);
  return std::sqrt(squares / static_cast<double>(exact.size()));
}

// 1.00 to 1.06 is what tests/protocols/test_rounding_cpu.py gives for the kernels on such inputs, and 1.15 to 1.35
// where a maximum may lag by 2^8.
void compare(const RoundedCase& rounded, const std::vector<Place>& places) {
  constexpr double kMost = 1.08;
  const Case c = legalised(parse_case(rounded.text, nullptr).value());
  const Inputs in = make_inputs(c);
  const Expected want = expected(in);
  const double once = rms_error(want.rounded_once, want.exact);
  for (const Place& place : places) {
    Call call = make_call(in);
    const RunResult result = run(call, TESSERA_FORWARD, {.kernel = rounded.kernel, .place = place});
    ASSERT_TRUE(result.ok()) << result.why();
    EXPECT_LE(rms_error(call.o.load(), want.exact), kMost * once) << place_name(place);
  }
}

class RoundedWeights : public ::testing::TestWithParam<RoundedCase> {};
TEST_P(RoundedWeights, CostOOneRounding) { compare(GetParam(), cpu_places()); }
INSTANTIATE_TEST_SUITE_P(Case, RoundedWeights, ::testing::ValuesIn(kRounded));

class AmxRoundedWeights : public RoundedWeights {};
TEST_P(AmxRoundedWeights, CostOOneRounding) {
  if (cpu_device().isa_limit != TESSERA_ISA_AMX_BF16) GTEST_SKIP() << "skipped: no AMX here, and none emulated";
  compare(GetParam(), {{.isa = TESSERA_ISA_AMX_BF16}});
}
INSTANTIATE_TEST_SUITE_P(Case, AmxRoundedWeights, ::testing::ValuesIn(kRounded));

}  // namespace
}  // namespace tessera::testing
