// The launches of bwd_sm90: kernels, grids, workspace, and the tensor maps requested from tests/fake_driver.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda/cuda.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "tessera/config.hpp"
#include "tessera/tensor.hpp"

namespace tessera::cuda {
namespace {

std::string told() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* const function = library ? dlsym(library, "fake_cuda_log") : nullptr;
  if (!function) throw std::runtime_error("wants the driver of tests/fake_driver: run by ctest");
  return reinterpret_cast<const char* (*)()>(function)();
}

const void* at(uintptr_t address) { return reinterpret_cast<const void*>(address); }
void* writable_at(uintptr_t address) { return reinterpret_cast<void*>(address); }

template <class Params>
Params params_of(const Launch& launch) {
  Params params;
  std::memcpy(static_cast<void*>(&params), launch.params, sizeof params);
  return params;
}

constexpr int64_t kBatch = 2, kQueries = 300, kKeys = 400, kHeads = 8, kHeadsKv = 2;

tessera_problem problem_of(int64_t head_dim, bool causal = true) {
  tessera_problem p;
  tessera_problem_init(&p);
  p.direction = TESSERA_BACKWARD;
  p.q = p.o = p.d_o = p.d_q = layout(bfloat16, {kBatch, kQueries, kHeads, head_dim});
  p.k = p.v = p.d_k = p.d_v = layout(bfloat16, {kBatch, kKeys, kHeadsKv, head_dim});
  p.lse = layout(float32, {kBatch, kHeads, kQueries});
  p.causal = causal;
  return p;
}

// On a GPU of few multiprocessors, which the blocks of these problems fill.
tessera_plan plan_of(const tessera_problem& problem, int32_t cores = 8) {
  tessera_device device{};
  EXPECT_EQ(tessera_device_cuda_arch(90, &device).code, TESSERA_OK);
  device.cores = cores;
  device.kernel = TESSERA_KERNEL_BWD_SM90;
  tessera_plan plan{};
  const tessera_status status = tessera_make_plan(&problem, &device, &plan);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return plan;
}

std::string config_of_products(const tessera_problem& p) {
  LaunchList list;
  EXPECT_EQ(lower(plan_of(p), tessera_buffers{}, nullptr, list).code, TESSERA_OK);
  return list[1].spec().config;
}

// Each tensor at an address of its own.
tessera_buffers buffers_of() {
  tessera_buffers b{};
  b.q = at(0x10000), b.k = at(0x20000), b.v = at(0x30000), b.o = writable_at(0x40000), b.d_o = at(0x50000);
  b.d_q = writable_at(0x60000), b.d_k = writable_at(0x70000), b.d_v = writable_at(0x80000);
  b.lse = static_cast<float*>(writable_at(0x90000));
  return b;
}
constexpr uintptr_t kWorkspace = 0x100000;

const Driver& fake_driver() {
  const Driver* driver = nullptr;
  EXPECT_EQ(open_driver(driver).code, TESSERA_OK);
  return *driver;
}

TEST(CudaBwdSm90, LaunchesThreeKernels) {
  for (const int64_t head_dim : {8, 64, 72, 128}) {
    const tessera_plan plan = plan_of(problem_of(head_dim));
    LaunchList list;
    ASSERT_EQ(lower(plan, tessera_buffers{}, nullptr, list).code, TESSERA_OK);
    ASSERT_EQ(list.size(), 3);
    const int64_t rows = head_dim > 64 ? 64 : 128, tiles = (kQueries + rows - 1) / rows;
    EXPECT_STREQ(list[0].name, "bwd_sm90_before");
    EXPECT_STREQ(list[1].name, "bwd_sm90");
    EXPECT_STREQ(list[2].name, "bwd_sm90_after");
    EXPECT_EQ(list[0].grid.x, tiles * kBatch * kHeads);
    EXPECT_EQ(list[1].grid.x, (kKeys + 127) / 128 * kBatch * kHeadsKv);
    EXPECT_EQ(list[2].grid.x, list[0].grid.x);
    EXPECT_EQ(list[0].spec().threads, 128);
    EXPECT_EQ(list[1].spec().threads, 512);
    EXPECT_EQ(list[1].spec().smem_bytes, plan.steps[0].smem_bytes);
  }
}

// Dense short heads of bfloat16 with a KV head each, where they fill the multiprocessors twice.
tessera_problem short_problem_of(DType dtype = bfloat16, int64_t rows = 512) {
  tessera_problem p = problem_of(64);
  p.q = p.o = p.d_o = p.d_q = p.k = p.v = p.d_k = p.d_v = layout(dtype, {kBatch, rows, kHeads, 64});
  p.lse = layout(float32, {kBatch, kHeads, rows});
  return p;
}

TEST(CudaBwdSm90, HasABlockForAHeadThatIsShort) {
  for (const bool deterministic : {false, true}) {
    tessera_problem problem = short_problem_of();
    problem.deterministic = deterministic;
    const tessera_plan plan = plan_of(problem);
    LaunchList list;
    ASSERT_EQ(lower(plan, buffers_of(), writable_at(kWorkspace), list).code, TESSERA_OK);
    ASSERT_EQ(list.size(), 2) << "the main kernel stores dQ";
    EXPECT_EQ(list[0].grid.x, 4 * kBatch * kHeads);
    EXPECT_EQ(list[1].grid.x, kBatch * kHeads);
    EXPECT_EQ(list[1].spec().threads, 384);
    EXPECT_EQ(list[1].spec().smem_bytes, plan.steps[0].smem_bytes);
    EXPECT_LE(plan.steps[0].smem_bytes, 227 << 10);
    EXPECT_EQ(plan.steps[0].workspace_bytes, 2 * kBatch * kHeads * 512 * 4) << "LSE and delta, and no dQ";
    const auto p = params_of<BwdSm90Params>(list[1]);
    EXPECT_EQ(p.key_tiles, 4);
    EXPECT_EQ(p.section_heads, 1);
    EXPECT_EQ(p.rotation, 0);
  }
}

TEST(CudaBwdSm90, HasABlockForAHeadOnlyWithoutOptionsAndGroups) {
  const auto whole = [](const tessera_problem& p, int32_t cores = 8) {
    LaunchList list;
    EXPECT_EQ(lower(plan_of(p, cores), tessera_buffers{}, nullptr, list).code, TESSERA_OK);
    return list[1].spec().config.find(".whole_head = true") != std::string::npos;
  };
  const tessera_problem base = short_problem_of();
  EXPECT_TRUE(whole(base));
  EXPECT_FALSE(whole(base, 9)) << "16 heads are fewer than twice 9";
  EXPECT_FALSE(whole(short_problem_of(float16))) << "spills registers";
  EXPECT_FALSE(whole(short_problem_of(bfloat16, 513)));
  tessera_problem p = base;
  p.k = p.v = p.d_k = p.d_v = layout(bfloat16, {kBatch, 512, kHeadsKv, 64});
  EXPECT_FALSE(whole(p)) << "groups";
  p = base, p.dropout_p = 0.1;
  EXPECT_FALSE(whole(p));
  p = base, p.alibi_slopes = layout(float32, {kHeads});
  EXPECT_FALSE(whole(p));
  p = base, p.has_scale = 1, p.scale = -1;
  EXPECT_FALSE(whole(p)) << "is applied first";
  p = base, p.seqused_k = layout(int32, {kBatch});
  EXPECT_FALSE(whole(p));
  p = base, p.window_left = 100;
  EXPECT_TRUE(whole(p));
}

tessera_problem masked_problem_of(int64_t head_dim) {
  tessera_problem problem = problem_of(head_dim);
  problem.mask_block_q = problem.mask_block_k = 64;
  problem.block_mask = layout(boolean, {1, kHeads, (kQueries + 63) / 64, (kKeys + 63) / 64});
  return problem;
}

// With a block mask also the lists, and a block more that orders the tiles of keys, in memory of its own.
TEST(CudaBwdSm90, OrdersAMasksTilesOfKeys) {
  const tessera_plan plan = plan_of(masked_problem_of(128));
  alignas(1024) static char workspace[1];
  LaunchList list;
  ASSERT_EQ(lower(plan, tessera_buffers{}, workspace, list).code, TESSERA_OK);
  ASSERT_EQ(list.size(), 4);
  EXPECT_STREQ(list[0].name, "block_lists");
  EXPECT_STREQ(list[1].name, "bwd_sm90_before");
  EXPECT_STREQ(list[2].name, "bwd_sm90");
  EXPECT_EQ(list[1].grid.x, list[3].grid.x + 1);
  const auto before = params_of<BwdSm90Params>(list[1]), products = params_of<BwdSm90Params>(list[2]);
  EXPECT_EQ(before.order, products.order);
  EXPECT_EQ(before.lists.words, products.lists.words);
  EXPECT_EQ(products.order, products.lists.count(kHeads * products.key_tiles));
  EXPECT_EQ(reinterpret_cast<char*>(products.order + list[2].grid.x) - workspace, plan.shared_bytes);
}

TEST(CudaBwdSm90, TakesAMaskByPairsOfBlocks) {
  const tessera_plan plan = plan_of(masked_problem_of(256));
  alignas(1024) static char workspace[1];
  LaunchList list;
  ASSERT_EQ(lower(plan, tessera_buffers{}, workspace, list).code, TESSERA_OK);
  ASSERT_EQ(list.size(), 4);
  EXPECT_STREQ(list[2].name, "bwd_sm90_d256");
  const auto products = params_of<BwdSm90Params>(list[2]);
  EXPECT_EQ(products.order, products.lists.count(kHeads * products.key_tiles));
  EXPECT_EQ(reinterpret_cast<char*>(products.order + list[2].grid.x / 2) - workspace, plan.shared_bytes);
  EXPECT_LE(list[2].spec().smem_bytes, 227 << 10);
}

TEST(CudaBwdSm90, TakesHeadSizesAbove128ByPairsOfBlocks) {
  for (const int64_t head_dim : {136, 192, 256}) {
    const tessera_plan plan = plan_of(problem_of(head_dim));
    LaunchList list;
    ASSERT_EQ(lower(plan, tessera_buffers{}, nullptr, list).code, TESSERA_OK);
    ASSERT_EQ(list.size(), 3);
    EXPECT_STREQ(list[1].name, "bwd_sm90_d256");
    EXPECT_EQ(list[1].spec().cluster, 2);
    EXPECT_EQ(list[1].grid.x, 2 * ((kKeys + 127) / 128) * kBatch * kHeadsKv);
    EXPECT_EQ(list[0].grid.x, (kQueries + 63) / 64 * kBatch * kHeads);
    EXPECT_EQ(list[1].spec().smem_bytes, plan.steps[0].smem_bytes);
    EXPECT_LE(plan.steps[0].smem_bytes, 227 << 10);
  }
}

TEST(CudaBwdSm90, SplitsAGroupWhoseBlocksDoNotFillTheGpu) {
  const tessera_plan plan = plan_of(problem_of(96), 100);
  EXPECT_EQ(plan.steps[0].num_splits, 4) << "16 blocks, 4 query heads a KV head";
  LaunchList list;
  ASSERT_EQ(lower(plan, buffers_of(), writable_at(kWorkspace), list).code, TESSERA_OK);
  ASSERT_EQ(list.size(), 4);
  EXPECT_STREQ(list[3].name, "bwd_sm90_group");
  EXPECT_EQ(list[1].grid.x, 16 * 4);
  EXPECT_EQ(list[3].grid.x, (kBatch * kHeadsKv * kKeys * 96 / 4 + 255) / 256);
  EXPECT_EQ(list[3].grid.y, 2);
  const auto p = params_of<BwdSm90Params>(list[1]);
  EXPECT_EQ(p.group_splits, 4);
  EXPECT_EQ(p.heads_kv, kHeadsKv * 4);
  EXPECT_EQ(p.group, 1);
  EXPECT_EQ(p.heads, kBatch * kHeadsKv * 4);
  const int64_t part_floats = 16 * 4 * 128 * 96;
  EXPECT_EQ(p.d_v_parts - p.d_k_parts, part_floats);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(p.d_v_parts + part_floats), kWorkspace + plan.shared_bytes);
  EXPECT_EQ(plan_of(problem_of(96, false), 32).steps[0].num_splits, 2) << "as few as fill it";
  EXPECT_EQ(plan_of(problem_of(96, false), 24).steps[0].num_splits, 4)
      << "three rounds of a quarter, not two of a half";
  EXPECT_EQ(plan_of(problem_of(96, false), 16).steps[0].num_splits, 1);
  EXPECT_EQ(plan_of(problem_of(96), 32).steps[0].num_splits, 4) << "causal: half as many steps in the mean";
  EXPECT_EQ(plan_of(problem_of(96), 16).steps[0].num_splits, 2);
  EXPECT_EQ(plan_of(problem_of(96), 8).steps[0].num_splits, 1);
}

