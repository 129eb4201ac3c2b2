// A shared prefix's launches as a plan for a GPU makes them (the index tensors, both parts, the merges), run on the
// host (tests/emulated_gpu) and compared with the float64 reference of the call without the prefix.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/convert.hpp"
#include "core/shared_prefix.hpp"
#include "core/steps.hpp"
#include "cuda/cuda.hpp"
#include "cuda/families/fwd_sm80.hpp"
#include "cuda/registry.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "tessera/combine/kernel.cuh"
#include "tessera/fwd_sm80/kernel.cuh"
#include "tessera/shared_prefix/kernel.cuh"
#include "tessera/tensor.hpp"
#include "unit_launch.hpp"

namespace tessera::cuda {
namespace {

// Runs the launch if it is of this kernel and config.
template <auto kConfig, class Params>
bool try_kernel(const Launch& launch, const char* name, void (*kernel)(const Params&)) {
  std::remove_const_t<decltype(kConfig)> config = kConfig;
  if (std::strcmp(launch.name, name) != 0 || config_values(config).value != launch.values.value) return false;
  Params params;
  std::memcpy(static_cast<void*>(&params), launch.params, sizeof params);
  return emulated::run_blocks({launch.grid.x, launch.grid.y, launch.grid.z}, launch.spec().threads,
                              launch.spec().smem_bytes, [&] { kernel(params); }) == 0;
}

constexpr FwdSm80Config forward_config(bool paged, bool split, bool aligned = true, bool pack_gqa = true) {
  return {.dtype = Dtype::kBFloat16,
          .head_dim = 64,
          .head_dim_v = 64,
          .block_m = 128,
          .block_n = 64,
          .warps = 4,
          .stages = 2,
          .min_blocks_per_sm = 2,
          .aligned = aligned,
          .paged = paged,
          .pack_gqa = pack_gqa,
          .split = split,
          .row_map = RowMap::kContiguous,
          .bulk = false,
          .score = {}};
}

template <bool kPaged>
bool run(const Launch& launch) {
  constexpr FwdSm80Config kWhole = forward_config(kPaged, false), kSplit = forward_config(kPaged, true);
  constexpr FwdSm80Config kUnaligned = forward_config(kPaged, false, false),
                          kOfChunks = forward_config(kPaged, false, true, false);
  constexpr CombineConfig kOfSplits{Dtype::kBFloat16, Dtype::kFloat32, false},
      kOfParts{Dtype::kBFloat16, Dtype::kBFloat16, false}, kOfChunkParts{Dtype::kBFloat16, Dtype::kBFloat16, true};
  constexpr PrefixIndicesConfig kIndices{kPaged};
  return try_kernel<kIndices>(launch, "prefix_indices", prefix_indices<kIndices>) ||
         try_kernel<kWhole>(launch, "fwd_sm80", fwd_sm80<kWhole>) ||
         try_kernel<kSplit>(launch, "fwd_sm80", fwd_sm80<kSplit>) ||
         try_kernel<kUnaligned>(launch, "fwd_sm80", fwd_sm80<kUnaligned>) ||
         try_kernel<kOfChunks>(launch, "fwd_sm80", fwd_sm80<kOfChunks>) ||
         try_kernel<kOfSplits>(launch, "combine", tessera::combine<kOfSplits>) ||
         try_kernel<kOfParts>(launch, "combine", tessera::combine<kOfParts>) ||
         try_kernel<kOfChunkParts>(launch, "combine", tessera::combine<kOfChunkParts>);
}

// Six sequences, with 20 packed rows and 3 rows that belong to none: one sequence in no group; a group of three with a
// chunk, a decoding sequence and one without queries; and a group of two, one of which has only the prefix. The
// capacity is 600 keys each, in pages of 16.
constexpr int64_t kBatch = 6, kRows = 23, kHeads = 4, kHeadsKv = 2, kDim = 64, kKeys = 600, kPage = 16;

struct Call {
  tessera_problem problem{};
  std::vector<uint16_t> q, k, v, o;
  std::vector<float> lse, sink{0.5f, -1, 2, 0};
  std::vector<int32_t> queries{0, 1, 11, 11, 12, 15, 20}, used{150, 230, 0, 300, 100, 108}, groups{1, 4, 6},
      lens{215, 100}, table;
  std::vector<char> workspace;

