// Checks that the table contains cases in which fwd_sm90's stale max fails, by following the inputs with the plan's
// tiles. It needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "execute.hpp"

namespace tessera::testing {
namespace {

// An H200's plan for the case with fwd_sm90 requested, as the GPU's tests request every kernel that supports a case.
tessera_plan hopper_plan(const Call& call, const Case& c) {
  tessera_device device = imagined_gpu(90);
  device.kernel = TESSERA_KERNEL_FWD_SM90;
  if (c.cores != Case{}.cores) device.cores = static_cast<int32_t>(c.cores);
  const tessera_problem problem = problem_of(call, TESSERA_FORWARD);
  tessera_plan plan{};
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return plan;
}

TEST(FwdSm90Cases, AreServedByIt) {
  int in_clusters = 0;
  for (Case c : hopper_cases()) {
    if (c.backward) continue;  // bwd_sm90's, whose forward pass is too small for it
    c = legalised(c);
    const Call call = make_call(make_shapes(c));
    const tessera_plan plan = hopper_plan(call, c);
    EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM90) << to_text(c);
    tessera_launch launch{};
    ASSERT_EQ(tessera_plan_launch(&plan, 1, 0, &launch).code, TESSERA_OK);
    in_clusters += launch.cluster > 1;
    // Tensors are copied to a GPU with their misalignment, and another kernel serves misaligned ones.
    constexpr uintptr_t kTensorMapAlignment = 16;
    if (c.gap != 0) continue;
    for (const Tensor* tensor : {&call.q, &call.k, &call.v, &call.o}) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->data()) % kTensorMapAlignment, 0u) << to_text(c);
    }
  }
  EXPECT_GE(in_clusters, 12) << "both types, every shape of tile and of chunks";
}

// The bound of a lane's sum against a stale max that is too low, kernels/tessera/fwd_sm90/kernel.cuh, and the stale max
// beyond which a maximum is always taken, attention/softmax.cuh.
constexpr double kStaleMaxBound_log2 = 6, kHugeScore_log2 = 0x1p16;

// Whether a row, after its first tile of keys, meets in a tile, from the first to the last, a score that passes all
// before by the bound, or no number.
bool row_falls_back(const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t block_n) {
  const Case& c = in.c;
  const double* q = &in.q[(in.q_row(b, i) * c.hq + h) * c.d];
  const int64_t blocks = (in.sk[b] + block_n - 1) / block_n;
  double stale_max = -std::numeric_limits<double>::infinity();
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t first = n * block_n;
    const int64_t end = std::min(first + block_n, in.sk[b]);
    double largest = -std::numeric_limits<double>::infinity();
    bool number = true;
    for (int64_t j = first; j < end; ++j) {
      if (!in.visible(b, h, i, j)) continue;
      const double* k = &in.k[(in.k_row(b, j) * c.hkv + h / (c.hq / c.hkv)) * c.d];
      double s = 0;
      for (int64_t d = 0; d < c.d; ++d) s += q[d] * k[d];
      s *= in.scale();
      if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
      s *= std::log2(std::exp(1.0));
      number &= !std::isnan(s);
      largest = std::max(largest, s);
    }
    const bool started = std::abs(stale_max) < kHugeScore_log2;
    if (started && (!number || largest > stale_max + kStaleMaxBound_log2)) return true;
    stale_max = std::max(stale_max, largest);
  }
  return false;
}

// A case's rows of every 37th query.
double share_of_rows(const Case& c) {
  const Inputs in = make_inputs(c);
  const tessera_plan plan = hopper_plan(make_call(in), c);
  int64_t rows = 0, fallen = 0;
  constexpr int64_t kStep = 37;
  for (int64_t b = 0; b < c.b; ++b)
    for (int64_t h = 0; h < c.hq; ++h)
      for (int64_t i = 0; i < in.sq[b]; i += kStep) {
        ++rows;
        fallen += row_falls_back(in, b, h, i, plan.steps[0].block_n);
      }
  return static_cast<double>(fallen) / static_cast<double>(std::max<int64_t>(rows, 1));
}

// A warp falls back for all of its 16 rows if one of them does.
TEST(FwdSm90Cases, MakeTheSoftmaxFallBack) {
  constexpr double kRowsOfAWarp = 16;
  int cases = 0;
  for (Case c : hopper_cases()) {
    c = legalised(c);
    if (c.data != kGrowing && c.data != kNanOnce && c.data != kInfOnce) continue;
    c.seed = ++cases;
    EXPECT_GT(share_of_rows(c), 1 / kRowsOfAWarp) << to_text(c);
  }
  EXPECT_GT(cases, 0);
}

}  // namespace
}  // namespace tessera::testing
