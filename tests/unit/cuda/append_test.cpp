// The GPU's kernel of tessera_append, kernels/tessera/append/kernel.cuh, on the host (tests/emulated_warp), against the
// definition, including tokens out of range.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "append_step.hpp"

// What a compiler of device code declares by itself. The lanes of a warp may run at once.
static int atomicAdd(int* at, int x) { return std::atomic_ref<int>(*at).fetch_add(x); }

#include "cuda/append_params.hpp"
#include "tessera/append/kernel.cuh"

namespace tessera::test {
namespace {

int aligned_calls = 0;

template <Dtype kDtype, bool kAligned>
void run_thread(const AppendParams& p, Dtype cache) {
  switch (cache) {
    case Dtype::kFloat8E4M3:
      return tessera::append<AppendConfig{kDtype, Dtype::kFloat8E4M3, kAligned}>(p);
    case Dtype::kFloat8E5M2:
      return tessera::append<AppendConfig{kDtype, Dtype::kFloat8E5M2, kAligned}>(p);
    default:
      return tessera::append<AppendConfig{kDtype, kDtype, kAligned}>(p);
  }
}
template <bool kAligned>
void run_thread(const AppendParams& p, const AppendConfig& config) {
  switch (config.dtype) {
    case Dtype::kFloat32:
      return run_thread<Dtype::kFloat32, kAligned>(p, config.cache);
    case Dtype::kFloat16:
      return run_thread<Dtype::kFloat16, kAligned>(p, config.cache);
    default:
      return run_thread<Dtype::kBFloat16, kAligned>(p, config.cache);
  }
}

// Blocks run one after another, and so do threads, but for the lanes of a warp that exchanges numbers.
void emulate(const tessera_append_call& call) {
  const AppendConfig config = append_config(call);
  const AppendParams p = append_params(call, config);
  aligned_calls += config.aligned;
  const auto blocks = static_cast<unsigned>(append_blocks(p));
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    const auto run = [&](unsigned thread) {
      threadIdx.x = thread;
      config.aligned ? run_thread<true>(p, config) : run_thread<false>(p, config);
    };
    for (unsigned warp = 0; warp < kAppendThreads / emulated::kLanes; ++warp) {
      const auto lane = [&](int n) { run(warp * emulated::kLanes + static_cast<unsigned>(n)); };
      if (writes_codes(config)) {
        emulated::Warp::run(lane);
      } else {
        for (int n = 0; n < emulated::kLanes; ++n) lane(n);
      }
    }
  }
}

TEST(DeviceAppend, PutsEveryTokenWhereItBelongs) {
  for (std::uint64_t n = 0; n < 400; ++n) {
    SCOPED_TRACE("form " + std::to_string(n));
    expect_right(draw_form(n), emulate);
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(aligned_calls, 20);
  EXPECT_LT(aligned_calls, 380);
}

TEST(DeviceAppend, RoundsKeysAndValuesTo8Bits) {
  for (std::uint64_t n = 0; n < 60; ++n) {
    SCOPED_TRACE("form " + std::to_string(n));
    expect_right(draw_form_of_codes(n), emulate);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(DeviceAppend, GivesTheCodesOfTheCpu) { expect_the_cpus_codes(emulate); }

// Random divisors, and dividends whose quotients are random or within a unit in the last place of a tie between two
// codes, or of the middle between such a tie and the next float32.
TEST(DeviceAppend, QuotientsAreExact) {
  std::mt19937_64 random(7);
  const auto bits = [&random](int least, int most) {  // 2^least to 2^(most + 1)
    const auto exponent =
        static_cast<std::uint64_t>(least + 127) + random() % static_cast<std::uint64_t>(most - least + 1);
    return std::bit_cast<float>(static_cast<std::uint32_t>(exponent << 23 | random() % (1u << 23)));
  };
  for (int n = 0; n < 2000000; ++n) {
    const float divisor = n % 4 == 3 ? bits(-126, 126) : bits(-64, 63);
    float x[4] = {bits(-126, 127), -bits(-100, 100), 0.0f, -0.0f};
    const auto tie =
        static_cast<double>(random() % 16 * 2 + 1) * 0x1p-4 * std::exp2(static_cast<int>(random() % 20) - 12);
    const double middle = tie * (1 + (static_cast<int>(random() % 3) - 1) * 0x1p-25);
    x[2] = static_cast<float>(tie * divisor), x[3] = -static_cast<float>(middle * divisor);
    const std::array<float, 4> dividends = {x[0], x[1], x[2], x[3]};
    ExactQuotient{divisor, 1.0f / divisor}.divide(x);
    for (std::size_t i = 0; i < dividends.size(); ++i) {
      const float exact = dividends[i] / divisor;
      ASSERT_EQ(std::signbit(x[i]), std::signbit(exact)) << dividends[i] << " / " << divisor;
      if (std::fabs(exact) < 0x1p-19f) {
        ASSERT_LT(std::fabs(x[i]), 0x1p-18f) << dividends[i] << " / " << divisor;
      } else {
        ASSERT_EQ(x[i], exact) << dividends[i] << " / " << divisor;
      }
    }
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float divisor : {1.0f, 0x1p-140f, 3e38f, -2.0f, 0.0f, -0.0f, kInfinity, kNan}) {
    const std::array<float, 8> dividends = {0.0f, -0.0f, kInfinity, -kInfinity, kNan, 3e38f, 0x1p-149f, -5.0f};
    for (const float dividend : dividends) {
      float x[2] = {dividend, 1.5f};
      ExactQuotient{divisor, 1.0f / divisor}.divide(x);
      const float exact = dividend / divisor;
      ASSERT_EQ(std::isnan(x[0]), std::isnan(exact)) << dividend << " / " << divisor;
      if (std::isnan(exact)) continue;
      ASSERT_EQ(x[0], exact) << dividend << " / " << divisor;
      ASSERT_EQ(std::signbit(x[0]), std::signbit(exact)) << dividend << " / " << divisor;
    }
  }
}

// The tokens of sequence 0 write nothing and are counted, those of the others are written.
void expect_dropped(const Form& form, int count, const std::function<void(Step&)>& spoil) {
  Step step(form);
  const auto before = step.memory;
  const Step::Expected all_keys = step.expected_keys(false), all_values = step.expected_keys(true);
  spoil(step);
  std::int32_t dropped = 5;
  step.call.dropped = tessera::tensor(layout(int32, {1}), &dropped);
  emulate(step.call);
  EXPECT_EQ(dropped, 5 + count);
  for (const auto& [name, all] : {std::pair("k_cache", all_keys), std::pair("v_cache", all_values)}) {
    const bool values = name == std::string("v_cache");
    const Layout& of = values ? step.call.v_cache.layout : step.call.k_cache.layout;
    const std::int64_t written = static_cast<std::int64_t>(all.size());
    std::int64_t changed = 0;
    for (const auto& [at, value] : all) {
      const double now = core::load(of.dtype, step.memory.at(name).data(), at);
      if (now == core::load(of.dtype, before.at(name).data(), at)) continue;
      ++changed;
      EXPECT_NEAR(now, value, 1e-5);
    }
    // A sequence of three has 4 tokens.
    EXPECT_EQ(changed, written * 2 / 3) << name;
    std::vector<std::byte> after = step.memory.at(name), old = before.at(name);
    for (const auto& [at, value] : all) {  // and nothing else
      for (auto* bytes : {&after, &old}) core::store(of.dtype, bytes->data(), at, 0);
    }
    EXPECT_EQ(after, old) << name;
  }
}

TEST(DeviceAppend, WhatIsOutOfRangeWritesNothing) {
  const Form dense{.queries = false, .seed = 3}, paged{.paged = true, .queries = false, .max_pages = 6, .seed = 3};
  for (const std::int32_t used : {-1, 3 - 4, 1000, 2147483647}) {
    expect_dropped(dense, 4, [used](Step& s) { s.seqused_k[0] = used < 0 ? used : std::max(used, 100); });
  }
  for (const std::int32_t page : {-1, 1 << 20, 2147483647}) {
    expect_dropped(paged, 4, [page](Step& s) {
      for (std::int64_t n = 0; n < s.form.max_pages; ++n) s.page_table[n] = page;
    });
  }
  Form positions = dense;
  positions.positions = true;
  for (const std::int32_t at : {-1, 64, 2147483647}) {
    expect_dropped(positions, 4, [at](Step& s) { std::fill_n(s.positions_k.begin(), 4, at); });
  }
}

}  // namespace
}  // namespace tessera::test
