// tessera_combine: partial results over disjoint keys merge into the whole.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "error_bound.hpp"
#include "execute.hpp"
#include "gpu_call.hpp"
#include "numbers.hpp"
#include "plain.hpp"
#include "tessera/attention.hpp"

namespace tessera::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr Placement kGapped{.order = {}, .gap = 2, .reversed_dim = -1, .repeated_dim = -1};

// `spoil` may replace the pointers that the library is given, o_parts, lse_parts, o and lse.
using Pointers = std::array<void*, 4>;
RunResult combine_on(const Place& place, const Tensor& o_parts, const Tensor& lse_parts, Tensor& o, Tensor& lse,
                     const std::function<void(Pointers&)>& spoil = nullptr) {
  RunResult result;
  const auto call = [&](Pointers p, const tessera_device* device, const tessera_executor* executor) {
    if (spoil) spoil(p);
    CombineCall merge;
    merge.o_parts = tensor(o_parts.layout(), p[0]), merge.lse_parts = tensor(lse_parts.layout(), p[1]);
    merge.o = tensor(o.layout(), p[2]), merge.lse = tensor(lse.layout(), p[3]);
    result.status = tessera_combine(&merge, device, executor);
  };
  if (place.backend == TESSERA_BACKEND_CUDA) {
    Gpu& gpu = Gpu::get();
    GpuCall on_gpu({{"o", &o}, {"lse", &lse}}, {{"o_parts", &o_parts}, {"lse_parts", &lse_parts}});
    on_gpu.upload(gpu.stream());
    const tessera_executor executor{.run = nullptr, .context = nullptr, .stream = gpu.stream()};
    call({on_gpu.address(o_parts), on_gpu.address(lse_parts), on_gpu.address(o), on_gpu.address(lse)}, &gpu_device(),
         &executor);
    gpu.synchronize(gpu.stream());
    result.harm = on_gpu.download(gpu.stream());
  } else {
    o.poison();
    lse.poison();
    tessera_device device = cpu_device();
    device.isa = place.isa;
    call({o_parts.data(), lse_parts.data(), o.data(), lse.data()}, &device, nullptr);
  }
  if (!o.unharmed_outside() || !lse.unharmed_outside()) result.harm = "wrote outside o or lse";
  return result;
}

// On every instruction set of the CPU, or on a GPU.
class Combine : public ::testing::TestWithParam<tessera_backend> {
 protected:
  void SetUp() override {
    if (GetParam() == TESSERA_BACKEND_CPU) {
      places_ = cpu_places();
    } else if (gpu_missing().empty()) {
      places_ = {kGpu};
    } else {
      GTEST_SKIP() << "skipped: " << gpu_missing();
    }
  }
  std::vector<Place> places_;
};

INSTANTIATE_TEST_SUITE_P(Cpu, Combine, ::testing::Values(TESSERA_BACKEND_CPU));
INSTANTIATE_TEST_SUITE_P(CudaGpu, Combine, ::testing::Values(TESSERA_BACKEND_CUDA));

void expect_parts_merge_into_the_whole(int64_t parts, const Place& place, const char* text) {
  SCOPED_TRACE(place_name(place) + ": " + text + " in " + std::to_string(parts));
  const Inputs in = make_inputs(*parse_case(text, nullptr));
  const Case& c = in.c;
  Call oracle = make_oracle_call(in);
  ASSERT_TRUE(run(oracle, TESSERA_FORWARD, {.kernel = TESSERA_KERNEL_REFERENCE}).ok());
  const PlainResult plain = plain_attention(in, Precision::kSame);

  const auto dtype = static_cast<int32_t>(c.dtype);
  Tensor o_parts(dtype, {parts + 1, c.b, c.sq, c.hq, c.dv});
  Tensor lse_parts(TESSERA_FLOAT32, {parts + 1, c.b, c.hq, c.sq});
  const Call whole = make_call(in);
  const bool on_cpu = place.backend == TESSERA_BACKEND_CPU;
  for (int64_t n = 0; n < parts; ++n) {
    Call part = whole;
    const int64_t first = n * c.sk / parts;
    part.k = whole.k.slice(1, first, (n + 1) * c.sk / parts - first);
    part.v = whole.v.slice(1, first, (n + 1) * c.sk / parts - first);
    part.o = Tensor(dtype, {c.b, c.sq, c.hq, c.dv});
    part.lse = Tensor(TESSERA_FLOAT32, {c.b, c.hq, c.sq});
    part.describe();
    const tessera_kernel kernel = on_cpu ? TESSERA_KERNEL_TILED : TESSERA_KERNEL_AUTO;
    const RunResult result = run(part, TESSERA_FORWARD, {.kernel = kernel, .place = place});
    ASSERT_TRUE(result.ok()) << result.why();
    o_parts.at(n).store(part.o.load());
    lse_parts.at(n).store(part.lse.load());
  }
  // The last part sees nothing, and its o is uninitialised: NaN.
  lse_parts.at(parts).store(std::vector<double>(c.b * c.hq * c.sq, -kInfinity));

  Tensor o(dtype, {c.b, c.sq, c.hq, c.dv}, {.order = {0, 2, 1, 3}, .gap = 3, .reversed_dim = -1, .repeated_dim = -1});
  Tensor lse(TESSERA_FLOAT32, {c.b, c.hq, c.sq});
  const RunResult result = combine_on(place, o_parts, lse_parts, o, lse);
  ASSERT_TRUE(result.ok()) << result.why();
  EXPECT_EQ(excess_error(o.load(), oracle.o.load(), plain.o, dtype), "");
  EXPECT_EQ(excess_error(lse.load(), oracle.lse.load(), plain.lse, TESSERA_FLOAT32), "");
}

