// fwd_sm90_fp8, and decode_sm90 and fwd_sm80 with an 8-bit cache, on a GPU: what the table's cases do not ask.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/float8.hpp"
#include "cuda_fixture.hpp"
#include "execute.hpp"
#include "numbers.hpp"

namespace tessera::testing {
namespace {

std::string gpu_without_fp8() {
  if (!gpu_missing().empty()) return gpu_missing();
  return gpu_device().arch == 90 ? "" : "no kernel of this GPU takes float8_e4m3";
}

// The kernels that read an 8-bit cache on this GPU, all of which the tests of caches must pass.
std::vector<tessera_kernel> kernels_of_caches() {
  if (gpu_device().arch == 90) return {TESSERA_KERNEL_DECODE_SM90, TESSERA_KERNEL_FWD_SM80};
  return {TESSERA_KERNEL_FWD_SM80};
}

std::vector<double> o_of(Call call, int32_t dtype, tessera_kernel kernel) {
  call.o = Tensor(dtype, std::vector<int64_t>(call.o.layout().shape, call.o.layout().shape + call.o.layout().rank));
  call.describe();
  const RunResult result = run(call, TESSERA_FORWARD, {.kernel = kernel, .place = kGpu, .cores = 3});
  EXPECT_TRUE(result.ok()) << result.why();
  return call.o.load();
}

std::vector<double> o_of(const Inputs& in, int32_t dtype, tessera_kernel kernel = TESSERA_KERNEL_AUTO) {
  return o_of(make_call(in), dtype, kernel);
}

double relative_error(const std::vector<double>& o, const std::vector<double>& exact) {
  double difference = 0, all = 0;
  for (size_t n = 0; n < exact.size(); ++n) {
    difference += (o[n] - exact[n]) * (o[n] - exact[n]), all += exact[n] * exact[n];
  }
  return std::sqrt(difference / all);
}

// o of 16 bits is the rounded o of float32: rows that see nothing, rows of no sequence and ends within a tile included.
TEST(CudaFp8, RoundsOneResultToEachDtype) {
  if (!gpu_without_fp8().empty()) GTEST_SKIP() << "skipped: " << gpu_without_fp8();
  for (const char* line :
       {"dtype=e4m3 b=2 sq=200 sk=90 hq=2 hkv=1 d=64 dv=80 causal=1 scales=bh",
        "dtype=e4m3 b=3 sq=150 sk=130 hq=2 hkv=2 d=128 dv=128 q=packed k=packed lead=3 scales=fine"}) {
    SCOPED_TRACE(line);
    const Inputs in = inputs_of(line);
    const std::vector<double> whole = o_of(in, TESSERA_FLOAT32);
    for (const int32_t dtype : {TESSERA_BFLOAT16, TESSERA_FLOAT16}) {
      const std::vector<double> rounded = o_of(in, dtype);
      ASSERT_EQ(rounded.size(), whole.size());
      for (size_t n = 0; n < whole.size(); ++n) {
        ASSERT_EQ(rounded[n], round_to(dtype, whole[n])) << "[" << n << "] of " << tessera_dtype_name(dtype);
      }
    }
  }
}

// The first `unaffected` elements are the usual ones, and all others NaN.
void expect_nan_from(size_t unaffected, const std::vector<double>& o, const std::vector<double>& usual) {
  ASSERT_EQ(o.size(), usual.size());
  for (size_t n = 0; n < usual.size(); ++n) {
    if (n < unaffected) {
      ASSERT_EQ(o[n], usual[n]) << n;
    } else {
      ASSERT_TRUE(std::isnan(o[n])) << n;
    }
  }
}

// Rows 0 to 49 see keys 0 to 127 alone, in the same tile as rows that see more.
TEST(CudaFp8, KeepsScalesOfHiddenKeysFromAResult) {
  if (!gpu_without_fp8().empty()) GTEST_SKIP() << "skipped: " << gpu_without_fp8();
  constexpr size_t kUnaffected = 50 * 64;
  Inputs in = inputs_of("dtype=e4m3 b=1 sq=100 sk=178 hq=1 hkv=1 d=64 dv=64 causal=1 scales=fine");
  const std::vector<double> usual = o_of(in, TESSERA_FLOAT32);
  in.k_scales[1] = in.v_scales[1] = std::numeric_limits<double>::quiet_NaN();
  expect_nan_from(kUnaffected, o_of(in, TESSERA_FLOAT32), usual);
}

// Blocks of 128 keys whose scales of v lie far apart, are 0, negative or beyond what O is kept in units of: the rows of
// each block of queries see one more of them.
TEST(CudaFp8, HasTheErrorOfAWeightWhateverTheScalesOfV) {
  if (!gpu_without_fp8().empty()) GTEST_SKIP() << "skipped: " << gpu_without_fp8();
  constexpr double kMostError = 0.04;
  constexpr size_t kBlock = 128, kBlocks = 4, kWidth = 64;
  using Factors = std::array<double, kBlocks>;
  for (const Factors& factors : {Factors{0x1p-30, -0x1p30, 0x1p-30, 1}, Factors{0x1p60, 0x1p-20, 0, 0x1p61},
                                 Factors{0, 0x1p-50, 0x1p-39, -0x1p39}, Factors{-0x1p-60, 0x1p-60, 0x1p-70, 0x1p-61}}) {
    Inputs in = inputs_of("dtype=e4m3 b=1 sq=512 sk=512 hq=1 hkv=1 d=64 dv=64 causal=1 scales=fine");
    ASSERT_EQ(in.v_scales.size(), kBlocks);
    for (size_t block = 0; block < kBlocks; ++block) {
      in.v_scales[block] *= factors[block];
      for (size_t n = block * kBlock * kWidth; n < (block + 1) * kBlock * kWidth; ++n) in.v[n] *= factors[block];
    }
    Call oracle = make_oracle_call(in);
    ASSERT_TRUE(run(oracle, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
    const std::vector<double> o = o_of(in, TESSERA_FLOAT32), exact = oracle.o.load();
    for (size_t block = 0; block < kBlocks; ++block) {
      const auto rows = [&](const std::vector<double>& of) {
        const auto first = of.begin() + static_cast<std::ptrdiff_t>(block * kBlock * kWidth);
        return std::vector<double>(first, first + kBlock * kWidth);
      };
      if (block == 0 && factors[0] == 0) {
        EXPECT_EQ(rows(o), std::vector<double>(kBlock * kWidth, 0));
      } else {
        EXPECT_LT(relative_error(rows(o), rows(exact)), kMostError) << "block " << block << ", first " << factors[0];
      }
    }
  }
}

// Of any key; rows that do not see the key have finite results.
TEST(CudaFp8, KeepsANaNOfAnyKey) {
  if (!gpu_without_fp8().empty()) GTEST_SKIP() << "skipped: " << gpu_without_fp8();
  constexpr size_t kRows = 40, kWidth = 64, kKeys = 300, kFirst = kKeys - kRows;
  for (size_t key = kFirst; key < kFirst + 16; ++key) {
    Inputs in = inputs_of("dtype=e4m3 b=1 sq=40 sk=300 hq=1 hkv=1 d=64 dv=64 causal=1 scales=bh");
    in.k_codes[key * kWidth + key % kWidth] = std::numeric_limits<double>::quiet_NaN();
    Call call = make_call(in);
    const RunResult result = run(call, TESSERA_FORWARD, {.place = kGpu, .cores = 3});
    ASSERT_TRUE(result.ok()) << result.why();
    const std::vector<double> o = call.o.load(), lse = call.lse.load();
    for (size_t row = 0; row < kRows; ++row) {
      const bool sees = kFirst + row >= key;
      EXPECT_EQ(std::isnan(lse[row]), sees) << "key " << key << ", row " << row;
      for (size_t n = 0; n < kWidth; ++n) EXPECT_EQ(std::isnan(o[row * kWidth + n]), sees) << key << ", " << row;
    }
  }
}

// A weight's rounding to e4m3 is off by at most 2^-4, 2.6 % in the mean over a binade's numbers; each key's rounding is
// of its own. So the error relative to O is that of one weight at any length: what adds to it with the keys would show.
TEST(CudaFp8, HasTheErrorOfOneWeightAtEveryLength) {
  if (!gpu_without_fp8().empty()) GTEST_SKIP() << "skipped: " << gpu_without_fp8();
  constexpr double kMostError = 0.03;
  for (const int64_t keys : {128, 1024, 8192}) {
    const std::string line = "dtype=e4m3 b=1 sq=64 hq=1 hkv=1 d=64 dv=64 scales=one sk=" + std::to_string(keys);
    const Inputs in = inputs_of(line.c_str());
    Call oracle = make_oracle_call(in);
    ASSERT_TRUE(run(oracle, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
    EXPECT_LT(relative_error(o_of(in, TESSERA_FLOAT32), oracle.o.load()), kMostError) << keys << " keys";
  }
}

// ---- an 8-bit cache -------------------------------------------------------------------------------------------------

// With one key O is its value, exactly; a query of a single 1 has one of its elements as its score, and LSE.
TEST(CudaFp8, ReadsAllCodesOfACache) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  constexpr int kCodes = 256, kHeads = 16, kHeadsKv = 2, kRowsOfKvHead = 128;
  for (const char* dtypes : {"dtype=bf16 kv=e4m3", "dtype=f16 kv=e5m2", "dtype=bf16 kv=e5m2", "dtype=f16 kv=e4m3"}) {
    SCOPED_TRACE(dtypes);
    Inputs in = inputs_of((std::string(dtypes) + " b=2 sq=16 sk=1 hq=16 hkv=2 d=256 dv=256 scales=h").c_str());
    const core::Float8Format& format = kv_dtype(in.c) == TESSERA_FLOAT8_E4M3 ? core::kE4M3 : core::kE5M2;
    const auto value_of = [&](size_t code) { return core::float8_to_float(format, static_cast<uint8_t>(code)); };
    std::ranges::fill(in.q, 0.0);
    // The element that a query sees.
    const auto element_of = [](size_t row) {
      return row / (16 * kHeads) * kRowsOfKvHead + row / kHeads % 16 * 8 + row % 8;
    };
    for (size_t row = 0; row < in.q.size() / kCodes; ++row) in.q[row * kCodes + element_of(row)] = 1;
    for (size_t n = 0; n < in.v_codes.size(); ++n) {
      const float value = value_of(n % kCodes);
      in.v_codes[n] = value, in.k_codes[n] = std::isfinite(value) ? value : 0;
    }
    for (const tessera_kernel kernel : kernels_of_caches()) {
      SCOPED_TRACE(tessera_kernel_name(kernel));
      Call call = make_call(in);
      const RunResult result = run(call, TESSERA_FORWARD, {.kernel = kernel, .place = kGpu, .cores = 3});
      ASSERT_TRUE(result.ok()) << result.why();
      const std::vector<double> o = call.o.load(), lse = call.lse.load();
      for (size_t row = 0; row < o.size() / kCodes; ++row) {
        const size_t head_kv = row % kHeads / (kHeads / kHeadsKv);
        for (size_t code = 0; code < kCodes; ++code) {
          const double exact = static_cast<float>(value_of(code) * in.v_scales[head_kv]), got = o[row * kCodes + code];
          const double rounded = round_to(static_cast<int32_t>(in.c.dtype), exact);
          ASSERT_TRUE(got == rounded || (std::isnan(got) && std::isnan(rounded)))
              << "value of code " << code << ": " << got;
        }
      }
      for (size_t b = 0; b < 2; ++b)
        for (size_t h = 0; h < kHeads; ++h)
          for (size_t i = 0; i < 16; ++i) {
            const size_t code = element_of((b * 16 + i) * kHeads + h);
            const float value = value_of(code);
            const double score = (std::isfinite(value) ? value : 0) * in.k_scales[h / 8] * in.scale();
            ASSERT_NEAR(lse[(b * kHeads + h) * 16 + i], score, std::fabs(score) * 0x1p-20) << "key of code " << code;
          }
    }
  }
}

// Of four queries two see keys 0 to 127 alone, in the same tile as the others.
TEST(CudaFp8, KeepsACachesScalesOfHiddenKeysFromAResult) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  constexpr size_t kUnaffected = size_t{2} * 64;
  Inputs in = inputs_of("dtype=bf16 kv=e4m3 b=1 sq=4 sk=130 hq=1 hkv=1 d=64 dv=64 causal=1 scales=fine");
  for (const tessera_kernel kernel : kernels_of_caches()) {
    const std::vector<double> usual = o_of(in, TESSERA_BFLOAT16, kernel);
    for (const bool of_keys : {true, false}) {
      Inputs odd = in;
      (of_keys ? odd.k_scales : odd.v_scales)[1] = std::numeric_limits<double>::quiet_NaN();
      expect_nan_from(kUnaffected, o_of(odd, TESSERA_BFLOAT16, kernel), usual);
    }
  }
}

// A key's two scales are found where each tensor has its own.
TEST(CudaFp8, FindsTheTwoScalesOfAKeyAtDifferentPlaces) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  const Inputs in =
      inputs_of("dtype=bf16 kv=e4m3 b=2 sq=2 sk=200 hq=4 hkv=2 d=64 dv=64 k=paged page=16 scales=fine cores=3");
  for (const tessera_kernel kernel : kernels_of_caches()) {
    Call call = make_call(in);
    const tessera_layout& usual = call.v_descale.layout();
    Tensor moved(TESSERA_FLOAT32, {usual.shape, usual.shape + usual.rank}, {.order = {1, 2, 0}});
    moved.store(call.v_descale.load());
    call.v_descale = moved;
    EXPECT_EQ(o_of(std::move(call), TESSERA_BFLOAT16, kernel), o_of(in, TESSERA_BFLOAT16, kernel))
        << tessera_kernel_name(kernel);
  }
}

// Scales that grow by 2^30 in a sequence, those of small values first or last: each value keeps its bits among those of
// its size, and queries of any size have scores.
TEST(CudaFp8, HasTheErrorOfAWeightWhateverTheScales) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  constexpr double kMostError = 0x1p-8;  // of bfloat16's rounding of O
  for (const int direction : {1, -1}) {
    Inputs in = inputs_of("dtype=bf16 kv=e4m3 b=1 sq=2 sk=1500 hq=4 hkv=1 d=64 dv=64 scales=fine cores=3");
    const size_t blocks = in.v_scales.size(), width = 64;
    for (size_t n = 0; n < in.q.size(); ++n) in.q[n] *= 0x1p-100;
    for (double& scale : in.k_scales) scale *= 0x1p100;
    for (size_t n = 0; n < in.k.size(); ++n) in.k[n] *= 0x1p100;
    for (size_t block = 0; block < blocks; ++block) {
      const double factor =
          std::exp2(direction * 30.0 * (static_cast<double>(block) / static_cast<double>(blocks) - 0.5));
      in.v_scales[block] *= factor;
      for (size_t n = block * 128 * width; n < std::min((block + 1) * 128 * width, in.v.size()); ++n) in.v[n] *= factor;
    }
    for (double& scale : in.v_scales) scale = static_cast<float>(scale);
    Call oracle = make_oracle_call(in);
    ASSERT_TRUE(run(oracle, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
    for (const tessera_kernel kernel : kernels_of_caches()) {
      EXPECT_LT(relative_error(o_of(in, TESSERA_BFLOAT16, kernel), oracle.o.load()), kMostError)
          << tessera_kernel_name(kernel) << " " << direction;
    }
  }
}

}  // namespace
}  // namespace tessera::testing