// Of a head's clusters, which wait in a circle, a GPU's multiprocessors have two blocks each.
TEST(CudaBwdSm90, RotatesClustersThatAreHalfOfTheMultiprocessorsAtMost) {
  const auto rotation = [](int64_t keys) {
    tessera_problem p = problem_of(256, false);
    p.deterministic = 1;
    p.q = p.d_q = p.o = p.d_o = layout(bfloat16, {1, keys, 1, 256});
    p.k = p.v = p.d_k = p.d_v = p.q, p.lse = layout(float32, {1, 1, keys});
    LaunchList list;
    EXPECT_EQ(lower(plan_of(p), tessera_buffers{}, nullptr, list).code, TESSERA_OK);
    EXPECT_STREQ(list[1].name, "bwd_sm90_d256");
    return params_of<BwdSm90Params>(list[1]).rotation;
  };
  const int64_t most = plan_of(problem_of(256)).device.cores / 2 / 2;
  EXPECT_EQ(rotation(most * 128), 2);
  EXPECT_EQ(rotation(most * 128 + 1), 0);
}

TEST(CudaBwdSm90, TakesHeadSizesAbove256ByClustersOfFour) {
  for (const int64_t head_dim : {264, 512}) {
    const tessera_plan plan = plan_of(problem_of(head_dim));
    LaunchList list;
    ASSERT_EQ(lower(plan, tessera_buffers{}, nullptr, list).code, TESSERA_OK);
    ASSERT_EQ(list.size(), 3);
    EXPECT_STREQ(list[1].name, "bwd_sm90_d512");
    EXPECT_EQ(list[1].spec().cluster, 4);
    EXPECT_EQ(list[1].spec().threads, 32 * plan.steps[0].num_warps);
    EXPECT_EQ(list[1].grid.x, 4 * ((kKeys + 127) / 128) * kBatch * kHeadsKv);
    EXPECT_EQ(list[0].grid.x, (kQueries + 63) / 64 * kBatch * kHeads);
    EXPECT_EQ(list[1].spec().smem_bytes, plan.steps[0].smem_bytes);
    EXPECT_LE(plan.steps[0].smem_bytes, 227 << 10);
  }
}

