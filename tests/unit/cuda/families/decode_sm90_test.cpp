// The launch of decode_sm90: one kernel, its grid and its workspace; and its replacement.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "cuda/cuda.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tensor.hpp"

namespace tessera::cuda {
namespace {

constexpr int kCores = 132;
constexpr uintptr_t kWorkspace = 0x100000;

const void* at(uintptr_t address) { return reinterpret_cast<const void*>(address); }
void* writable_at(uintptr_t address) { return reinterpret_cast<void*>(address); }

tessera_problem problem_of(int64_t head_dim, int64_t heads_kv = 8, int64_t queries = 1) {
  tessera_problem p;
  tessera_problem_init(&p);
  p.q = p.o = layout(bfloat16, {3, queries, 4 * heads_kv, head_dim});
  p.k = p.v = layout(bfloat16, {3, 5000, heads_kv, head_dim});
  return p;
}

tessera_plan plan_of(const tessera_problem& problem) {
  tessera_device device{};
  EXPECT_EQ(tessera_device_cuda_arch(90, &device).code, TESSERA_OK);
  device.kernel = TESSERA_KERNEL_DECODE_SM90;
  device.cores = kCores;
  tessera_plan plan{};
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return plan;
}

// Each tensor at an address of its own.
tessera_buffers buffers_of() {
  tessera_buffers b{};
  b.q = at(0x10000), b.k = at(0x20000), b.v = at(0x30000), b.o = writable_at(0x40000);
  return b;
}

DecodeSm90Params params_of(const Launch& launch) {
  DecodeSm90Params params;
  std::memcpy(static_cast<void*>(&params), launch.params, sizeof params);
  return params;
}

uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

TEST(CudaDecodeSm90, LaunchesOneKernelWithABlockAMultiprocessor) {
  for (const int64_t head_dim : {8, 64, 72, 128, 256}) {
    const tessera_plan plan = plan_of(problem_of(head_dim));
    LaunchList list;
    ASSERT_EQ(lower(plan, tessera_buffers{}, nullptr, list).code, TESSERA_OK);
    ASSERT_EQ(list.size(), 1);
    EXPECT_STREQ(list[0].name, "decode_sm90");
    EXPECT_EQ(list[0].grid.x, static_cast<uint32_t>(kCores));
    EXPECT_EQ(list[0].spec().smem_bytes, plan.steps[0].smem_bytes);
    EXPECT_EQ(list[0].spec().threads, plan.steps[0].num_warps * 32);
  }
}

// Parts of a work of the most rows, two of each block, and a counter each.
TEST(CudaDecodeSm90, ItsWorkspaceHoldsEveryBlocksParts) {
  for (const bool invariant : {false, true}) {
    for (const int64_t queries : {1, 2, 8}) {
      tessera_problem problem = problem_of(128, 8, queries);
      problem.batch_invariant = invariant;
      const tessera_plan plan = plan_of(problem);
      LaunchList list;
      ASSERT_EQ(lower(plan, buffers_of(), writable_at(kWorkspace), list).code, TESSERA_OK);
      const DecodeSm90Params p = params_of(list[0]);
      const uintptr_t rows = queries > 4 ? 16 : 4 * static_cast<uintptr_t>(queries);
      const uintptr_t parts = kCores * (invariant ? kDecodeMostParts : 2) * rows;
      EXPECT_EQ(static_cast<uintptr_t>(p.part_rows), rows);
      EXPECT_EQ(address(p.arrivals), kWorkspace);
      EXPECT_GE(address(p.partial_stat), kWorkspace + kCores * 8);
      EXPECT_GE(address(p.partial_o), address(p.partial_stat) + parts * 8);
      EXPECT_EQ(address(p.partial_o) % 16, 0u);
      EXPECT_GE(kWorkspace + static_cast<uintptr_t>(plan.workspace_bytes), address(p.partial_o) + parts * 128 * 4);
    }
  }
}

// Neighbouring heads side by side, while few multiprocessors go without a block.
TEST(CudaDecodeSm90, TeamsDivideTheHeads) {
  const struct {
    int heads_kv, group_blocks;
  } rows[] = {{1, 1}, {2, 2}, {8, 8}, {32, 32}, {40, 10}, {5, 5}, {7, 1}, {128, 128}, {264, 132}, {80, 16}};
  for (const auto& [heads_kv, group_blocks] : rows) {
    const tessera_plan plan = plan_of(problem_of(64, heads_kv));
    LaunchList list;
    ASSERT_EQ(lower(plan, buffers_of(), writable_at(kWorkspace), list).code, TESSERA_OK);
    EXPECT_EQ(params_of(list[0]).group_blocks, group_blocks) << heads_kv;
    EXPECT_EQ(params_of(list[0]).head_groups, heads_kv / group_blocks);
  }
}

TEST(CudaDecodeSm90, LeavesMisalignedDataToFwdSm80) {
  for (const bool codes : {false, true}) {
    tessera_problem problem = problem_of(128);
    if (codes) problem.k.dtype = problem.v.dtype = TESSERA_FLOAT8_E5M2;
    const tessera_plan plan = plan_of(problem);
    for (const void* tessera_buffers::*tensor : {&tessera_buffers::q, &tessera_buffers::k, &tessera_buffers::v}) {
      tessera_buffers buffers = buffers_of();
      buffers.*tensor = at(0x50008);
      LaunchList list;
      ASSERT_EQ(lower(plan, buffers, writable_at(kWorkspace), list).code, TESSERA_OK);
      ASSERT_EQ(list.size(), 1);
      EXPECT_STREQ(list[0].name, codes ? "fwd_sm80_codes" : "fwd_sm80");
    }
  }
}

// Each number of a scale tensor is found by its strides: a sequence's, a block's of 128 keys, a token's of a page.
TEST(CudaDecodeSm90, FindsScalesOfEachShape) {
  const auto params = [](const tessera_problem& problem) {
    const tessera_plan plan = plan_of(problem);
    tessera_buffers buffers = buffers_of();
    buffers.k_descale = buffers.v_descale = static_cast<const float*>(at(0x60000));
    LaunchList list;
    EXPECT_EQ(lower(plan, buffers, writable_at(kWorkspace), list).code, TESSERA_OK);
    return params_of(list[0]);
  };
  const auto strides = [](const ScaleTensor& s) { return std::array<int64, 4>{s.batch, s.row, s.head, s.in_pages}; };
  tessera_problem problem = problem_of(128);
  problem.k.dtype = problem.v.dtype = TESSERA_FLOAT8_E4M3;
  problem.k_descale = layout(float32, {1}), problem.v_descale = layout(float32, {8});
  DecodeSm90Params p = params(problem);
  EXPECT_EQ(strides(p.k_scales), (std::array<int64, 4>{0, 0, 0, 0}));
  EXPECT_EQ(strides(p.v_scales), (std::array<int64, 4>{0, 0, 1, 0}));
  problem.k_descale = layout(float32, {3, 8}), problem.v_descale = layout(float32, {3, 40, 8});
  p = params(problem);
  EXPECT_EQ(strides(p.k_scales), (std::array<int64, 4>{8, 0, 1, 0}));
  EXPECT_EQ(strides(p.v_scales), (std::array<int64, 4>{320, 8, 1, 0}));
  problem.k = problem.v = layout(float8_e4m3, {30, 16, 8, 128});
  problem.page_table = layout(int32, {3, 10}), problem.v_descale = layout(float32, {30, 16, 8});
  problem.seqused_k = layout(int32, {3});
  p = params(problem);
  EXPECT_EQ(strides(p.k_scales), (std::array<int64, 4>{8, 0, 1, 0}));
  EXPECT_EQ(strides(p.v_scales), (std::array<int64, 4>{128, 8, 1, 1}));
}

TEST(CudaDecodeSm90, LaunchesNothingForNoQueries) {
  const tessera_plan plan = plan_of(problem_of(128, 8, 0));
  LaunchList list;
  ASSERT_EQ(lower(plan, buffers_of(), writable_at(kWorkspace), list).code, TESSERA_OK);
  EXPECT_EQ(list.size(), 0);
}

}  // namespace
}  // namespace tessera::cuda
