// Rows whose scores all share one number, of any size: weights are equal, however large that number's rounding error
// is. Checks the results that plain float32 gives exactly, with every kernel and merge of parts: the mean of V, and dV
// of equal weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "execute.hpp"
#include "numbers.hpp"

namespace tessera::testing {
namespace {

// Every key is the same vector, whose products with the queries are not exact: their sums' bits depend on the order of
// summation.
Inputs equal_keys(const Case& c, double length) {
  Inputs in = make_inputs(c);
  const auto scale = [&](std::vector<double>& rows) {
    for (double& x : rows) x = round_to(static_cast<int32_t>(c.dtype), x * length);
  };
  scale(in.q), scale(in.k);
  for (int64_t b = 0; b < c.b; ++b) {
    for (int64_t j = 1; j < in.sk[b]; ++j) {
      std::copy_n(&in.k[in.k_row(b, 0) * c.hkv * c.d], c.hkv * c.d, &in.k[in.k_row(b, j) * c.hkv * c.d]);
    }
  }
  return in;
}

// O of head h, and dV of head kv: the mean of V, and the sum of dO over Sk.
void expect_means(const Inputs& in, const Call& call, double tolerance) {
  const Case& c = in.c;
  const std::vector<double> o = call.o.load(), d_v = c.backward ? call.d_v.load() : std::vector<double>{};
  double worst_o = 0, worst_d_v = 0;
  for (int64_t b = 0; b < c.b; ++b) {
    for (int64_t h = 0; h < c.hq; ++h) {
      const int64_t kv = h * c.hkv / c.hq;
      for (int64_t x = 0; x < c.dv; ++x) {
        double mean = 0;
        for (int64_t j = 0; j < in.sk[b]; ++j) mean += in.v[(in.k_row(b, j) * c.hkv + kv) * c.dv + x];
        mean /= static_cast<double>(in.sk[b]);
        for (int64_t i = 0; i < in.sq[b]; ++i) {
          worst_o = std::max(worst_o, std::fabs(o[(in.q_row(b, i) * c.hq + h) * c.dv + x] - mean));
        }
      }
    }
    for (int64_t kv = 0; kv < c.hkv && c.backward; ++kv) {
      for (int64_t x = 0; x < c.dv; ++x) {
        double sum = 0;
        for (int64_t h = kv * c.hq / c.hkv; h < (kv + 1) * c.hq / c.hkv; ++h) {
          for (int64_t i = 0; i < in.sq[b]; ++i) sum += in.d_o[(in.q_row(b, i) * c.hq + h) * c.dv + x];
        }
        sum /= static_cast<double>(in.sk[b]);
        for (int64_t j = 0; j < in.sk[b]; ++j) {
          worst_d_v = std::max(worst_d_v, std::fabs(d_v[(in.k_row(b, j) * c.hkv + kv) * c.dv + x] - sum));
        }
      }
    }
  }
  EXPECT_LE(worst_o, tolerance) << "o";
  EXPECT_LE(worst_d_v, tolerance) << "d_v";
}

void expect_means(const char* text, tessera_kernel kernel) {
  const Case drawn = legalised(parse_case(text, nullptr).value());
  for (const int32_t dtype : {TESSERA_FLOAT32, TESSERA_FLOAT16, TESSERA_BFLOAT16}) {
    Case c = drawn;
    c.dtype = dtype;
    for (const double length : {1.0, 30.0, 100.0, 3000.0, 3e6}) {
      if (dtype == TESSERA_FLOAT16 && length > 3000) continue;
      const Inputs in = equal_keys(c, length);
      for (Place place : cpu_places()) {
        // As a device has it: AMX's tiles serve what they are the fastest for, in a direction by itself.
        if (place.isa == TESSERA_ISA_AMX_BF16) place.vector_isa = TESSERA_ISA_AVX512_BF16;
        SCOPED_TRACE(place_name(place) + ", length " + std::to_string(length) + ": " + to_text(c));
        Call call = make_call(in);
        const RunResult forward = run(call, TESSERA_FORWARD, {.kernel = kernel, .place = place});
        ASSERT_TRUE(forward.ok()) << forward.why();
        if (c.backward) {
          const RunResult backward = run(call, TESSERA_BACKWARD, {.place = place});
          ASSERT_TRUE(backward.ok()) << backward.why();
        }
        // Sums of weights that are rounded, and of values up to 4; a sum of some queries' dO.
        expect_means(in, call, 16 * epsilon(dtype == TESSERA_FLOAT32 ? dtype : TESSERA_BFLOAT16));
      }
    }
  }
}

constexpr const char* kTiled = "b=1 sq=70 sk=140 hq=2 hkv=1 d=64 dv=32 low=1 backward=1";
TEST(SharedScores, WeighTheirKeysEquallyInTiles) { expect_means(kTiled, TESSERA_KERNEL_TILED); }

TEST(SharedScores, WeighTheirKeysEquallyInTilesOfAmx) {  // of as many rows as they serve
  expect_means("b=1 sq=160 sk=200 hq=1 hkv=1 d=64 dv=64 low=1 backward=1", TESSERA_KERNEL_TILED);
}

// The backward pass makes the tiled kernels' bits again, which are not those that decoding sums.
TEST(SharedScores, WeighTheirKeysEquallyAfterDecoding) {
  expect_means("b=1 sq=3 sk=300 hq=2 hkv=1 d=80 dv=32 low=1 backward=1", TESSERA_KERNEL_DECODE);
}

TEST(SharedScores, WeighPartsByTheirKeys) {
  for (const tessera_kernel kernel : {TESSERA_KERNEL_DECODE, TESSERA_KERNEL_TILED}) {
    expect_means("b=1 sq=1 sk=5000 hq=4 hkv=2 d=64 dv=16 cores=16", kernel);
  }
  expect_means("b=3 sq=2 sk=700 prefix=600 hq=2 hkv=1 d=64 dv=16 used=1", TESSERA_KERNEL_AUTO);
}

}  // namespace
}  // namespace tessera::testing