  // gap: elements between a query's last head and the next query's first.
  Call(bool paged, bool causal, int64_t gap) {
    tessera_problem& p = problem;
    tessera_problem_init(&p);
    p.q = p.o = layout(bfloat16, {kRows, kHeads, kDim});
    p.q.strides[0] += gap;
    const int64_t pages = (kKeys + kPage - 1) / kPage;
    p.k = paged ? layout(bfloat16, {kBatch * pages, kPage, kHeadsKv, kDim})
                : layout(bfloat16, {kBatch, kKeys, kHeadsKv, kDim});
    p.v = p.k;
    p.lse = layout(float32, {kHeads, kRows}), p.sink = layout(float32, {kHeads});
    p.cu_seqlens_q = layout(int32, {kBatch + 1}), p.seqused_k = layout(int32, {kBatch});
    if (paged) p.page_table = layout(int32, {kBatch, pages});
    p.causal = causal, p.max_seqlen_q = 12;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto draw = [&](std::vector<uint16_t>& values, int64_t count) {
      values.resize(static_cast<size_t>(count));
      for (uint16_t& x : values) x = core::float_to_bfloat16(normal(random));
    };
    const int64_t row = kHeadsKv * kDim;
    draw(q, kRows * p.q.strides[0]), draw(k, kBatch * (paged ? pages * kPage : kKeys) * row),
        draw(v, static_cast<int64_t>(k.size()));
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t n = 0; n < pages; ++n) table.push_back(static_cast<int32_t>(n * kBatch + b));
    // The prefixes: the same whole pages, and copies of the rest.
    for (const auto& [from, to, keys] : {std::tuple{1, 3, 215}, std::tuple{4, 5, 100}}) {
      for (int64_t n = 0; paged && n < keys / kPage; ++n) table[to * pages + n] = table[from * pages + n];
      for (int64_t j = 0; j < keys; ++j) {
        const auto place = [&, j = j](int64_t b) {
          return (paged ? table[b * pages + j / kPage] * kPage + j % kPage : b * kKeys + j) * row;
        };
        for (std::vector<uint16_t>* keys_of : {&k, &v})
          std::copy_n(keys_of->begin() + place(from), row, keys_of->begin() + place(to));
      }
    }
    o.assign(kRows * kHeads * kDim, 0xffff), lse.assign(kRows * kHeads, std::nanf(""));
  }

