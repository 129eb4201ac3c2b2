// fwd_sm90_fp8 on a GPU: what the table's cases do not ask about it.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cuda_fixture.hpp"
#include "execute.hpp"
#include "numbers.hpp"

namespace tessera::testing {
namespace {

std::string gpu_without_fp8() {
  if (!gpu_missing().empty()) return gpu_missing();
  return gpu_device().arch == 90 ? "" : "no kernel of this GPU takes float8_e4m3";
}

std::vector<double> o_of(const Inputs& in, int32_t dtype) {
  Call call = make_call(in);
  call.o = Tensor(dtype, std::vector<int64_t>(call.o.layout().shape, call.o.layout().shape + call.o.layout().rank));
  call.describe();
  const RunResult result = run(call, TESSERA_FORWARD, {.place = kGpu, .cores = 3});
  EXPECT_TRUE(result.ok()) << result.why();
  return call.o.load();
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

// Rows 0 to 49 see keys 0 to 127 alone, in the same tile as rows that see more.
TEST(CudaFp8, KeepsScalesOfHiddenKeysFromAResult) {
  if (!gpu_without_fp8().empty()) GTEST_SKIP() << "skipped: " << gpu_without_fp8();
  constexpr size_t kUnaffected = 50 * 64;
  Inputs in = inputs_of("dtype=e4m3 b=1 sq=100 sk=178 hq=1 hkv=1 d=64 dv=64 causal=1 scales=fine");
  const std::vector<double> usual = o_of(in, TESSERA_FLOAT32);
  in.k_scales[1] = in.v_scales[1] = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> with_nan = o_of(in, TESSERA_FLOAT32);
  for (size_t n = 0; n < usual.size(); ++n) {
    if (n < kUnaffected) {
      ASSERT_EQ(with_nan[n], usual[n]) << n;
    } else {
      ASSERT_TRUE(std::isnan(with_nan[n])) << n;
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

}  // namespace
}  // namespace tessera::testing