TEST(CudaBwdSm90, PairsOfBlocksComputeNoMoreColumnsThanTheHeadsHave) {
  const auto columns = [](int64_t head_dim, int64_t head_dim_v) {
    tessera_problem p = problem_of(head_dim);
    p.v = p.d_v = layout(bfloat16, {kBatch, kKeys, kHeadsKv, head_dim_v});
    p.o = p.d_o = layout(bfloat16, {kBatch, kQueries, kHeads, head_dim_v});
    const std::string config = config_of_products(p);
    const auto number = [&config](const std::string& field) {
      return std::stoi(config.substr(config.find("." + field + " = ") + field.size() + 4));
    };
    return std::pair(number("head_dim"), number("head_dim_v"));
  };
  EXPECT_EQ(columns(192, 192), std::pair(192, 192));
  EXPECT_EQ(columns(128, 160), std::pair(192, 192));
  EXPECT_EQ(columns(200, 128), std::pair(256, 256));
}

TEST(CudaBwdSm90, CutsKeysQueriesAndWorkspaceIntoTiles) {
  const tessera_plan plan = plan_of(problem_of(96));
  LaunchList list;
  ASSERT_EQ(lower(plan, buffers_of(), writable_at(kWorkspace), list).code, TESSERA_OK);
  const auto p = params_of<BwdSm90Params>(list[1]);
  constexpr int64_t kTiles = 5 * kBatch * kHeads, kRows = kTiles * 64;  // 5 tiles of 64 queries
  EXPECT_EQ(p.q_tiles, 5);
  EXPECT_EQ(p.q_slots, 5 * kBatch);
  EXPECT_EQ(p.key_tiles, 4);
  EXPECT_EQ(p.heads, kBatch * kHeadsKv);
  EXPECT_EQ(p.section_heads, kBatch * kHeadsKv) << "short heads all fit into the L2 cache";
  EXPECT_EQ(p.row_lse_log2, at(kWorkspace));
  EXPECT_EQ(p.row_delta, at(kWorkspace + kRows * 4));
  EXPECT_EQ(p.dq_accum, at(kWorkspace + 2 * kRows * 4));
  EXPECT_GE(plan.shared_bytes, 2 * kRows * 4 + kRows * 96 * 4) << "dQ is gathered in tiles of the padded head size";
  EXPECT_EQ(params_of<BwdParams>(list[0]).scale, p.scale);
  EXPECT_EQ(params_of<BwdParams>(list[2]).scale, p.scale * 0x1p-15f) << "what P was raised by";
}

