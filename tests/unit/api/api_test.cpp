// The C++ layer: layouts, views, errors, executors, combine, append.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

TEST(Layouts, AreContiguousUnlessToldOtherwise) {
  const Layout l = layout(bfloat16, {2, 3, 4, 5});
  EXPECT_EQ(l.rank, 4);
  EXPECT_EQ(dtype(l), bfloat16);
  EXPECT_EQ(elements(l), 120);
  EXPECT_EQ((std::vector<std::int64_t>(l.strides, l.strides + 4)), (std::vector<std::int64_t>{60, 20, 5, 1}));
  const Layout p = permute(l, {0, 2, 1, 3});
  EXPECT_EQ((std::vector<std::int64_t>(p.shape, p.shape + 4)), (std::vector<std::int64_t>{2, 4, 3, 5}));
  EXPECT_EQ((std::vector<std::int64_t>(p.strides, p.strides + 4)), (std::vector<std::int64_t>{60, 5, 20, 1}));
  EXPECT_EQ(elements(Layout{}), 0);
}

TEST(Layouts, RefuseWhatTheyCannotHold) {
  EXPECT_THROW(layout(float32, {1, 2, 3, 4, 5, 6}), Error);
  EXPECT_THROW(layout(float32, {1, 2}, {1}), Error);
  EXPECT_THROW(permute(layout(float32, {1, 2}), {0, 0}), Error);
  EXPECT_THROW(permute(layout(float32, {1, 2}), {0}), Error);
  EXPECT_THROW(permute(layout(float32, {1, 2}), {0, 2}), Error);
}

TEST(Views, ReachTheirElements) {
  std::vector<float> data(24);
  for (std::size_t n = 0; n < data.size(); ++n) data[n] = static_cast<float>(n);
  const TensorView<float> view(data.data(), {2, 3, 4});
  EXPECT_EQ(view(1, 2, 3), 23);
  view(0, 1, 0) = -1;
  EXPECT_EQ(data[4], -1);
  const TensorView<const float> transposed(data.data(), {4, 3}, {1, 4});
  EXPECT_EQ(transposed(3, 2), 11);
  const TensorView<const float> read_only = view;
  EXPECT_EQ(read_only(1, 0, 0), 12);
  Problem problem;
  problem.sink = view;
  EXPECT_EQ(problem.sink.rank, 3);
  EXPECT_THROW(TensorView<float>(data.data(), layout(float64, {3})), Error);
  static_assert(!std::is_convertible_v<TensorView<const float>, TensorView<float>>);
}

TEST(Problems, GradientOfLaysOutItsTwins) {
  Problem forward = dense_problem();
  const Problem backward = gradient_of(forward);
  EXPECT_EQ(backward.direction, TESSERA_BACKWARD);
  EXPECT_EQ(backward.d_v.shape[3], 6);
  EXPECT_EQ(backward.lse.shape[1], 4);
  EXPECT_EQ(backward.lse.shape[2], 16);
  const Layout packed = lse_layout(packed_problem());
  EXPECT_EQ(packed.rank, 2);
  EXPECT_EQ(packed.shape[0], 4);
  EXPECT_EQ(packed.shape[1], 16);
}

TEST(Errors, CarryCodeAndMessage) {
  Problem problem = dense_problem();
  problem.softcap = -2;
  try {
    tessera::plan(problem);
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_STREQ(error.what(), "softcap: -2, accepted 0 (none) and 1e-18 .. 1e18");
  }
  EXPECT_TRUE(Status().ok());
}

TEST(Executors, RunOnTheCallersThreads) {
  Problem problem;
  problem.q = problem.k = problem.v = problem.o = layout(float32, {1, 256, 8, 64});
  std::vector<float> x(span_elements(problem.q), 0.5f), mine(x.size()), library(x.size());
  const Plan plan = tessera::plan(problem);
  std::vector<std::byte> workspace(plan.workspace_bytes);
  std::atomic<int> tasks = 0;
  auto run = [&tasks](std::int32_t workers, auto task) {
    std::vector<std::jthread> threads;
    for (std::int32_t w = 0; w < workers; ++w) {
      threads.emplace_back([&tasks, task, w] {
        ++tasks;
        task(w);
      });
    }
  };
  const Executor executor = make_executor(run);
  forward(plan, {.q = x.data(), .k = x.data(), .v = x.data(), .o = mine.data()}, workspace, &executor);
  EXPECT_GT(tasks, 0);
  forward(plan, {.q = x.data(), .k = x.data(), .v = x.data(), .o = library.data()}, workspace);
  EXPECT_EQ(mine, library);
}

// ---- combine --------------------------------------------------------------------------------------------------------

struct Parts {
  static constexpr std::int64_t kN = 3, kB = 2, kS = 5, kH = 2, kDv = 4;
  Layout o_parts_layout = layout(float32, {kN, kB, kS, kH, kDv}), lse_parts_layout = layout(float32, {kN, kB, kH, kS});
  Layout o_layout = layout(float32, {kB, kS, kH, kDv}), lse_layout = layout(float32, {kB, kH, kS});
  std::vector<float> o_parts, lse_parts, o, lse;

