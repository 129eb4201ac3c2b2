// A GPU's kernels with every program of the table against the oracle: forward, decoding, gradients.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/score/programmed.hpp"
#include "gpu_memory.hpp"
#include "place.hpp"

namespace tessera::testing {
namespace {

using test::expect_near;
using test::PackedSequences;
using test::Programmed;

// Makes a call with copies in a GPU's memory of everything that it reads or writes.
class OnGpu {
 public:
  // `given`: the problem, with the layouts of all captured tensors; a plan lacks those of what became an option.
  explicit OnGpu(const Problem& given) : given_(given) {}
  void operator()(const Plan& plan, const Buffers& buffers, std::int32_t direction) {
    const tessera_problem& problem = plan.problem;
    Buffers there = buffers;
    const auto copied = [&](const tessera_layout& layout, auto& pointer) {
      if (layout.rank == 0 || !pointer) return;
      pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(copy_of(layout, pointer));
    };
    const bool backward = direction == TESSERA_BACKWARD;
    copied(problem.q, there.q), copied(problem.k, there.k), copied(problem.v, there.v), copied(problem.o, there.o);
    copied(problem.lse, there.lse);
    copied(problem.cu_seqlens_q, there.cu_seqlens_q), copied(problem.cu_seqlens_k, there.cu_seqlens_k);
    if (backward) {
      copied(problem.d_o, there.d_o);
      copied(problem.d_q, there.d_q), copied(problem.d_k, there.d_k), copied(problem.d_v, there.d_v);
    }
    for (size_t n = 0; n < std::size(there.captured); ++n) {
      copied(given_.captured[n], there.captured[n]);
      if (backward) copied(problem.d_captured[n], there.d_captured[n]);
    }
    GpuBlock workspace(plan.workspace_bytes + 64, true);
    gpu.fill(workspace.data(), 0xff, plan.workspace_bytes + 64, gpu.stream());
    const Executor executor{.run = nullptr, .context = nullptr, .stream = gpu.stream()};
    const auto run = backward ? try_backward : try_forward;
    const Status status =
        run(plan, there, {workspace.data(), static_cast<std::size_t>(plan.workspace_bytes)}, &executor);
    ASSERT_TRUE(status.ok()) << status.message();
    gpu.synchronize(gpu.stream());
    for (const Copy& copy : copies_) gpu.download(copy.host, copy.block->data(), copy.bytes, gpu.stream());
    copies_.clear();
  }

 private:
  struct Copy {
    void* host;
    std::size_t bytes;
    std::unique_ptr<GpuBlock> block;
  };

  void* copy_of(const tessera_layout& layout, const void* host) {
    const std::size_t bytes =
        test::span_elements(layout) * tessera_dtype_bytes(static_cast<tessera_dtype>(layout.dtype));
    Copy& copy = copies_.emplace_back(const_cast<void*>(host), bytes, std::make_unique<GpuBlock>(bytes, true));
    gpu.upload(copy.block->data(), host, bytes, gpu.stream());
    return copy.block->data();
  }

  const Problem& given_;
  Gpu& gpu = Gpu::get();
  std::vector<Copy> copies_;
};

Device gpu_with(tessera_kernel kernel) {
  Device device;
  static_cast<tessera_device&>(device) = gpu_device();
  device.kernel = kernel;
  return device;
}

class CudaPrograms : public ::testing::TestWithParam<std::size_t> {
 protected:
  void SetUp() override {
    if (!gpu_missing().empty()) GTEST_SKIP() << "skipped: " << gpu_missing();
  }

