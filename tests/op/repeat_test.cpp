// The same call, ten thousand times: the same bits. A race that shows once in thousands of launches shows here.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "execute.hpp"
#include "gpu_call.hpp"

namespace tessera::testing {
namespace {

struct Repeated {
  const char* text;
  tessera_kernel kernel;
};

// Small, and for few multiprocessors, so that a block takes several works: 10,000 results are a few gigabytes. The last
// takes all multiprocessors. Inputs are such that the softmax falls back in some.
constexpr Repeated kRepeated[] = {
    {"dtype=bf16 sq=500 sk=700 hq=6 hkv=2 d=128 dv=128 cores=7", TESSERA_KERNEL_FWD_SM90},
    {"dtype=bf16 sq=500 sk=700 hq=6 hkv=2 d=128 dv=128 causal=1 cores=7", TESSERA_KERNEL_FWD_SM90},
    {"dtype=f16 sq=600 sk=600 hq=8 hkv=8 d=64 dv=64 causal=1 cores=7", TESSERA_KERNEL_FWD_SM90},
    {"dtype=bf16 sq=500 sk=600 hq=4 hkv=2 d=256 dv=256 cores=5", TESSERA_KERNEL_FWD_SM90},
    {"dtype=f16 b=4 sq=400 sk=400 hq=4 hkv=2 d=128 dv=128 q=packed k=packed causal=1 cores=5", TESSERA_KERNEL_FWD_SM90},
    {"dtype=bf16 sq=500 sk=900 hq=6 hkv=2 d=128 dv=128 data=outlier cores=7", TESSERA_KERNEL_FWD_SM90},
    {"dtype=bf16 sq=500 sk=900 hq=8 hkv=2 d=64 dv=64 data=growing cores=5", TESSERA_KERNEL_FWD_SM90},
    {"dtype=f16 sq=500 sk=900 hq=6 hkv=2 d=128 dv=128 causal=1 data=growing cores=7", TESSERA_KERNEL_FWD_SM90},
    // In clusters of two blocks: with the tiles of long queries.
    {"dtype=bf16 sq=700 sk=900 hq=6 hkv=2 d=128 dv=128 data=outlier cores=7 invariant=1", TESSERA_KERNEL_FWD_SM90},
    {"dtype=f16 sq=500 sk=900 hq=4 hkv=2 d=256 dv=256 data=growing cores=5 invariant=1", TESSERA_KERNEL_FWD_SM90},
    {"dtype=bf16 sq=500 sk=900 hq=6 hkv=2 d=64 dv=64 data=falling cores=7", TESSERA_KERNEL_FWD_SM80},
    {"dtype=bf16 sq=500 sk=900 hq=6 hkv=2 d=128 dv=128 causal=1 cores=7", TESSERA_KERNEL_FWD_SM80},
    {"dtype=bf16 sq=500 sk=900 hq=4 hkv=2 d=256 dv=256 data=falling cores=5", TESSERA_KERNEL_FWD_SM80},
    {"dtype=bf16 sq=500 sk=900 hq=4 hkv=2 d=256 dv=256 data=growing cores=5", TESSERA_KERNEL_FWD_SM80},
    {"dtype=bf16 sq=500 sk=600 hq=6 hkv=2 d=128 dv=128 softcap=30 alibi=h dropout=0.2 cores=7",
     TESSERA_KERNEL_FWD_SM90},
    {"dtype=f16 sq=500 sk=640 hq=6 hkv=2 d=64 dv=64 bias=hqk mask=qk causal=1 cores=7", TESSERA_KERNEL_FWD_SM90},
    {"dtype=bf16 sq=80 sk=300 hq=160 hkv=20 d=64 dv=64 causal=1", TESSERA_KERNEL_FWD_SM90},
};

tessera_plan plan_of(const Repeated& repeated, const Call& call, tessera_device device) {
  const Case c = *parse_case(repeated.text, nullptr);
  device.kernel = repeated.kernel;
  if (c.cores != Case{}.cores) device.cores = static_cast<int32_t>(c.cores);
  const tessera_problem problem = problem_of(call, TESSERA_FORWARD);
  tessera_plan plan{};
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message << "\n  " << repeated.text;
  EXPECT_EQ(plan.kernel, repeated.kernel) << repeated.text;
  return plan;
}

TEST(RepeatedCases, HavePlansOnHopper) {
  for (const Repeated& repeated : kRepeated) {
    plan_of(repeated, make_call(make_inputs(legalised(*parse_case(repeated.text, nullptr)))), imagined_gpu(90));
  }
}

class CudaRepeat : public ::testing::TestWithParam<Repeated> {};

TEST_P(CudaRepeat, TenThousandLaunchesGiveTheSameBits) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  const Repeated& repeated = GetParam();
  if (repeated.kernel == TESSERA_KERNEL_FWD_SM90 && gpu_device().arch != 90) GTEST_SKIP() << "skipped: not Hopper";
  const Case c = legalised(*parse_case(repeated.text, nullptr));
  const Inputs in = make_inputs(c);
  Call call = make_call(in);
  const tessera_plan plan = plan_of(repeated, call, gpu_device());

  // Each launch of a batch has an output of its own, poisoned, so that all of its bits can be looked at.
  constexpr int kBatch = 200, kLaunches = 10000;
  constexpr size_t kAlignment = 256;
  const auto padded = [](size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  const size_t o_bytes = padded(static_cast<size_t>(call.o.size()) * sizeof(uint16_t));
  const size_t each = o_bytes + padded(static_cast<size_t>(call.lse.size()) * sizeof(float));
  Gpu& gpu = Gpu::get();
  void* const stream = gpu.stream();
  const GpuBlock results(each * kBatch, false);
  GpuCall on_gpu(call, TESSERA_FORWARD, tessera_workspace_bytes(&plan), 0xFF);
  on_gpu.upload(stream);
  tessera_buffers buffers = on_gpu.buffers();
  const tessera_executor executor{.run = nullptr, .context = nullptr, .stream = stream};
  std::vector<std::byte> first, batch(each * kBatch);
  int different = 0;
  for (int launch = 0; launch < kLaunches; launch += kBatch) {
    gpu.fill(results.data(), 0xFF, each * kBatch, stream);
    for (int n = 0; n < kBatch; ++n) {
      buffers.o = results.data() + each * n;
      buffers.lse = reinterpret_cast<float*>(results.data() + each * n + o_bytes);
      const tessera_status status =
          tessera_forward(&plan, &buffers, on_gpu.workspace(), tessera_workspace_bytes(&plan), &executor);
      ASSERT_EQ(status.code, TESSERA_OK) << status.message;
    }
    gpu.synchronize(stream);
    gpu.download(batch.data(), results.data(), batch.size(), stream);
    if (first.empty()) first.assign(batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(each));
    for (int n = 0; n < kBatch; ++n) different += std::memcmp(batch.data() + each * n, first.data(), each) != 0;
  }
  EXPECT_EQ(different, 0) << "of " << kLaunches << " launches: " << to_text(c);
}

INSTANTIATE_TEST_SUITE_P(Case, CudaRepeat, ::testing::ValuesIn(kRepeated));

}  // namespace
}  // namespace tessera::testing