// Rows of all sequences; 3 of them.
tessera_problem packed_problem_of(int64_t head_dim) {
  tessera_problem p = problem_of(head_dim);
  p.q = p.o = p.d_o = p.d_q = layout(bfloat16, {kQueries, kHeads, head_dim});
  p.k = p.v = p.d_k = p.d_v = layout(bfloat16, {kKeys, kHeadsKv, head_dim});
  p.lse = layout(float32, {kHeads, kQueries});
  p.cu_seqlens_q = p.cu_seqlens_k = layout(int32, {4});
  return p;
}

TEST(CudaBwdSm90, PackedSequencesHaveSlots) {
  const tessera_plan plan = plan_of(packed_problem_of(128));
  LaunchList list;
  ASSERT_EQ(lower(plan, buffers_of(), writable_at(kWorkspace), list).code, TESSERA_OK);
  const auto p = params_of<BwdSm90Params>(list[1]);
  EXPECT_EQ(p.q_slots, kQueries / 64 + 3);
  EXPECT_EQ(p.key_tiles, kKeys / 128 + 3);
  EXPECT_EQ(p.heads, kHeadsKv);
  EXPECT_EQ(p.section_heads, 1);
  EXPECT_EQ(list[0].grid.x, (kQueries / 64 + 3) * kHeads);
  EXPECT_EQ(list[1].grid.x, (kKeys / 128 + 3) * kHeadsKv);
  EXPECT_NE(list[1].spec().config.find(".varlen = true"), std::string::npos);
}