  // Whether the device has the kernel.
  static bool has(tessera_kernel kernel) {
    return gpu_device().arch == 90 || kernel == TESSERA_KERNEL_FWD_SM80 || kernel == TESSERA_KERNEL_BWD_SM80;
  }
  // Whether the kernel supports the backward pass of the program, without gradients of its tensors.
  static bool takes(const Programmed& call, tessera_kernel kernel) {
    Plan unused;
    return try_plan(gradient_of(call.problem_of(bfloat16, float32)), gpu_with(kernel), unused).ok();
  }
  void check(Programmed& call, tessera_kernel forward, tessera_kernel backward) {
    const Device device = gpu_with(forward), of_gradients = gpu_with(backward);
    call.backward_device = &of_gradients;
    std::string kernel;
    const Problem given = call.problem_of(call.bf16 ? bfloat16 : float32, float32);
    OnGpu on_gpu(given);
    const auto results = call.run(device, backward != TESSERA_KERNEL_AUTO, kernel, on_gpu);
    EXPECT_EQ(kernel, tessera_kernel_name(forward));
    if (backward != TESSERA_KERNEL_AUTO) {
      EXPECT_EQ(call.backward_kernel, tessera_kernel_name(backward));
    }
    expect_near(call, results, kernel + " " + call.backward_kernel, 3e-2, 1e-3);
  }
};

TEST_P(CudaPrograms, GiveTheOraclesOutputsAndGradients) {
  Programmed call(GetParam(), true, 40, 64, 64);
  call.run_oracle();
  check(call, TESSERA_KERNEL_FWD_SM80, TESSERA_KERNEL_BWD_SM80);
  if (!has(TESSERA_KERNEL_FWD_SM90)) return;
  const bool with_backward = takes(call, TESSERA_KERNEL_BWD_SM90);
  call.captured_gradients = false;
  check(call, TESSERA_KERNEL_FWD_SM90, with_backward ? TESSERA_KERNEL_BWD_SM90 : TESSERA_KERNEL_AUTO);
}

TEST_P(CudaPrograms, AreExactInFloat32) {
  Programmed call(GetParam(), false, 40, 32, 32);
  call.run_oracle();
  call.deterministic = true;
  check(call, TESSERA_KERNEL_FWD_SM80, TESSERA_KERNEL_BWD_SM80);
}

TEST_P(CudaPrograms, DecodeAsTheOracle) {
  Programmed call(GetParam(), true, 3, 64, 64);
  call.run_oracle();
  if (!has(TESSERA_KERNEL_DECODE_SM90)) GTEST_SKIP() << "skipped: decode_sm90 needs Hopper";
  check(call, TESSERA_KERNEL_DECODE_SM90, TESSERA_KERNEL_AUTO);
}

// Up to so many queries and keys each, and rows of no sequence.
PackedSequences two_sequences(std::int64_t queries, std::int64_t keys) {
  const auto q = static_cast<std::int32_t>(queries), k = static_cast<std::int32_t>(keys);
  return {.cu_seqlens_q = {0, 97, 97 + q},
          .cu_seqlens_k = {0, k, k + 201},
          .rows_q = 97 + queries + 9,
          .rows_k = keys + 201 + 30};
}

// Masks whose lists of visible blocks are made on the GPU, with several tiles of queries and of keys.
class CudaProgramMasks : public CudaPrograms {
 protected:
  static constexpr std::int64_t kQueries = 150, kKeys = 330;

  static bool makes_lists(const Plan& plan) {
    for (std::int32_t n = 0; n < tessera_plan_num_launches(&plan, 1); ++n) {
      tessera_launch launch;
      EXPECT_EQ(tessera_plan_launch(&plan, 1, n, &launch).code, TESSERA_OK);
      if (launch.kernel == std::string("program_lists")) return true;
    }
    return false;
  }
  // The call's kernels that make lists: forward and backward.
  static std::vector<std::string> kernels_with_lists(const Programmed& call) {
    std::vector<std::string> names;
    const Problem forward = call.problem_of(bfloat16, float32);
    for (const tessera_kernel kernel : {TESSERA_KERNEL_FWD_SM80, TESSERA_KERNEL_FWD_SM90}) {
      if (has(kernel) && makes_lists(plan(forward, gpu_with(kernel)))) names.emplace_back(tessera_kernel_name(kernel));
    }
    const Problem backward = gradient_of(forward);
    for (const tessera_kernel kernel : {TESSERA_KERNEL_BWD_SM80, TESSERA_KERNEL_BWD_SM90}) {
      if (has(kernel) && makes_lists(plan(backward, gpu_with(kernel)))) names.emplace_back(tessera_kernel_name(kernel));
    }
    return names;
  }
  Programmed call_of(const PackedSequences& packed) const {
    return {GetParam(), true, World(GetParam() + 1, kQueries, kKeys), kQueries, 64, 64, packed};
  }
  void skip_blocks(const PackedSequences& packed, std::int64_t list_capacity = 0) {
    Programmed call = call_of(packed);
    call.list_capacity = list_capacity;
    call.run_oracle();
    check(call, TESSERA_KERNEL_FWD_SM80, TESSERA_KERNEL_BWD_SM80);
    if (!has(TESSERA_KERNEL_FWD_SM90)) return;
    call.captured_gradients = false;
    check(call, TESSERA_KERNEL_FWD_SM90, TESSERA_KERNEL_BWD_SM90);
  }
};

TEST_P(CudaProgramMasks, SkipBlocksOfKeys) { skip_blocks({}); }

TEST_P(CudaProgramMasks, SkipBlocksOfKeysOfPackedSequences) {
  const PackedSequences packed = two_sequences(kQueries, kKeys);
  EXPECT_EQ(kernels_with_lists(call_of(packed)), kernels_with_lists(call_of({})));
  skip_blocks(packed);
}

TEST_P(CudaProgramMasks, VisitAllBlocksWhereListsHaveNoRoom) {
  skip_blocks({}, 3);
  skip_blocks(two_sequences(kQueries, kKeys), 3);
}

std::vector<std::size_t> masks() {
  std::vector<std::size_t> places;
  for (std::size_t n = 0; n < definitions().size(); ++n) {
    if (*definitions()[n].mask) places.push_back(n);
  }
  return places;
}

std::string name_of(const ::testing::TestParamInfo<std::size_t>& info) { return name_for_tests(info.param); }
INSTANTIATE_TEST_SUITE_P(Definitions, CudaPrograms, ::testing::Range<std::size_t>(0, definitions().size()), name_of);
INSTANTIATE_TEST_SUITE_P(Definitions, CudaProgramMasks, ::testing::ValuesIn(masks()), name_of);

}  // namespace
}  // namespace tessera::testing