// Each part sees some of the keys; one of them sees none at all.
TEST_P(Combine, PartsMergeIntoTheWhole) {
  for (const Place& place : places_) {
    for (const int64_t parts : {1, 2, 3, 8}) {
      for (const char* text :
           {"dtype=f32 b=2 sq=37 sk=300 hq=4 hkv=2 d=48 dv=64", "dtype=f32 b=1 sq=1 sk=1000 hq=8 hkv=2 d=64 dv=64",
            "dtype=bf16 b=2 sq=20 sk=130 hq=2 hkv=2 d=64 dv=32", "dtype=f16 b=2 sq=5 sk=99 hq=2 hkv=1 d=32 dv=32"}) {
        expect_parts_merge_into_the_whole(parts, place, text);
      }
    }
  }
}

// Against the definition, in float64, for weights from equal to extremely different.
void expect_weighted_sum(const Place& place, int32_t dtype, double spread) {
  SCOPED_TRACE(place_name(place) + ", " + tessera_dtype_name(dtype) + ", spread " + std::to_string(spread));
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  const int64_t parts = 4, b = 2, s = 3, h = 2, dv = 19;
  std::vector<double> o_values(parts * b * s * h * dv), lse_values(parts * b * h * s);
  for (double& value : o_values) value = round_to(dtype, normal(random));
  for (double& value : lse_values) value = round_to(TESSERA_FLOAT32, spread * normal(random));
  Tensor o_parts(dtype, {parts, b, s, h, dv}, kGapped);
  Tensor lse_parts(TESSERA_FLOAT32, {parts, b, h, s},
                   {.order = {3, 0, 2, 1}, .gap = 1, .reversed_dim = 2, .repeated_dim = -1});
  o_parts.store(o_values);
  lse_parts.store(lse_values);
  Tensor o(dtype, {b, s, h, dv}), lse(TESSERA_FLOAT32, {b, h, s}, {{2, 0, 1}, 0, -1, -1});
  const RunResult result = combine_on(place, o_parts, lse_parts, o, lse);
  ASSERT_TRUE(result.ok()) << result.why();
  const std::vector<double> o_got = o.load(), lse_got = lse.load();
  for (int64_t row = 0; row < b * s * h; ++row) {
    const int64_t batch = row / (s * h), i = row / h % s, head = row % h;
    const auto part_lse = [&](int64_t n) { return lse_values[((n * b + batch) * h + head) * s + i]; };
    double m = -kInfinity, sum = 0;
    for (int64_t n = 0; n < parts; ++n) m = std::max(m, part_lse(n));
    for (int64_t n = 0; n < parts; ++n) sum += std::exp(part_lse(n) - m);
    const double lse_expected = m + std::log(sum);
    const double lse_ulp = epsilon(TESSERA_FLOAT32) * std::max(1.0, std::fabs(lse_expected));
    EXPECT_NEAR(lse_got[(batch * h + head) * s + i], lse_expected, 2 * lse_ulp);
    for (int64_t x = 0; x < dv; ++x) {
      double expected = 0, magnitude = 0;
      for (int64_t n = 0; n < parts; ++n) {
        const double term = std::exp(part_lse(n) - lse_expected) * o_values[(n * b * s * h + row) * dv + x];
        expected += term;
        magnitude += std::fabs(term) * (1 + std::fabs(part_lse(n)));
      }
      EXPECT_NEAR(o_got[row * dv + x], expected,
                  epsilon(dtype) * std::fabs(expected) + 2 * epsilon(TESSERA_FLOAT32) * magnitude);
    }
  }
}

