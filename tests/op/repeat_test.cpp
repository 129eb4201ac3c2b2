// The same call, ten thousand times: the same bits. A race that shows once in thousands of launches shows here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "execute.hpp"
#include "gpu_call.hpp"
#include "numbers.hpp"

namespace tessera::testing {
namespace {

struct Repeated {
  const char* text;  // backward=1: of the backward pass
  tessera_kernel kernel;
};

// Small, and for few multiprocessors, so that a block processes several work tiles: 10,000 results are a few gigabytes.
// The last uses all multiprocessors. Some inputs make the softmax take new maxima.
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
    // Backward: score warpgroups at every pace, dropout bits from idle warps, rows of a block mask, dQ added in a fixed
    // order and in any order.
    {"dtype=bf16 backward=1 sq=500 sk=700 hq=4 hkv=2 d=128 dv=128 causal=1", TESSERA_KERNEL_BWD_SM90},
    {"dtype=bf16 backward=1 sq=500 sk=700 hq=4 hkv=2 d=64 dv=64", TESSERA_KERNEL_BWD_SM90},
    {"dtype=f16 backward=1 sq=300 sk=300 hq=4 hkv=2 d=256 dv=256 causal=1", TESSERA_KERNEL_BWD_SM90},
    {"dtype=bf16 backward=1 sq=500 sk=500 hq=4 hkv=4 d=64 dv=64 dropout=0.1", TESSERA_KERNEL_BWD_SM90},
    {"dtype=bf16 backward=1 sq=500 sk=700 hq=4 hkv=2 d=128 dv=128 causal=1 dropout=0.25", TESSERA_KERNEL_BWD_SM90},
    {"dtype=f16 backward=1 b=4 sq=300 sk=300 hq=2 hkv=1 d=128 dv=128 q=packed k=packed causal=1 dropout=0.1",
     TESSERA_KERNEL_BWD_SM90},
    {"dtype=bf16 backward=1 sq=512 sk=640 hq=4 hkv=2 d=64 dv=64 block_mask=hqk block_q=64 block_k=64",
     TESSERA_KERNEL_BWD_SM90},
    {"dtype=bf16 backward=1 sq=512 sk=512 hq=4 hkv=2 d=128 dv=128 causal=1 block_mask=hqk block_q=128 block_k=64",
     TESSERA_KERNEL_BWD_SM90},
    {"dtype=bf16 backward=1 sq=500 sk=500 hq=4 hkv=2 d=192 dv=128 causal=1", TESSERA_KERNEL_BWD_SM90},
    {"dtype=bf16 backward=1 deterministic=1 sq=700 sk=700 hq=4 hkv=2 d=128 dv=128", TESSERA_KERNEL_BWD_SM90},
    {"dtype=bf16 backward=1 deterministic=1 sq=500 sk=500 hq=4 hkv=2 d=256 dv=256", TESSERA_KERNEL_BWD_SM90},
    {"dtype=f16 backward=1 deterministic=1 sq=500 sk=500 hq=4 hkv=4 d=192 dv=192 causal=1", TESSERA_KERNEL_BWD_SM90},
    {"dtype=bf16 backward=1 deterministic=1 sq=700 sk=700 hq=4 hkv=4 d=64 dv=64 causal=1", TESSERA_KERNEL_BWD_SM90},
    {"dtype=bf16 backward=1 deterministic=1 sq=500 sk=500 hq=4 hkv=2 d=128 dv=128 causal=1 dropout=0.1",
     TESSERA_KERNEL_BWD_SM90},
    {"dtype=f16 backward=1 deterministic=1 sq=512 sk=640 hq=4 hkv=2 d=64 dv=64 dropout=0.1 block_mask=hqk block_q=64 "
     "block_k=128",
     TESSERA_KERNEL_BWD_SM90},
};

// Lists of a program's mask, whose room in the pool depends on the order in which they are made.
constexpr Repeated kRepeatedLists[] = {
    {"dtype=bf16 backward=1 deterministic=1 sq=512 sk=900 hq=4 hkv=2 d=64 dv=64 mask_mod='i // 100 % 3 == j // 130 % "
     "3'",
     TESSERA_KERNEL_BWD_SM90},
    {"dtype=f16 backward=1 deterministic=1 sq=512 sk=900 hq=4 hkv=2 d=128 dv=128 causal=1 lists=9 "
     "mask_mod='i // 100 % 3 == j // 130 % 3'",
     TESSERA_KERNEL_BWD_SM90},
    {"dtype=f16 backward=1 deterministic=1 sq=512 sk=900 hq=4 hkv=2 d=64 dv=64 mask_mod='i // 100 % 3 == j // 130 % 3'",
     TESSERA_KERNEL_BWD_SM80},
};

tessera_direction direction_of(const Case& c) { return c.backward ? TESSERA_BACKWARD : TESSERA_FORWARD; }

tessera_plan plan_of(const Repeated& repeated, const Call& call, tessera_device device) {
  const Case c = *parse_case(repeated.text, nullptr);
  device.kernel = repeated.kernel;
  if (c.cores != Case{}.cores) device.cores = static_cast<int32_t>(c.cores);
  const tessera_problem problem = problem_of(call, direction_of(c));
  tessera_plan plan{};
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message << "\n  " << repeated.text;
  EXPECT_EQ(plan.kernel, repeated.kernel) << repeated.text;
  return plan;
}

TEST(RepeatedCases, HavePlansOnHopper) {
  std::vector<Repeated> all(std::begin(kRepeated), std::end(kRepeated));
  all.insert(all.end(), std::begin(kRepeatedLists), std::end(kRepeatedLists));
  for (const Repeated& repeated : all) {
    plan_of(repeated, make_call(make_inputs(legalised(*parse_case(repeated.text, nullptr)))), imagined_gpu(90));
  }
}

// A launch's outputs, one after another in memory of their own.
struct Output {
  const Tensor* tensor;
  size_t begin, bytes;
  bool any_order;  // sums of float32 whose order is not fixed
};

size_t element_bytes(const Tensor& tensor) { return tensor.layout().dtype == TESSERA_FLOAT32 ? 4 : 2; }

std::vector<Output> place_outputs(const Case& c, const Call& call, size_t& end) {
  constexpr size_t kAlignment = 256;
  std::vector<Output> placed;
  for (const NamedTensor& output : outputs(call, direction_of(c))) {
    const size_t bytes = static_cast<size_t>(output.tensor->size()) * element_bytes(*output.tensor);
    placed.push_back({output.tensor, end, bytes, output.tensor == &call.d_q && !c.deterministic});
    end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  return placed;
}

// The same sums in another order: they differ by float32's rounding of their terms, or by one step of the dtype.
bool same_sums(const Tensor& tensor, const std::byte* a, const std::byte* b) {
  const int32_t dtype = tensor.layout().dtype;
  const size_t size = element_bytes(tensor);
  constexpr double kSmall = 1e-4;  // of sums whose terms cancel: dQ's terms are of the order of 1
  for (int64_t n = 0; n < tensor.size(); ++n, a += size, b += size) {
    if (std::memcmp(a, b, size) == 0) continue;
    const double one = decode(dtype, a), other = decode(dtype, b);
    if (!(std::fabs(one - other) <= 2 * epsilon(dtype) * std::fabs(one) + kSmall)) return false;
  }
  return true;
}

bool same(const std::vector<Output>& outputs, const std::byte* a, const std::byte* b) {
  return std::ranges::all_of(outputs, [&](const Output& output) {
    if (std::memcmp(a + output.begin, b + output.begin, output.bytes) == 0) return true;
    return output.any_order && same_sums(*output.tensor, a + output.begin, b + output.begin);
  });
}

class CudaRepeat : public ::testing::TestWithParam<Repeated> {};

TEST_P(CudaRepeat, TenThousandLaunchesGiveTheSame) {
  if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  const Repeated& repeated = GetParam();
  const bool hopper = repeated.kernel == TESSERA_KERNEL_FWD_SM90 || repeated.kernel == TESSERA_KERNEL_BWD_SM90;
  if (hopper && gpu_device().arch != 90) GTEST_SKIP() << "skipped: not Hopper";
  const Case c = legalised(*parse_case(repeated.text, nullptr));
  const Inputs in = make_inputs(c);
  Call call = make_call(in);
  if (c.backward) {
    const RunResult forward = run(call, TESSERA_FORWARD, {.place = kGpu});
    ASSERT_TRUE(forward.ok()) << forward.why();
  }
  const tessera_plan plan = plan_of(repeated, call, gpu_device());

  // Each launch of a batch has its own poisoned outputs, so that all of their bits can be compared.
  const char* const wish = std::getenv("TESSERA_TEST_LAUNCHES");
  const int launches = wish ? std::max(1, std::atoi(wish)) : 10000, at_once = std::min(200, launches);
  size_t each = 0;
  const std::vector<Output> placed = place_outputs(c, call, each);
  Gpu& gpu = Gpu::get();
  void* const stream = gpu.stream();
  const GpuBlock results(each * static_cast<size_t>(at_once), false);
  GpuCall on_gpu(call, direction_of(c), tessera_workspace_bytes(&plan), 0xFF);
  on_gpu.upload(stream);
  const tessera_executor executor{.run = nullptr, .context = nullptr, .stream = stream};
  const auto execute = c.backward ? tessera_backward : tessera_forward;
  std::vector<std::byte> first, batch(each * static_cast<size_t>(at_once));
  int different = 0;
  for (int launch = 0; launch < launches; launch += at_once) {
    gpu.fill(results.data(), 0xFF, each * static_cast<size_t>(at_once), stream);
    for (int n = 0; n < at_once; ++n) {
      const tessera_buffers buffers = call.buffers([&](const Tensor& tensor) -> void* {
        const auto output = std::ranges::find(placed, &tensor, &Output::tensor);
        return output == placed.end() ? on_gpu.address(tensor) : results.data() + each * n + output->begin;
      });
      const tessera_status status =
          execute(&plan, &buffers, on_gpu.workspace(), tessera_workspace_bytes(&plan), &executor);
      ASSERT_EQ(status.code, TESSERA_OK) << status.message;
    }
    gpu.synchronize(stream);
    gpu.download(batch.data(), results.data(), batch.size(), stream);
    if (first.empty()) first.assign(batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(each));
    for (int n = 0; n < at_once; ++n) different += !same(placed, batch.data() + each * n, first.data());
  }
  EXPECT_EQ(different, 0) << "of " << launches << " launches: " << to_text(c);
}

INSTANTIATE_TEST_SUITE_P(Case, CudaRepeat, ::testing::ValuesIn(kRepeated));
INSTANTIATE_TEST_SUITE_P(ProgramLists, CudaRepeat, ::testing::ValuesIn(kRepeatedLists));

}  // namespace
}  // namespace tessera::testing