  Parts() {
    std::mt19937_64 random(8);
    std::normal_distribution<float> normal;
    o_parts.resize(span_elements(o_parts_layout));
    lse_parts.resize(span_elements(lse_parts_layout));
    for (auto* data : {&o_parts, &lse_parts}) {
      for (float& x : *data) x = normal(random);
    }
    o.assign(span_elements(o_layout), std::numeric_limits<float>::quiet_NaN());
    lse.assign(span_elements(lse_layout), std::numeric_limits<float>::quiet_NaN());
  }
  Status run() {
    CombineCall call;
    call.o_parts = tensor(o_parts_layout, o_parts.data()), call.lse_parts = tensor(lse_parts_layout, lse_parts.data());
    call.o = tensor(o_layout, o.data()), call.lse = tensor(lse_layout, lse.data());
    return try_combine(call);
  }
};

TEST(Combine, MergesByTheFormula) {
  Parts p;
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  const TensorView<float> o_parts(p.o_parts.data(), p.o_parts_layout),
      lse_parts(p.lse_parts.data(), p.lse_parts_layout);
  const TensorView<float> o(p.o.data(), p.o_layout), lse(p.lse.data(), p.lse_layout);
  lse_parts(1, 0, 1, 2) = kMinusInfinity;  // a part that saw nothing does not count, whatever it holds
  for (int d = 0; d < Parts::kDv; ++d) o_parts(1, 0, 2, 1, d) = std::numeric_limits<float>::quiet_NaN();
  for (int n = 0; n < Parts::kN; ++n) lse_parts(n, 1, 0, 4) = kMinusInfinity;
  ASSERT_EQ(p.run().message(), "");
  for (int b = 0; b < Parts::kB; ++b) {
    for (int s = 0; s < Parts::kS; ++s) {
      for (int h = 0; h < Parts::kH; ++h) {
        double total = 0;
        for (int n = 0; n < Parts::kN; ++n) total += std::exp(double{lse_parts(n, b, h, s)});
        if (total == 0) {
          EXPECT_EQ(lse(b, h, s), kMinusInfinity);
        } else {
          EXPECT_NEAR(lse(b, h, s), std::log(total), 4 * 0x1p-24 * std::max(1.0, std::fabs(std::log(total))));
        }
        for (int d = 0; d < Parts::kDv; ++d) {
          double sum = 0, magnitude = 0;
          for (int n = 0; n < Parts::kN; ++n) {
            if (lse_parts(n, b, h, s) == kMinusInfinity) continue;
            const double term = std::exp(double{lse_parts(n, b, h, s)}) / total * o_parts(n, b, s, h, d);
            sum += term;
            magnitude += std::fabs(term);
          }
          EXPECT_NEAR(o(b, s, h, d), sum, 8 * 0x1p-24 * magnitude);
        }
      }
    }
  }
}

TEST(Combine, RefusesAndNames) {
  const auto message = [](auto&& break_it) {
    Parts p;
    break_it(p);
    const Status status = p.run();
    EXPECT_EQ(status.code(), Code::invalid_argument);
    for (const float x : p.o) EXPECT_TRUE(std::isnan(x));
    return std::string(status.message());
  };
  const auto begins = [&](const char* expected, auto&& break_it) {
    const std::string actual = message(break_it);
    EXPECT_TRUE(actual.starts_with(expected)) << actual;
  };
  begins("o_parts: rank 4", [](Parts& p) { p.o_parts_layout.rank = 4; });
  begins("o_parts: dtype float64", [](Parts& p) { p.o_parts_layout.dtype = TESSERA_FLOAT64; });
  begins("lse_parts: dtype float16", [](Parts& p) { p.lse_parts_layout.dtype = TESSERA_FLOAT16; });
  begins("lse_parts: shape [3, 2, 5, 2]", [](Parts& p) { p.lse_parts_layout = layout(float32, {3, 2, 5, 2}); });
  begins("o: shape [2, 5, 2, 3]", [](Parts& p) { p.o_layout = layout(float32, {2, 5, 2, 3}); });
  begins("lse: shape [2, 5, 2]", [](Parts& p) { p.lse_layout = layout(float32, {2, 5, 2}); });
  begins("o: shape", [](Parts& p) { p.o_layout.strides[1] = 0; });
  begins("o_parts: stride 2", [](Parts& p) { p.o_parts_layout.strides[4] = 2; });
  begins("o_parts: shape [3, 2, 5, 2, 513]", [](Parts& p) { p.o_parts_layout.shape[4] = 513; });
  begins("o_parts: shape [0, ", [](Parts& p) { p.o_parts_layout = layout(float32, {0, 2, 5, 2, 4}); });
}

// Like a new Problem: members that are not given are absent, whatever the memory contained.
TEST(Append, AFreshCallTakesWhatItIsGiven) {
  alignas(AppendCall) std::byte memory[sizeof(AppendCall)];
  std::memset(memory, 0xff, sizeof memory);
  AppendCall& call = *new (memory) AppendCall;
  const std::vector<float> k = {1, 2, 3, 4}, v = {5, 6, 7, 8};
  std::vector<float> k_cache(6), v_cache(6);
  const std::int32_t seqused = 3;
  call.k = tensor(layout(float32, {1, 2, 1, 2}), k.data());
  call.v = tensor(layout(float32, {1, 2, 1, 2}), v.data());
  call.k_cache = tensor(layout(float32, {1, 3, 1, 2}), k_cache.data());
  call.v_cache = tensor(layout(float32, {1, 3, 1, 2}), v_cache.data());
  call.seqused_k = tensor(layout(int32, {1}), &seqused);
  append(call);
  EXPECT_EQ(k_cache, (std::vector<float>{0, 0, 1, 2, 3, 4}));
  EXPECT_EQ(v_cache, (std::vector<float>{0, 0, 5, 6, 7, 8}));
}

}  // namespace
}  // namespace tessera::test
