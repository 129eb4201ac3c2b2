// Structs and plans that the library did not fill in are refused by name, and never used.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/seal.hpp"
#include "support.hpp"

namespace tessera::test {
namespace {

std::string text(const tessera_status& status) { return status.message; }

#define EXPECT_REFUSED(call, begins, contains)                                     \
  do {                                                                             \
    const tessera_status status_ = (call);                                         \
    EXPECT_EQ(status_.code, TESSERA_INVALID_ARGUMENT);                             \
    EXPECT_TRUE(text(status_).starts_with(begins)) << status_.message;             \
    EXPECT_NE(text(status_).find(contains), std::string::npos) << status_.message; \
  } while (false)

// As `= {0}` leaves it in C, whatever C++'s member initialisers would set.
template <class T>
void zero(T& value) {
  std::memset(static_cast<void*>(&value), 0, sizeof value);
}

struct Ready {
  Attention attention;
  Plan plan;
  std::vector<std::byte> workspace;
  tessera_buffers buffers;

  explicit Ready(const Device& device = reference_device()) {
    std::mt19937_64 random(1);
    attention.problem = dense_problem(float64);
    attention.allocate(random);
    plan = tessera::plan(attention.problem, device);
    workspace.resize(plan.workspace_bytes);
    buffers = attention.buffers();
  }
  tessera_status run(const tessera_executor* executor = nullptr) {
    return tessera_forward(&plan, &buffers, workspace.data(), workspace.size(), executor);
  }
  ~Ready() {
    EXPECT_TRUE(std::ranges::all_of(attention.o, [](double x) { return std::isnan(x); })) << "an output was written";
  }
};

TEST(Structs, ThatNothingInitialisedAreRefused) {
  const Device device = cpu();
  Plan plan;
  tessera_problem problem;
  zero(problem);
  const Problem dense = dense_problem();
  problem.q = dense.q, problem.k = dense.k, problem.v = dense.v, problem.o = dense.o;
  EXPECT_REFUSED(tessera_make_plan(&problem, &device, &plan), "problem: struct_size 0", "tessera_problem_init");
  tessera_problem value_initialised{};
  EXPECT_REFUSED(tessera_make_plan(&value_initialised, &device, &plan), "problem: struct_size 0",
                 "nothing initialised");
  problem.struct_size = 0xABABABABABAB;
  EXPECT_REFUSED(tessera_make_plan(&problem, &device, &plan), "problem: struct_size 188", "accepted");

  tessera_device no_device;
  zero(no_device);
  EXPECT_REFUSED(tessera_make_plan(&dense, &no_device, &plan), "device: struct_size 0", "tessera_device_cpu");

  Ready ready;
  tessera_executor executor;
  zero(executor);
  EXPECT_REFUSED(ready.run(&executor), "executor: struct_size 0", "sizeof(tessera_executor)");
  zero(ready.buffers);
  EXPECT_REFUSED(ready.run(), "buffers: struct_size 0", "sizeof(tessera_buffers)");
  zero(ready.plan);
  EXPECT_REFUSED(ready.run(), "plan: struct_size 0", "tessera_make_plan");
}

TEST(Structs, OfOlderHeadersHaveDefaultsWhereTheyEnd) {
  Problem problem = dense_problem();
  problem.softcap = 3;
  const std::size_t with_softcap = offsetof(tessera_problem, softcap) + sizeof problem.softcap;
  std::memset(reinterpret_cast<char*>(&problem) + with_softcap, 0xAB, sizeof problem - with_softcap);
  problem.struct_size = with_softcap;
  const Plan plan = tessera::plan(problem);
  EXPECT_EQ(plan.problem.softcap, 3);
  EXPECT_EQ(plan.problem.dropout_p, 0);
  EXPECT_EQ(plan.problem.batch_invariant, 0);
  EXPECT_EQ(plan.problem.struct_size, with_softcap) << "who copies it copies no more";

  problem.struct_size = offsetof(tessera_problem, scale);
  const Plan without_options = tessera::plan(problem);
  EXPECT_EQ(without_options.problem.softcap, 0);
  EXPECT_EQ(without_options.problem.window_left, -1);
  problem.struct_size = offsetof(tessera_problem, scale) - 8;
  Plan untouched;
  EXPECT_EQ(try_plan(problem, cpu(), untouched).code(), Code::invalid_argument);
}

TEST(Structs, OfNewerHeadersAreTakenWhereTheirNewMembersAreZero) {
  struct {
    tessera_problem known;
    double option[2];
  } newer{dense_problem(), {0, 0}};
  newer.known.struct_size = sizeof newer;
  const Device device = cpu();
  Plan plan;
  EXPECT_EQ(tessera_make_plan(&newer.known, &device, &plan).code, TESSERA_OK);
  EXPECT_EQ(plan.problem.struct_size, sizeof(tessera_problem));
  newer.option[1] = 1;
  EXPECT_REFUSED(tessera_make_plan(&newer.known, &device, &plan), "problem: a member at byte", "does not know");
  Device other = device;
  other.reserved[7] = 1;
  const Problem dense = dense_problem();
  EXPECT_REFUSED(tessera_make_plan(&dense, &other, &plan), "device: a member is set", "does not know");
}

TEST(Plans, OfAnotherVersionAreRefused) {
  Ready ready;
  ready.plan.version += 100;
  EXPECT_REFUSED(ready.run(), "plan: made by version 0.2.0", std::string("this version made: ") + tessera_version());
  EXPECT_REFUSED(tessera_prepare(&ready.plan), "plan: made by version", "");
  EXPECT_EQ(tessera_workspace_bytes(&ready.plan), 0u);
  EXPECT_EQ(describe(ready.plan), "");
  EXPECT_EQ(json(ready.plan), "");
}

TEST(Plans, ThatWereChangedAreRefused) {
  void (*const changes[])(Plan&) = {
      [](Plan& plan) { plan.workspace_bytes = 0; },
      [](Plan& plan) { plan.workspace_bytes -= 64; },
      [](Plan& plan) { plan.scratch_bytes += 64; },
      [](Plan& plan) { plan.kernel = TESSERA_KERNEL_DECODE; },
      [](Plan& plan) { plan.kernel = 99; },
      [](Plan& plan) { plan.device.threads += 1000; },
      [](Plan& plan) { plan.device.isa = TESSERA_ISA_AVX512_BF16 - plan.device.isa; },
      [](Plan& plan) { plan.max_seqlen_k = 1; },
      [](Plan& plan) { plan.problem.causal = 1; },
      [](Plan& plan) { plan.problem.q.shape[0] = 1000; },
      [](Plan& plan) { plan.problem.bias.rank = 4; },
      [](Plan& plan) { plan.problem.d_captured[7].strides[4] = 1; },
      [](Plan& plan) { plan.num_steps = 0; },
      [](Plan& plan) { plan.num_steps = 99; },
      [](Plan& plan) { plan.steps[0].family[0] = 't'; },
      [](Plan& plan) { plan.steps[0].config[0] ^= 1; },
      [](Plan& plan) { plan.seal = 0; },
  };
  for (const auto& change : changes) {
    Device device = reference_device();
    device.isa = TESSERA_ISA_BASELINE;
    Ready ready(device);
    change(ready.plan);
    if (ready.plan.workspace_bytes == 0) ready.workspace.clear();
    EXPECT_REFUSED(ready.run(), "plan: changed since tessera_make_plan filled it in", "plan again");
    EXPECT_EQ(describe(ready.plan), "");
  }
}

TEST(Plans, MayBeCopied) {
  Ready ready;
  const Plan copy = ready.plan;
  std::vector<char> bytes(sizeof copy + 8);
  char* aligned = bytes.data();
  std::memcpy(aligned, &copy, sizeof copy);
  Plan back;
  std::memcpy(static_cast<void*>(&back), aligned, sizeof back);
  EXPECT_EQ(describe(back), describe(ready.plan));
}

// As a machine with more instruction sets would make it: this one may have all that there are.
TEST(Plans, ForAnInstructionSetThatIsNotHereAreRefused) {
  Ready ready;
  ready.plan.device.isa = ready.plan.device.isa_limit = TESSERA_ISA_NEON_BF16 + 1;
  ready.plan.seal = core::seal_of(ready.plan);
  EXPECT_REFUSED(ready.run(), "plan: made for a CPU with ",
                 std::string("this machine, which has ") + tessera_isa_name(cpu().isa_limit));
}

TEST(Plans, DetectTheCpuOnce) {
  const Plan before = tessera::plan(dense_problem());
  setenv("TESSERA_ISA", "none such", 1);
  EXPECT_THROW(cpu(), Error);
  const Plan after = tessera::plan(dense_problem());
  unsetenv("TESSERA_ISA");
  EXPECT_EQ(after.device.isa, before.device.isa);
}

}  // namespace
}  // namespace tessera::test
