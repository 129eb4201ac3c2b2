// Executors: exceptions and incomplete runs are reported, and a cancelled call stops.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

// [1, length, 4, 64] float32, or float64 for the reference; every tensor that both directions need.
struct Work {
  Problem problem;
  std::vector<double> in, out[4];
  std::vector<float> lse;
  Plan plan;
  std::vector<std::byte> workspace;

  Work(std::int64_t queries, std::int64_t keys, bool backward, const Device& device, DType dtype = float32) {
    problem.q = problem.o = layout(dtype, {1, queries, 4, 64});
    problem.k = problem.v = layout(dtype, {1, keys, 4, 64});
    if (backward) problem = gradient_of(problem);
    in.assign(static_cast<std::size_t>(std::max(queries, keys)) * (dtype == float64 ? 256 : 128), 0.0);
    for (auto& memory : out) memory = in;
    lse.assign(static_cast<std::size_t>(queries) * 4, 0.0f);
    plan = tessera::plan(problem, device);
    workspace.resize(plan.workspace_bytes);
  }
  Status run(const Executor* executor = nullptr) {
    const bool backward = problem.direction == TESSERA_BACKWARD;
    Buffers b = {.q = in.data(), .k = in.data(), .v = in.data(), .o = backward ? in.data() : out[0].data()};
    b.lse = lse.data(), b.d_o = in.data();
    b.d_q = out[1].data(), b.d_k = out[2].data(), b.d_v = out[3].data();
    return backward ? try_backward(plan, b, workspace, executor) : try_forward(plan, b, workspace, executor);
  }
};

Device two_threads() {
  Device device = cpu();
  device.threads = device.cores = 2;
  return device;
}

TEST(Executor, ThatThrowsIsAnswered) {
  Work work(512, 512, false, two_threads());
  auto throws = [](std::int32_t, auto) { throw std::runtime_error("no thread left"); };
  auto throws_other = [](std::int32_t, auto) { throw 42; };
  const Executor executor = make_executor(throws), other = make_executor(throws_other);
  Status status = work.run(&executor);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_NE(status.message().find("executor: run threw \"no thread left\""), std::string_view::npos)
      << status.message();
  status = work.run(&other);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_NE(status.message().find("executor: run threw what is no std::exception"), std::string_view::npos)
      << status.message();
  EXPECT_TRUE(work.run().ok());
}

TEST(Executor, ThatLeavesTasksUndoneIsAnswered) {
  Work work(512, 512, false, two_threads());
  auto one_of_them = [](std::int32_t, auto task) { task(0); };
  const Executor executor = make_executor(one_of_them);
  const Status status = work.run(&executor);
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_TRUE(status.message().starts_with("executor: run returned with 1 of 2 tasks done")) << status.message();
}

TEST(Cancel, IsAnsweredByEveryKernel) {
  Device reference = two_threads(), decode = two_threads(), tiled = two_threads();
  reference.kernel = TESSERA_KERNEL_REFERENCE, decode.kernel = TESSERA_KERNEL_DECODE;
  tiled.kernel = TESSERA_KERNEL_TILED;
  const struct {
    Work work;
  } rows[] = {{Work(256, 256, false, reference)},
              {Work(256, 256, true, reference)},
              {Work(1, 32768, false, decode)},
              {Work(2048, 2048, false, tiled)},
              {Work(2048, 2048, true, tiled)}};
  for (const auto& row : rows) {
    for (const int after : {0, 5}) {
      Work work = row.work;
      std::atomic<int> asked = 0;
      auto cancelled = [&asked, after] { return asked++ >= after; };
      const Executor executor = cancelled_by(cancelled);
      const Status status = work.run(&executor);
      EXPECT_EQ(status.code(), Code::cancelled) << status.message();
      EXPECT_TRUE(status.message().starts_with("cancelled: ")) << status.message();
      EXPECT_LE(asked, after + 3) << "once told, every thread knows";
      auto never = [] { return false; };
      const Executor patient = cancelled_by(never);
      EXPECT_TRUE(work.run(&patient).ok());
    }
  }
}

// Work items with many keys check for cancellation while they run: this call has one item, or one per parallel region.
TEST(Cancel, IsAskedWithinAnItem) {
  Device device = cpu();
  device.threads = device.cores = 1;
  device.kernel = TESSERA_KERNEL_TILED;
  for (const bool backward : {false, true}) {
    Work work(64, 8192, backward, device);
    work.problem.batch_invariant = 1;
    work.plan = tessera::plan(work.problem, device);
    std::atomic<int> asked = 0;
    auto cancelled = [&asked] {
      ++asked;
      return false;
    };
    const Executor executor = cancelled_by(cancelled);
    EXPECT_TRUE(work.run(&executor).ok());
    EXPECT_GT(asked, 40) << (backward ? "backward" : "forward");
  }
}

TEST(Cancel, ThatThrowsCancels) {
  Work work(512, 512, false, two_threads());
  auto throws = []() -> bool { throw std::runtime_error("never mind"); };
  const Executor executor = cancelled_by(throws);
  EXPECT_EQ(work.run(&executor).code(), Code::cancelled);
}

TEST(Cancel, EndsACombine) {
  constexpr std::int64_t kRows = 4096;
  std::vector<float> o_parts(2 * kRows * 8, 1.0f), lse_parts(2 * kRows), o(kRows * 8);
  auto cancelled = [] { return true; };
  const Executor executor = cancelled_by(cancelled);
  CombineCall call;
  call.o_parts = tensor(layout(float32, {2, 1, kRows, 1, 8}), o_parts.data());
  call.lse_parts = tensor(layout(float32, {2, 1, 1, kRows}), lse_parts.data());
  call.o = tensor(layout(float32, {1, kRows, 1, 8}), o.data());
  EXPECT_EQ(try_combine(call, nullptr, &executor).code(), Code::cancelled);
}

// Half a minute of work: over within a second of being told.
TEST(Cancel, TakesLessThanASecond) {
  Work work(32768, 32768, true, cpu());
  const auto start = std::chrono::steady_clock::now();
  const auto since_start = [start] { return std::chrono::steady_clock::now() - start; };
  auto cancelled = [&] { return since_start() > std::chrono::milliseconds(100); };
  const Executor executor = cancelled_by(cancelled);
  EXPECT_EQ(work.run(&executor).code(), Code::cancelled);
  EXPECT_LT(since_start(), std::chrono::milliseconds(1100));
}

}  // namespace
}  // namespace tessera::test