TEST_P(Combine, IsTheWeightedSum) {
  for (const Place& place : places_) {
    for (const int32_t dtype : {TESSERA_FLOAT32, TESSERA_FLOAT16, TESSERA_BFLOAT16}) {
      for (const double spread : {0.0, 1.0, 30.0, 1000.0}) expect_weighted_sum(place, dtype, spread);
    }
  }
}

// Parts that share a large number know their sums by the lower digits alone: equal scores of 8e6 over 5, 3, 7 and 1
// keys.
void expect_weights_from_both_digits(const Place& place, double shared) {
  SCOPED_TRACE(place_name(place) + ", " + std::to_string(shared));
  constexpr double kKeys[] = {5, 3, 7, 1};
  constexpr int64_t kParts = std::size(kKeys), kDv = 3;
  const auto digits = [&](int64_t n) {
    const float high = static_cast<float>(shared + std::log(kKeys[n]));
    return std::pair{high, static_cast<float>((shared - high) + std::log(kKeys[n]))};
  };
  Tensor o_parts(TESSERA_FLOAT32, {kParts, 1, 1, 1, kDv}), lse_parts(TESSERA_FLOAT32, {kParts, 1, 1, 1});
  Tensor low_parts(TESSERA_FLOAT32, {kParts, 1, 1, 1}), o(TESSERA_FLOAT32, {1, 1, 1, kDv});
  Tensor lse(TESSERA_FLOAT32, {1, 1, 1}), low(TESSERA_FLOAT32, {1, 1, 1});
  std::vector<double> values, high_values, low_values;
  for (int64_t n = 0; n < kParts; ++n) {
    for (int64_t d = 0; d < kDv; ++d) values.push_back(static_cast<double>((n + 1) * (d + 1)));
    high_values.push_back(digits(n).first), low_values.push_back(digits(n).second);
  }
  o_parts.store(values), lse_parts.store(high_values), low_parts.store(low_values);
  tessera_device device = cpu_device();
  device.isa = place.isa;
  CombineCall merge;
  merge.o_parts = tensor(o_parts.layout(), o_parts.data()),
  merge.lse_parts = tensor(lse_parts.layout(), lse_parts.data());
  merge.lse_low_parts = tensor(low_parts.layout(), low_parts.data());
  merge.o = tensor(o.layout(), o.data()), merge.lse = tensor(lse.layout(), lse.data());
  merge.lse_low = tensor(low.layout(), low.data());
  const tessera_status status = tessera_combine(&merge, &device, nullptr);
  ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  for (int64_t d = 0; d < kDv; ++d) {
    double mean = 0;
    for (int64_t n = 0; n < kParts; ++n) mean += kKeys[n] / 16 * static_cast<double>((n + 1) * (d + 1));
    EXPECT_NEAR(o.load()[d], mean, 1e-6 * mean);
  }
  EXPECT_NEAR((lse.load()[0] - shared) + low.load()[0], std::log(16), 1e-6);
  EXPECT_EQ(lse.load()[0], static_cast<float>(shared + std::log(16)));
}

TEST_P(Combine, WeighsPartsByBothDigitsOfTheirLse) {
  for (const Place& place : places_) {
    for (const double shared : {0.0, 8e6, -8e6, 1e30, -3.4e38, 3.4e38}) {
      expect_weights_from_both_digits(place, round_to(TESSERA_FLOAT32, shared));
    }
  }
}

