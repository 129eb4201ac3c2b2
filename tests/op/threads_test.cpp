// One plan, many threads; the caller's own executors; and the thread pool after fork.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "execute.hpp"

namespace tessera::testing {
namespace {

constexpr const char* kCases[] = {
    "dtype=f32 backward=1 b=2 sq=150 sk=150 hq=4 hkv=2 d=64 dv=64 causal=1",
    "dtype=bf16 backward=1 b=3 sq=100 sk=170 hq=2 hkv=1 d=32 dv=48 bias=hk d_bias=1 sink=1 d_sink=1",
    "dtype=f16 b=2 sq=1 sk=2000 hq=8 hkv=2 d=64 dv=64 cores=8",
};

std::vector<std::vector<std::byte>> forward_and_backward(Call& call, const RunOptions& options, std::string& error) {
  std::vector<std::vector<std::byte>> bytes;
  for (const tessera_direction direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
    if (direction == TESSERA_BACKWARD && !call.d_o.present()) break;
    const RunResult result = run(call, direction, options);
    if (!result.ok()) error = result.why();
    for (auto& output : output_bytes(call, direction)) bytes.push_back(std::move(output));
  }
  return bytes;
}

RunOptions best(int32_t threads, const Case& c) {
  return {.place = cpu_places().back(), .threads = threads, .cores = static_cast<int32_t>(c.cores)};
}

class Threads : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    std::string error;
    expected_ = forward_and_backward(call_, best(1, in_.c), error);
    ASSERT_EQ(error, "");
  }

  const Inputs in_ = make_inputs(legalised(*parse_case(GetParam(), nullptr)));
  Call call_ = make_call(in_);
  std::vector<std::vector<std::byte>> expected_;
};

TEST_P(Threads, ManyUsersShareThePool) {
  constexpr int kUsers = 6, kCallsEach = 5;
  std::vector<std::string> errors(kUsers);
  std::vector<std::thread> users;
  for (int user = 0; user < kUsers; ++user) {
    users.emplace_back([&, user] {
      for (int n = 0; n < kCallsEach; ++n) {
        Call own = make_call(in_);
        const auto bytes = forward_and_backward(own, best(1 + (user + n) % 3, in_.c), errors[user]);
        if (bytes != expected_) errors[user] = "other bits than alone";
      }
    });
  }
  for (std::thread& user : users) user.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST_P(Threads, OnePlanServesManyThreads) {
  tessera_device device = cpu_device();
  device.threads = 2;
  Call first = make_call(in_);
  tessera_problem problem = first.problem;
  problem.d_o = problem.d_q = problem.d_k = problem.d_v = problem.d_lse = problem.d_bias = problem.d_sink = {};
  tessera_plan plan;
  ASSERT_EQ(tessera_make_plan(&problem, &device, &plan).code, TESSERA_OK);
  constexpr int kUsers = 4;
  std::vector<Call> calls;
  for (int user = 0; user < kUsers; ++user) calls.push_back(make_call(in_));
  std::vector<int32_t> codes(kUsers, -1);
  std::vector<std::thread> users;
  for (int user = 0; user < kUsers; ++user) {
    users.emplace_back([&, user] {
      const tessera_buffers buffers = calls[user].buffers();
      std::vector<std::byte> workspace(tessera_workspace_bytes(&plan));
      codes[user] = tessera_forward(&plan, &buffers, workspace.data(), workspace.size(), nullptr).code;
    });
  }
  for (std::thread& user : users) user.join();
  for (int user = 0; user < kUsers; ++user) {
    EXPECT_EQ(codes[user], TESSERA_OK);
    EXPECT_EQ(output_bytes(calls[user], TESSERA_FORWARD), output_bytes(calls[0], TESSERA_FORWARD));
  }
}

// Runs workers one after another, the last one first; counts the requests.
void run_backwards(void* context, int32_t workers, void (*task)(void*, int32_t), void* argument) {
  *static_cast<int*>(context) += workers;
  for (int32_t worker = workers - 1; worker >= 0; --worker) task(argument, worker);
}

void run_on_threads(void* context, int32_t workers, void (*task)(void*, int32_t), void* argument) {
  *static_cast<int*>(context) += workers;
  std::vector<std::thread> threads;
  for (int32_t worker = 0; worker < workers; ++worker) threads.emplace_back(task, argument, worker);
  for (std::thread& thread : threads) thread.join();
}

TEST_P(Threads, AnExecutorOfTheCallersOwn) {
  for (const auto run_workers : {run_backwards, run_on_threads}) {
    int asked = 0;
    const tessera_executor executor{.run = run_workers, .context = &asked};
    RunOptions options = best(3, in_.c);
    options.executor = &executor;
    std::string error;
    EXPECT_EQ(forward_and_backward(call_, options, error), expected_);
    EXPECT_EQ(error, "");
    EXPECT_GT(asked, 0);
  }
}

// A child of fork has none of its parent's threads.
TEST_P(Threads, WorkAfterFork) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer ends a child that starts threads";
#endif
  std::string error;
  ASSERT_EQ(forward_and_backward(call_, best(2, in_.c), error), expected_);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // ends a child that waits for a missing thread
    _exit(forward_and_backward(call_, best(2, in_.c), error) == expected_ && error.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  EXPECT_EQ(forward_and_backward(call_, best(2, in_.c), error), expected_) << "in the parent, afterwards";
}

INSTANTIATE_TEST_SUITE_P(Case, Threads, ::testing::ValuesIn(kCases));

}  // namespace
}  // namespace tessera::testing