  tessera_buffers buffers() {
    tessera_buffers b{};
    b.q = q.data(), b.k = k.data(), b.v = v.data(), b.o = o.data(), b.lse = lse.data(), b.sink = sink.data();
    b.cu_seqlens_q = queries.data(), b.seqused_k = used.data(), b.page_table = table.data();
    b.prefix_groups = groups.data(), b.prefix_lens = lens.data();
    return b;
  }
  tessera_plan plan(const tessera_device& device) {
    tessera_plan made{};
    const tessera_status status = tessera_make_plan(&problem, &device, &made);
    EXPECT_EQ(status.code, TESSERA_OK) << status.message;
    workspace.assign(tessera_workspace_bytes(&made), '\xff');
    return made;
  }
  void oracle() {
    tessera_device cpu{};
    ASSERT_EQ(tessera_device_cpu(&cpu).code, TESSERA_OK);
    cpu.kernel = TESSERA_KERNEL_REFERENCE;
    const tessera_plan made = plan(cpu);
    const tessera_buffers b = buffers();
    const tessera_status status = tessera_forward(&made, &b, workspace.data(), workspace.size(), nullptr);
    ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  }
  // The launch of fwd_sm80 for a part of a plan whose own step runs only on Hopper.
  void list_by_fwd_sm80(const tessera_plan& made, core::PrefixPart part, void* memory, LaunchList& list) {
    tessera_plan of = core::plan_of(made, part);
    of.device.arch = 80;  // without bulk copies
    add_fwd_sm80_stand_in(of);
    const core::PrefixMemory parts = core::carve_prefix(static_cast<char*>(memory), made);
    const tessera_status status =
        lower_step(of, core::steps_of(of).back(), core::buffers_of(made, part, buffers(), parts), nullptr, list);
    EXPECT_EQ(status.code, TESSERA_OK) << status.message;
    EXPECT_EQ(list.size(), 1);
  }
  template <bool kPaged>
  void emulate(int32_t arch, int32_t cores, int launches) {
    const auto count = static_cast<int64_t>(lens.size());
    problem.prefix_groups = layout(int32, {count + 1}), problem.prefix_lens = layout(int32, {count});
    tessera_device gpu{};
    ASSERT_EQ(tessera_device_cuda_arch(arch, &gpu).code, TESSERA_OK);
    gpu.cores = cores;
    const tessera_plan made = plan(gpu);
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    LaunchList list;
    void* const memory = reinterpret_cast<void*>((address + 63) / 64 * 64);
    const tessera_status status = lower(made, buffers(), memory, list);
    ASSERT_EQ(status.code, TESSERA_OK) << status.message;
    ASSERT_EQ(list.size(), launches);
    int parts = 0;
    for (const Launch& launch : list) {
      const std::string_view name = launch.name;
      const bool of_part = name != "prefix_indices" && name != "combine", of_hopper = of_part && name != "fwd_sm80";
      parts += of_part;
      LaunchList instead;
      if (of_hopper) list_by_fwd_sm80(made, parts == 1 ? core::kPrefix : core::kSuffix, memory, instead);
      const Launch& runs = of_hopper ? instead[0] : launch;
      ASSERT_TRUE(run<kPaged>(runs)) << runs.name << " " << runs.spec().config;
    }
  }
};

template <bool kPaged>
void check(bool causal, int32_t arch, int32_t cores, int launches, bool one_group = false) {
  const bool chunks = arch == 90;
  Call expected(kPaged, causal, chunks && !kPaged ? 1 : 0), got = expected;
  expected.oracle();
  if (one_group) got.groups.pop_back(), got.lens.pop_back();
  got.template emulate<kPaged>(arch, cores, launches);
  if (testing::Test::HasFatalFailure()) return;
  double error = 0, norm = 0;
  for (size_t n = 0; n < got.o.size(); ++n) {
    const double x = core::bfloat16_to_float(expected.o[n]), y = core::bfloat16_to_float(got.o[n]);
    ASSERT_FALSE(std::isnan(y)) << n;
    error += (x - y) * (x - y), norm += x * x;
  }
  EXPECT_LT(std::sqrt(error / norm), 5e-3);  // two roundings to bfloat16, and that of P
  for (size_t n = 0; n < got.lse.size(); ++n) {
    if (got.lse[n] == expected.lse[n]) continue;  // -inf
    EXPECT_NEAR(got.lse[n], expected.lse[n], 1e-4) << "lse " << n;
  }
}

TEST(CudaSharedPrefix, InPages) { check<true>(true, 80, 2, 4); }
TEST(CudaSharedPrefix, InPagesWithSplits) { check<true>(true, 80, 40, 6); }
TEST(CudaSharedPrefix, Dense) { check<false>(false, 80, 2, 4); }
TEST(CudaSharedPrefix, DenseWithSplits) { check<false>(true, 80, 40, 6); }
// The longer prefix in two chunks, of the shorter one the second is empty.
TEST(CudaSharedPrefix, InPagesWithChunks) { check<true>(true, 90, 8, 4); }
TEST(CudaSharedPrefix, DenseWithChunks) { check<false>(true, 90, 8, 4); }
// The group has neither the first rows nor the last.
TEST(CudaSharedPrefix, InPagesWithChunksOfOneGroup) { check<true>(true, 90, 8, 4, true); }
TEST(CudaSharedPrefix, DenseWithChunksOfOneGroup) { check<false>(true, 90, 8, 4, true); }

}  // namespace
}  // namespace tessera::cuda