TEST(CudaBwdSm90, DeterministicAdditionsAreInOrder) {
  tessera_problem problem = problem_of(128);
  const tessera_plan as_they_come = plan_of(problem);
  problem.deterministic = 1;
  const tessera_plan plan = plan_of(problem);
  constexpr int64_t kTiles = 5 * kBatch * kHeads, kRows = kTiles * 64;
  LaunchList list;
  ASSERT_EQ(lower(plan, buffers_of(), writable_at(kWorkspace), list).code, TESSERA_OK);
  const auto p = params_of<BwdSm90Params>(list[1]);
  EXPECT_EQ(p.dq_semaphore, at(kWorkspace + 2 * kRows * 4 + kRows * 128 * 4));
  EXPECT_EQ(p.ticket, at(kWorkspace + 2 * kRows * 4 + kRows * 128 * 4 + kTiles * 4));
  EXPECT_GE(plan.shared_bytes, as_they_come.shared_bytes + kTiles * 4 + 4);
  EXPECT_EQ(params_of<BwdParams>(list[0]).dq_semaphore, p.dq_semaphore) << "cleared before";
  for (const int kernel : {0, 1}) {
    EXPECT_NE(list[kernel].spec().config.find(".deterministic = true"), std::string::npos)
        << "the first block stores dQ";
  }
  EXPECT_EQ(plan.steps[0].smem_bytes, as_they_come.steps[0].smem_bytes + 64 * 128 * 4 + 4 * 8)
      << "a second place for dQ, and its barriers";
}