TEST_P(Combine, PartsThatSawNothingDoNotCount) {
  const int64_t parts = 3, dv = 8;
  for (const Place& place : places_) {
    Tensor o_parts(TESSERA_FLOAT32, {parts, 1, 1, 1, dv}), lse_parts(TESSERA_FLOAT32, {parts, 1, 1, 1});
    Tensor o(TESSERA_FLOAT32, {1, 1, 1, dv}), lse(TESSERA_FLOAT32, {1, 1, 1});
    const std::vector<double> values = {1, -2, 3, -4, 5, -6, 7, -8};
    o_parts.at(1).store(values);  // 0 and 2 stay NaN
    lse_parts.store({-kInfinity, 2.5, -kInfinity});
    RunResult result = combine_on(place, o_parts, lse_parts, o, lse);
    ASSERT_TRUE(result.ok()) << result.why();
    EXPECT_EQ(o.load(), values);
    EXPECT_EQ(lse.load(), std::vector<double>{2.5});

    lse_parts.store({-kInfinity, -kInfinity, -kInfinity});
    result = combine_on(place, o_parts, lse_parts, o, lse);
    ASSERT_TRUE(result.ok()) << result.why();
    EXPECT_EQ(o.load(), std::vector<double>(dv, 0.0));
    EXPECT_EQ(lse.load(), std::vector<double>{-kInfinity});
  }
}

// Outputs are untouched.
void expect_refused(const RunResult& result, const std::string& begin, const Tensor& o, const Tensor& lse) {
  EXPECT_EQ(result.status.code, TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(result.status.message).find(begin), 0u) << result.status.message;
  for (const Tensor* output : {&o, &lse})
    for (const char untouched : output->untouched()) EXPECT_TRUE(untouched) << "written in spite of the refusal";
}

TEST_P(Combine, RefusesShapesThatDoNotMatch) {
  for (const Place& place : places_) {
    const Tensor o_parts(TESSERA_FLOAT32, {2, 1, 3, 1, 8}), lse_parts(TESSERA_FLOAT32, {2, 1, 1, 4});
    Tensor o(TESSERA_FLOAT32, {1, 3, 1, 8}), lse(TESSERA_FLOAT32, {1, 1, 3});
    expect_refused(combine_on(place, o_parts, lse_parts, o, lse), "lse_parts: shape", o, lse);
  }
}

TEST_P(Combine, RefusesPointersThatAreWrong) {
  constexpr const char* kNames[] = {"o_parts", "lse_parts", "o", "lse"};
  for (const Place& place : places_) {
    const Tensor o_parts(TESSERA_FLOAT32, {2, 1, 3, 1, 8}), lse_parts(TESSERA_FLOAT32, {2, 1, 1, 3});
    Tensor o(TESSERA_FLOAT32, {1, 3, 1, 8}), lse(TESSERA_FLOAT32, {1, 1, 3});
    void* const host[] = {o_parts.data(), lse_parts.data(), o.data(), lse.data()};
    for (size_t n = 0; n < std::size(kNames); ++n) {
      const std::string name = kNames[n];
      const auto refused = [&](const std::string& why, const std::function<void(Pointers&)>& spoil) {
        expect_refused(combine_on(place, o_parts, lse_parts, o, lse, spoil), name + why, o, lse);
      };
      refused(": NULL", [n](Pointers& p) { p[n] = nullptr; });
      refused(": ", [n](Pointers& p) { p[n] = static_cast<std::byte*>(p[n]) + 2; });
      if (place == kGpu) refused(": ", [n, &host](Pointers& p) { p[n] = host[n]; });
    }
  }
}

TEST(CombineDevice, IsThisMachinesCpuUnlessGiven) {
  const Tensor o_parts(TESSERA_FLOAT32, {1, 1, 1, 1, 4}), lse_parts(TESSERA_FLOAT32, {1, 1, 1, 1});
  Tensor o(TESSERA_FLOAT32, {1, 1, 1, 4});
  const auto combine = [&](const tessera_device* device) {
    CombineCall call;
    call.o_parts = tensor(o_parts.layout(), o_parts.data()),
    call.lse_parts = tensor(lse_parts.layout(), lse_parts.data());
    call.o = tensor(o.layout(), o.data());
    return tessera_combine(&call, device, nullptr);
  };
  const_cast<Tensor&>(o_parts).store({1, 2, 3, 4});
  const_cast<Tensor&>(lse_parts).store({0.5});
  const tessera_status status = combine(nullptr);
  ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  EXPECT_EQ(o.load(), o_parts.load());
  tessera_device device = cpu_device();
  device.backend = 7;
  expect_refused({.status = combine(&device)}, "device.backend", Tensor(TESSERA_FLOAT32, {1}), {});
  if (!gpu_missing().empty()) {
    device = imagined_gpu(90);
    EXPECT_EQ(combine(&device).code, TESSERA_UNSUPPORTED) << "no driver, so that nothing is launched";
  }
}

}  // namespace
}  // namespace tessera::testing
