// The CUDA back end's families: the problems that each supports, as data, and that no id, name or prebuilt row is
// missing or duplicated.
#include "cuda/registry.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <string_view>

#include "tessera/tensor.hpp"

namespace tessera::cuda {
namespace {

// A family is its name. The first ones have a number as well.
TEST(CudaRegistry, FamiliesHaveNamesOfTheirOwn) {
  std::set<std::string_view> names;
  for (const Family* family : families()) {
    EXPECT_LT(std::strlen(family->name), sizeof tessera_family::name);
    EXPECT_TRUE(names.insert(family->name).second) << family->name;
    EXPECT_EQ(find_family(family->name), family);
    if (family->kernel != TESSERA_KERNEL_AUTO) {
      EXPECT_STREQ(family->name, tessera_kernel_name(family->kernel));
    }
  }
  EXPECT_EQ(find_family("tiled"), nullptr);
  EXPECT_EQ(find_family(""), nullptr);
}

TEST(CudaRegistry, APrebuiltProblemHasOneRowInAFamily) {
  for (const Family* family : families()) {
    std::set<std::pair<Use, int64_t>> rows;
    for (const PrebuiltRow& row : family->prebuilt) {
      EXPECT_TRUE(rows.insert({row.use, row.head_dim}).second) << family->name << " " << row.head_dim;
      EXPECT_GT(row.limits.registers, 0);
      EXPECT_LE(row.head_dim, family->supports.head_dim);
    }
  }
}

constexpr Supports kSome{.direction = TESSERA_FORWARD,
                         .oldest_arch = 80,
                         .newest_arch = 89,
                         .dtypes = kHalfPrecision,
                         .head_dim = 128,
                         .tensors = ~tensors({"bias", "page_table"})};

tessera_plan taken() {
  tessera_plan plan{};
  plan.problem.direction = TESSERA_FORWARD;
  plan.problem.q.dtype = plan.problem.k.dtype = plan.problem.v.dtype = plan.problem.o.dtype = TESSERA_BFLOAT16;
  plan.device.arch = 86;
  plan.head_dim = plan.head_dim_v = 128;
  return plan;
}

// The first requested feature that is not supported, as text.
TEST(CudaRegistry, ARefusalIsADifference) {
  EXPECT_EQ(refusal(kSome, taken()), "");
  tessera_plan plan = taken();
  plan.problem.direction = TESSERA_BACKWARD;
  EXPECT_EQ(refusal(kSome, plan), "a forward kernel");
  plan = taken(), plan.device.arch = 90;
  EXPECT_EQ(refusal(kSome, plan), "compute capability 9.0, must be 8.0 to 8.9");
  Supports newer = kSome;
  newer.oldest_arch = 90, newer.newest_arch = kAnyNewer;
  EXPECT_EQ(refusal(newer, taken()), "compute capability 8.6, must be 9.0 or newer");
  newer.newest_arch = 90;
  EXPECT_EQ(refusal(newer, taken()), "compute capability 8.6, must be 9.0");
  plan = taken(), plan.problem.q.dtype = TESSERA_FLOAT32;
  EXPECT_EQ(refusal(kSome, plan), "float32, accepted float16, bfloat16");
  plan = taken(), plan.problem.mask = layout(boolean, {1, 1, 4, 4});
  EXPECT_EQ(refusal(kSome, plan), "");
  plan.problem.bias = layout(float32, {1, 1, 4, 4});
  EXPECT_EQ(refusal(kSome, plan), "bias: not supported");
  plan = taken(), plan.head_dim_v = 129;
  EXPECT_EQ(refusal(kSome, plan), "head size 129, at most 128");
}

TEST(CudaRegistry, AStepKeepsItsFamilysConfig) {
  struct Config {
    int a;
    double b;
  };
  tessera_plan plan{};
  core::keep_config(plan.steps[3], Config{3, 0.5});
  const tessera_plan copy = plan;
  EXPECT_EQ(core::config_of<Config>(copy.steps[3]).a, 3);
  EXPECT_EQ(core::config_of<Config>(copy.steps[3]).b, 0.5);
}

}  // namespace
}  // namespace tessera::cuda