// Each block begins with the queries at its own keys, if every block sees every query and half of the multiprocessors
// hold a head's.
TEST(CudaBwdSm90, DeterministicBlocksOfAHeadAreRotated) {
  const auto rotation_of = [](int64_t head_dim, int64_t queries, int64_t keys, auto change) {
    tessera_problem p = problem_of(head_dim, false);
    p.deterministic = 1;
    p.q = p.o = p.d_o = p.d_q = layout(bfloat16, {kBatch, queries, kHeads, head_dim});
    p.k = p.v = p.d_k = p.d_v = layout(bfloat16, {kBatch, keys, kHeadsKv, head_dim});
    p.lse = layout(float32, {kBatch, kHeads, queries});
    change(p);
    LaunchList list;
    EXPECT_EQ(lower(plan_of(p, 132), tessera_buffers{}, nullptr, list).code, TESSERA_OK);
    return params_of<BwdSm90Params>(list[1]).rotation;
  };
  const auto as_it_is = [](tessera_problem&) {};
  EXPECT_EQ(rotation_of(64, 4096, 4096, as_it_is), 1);
  EXPECT_EQ(rotation_of(128, 4096, 4096, as_it_is), 2) << "a block has as many keys as two tiles have queries";
  EXPECT_EQ(rotation_of(128, 4097, 4097, as_it_is), 2) << "65 tiles of queries, 33 blocks";
  EXPECT_EQ(rotation_of(128, 896, 500, as_it_is), 4) << "14 tiles, 4 blocks";
  EXPECT_EQ(rotation_of(128, 640, 128 * 7, as_it_is), 0) << "10 tiles cannot begin 7 blocks two tiles apart";
  EXPECT_EQ(rotation_of(64, 200, 4096, as_it_is), 0) << "more blocks than tiles";
  tessera_device device{};
  ASSERT_EQ(tessera_device_cuda_arch(90, &device).code, TESSERA_OK);
  const int64_t most = device.cores / 2 * 128;
  EXPECT_EQ(rotation_of(64, most, most, as_it_is), 1);
  EXPECT_EQ(rotation_of(64, most + 1, most + 1, as_it_is), 0);
  EXPECT_EQ(rotation_of(128, 1024, 1024, [](tessera_problem& p) { p.deterministic = 0; }), 0);
  EXPECT_EQ(rotation_of(128, 1024, 1024, [](tessera_problem& p) { p.causal = 1; }), 0);
  EXPECT_EQ(rotation_of(128, 1024, 1024, [](tessera_problem& p) { p.window_left = 100; }), 0);
  EXPECT_EQ(rotation_of(128, 1024, 1024, [](tessera_problem& p) { p.window_right = 100; }), 0);
  EXPECT_EQ(rotation_of(128, 1024, 1024, [](tessera_problem& p) { p.seqused_k = layout(int32, {kBatch}); }), 0);
  EXPECT_EQ(rotation_of(128, 1024, 1024, [](tessera_problem& p) { p.softcap = 30; }), 2);
  tessera_problem packed = packed_problem_of(128);
  packed.causal = 0, packed.deterministic = 1;
  LaunchList list;
  ASSERT_EQ(lower(plan_of(packed), tessera_buffers{}, nullptr, list).code, TESSERA_OK);
  EXPECT_EQ(params_of<BwdSm90Params>(list[1]).rotation, 0);
}

