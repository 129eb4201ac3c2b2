// Plans for GPUs, made without one: refusals, and plans for every case of the table.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "cuda_fixture.hpp"

namespace tessera::testing {
namespace {

TEST(CudaPlan, RefusesFloat64WithAReason) {
  const Call call = make_oracle_call(inputs_of("sq=16 sk=16 d=16 dv=16"));
  const tessera_device device = imagined_gpu(90);
  const tessera_problem problem = problem_of(call, TESSERA_FORWARD);
  tessera_plan plan;
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_UNSUPPORTED) << status.message;
  EXPECT_NE(std::string(status.message).find("float64"), std::string::npos) << status.message;
}

TEST(CudaPlan, RefusesAnArchitectureThatNoKernelIsFor) {
  const Call call = make_call(inputs_of("sq=16 sk=16 d=16 dv=16"));
  const tessera_problem problem = problem_of(call, TESSERA_FORWARD);
  for (const int32_t arch : {70, 75, 1000}) {
    const tessera_device device = imagined_gpu(arch);
    tessera_plan plan;
    const tessera_status status = tessera_make_plan(&problem, &device, &plan);
    EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
    EXPECT_EQ(status.message, "device.arch: " + std::to_string(arch) + ", accepted 80 .. 999");
  }
}

TEST(CudaPlan, RefusesAHeadSizeBeyondTheLimit) {
  Call call = make_call(inputs_of("sq=16 sk=16 d=512 dv=512"));
  tessera_problem problem = problem_of(call, TESSERA_FORWARD);
  problem.q.shape[3] = problem.k.shape[3] = 577;
  const tessera_device device = imagined_gpu(90);
  tessera_plan plan;
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(status.message).find("q: "), 0u) << status.message;
  EXPECT_NE(std::string(status.message).find("D in 1 .. 576"), std::string::npos) << status.message;
}

// Every feature but the CPU's own, at every head size, on every architecture: also those with the least shared memory.
TEST(CudaPlan, TakesEveryCaseOfTheTable) {
  for (const Case& c : case_table()) {
    const Call call = make_call(make_shapes(c));
    for (const int32_t arch : {80, 86, 90, 100, 120}) {
      for (const tessera_direction direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
        if (direction == TESSERA_BACKWARD && !c.backward) continue;
        const tessera_device device = imagined_gpu(arch);
        const tessera_problem problem = problem_of(call, direction);
        tessera_plan plan;
        const tessera_status status = tessera_make_plan(&problem, &device, &plan);
        EXPECT_EQ(status.code, served_by_gpu(c, direction, arch) ? TESSERA_OK : TESSERA_UNSUPPORTED)
            << "sm_" << arch << ": " << status.message << "\n  " << to_text(c);
      }
    }
  }
}

// Kernels that no plan chooses are tested by the cases that they support on request: there must be enough of these.
TEST(CudaPlan, KernelsOnRequestHaveCasesOfTheirOwn) {
  constexpr int kEnough = 30;
  std::map<tessera_kernel, tessera_direction> asked = {{TESSERA_KERNEL_BWD_SM90, TESSERA_BACKWARD}};
  for (const ComparisonKernels& kernels : kComparisonKernels) {
    asked[kernels.forward] = TESSERA_FORWARD, asked[kernels.backward] = TESSERA_BACKWARD;
  }
  std::map<tessera_kernel, int> taken;
  const auto enough = [&](const auto& one) { return taken[one.first] >= kEnough; };
  for (const Case& c : case_table()) {
    if (std::ranges::all_of(asked, enough)) break;
    if (c.dtype == TESSERA_FLOAT32) continue;  // none of them supports it
    const Call call = make_call(make_shapes(c));
    for (const auto& [kernel, direction] : asked) {
      if (taken[kernel] == kEnough || (direction == TESSERA_BACKWARD && !c.backward)) continue;
      tessera_device device = imagined_gpu(90);
      device.kernel = kernel;
      const tessera_problem problem = problem_of(call, direction);
      tessera_plan plan;
      taken[kernel] += tessera_make_plan(&problem, &device, &plan).code == TESSERA_OK;
    }
  }
  for (const auto& [kernel, direction] : asked) EXPECT_EQ(taken[kernel], kEnough) << tessera_kernel_name(kernel);
}

TEST(CudaPlan, TheDecodingKernelForHopperHasCasesOfItsOwn) {
  constexpr int kEnough = 40;
  int taken = 0;
  for (const Case& c : case_table()) {
    if (taken == kEnough) break;
    if (c.sq > 16) continue;  // larger inputs take long
    const Call call = make_call(make_shapes(c));
    tessera_device device = imagined_gpu(90);
    device.kernel = TESSERA_KERNEL_DECODE_SM90;
    const tessera_problem problem = problem_of(call, TESSERA_FORWARD);
    tessera_plan plan;
    taken += tessera_make_plan(&problem, &device, &plan).code == TESSERA_OK;
  }
  EXPECT_EQ(taken, kEnough);
}

}  // namespace
}  // namespace tessera::testing