// Its dS is not raised, which float16 has no range for.
TEST(CudaBwdSm90, Float16IsLoweredBeforeItIsRounded) {
  tessera_problem problem = problem_of(128);
  for (tessera_layout* tensor :
       {&problem.q, &problem.k, &problem.v, &problem.o, &problem.d_o, &problem.d_q, &problem.d_k, &problem.d_v}) {
    tensor->dtype = TESSERA_FLOAT16;
  }
  LaunchList list;
  ASSERT_EQ(lower(plan_of(problem), buffers_of(), writable_at(kWorkspace), list).code, TESSERA_OK);
  EXPECT_EQ(params_of<BwdParams>(list[2]).scale, params_of<BwdSm90Params>(list[1]).scale);
}

TEST(CudaBwdSm90, BlocksOfLongHeadsComeHeadByHead) {
  tessera_problem p = problem_of(128);
  p.q = p.o = p.d_o = p.d_q = layout(bfloat16, {kBatch, 16384, kHeads, 128});
  p.lse = layout(float32, {kBatch, kHeads, 16384});
  LaunchList causal, few, full;
  ASSERT_EQ(lower(plan_of(p, 4), tessera_buffers{}, nullptr, causal).code, TESSERA_OK);
  ASSERT_EQ(lower(plan_of(p, 6), tessera_buffers{}, nullptr, few).code, TESSERA_OK);
  p = problem_of(128, false);
  ASSERT_EQ(lower(plan_of(p), tessera_buffers{}, nullptr, full).code, TESSERA_OK);
  EXPECT_EQ(params_of<BwdSm90Params>(causal[1]).section_heads, 1);
  EXPECT_EQ(params_of<BwdSm90Params>(few[1]).section_heads, kBatch * kHeadsKv) << "16 blocks, 3 rounds of 6 at most";
  EXPECT_EQ(params_of<BwdSm90Params>(full[1]).section_heads, 1) << "all are equally long";
}

// Sums are added to by ordinary loads and stores: TMA maps only what it loads, and their rows may lie anywhere.
TEST(CudaBwdSm90, SumsHaveNoTensorMaps) {
  tessera_problem p = problem_of(88);
  p.d_q.dtype = p.d_k.dtype = p.d_v.dtype = TESSERA_FLOAT32;
  p.d_k.strides[0] += 1;
  p.accumulate = 1;
  const tessera_plan plan = plan_of(p);
  LaunchList list(&fake_driver());
  told();
  tessera_buffers buffers = buffers_of();
  buffers.d_v = static_cast<char*>(buffers.d_v) + 4;
  ASSERT_EQ(lower(plan, buffers, writable_at(kWorkspace), list).code, TESSERA_OK);
  const std::string maps = told();
  EXPECT_EQ(std::ranges::count(maps, '\n'), 4) << maps;
  ASSERT_EQ(list.size(), 3);
  EXPECT_EQ(std::string(list[1].name), "bwd_sm90");
  const auto params = params_of<BwdSm90Params>(list[1]);
  EXPECT_EQ(params.accumulate, 1);
  EXPECT_FALSE(params.d_k_aligned);
  for (int n = 0; n < list.size(); ++n) {
    EXPECT_NE(list[n].spec().config.find(".sums = true"), std::string::npos) << list[n].spec().config;
  }
}

TEST(CudaBwdSm90, DescribesWhatTmaLoadsAndStores) {
  const tessera_plan plan = plan_of(problem_of(96));
  LaunchList list(&fake_driver());
  told();
  ASSERT_EQ(lower(plan, buffers_of(), writable_at(kWorkspace), list).code, TESSERA_OK);
  const std::string of_q = ": 96 x 300 x 8 x 2, steps of 1536, 192, 460800 bytes, boxes of 64 x 64 x 1 x 1\n";
  const std::string of_k = ": 96 x 400 x 2 x 2, steps of 384, 192, 153600 bytes, boxes of 64 x ";
  EXPECT_EQ(told(), "map of " + std::to_string(0x10000) + of_q + "map of " + std::to_string(0x50000) + of_q +
                        "map of " + std::to_string(0x20000) + of_k + "128 x 1 x 1\n" + "map of " +
                        std::to_string(0x30000) + of_k + "128 x 1 x 1\n" + "map of " + std::to_string(0x70000) + of_k +
                        "16 x 1 x 1\n" + "map of " + std::to_string(0x80000) + of_k + "16 x 1 x 1\n");
  const auto p = params_of<BwdSm90Params>(list[1]);
  const auto data_of = [](const TensorMap& map) {
    uint64_t address;
    std::memcpy(&address, map.opaque, sizeof address);
    return address;
  };
  EXPECT_EQ(data_of(p.q_map), 0x10000u);
  EXPECT_EQ(data_of(p.d_o_map), 0x50000u);
  EXPECT_EQ(data_of(p.k_map), 0x20000u);
  EXPECT_EQ(data_of(p.v_map), 0x30000u);
  EXPECT_EQ(data_of(p.d_k_map), 0x70000u);
  EXPECT_EQ(data_of(p.d_v_map), 0x80000u);
}

TEST(CudaBwdSm90, LeavesMisalignedDataToBwdSm80) {
  const tessera_plan plan = plan_of(problem_of(64));
  for (const auto& misalign : std::initializer_list<void (*)(tessera_buffers&)>{
           [](tessera_buffers& b) { b.q = at(0x10008); }, [](tessera_buffers& b) { b.d_o = at(0x50002); },
           [](tessera_buffers& b) { b.o = writable_at(0x40008); },
           [](tessera_buffers& b) { b.d_k = writable_at(0x70008); },
           [](tessera_buffers& b) { b.d_v = writable_at(0x80004); }}) {
    tessera_buffers buffers = buffers_of();
    misalign(buffers);
    LaunchList list;
    ASSERT_EQ(lower(plan, buffers, writable_at(kWorkspace), list).code, TESSERA_OK);
    ASSERT_EQ(list.size(), 3);
    EXPECT_STREQ(list[1].name, "bwd_sm80");
  }
  tessera_buffers buffers = buffers_of();
  buffers.d_q = writable_at(0x60002), buffers.lse = static_cast<float*>(writable_at(0x90004));
  LaunchList list;
  ASSERT_EQ(lower(plan, buffers, writable_at(kWorkspace), list).code, TESSERA_OK);
  EXPECT_STREQ(list[1].name, "bwd_sm90") << "no TMA for these";
}

// The kernels for D = 64, 96 and 128, dtype by dtype, are the same for every mask but a window.
TEST(CudaBwdSm90, MasksShareTheirKernels) {
  const std::string causal = config_of_products(problem_of(128));
  EXPECT_EQ(config_of_products(problem_of(128, false)), causal);
  EXPECT_EQ(config_of_products(problem_of(104)), causal);
  tessera_problem windowed = problem_of(128);
  windowed.window_left = 100;
  EXPECT_NE(config_of_products(windowed), causal);
}

}  // namespace
}  // namespace tessera::cuda
