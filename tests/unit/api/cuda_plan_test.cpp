// Which forward kernel a CUDA plan chooses, why another refuses, and with which tiles: no GPU is needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "support.hpp"

namespace tessera::test {
namespace {

Device gpu(std::int32_t arch = 90) {
  Device device{};
  device.backend = TESSERA_BACKEND_CUDA;
  device.arch = arch;
  device.cores = 132;
  device.threads = 1;
  device.smem_bytes = 227 << 10;
  return device;
}

// Enough tiles for every multiprocessor.
Problem large_problem(std::int64_t d, std::int64_t dv, std::int64_t length = 4096, DType dtype = bfloat16) {
  Problem problem;
  problem.q = layout(dtype, {4, length, 16, d});
  problem.k = layout(dtype, {4, length, 16, d});
  problem.v = layout(dtype, {4, length, 16, dv});
  problem.o = layout(dtype, {4, length, 16, dv});
  return problem;
}

Problem fp8_problem(std::int64_t d, std::int64_t dv, DType out = bfloat16) {
  Problem problem = large_problem(d, dv, 4096, float8_e4m3);
  problem.o.dtype = static_cast<int32_t>(out);
  return problem;
}

TEST(CudaPlan, TakesFloat8OnHopper) {
  for (const auto& [d, dv] : {std::pair{16, 64}, {64, 64}, {128, 128}, {192, 128}, {256, 256}}) {
    for (const DType out : {bfloat16, float16, float32}) {
      Problem problem = fp8_problem(d, dv, out);
      problem.causal = d == 128, problem.softcap = dv == 64 ? 20 : 0;
      problem.q_descale = layout(float32, {16});
      problem.k_descale = problem.v_descale = layout(float32, {4, 32, 16});
      const Plan plan = tessera::plan(problem, gpu());
      EXPECT_STREQ(plan.family, "fwd_sm90_fp8");
      EXPECT_EQ(128 % plan.steps[0].block_n, 0) << "one scale a tile of keys";
    }
  }
}

// Of more rows than decode_sm90 reads a cache for, with an option that it does not support either.
TEST(CudaPlan, TakesEightBitCachesOnEveryGpu) {
  for (const DType codes : {float8_e4m3, float8_e5m2}) {
    Problem problem = large_problem(128, 128);
    problem.k.dtype = problem.v.dtype = static_cast<int32_t>(codes);
    problem.k_descale = problem.v_descale = layout(float32, {4, 32, 16});
    problem.bias = layout(bfloat16, {1, 1, 4096, 4096});
    for (const int arch : {80, 86, 89, 90, 100, 120}) {
      EXPECT_STREQ(tessera::plan(problem, gpu(arch)).family, "fwd_sm80") << arch;
    }
  }
}

// A step of an engine: decode_sm90 reads the sequences of a token.
TEST(CudaPlan, SharesMixedBatchesOverEightBitCaches) {
  Problem problem;
  problem.q = problem.o = layout(bfloat16, {2048, 32, 128});
  problem.cu_seqlens_q = layout(int32, {65});
  problem.max_seqlen_q = 512, problem.causal = true;
  problem.k = problem.v = layout(float8_e4m3, {16384, 16, 8, 128});
  problem.page_table = layout(int32, {64, 256}), problem.seqused_k = layout(int32, {64});
  problem.k_descale = problem.v_descale = layout(float32, {16384, 16, 8});
  EXPECT_STREQ(tessera::plan(problem, gpu(90)).family, "mixed_sm90");
  EXPECT_STREQ(tessera::plan(problem, gpu(80)).family, "fwd_sm80");
}

// What GPUs do not read of 8 bits, in words.
TEST(CudaPlan, RefusesEightBits) {
  Problem cached = large_problem(128, 128);
  cached.k.dtype = cached.v.dtype = TESSERA_INT8;
  Problem e5m2 = large_problem(128, 128, 4096, float8_e5m2);
  e5m2.o.dtype = TESSERA_BFLOAT16;
  Problem biased = fp8_problem(128, 128), dropped = fp8_problem(128, 128), paged = fp8_problem(128, 128);
  biased.bias = layout(bfloat16, {1, 1, 4096, 4096});
  dropped.dropout_p = 0.5;
  for (tessera_layout* tensor : {&paged.k, &paged.v}) *tensor = layout(float8_e4m3, {1024, 16, 16, 128});
  paged.page_table = layout(int32, {4, 256}), paged.seqused_k = layout(int32, {4});
  const std::pair<Problem, std::string> refused[] = {
      {cached, "fwd_sm80: keys and values of int8, accepted those of q's dtype and float8_e4m3, float8_e5m2"},
      {e5m2, "fwd_sm90_fp8: float8_e5m2, accepted float8_e4m3"},
      {biased, "fwd_sm90_fp8: bias: not supported"},
      {dropped, "fwd_sm90_fp8: dropout: not supported"},
      {paged, "fwd_sm90_fp8: page_table: not supported"},
      {fp8_problem(72, 64), "fwd_sm90_fp8: q: head size 72, must be a multiple of 16"},
      {fp8_problem(512, 512), "fwd_sm90_fp8: head size 512, at most 256"}};
  for (const auto& [problem, reason] : refused) {
    Plan plan;
    const Status status = try_plan(problem, gpu(), plan);
    EXPECT_EQ(status.code(), Code::unsupported);
    EXPECT_NE(status.message().find(reason), std::string::npos) << status.message();
  }
  Plan plan;
  const Status elsewhere = try_plan(fp8_problem(128, 128), gpu(80), plan);
  EXPECT_NE(elsewhere.message().find("fwd_sm90_fp8: compute capability 8.0, must be 9.0"), std::string::npos)
      << elsewhere.message();
}

Problem packed_large_problem() {
  Problem problem;
  problem.q = problem.k = problem.v = problem.o = layout(float16, {16384, 16, 128});
  problem.cu_seqlens_q = problem.cu_seqlens_k = layout(int32, {9});
  return problem;
}

// Keys and values of the same heads in pages, 256 a sequence.
void set_pages(Problem& p, std::int64_t pages, std::int64_t page_size) {
  for (tessera_layout* tensor : {&p.k, &p.v}) {
    *tensor = layout(bfloat16, {pages, page_size, tensor->shape[2], tensor->shape[3]});
  }
  p.page_table = layout(int32, {p.q.shape[0], 256});
  p.seqused_k = layout(int32, {p.q.shape[0]});
}

std::string refusal(const Plan& plan, const char* kernel) {
  for (const tessera_candidate& candidate : candidates(plan)) {
    if (std::strcmp(candidate.kernel, kernel) == 0) return candidate.accepted ? "" : candidate.reason;
  }
  throw std::out_of_range(kernel);
}

// Of a kernel that accepts.
double estimate_us(const Plan& plan, const char* kernel) {
  EXPECT_EQ(refusal(plan, kernel), "");
  for (const tessera_candidate& candidate : candidates(plan)) {
    if (std::strcmp(candidate.kernel, kernel) == 0) return candidate.estimate_us;
  }
  return 0;
}

void expect_refused(const Problem& problem, const Device& device, const std::string& reason) {
  const Plan plan = tessera::plan(problem, device);
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM80);
  EXPECT_NE(refusal(plan, "fwd_sm90").find(reason), std::string::npos) << refusal(plan, "fwd_sm90");
}

// ---- supported problems and their tiles -----------------------------------------------------------------------------

struct TileRow {
  std::int64_t d, dv, length;
  bool causal;
  std::int32_t block_m, block_n, stages;
};
std::ostream& operator<<(std::ostream& out, const TileRow& row) {
  return out << "d " << row.d << " dv " << row.dv << " length " << row.length << (row.causal ? " causal" : " full");
}

class FwdSm90Tile : public testing::TestWithParam<TileRow> {};

TEST_P(FwdSm90Tile, IsItsRow) {
  const TileRow& row = GetParam();
  Problem problem = large_problem(row.d, row.dv, row.length);
  problem.causal = row.causal;
  const Plan plan = tessera::plan(problem, gpu());
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM90) << refusal(plan, "fwd_sm90");
  EXPECT_EQ(plan.steps[0].block_m, row.block_m);
  EXPECT_EQ(plan.steps[0].block_n, row.block_n);
  EXPECT_EQ(plan.steps[0].num_stages, row.stages);
  EXPECT_EQ(plan.steps[0].num_warps, row.block_m / 16 + 4) << "and a warpgroup that fetches";
  EXPECT_EQ(plan.steps[0].num_splits, 1);
  EXPECT_EQ(plan.steps[0].num_items, (row.length + row.block_m - 1) / row.block_m * 16 * 4);
  EXPECT_EQ(plan.shared_bytes, 0);
  EXPECT_LE(plan.steps[0].smem_bytes, gpu().smem_bytes);
}

INSTANTIATE_TEST_SUITE_P(
    Row, FwdSm90Tile,
    testing::Values(TileRow{64, 64, 4096, false, 256, 64, 6}, TileRow{64, 64, 512, false, 256, 64, 6},
                    TileRow{64, 64, 256, false, 128, 128, 3}, TileRow{64, 64, 2048, true, 256, 64, 6},
                    TileRow{64, 64, 512, true, 128, 128, 3}, TileRow{32, 32, 1024, true, 256, 64, 6},
                    TileRow{96, 96, 4096, false, 256, 64, 2}, TileRow{96, 96, 256, false, 128, 128, 2},
                    TileRow{128, 128, 2048, false, 192, 64, 2}, TileRow{128, 128, 16384, true, 192, 80, 2},
                    TileRow{128, 128, 2047, false, 128, 128, 2}, TileRow{128, 128, 4096, true, 128, 128, 2},
                    TileRow{192, 128, 4096, true, 128, 128, 2}, TileRow{192, 192, 4096, false, 128, 96, 2},
                    TileRow{128, 136, 4096, false, 128, 96, 2}, TileRow{256, 256, 4096, true, 128, 64, 2},
                    TileRow{8, 256, 4096, false, 128, 64, 2}));

TEST(FwdSm90, TakesWindowsSinksPackedSequencesAndUnequalHeads) {
  Problem problem = packed_large_problem();
  problem.k = problem.v = layout(float16, {16384, 4, 128});
  problem.seqused_k = layout(int32, {8});
  problem.sink = layout(float32, {16});
  problem.lse = layout(float32, {16, 16384});
  problem.causal = 1;
  problem.alignment = TESSERA_TOP_LEFT;
  problem.window_left = 1000;
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_FWD_SM90;
  const Plan plan = tessera::plan(problem, device);
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM90) << refusal(plan, "fwd_sm90");
  EXPECT_EQ(plan.steps[0].block_m, 192) << "a varlen area's row";
}

// Which work tiles are long only the GPU knows: the scheduler is dynamic, by a counter.
TEST(FwdSm90, PackedSequencesHaveACounterWhereABlockHasSeveralWorks) {
  const Plan dense = tessera::plan(large_problem(128, 128), gpu());
  Problem problem = packed_large_problem();
  const Plan many = tessera::plan(problem, gpu());
  EXPECT_EQ(many.kernel, TESSERA_KERNEL_FWD_SM90) << refusal(many, "fwd_sm90");
  EXPECT_EQ(dense.shared_bytes, 0);
  EXPECT_GE(many.shared_bytes, 4);
  EXPECT_EQ(many.workspace_bytes - dense.workspace_bytes, many.shared_bytes);
  problem.q = problem.k = problem.v = problem.o = layout(float16, {1024, 8, 128});
  const Plan few = tessera::plan(problem, gpu());
  EXPECT_EQ(few.kernel, TESSERA_KERNEL_FWD_SM90) << refusal(few, "fwd_sm90");
  EXPECT_EQ(few.shared_bytes, 0) << few.steps[0].num_items << " works";
}

// ---- clusters: neighbouring tiles of queries that always see the same keys ------------------------------------------

struct ClusterRow {
  const char* name;
  std::int32_t cluster;
  std::function<void(Problem&, Device&)> change;  // of full attention, 16384 queries and keys, 86 tiles a head
};
std::ostream& operator<<(std::ostream& out, const ClusterRow& row) { return out << row.name; }

class FwdSm90Cluster : public testing::TestWithParam<ClusterRow> {};

TEST_P(FwdSm90Cluster, IsTakenWhereItsBlocksSeeTheSameKeys) {
  Problem problem = large_problem(128, 128, 16384);
  Device device = gpu();
  GetParam().change(problem, device);
  const Plan plan = tessera::plan(problem, device);
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM90) << refusal(plan, "fwd_sm90");
  EXPECT_EQ(launches(plan).at(0).cluster, GetParam().cluster);
  EXPECT_EQ(tessera::describe(plan).find("clusters of 2") != std::string::npos, GetParam().cluster == 2);
}

INSTANTIATE_TEST_SUITE_P(
    Row, FwdSm90Cluster,
    testing::Values(ClusterRow{"Full", 2, [](Problem&, Device&) {}},
                    ClusterRow{"KeyLengths", 2, [](Problem& p, Device&) { p.seqused_k = layout(int32, {4}); }},
                    ClusterRow{"FewerKeys", 2, [](Problem& p, Device&) { p.k.shape[1] = p.v.shape[1] = 1000; }},
                    ClusterRow{"OddMultiprocessors", 2, [](Problem&, Device& d) { d.cores = 131; }},
                    ClusterRow{"LargeHeads", 2, [](Problem& p, Device&) { p = large_problem(192, 192, 4096); }},
                    ClusterRow{"ShortQueries", 2, [](Problem& p, Device&) { p = large_problem(192, 128, 256); }},
                    ClusterRow{"OddTiles", 1, [](Problem& p, Device&) { p = large_problem(128, 128, 16700); }},
                    ClusterRow{"OneMultiprocessor", 1, [](Problem&, Device& d) { d.cores = 1; }},
                    ClusterRow{"Causal", 1, [](Problem& p, Device&) { p.causal = 1; }},
                    ClusterRow{"WindowLeft", 1, [](Problem& p, Device&) { p.window_left = 1000; }},
                    ClusterRow{"WindowRight", 1, [](Problem& p, Device&) { p.window_right = 1000; }},
                    ClusterRow{"CausalWindow", 1, [](Problem& p, Device&) { p.causal = 1, p.window_left = 1000; }},
                    ClusterRow{"Packed", 1,
                               [](Problem& p, Device&) {
                                 p = packed_large_problem();
                                 p.max_seqlen_q = p.max_seqlen_k = 16384;
                               }}),
    [](const auto& row) { return std::string(row.param.name); });

// ---- pages ----------------------------------------------------------------------------------------------------------

TEST(FwdSm90, TakesPagesOfMultiplesOf16Keys) {
  for (const std::int64_t page_size : {16, 48, 64, 80, 128, 256, 4096})
    for (const std::int64_t d : {64, 128, 192, 256})
      for (const bool causal : {false, true}) {
        Problem problem = large_problem(d, d, 16384);
        problem.causal = causal;
        const Plan dense = tessera::plan(problem, gpu());
        set_pages(problem, 1024, page_size);
        const Plan plan = tessera::plan(problem, gpu());
        EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM90) << refusal(plan, "fwd_sm90");
        EXPECT_EQ(launches(plan).at(0).cluster, 1) << "blocks fetch their pages alone";
        EXPECT_EQ(plan.steps[0].block_m, dense.steps[0].block_m);
        EXPECT_EQ(plan.steps[0].block_n, dense.steps[0].block_n);
      }
}

TEST(FwdSm90, TakesPagesWhoseHeadsLieApartAndPackedQueries) {
  Problem problem = packed_large_problem();
  problem.k = problem.v = tessera::permute(layout(float16, {1024, 4, 16, 128}), {0, 2, 1, 3});
  problem.cu_seqlens_k = {};
  problem.page_table = layout(int32, {8, 256});
  problem.seqused_k = layout(int32, {8});
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_FWD_SM90;
  const Plan plan = tessera::plan(problem, device);
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM90) << refusal(plan, "fwd_sm90");
  EXPECT_NE(tessera::describe(plan).find("paged keys"), std::string::npos);
}

TEST(FwdSm90, ADimensionOfOneMayHaveAnyStride) {
  Problem problem = large_problem(128, 128);
  for (tessera_layout* tensor : {&problem.q, &problem.k, &problem.v, &problem.o}) {
    *tensor = layout(bfloat16, {1, 16384, 16, 128});
    tensor->strides[0] = 1;
  }
  EXPECT_EQ(tessera::plan(problem, gpu()).kernel, TESSERA_KERNEL_FWD_SM90);
}

TEST(FwdSm90, NoTileDependsOnOtherSequencesWhenInvariant) {
  Problem problem = packed_large_problem();
  problem.causal = 1;
  problem.batch_invariant = 1;
  for (const std::int64_t longest : {3, 40, 600, 16384}) {
    problem.max_seqlen_q = problem.max_seqlen_k = longest;
    const Plan plan = tessera::plan(problem, gpu());
    EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM90) << refusal(plan, "fwd_sm90");
    EXPECT_EQ(plan.steps[0].block_m, 192);
    EXPECT_EQ(plan.steps[0].block_n, 80);
  }
}

TEST(FwdSm90, NothingToDoIsPlanned) {
  for (const int axis : {0, 1}) {  // no sequences, no queries
    Problem problem = large_problem(64, 64);
    problem.q.shape[axis] = problem.o.shape[axis] = 0;
    if (axis == 0) problem.k.shape[axis] = problem.v.shape[axis] = 0;
    EXPECT_NO_THROW((void)tessera::plan(problem, gpu())) << axis;
  }
}

// ---- refusals -------------------------------------------------------------------------------------------------------

struct Refusal {
  const char* name;
  const char* reason;
  std::function<void(Problem&, Device&)> spoil;
};
std::ostream& operator<<(std::ostream& out, const Refusal& row) { return out << row.name; }

class FwdSm90Refusal : public testing::TestWithParam<Refusal> {};

TEST_P(FwdSm90Refusal, SaysWhy) {
  Problem problem = large_problem(128, 128);
  Device device = gpu();
  GetParam().spoil(problem, device);
  expect_refused(problem, device, GetParam().reason);
}

constexpr auto set_strides = [](tessera_layout& tensor, int axis, std::int64_t stride) {
  tensor.strides[axis] = stride;
};

INSTANTIATE_TEST_SUITE_P(
    Row, FwdSm90Refusal,
    testing::Values(
        Refusal{"Ampere", "compute capability 8.0, must be 9.0", [](Problem&, Device& d) { d.arch = 80; }},
        Refusal{"Blackwell", "compute capability 10.0, must be 9.0", [](Problem&, Device& d) { d.arch = 100; }},
        Refusal{"Float32", "float32, accepted float16, bfloat16",
                [](Problem& p, Device&) { p = large_problem(64, 64, 4096, float32); }},
        Refusal{"BlockMask", "block_mask: blocks of 128 x 32, must be multiples of 64",
                [](Problem& p, Device&) {
                  p.block_mask = layout(boolean, {4, 1, 32, 128}), p.mask_block_q = 128, p.mask_block_k = 32;
                }},
        Refusal{"BlockMaskOfPages", "block_mask: of packed, paged or partly used sequences",
                [](Problem& p, Device&) {
                  p.block_mask = layout(boolean, {4, 1, 32, 32}), p.mask_block_q = p.mask_block_k = 128;
                  p.seqused_k = layout(int32, {4});
                }},
        Refusal{"Pages", "pages of 24 keys, must be a multiple of 16",
                [](Problem& p, Device&) { set_pages(p, 1024, 24); }},
        Refusal{"SmallPages", "pages of 1 keys, must be a multiple of 16",
                [](Problem& p, Device&) { set_pages(p, 16384, 1); }},
        Refusal{"NoPages", "k: no rows", [](Problem& p, Device&) { set_pages(p, 0, 16); }},
        Refusal{"PageStride", "k: row stride of 4102 bytes",
                [](Problem& p, Device&) {
                  set_pages(p, 1024, 16);
                  set_strides(p.k, 1, 2051);
                }},
        Refusal{"PagesByPairs", "pages: not supported at head sizes above 256",
                [](Problem& p, Device&) { p = large_problem(264, 264), set_pages(p, 1024, 16); }},
        Refusal{"DropoutByPairs", "dropout with other options: not supported at head sizes above 256",
                [](Problem& p, Device&) { p = large_problem(264, 264), p.dropout_p = 0.1, p.softcap = 30; }},
        Refusal{"HeadBytes", "q: rows of 200 bytes", [](Problem& p, Device&) { p = large_problem(100, 128); }},
        Refusal{"ValueBytes", "v: rows of 200 bytes", [](Problem& p, Device&) { p = large_problem(128, 100); }},
        Refusal{"RowStride", "k: row stride of 4102 bytes", [](Problem& p, Device&) { set_strides(p.k, 1, 2051); }},
        Refusal{"SharedKeys", "k: batch stride of 0 bytes", [](Problem& p, Device&) { set_strides(p.k, 0, 0); }},
        Refusal{"Reversed", "v: row stride of -4096 bytes", [](Problem& p, Device&) { set_strides(p.v, 1, -2048); }},
        Refusal{"FarHeads", "q: head stride of 1099511627776 bytes",
                [](Problem& p, Device&) { set_strides(p.q, 2, std::int64_t{1} << 39); }},
        Refusal{"Output", "o: batch stride of 16777224 bytes",
                [](Problem& p, Device&) { set_strides(p.o, 0, 4096 * 2048 + 4); }},
        Refusal{"NoKeys", "k: no rows", [](Problem& p, Device&) { p.k.shape[1] = p.v.shape[1] = 0; }},
        Refusal{"SharedMemory", "KiB of shared memory", [](Problem&, Device& d) { d.smem_bytes = 163 << 10; }}),
    [](const auto& row) { return std::string(row.param.name); });

// fwd_sm80 has tiles for few rows. Where few tiles would leave most of the GPU idle, fwd_sm90 splits the keys.
TEST(FwdSm90, TakesLongerForOneQueryAndForFewTiles) {
  Problem one_query = large_problem(128, 128), few_tiles = one_query;
  one_query.q = one_query.o = layout(bfloat16, {64, 1, 16, 128});
  one_query.k = one_query.v = layout(bfloat16, {64, 200, 4, 128});
  few_tiles.q = few_tiles.o = layout(bfloat16, {1, 100, 16, 128});
  few_tiles.k = few_tiles.v = layout(bfloat16, {1, 8192, 8, 128});
  few_tiles.mask = layout(boolean, {1, 1, 100, 8192});  // which decode_sm90 does not take
  const Plan plan = tessera::plan(one_query, gpu());
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM80);
  EXPECT_GT(estimate_us(plan, "fwd_sm90"), estimate_us(plan, "fwd_sm80"));
  const Plan split = tessera::plan(few_tiles, gpu());
  EXPECT_EQ(split.kernel, TESSERA_KERNEL_FWD_SM90);
  EXPECT_GT(split.steps[0].num_splits, 1);
  EXPECT_EQ(launches(split)[0].blocks, split.steps[0].num_items);
}

// combine merges parts where a block has several, and where o has another dtype.
TEST(FwdSm90, MergesPartsByClustersWhereEachBlockHasOne) {
  Problem problem;
  problem.q = problem.o = layout(bfloat16, {1, 8, 64, 128});
  problem.k = problem.v = layout(bfloat16, {1, 8192, 8, 128});
  const auto merged = launches(tessera::plan(problem, gpu()));
  ASSERT_EQ(merged.size(), 1u);
  EXPECT_EQ(merged[0].blocks, 64);
  EXPECT_EQ(merged[0].cluster, 8);
  problem.o = layout(float32, {1, 8, 64, 128});
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_FWD_SM90;
  const auto combined = launches(tessera::plan(problem, device));
  ASSERT_EQ(combined.size(), 2u);
  EXPECT_EQ(combined[0].cluster, 1);
  EXPECT_STREQ(combined[1].kernel, "combine");
}

// The parts of the keys fill the GPU, as far as each has enough; heads that share keys are rows of one tile.
TEST(FwdSm90, SplitsKeysAndPacksHeads) {
  const struct {
    std::int64_t queries, heads, heads_kv, keys;
    int num_splits, num_items;
  } rows[] = {{8, 64, 8, 131072, 16, 128},
              {512, 16, 2, 65536, 2, 128},
              {512, 8, 1, 65536, 4, 128},
              {64, 8, 1, 65536, 32, 128},
              {1024, 16, 2, 65536, 1, 128}};
  for (const auto& row : rows) {
    Problem problem;
    problem.q = problem.o = layout(bfloat16, {1, row.queries, row.heads, 128});
    problem.k = problem.v = layout(bfloat16, {row.keys / 16, 16, row.heads_kv, 128});
    problem.page_table = layout(int32, {1, row.keys / 16}), problem.seqused_k = layout(int32, {1});
    problem.causal = 1;
    const Plan plan = tessera::plan(problem, gpu());
    SCOPED_TRACE(describe(plan));
    EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM90);
    EXPECT_EQ(plan.steps[0].num_splits, row.num_splits);
    EXPECT_EQ(plan.steps[0].num_items, row.num_items);
    problem.batch_invariant = 1;
    EXPECT_EQ(tessera::plan(problem, gpu()).steps[0].num_splits, 1);
  }
}

TEST(FwdSm90, TheOtherCanBeAskedFor) {
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_FWD_SM80;
  EXPECT_EQ(tessera::plan(large_problem(128, 128), device).kernel, TESSERA_KERNEL_FWD_SM80);
  device.kernel = TESSERA_KERNEL_FWD_SM90;
  EXPECT_EQ(tessera::plan(large_problem(128, 128), device).kernel, TESSERA_KERNEL_FWD_SM90);
  EXPECT_STREQ(tessera_kernel_name(TESSERA_KERNEL_FWD_SM90), "fwd_sm90");
}

// ---- bwd_sm80 -------------------------------------------------------------------------------------------------------

// Of the tiles that fit the GPU's shared memory, the largest: 227, 163 and 99 KiB.
TEST(BwdSm80, TakesTheLargestTileThatFits) {
  struct Row {
    std::int32_t arch;
    std::int64_t d;
    DType dtype;
    std::int32_t block_m, block_n;
  };
  for (const auto& [arch, d, dtype, block_m, block_n] :
       {Row{90, 128, bfloat16, 64, 128}, Row{90, 256, bfloat16, 64, 64}, Row{90, 512, bfloat16, 32, 32},
        Row{80, 128, bfloat16, 64, 128}, Row{80, 256, bfloat16, 32, 64}, Row{80, 512, bfloat16, 16, 32},
        Row{86, 96, bfloat16, 64, 64}, Row{89, 128, bfloat16, 32, 64}, Row{120, 192, bfloat16, 32, 32},
        Row{86, 256, bfloat16, 16, 32}, Row{86, 512, bfloat16, 16, 16}, Row{80, 128, float32, 32, 64},
        Row{80, 256, float32, 16, 32}, Row{86, 128, float32, 16, 32}, Row{86, 256, float32, 16, 16}}) {
    Problem problem = large_problem(d, d, 4096, dtype);
    problem.direction = TESSERA_BACKWARD;
    problem.d_q = problem.q, problem.d_k = problem.k, problem.d_v = problem.v, problem.d_o = problem.o;
    problem.lse = layout(float32, {4, 16, 4096});
    Device device = cuda_arch(arch);
    device.kernel = TESSERA_KERNEL_BWD_SM80;
    const Plan plan = tessera::plan(problem, device);
    EXPECT_EQ(plan.steps[0].block_m, block_m) << arch << ", " << d;
    EXPECT_EQ(plan.steps[0].block_n, block_n) << arch << ", " << d;
  }
}

// ---- bwd_sm90 -------------------------------------------------------------------------------------------------------

Problem training_problem(std::int64_t d, std::int64_t dv, DType dtype = bfloat16) {
  Problem problem = large_problem(d, dv, 4096, dtype);
  problem.direction = TESSERA_BACKWARD;
  problem.d_q = problem.q, problem.d_k = problem.k, problem.d_v = problem.v, problem.d_o = problem.o;
  problem.lse = layout(float32, {4, 16, 4096});
  problem.causal = 1;
  return problem;
}

TEST(BwdSm90, ServesWhatItTakes) {
  const Device device = gpu();
  struct Row {
    std::int64_t d, dv;
    std::int32_t block_m;
  };
  for (const auto& [d, dv, block_m] :
       {Row{64, 64, 128}, Row{8, 8, 128}, Row{72, 72, 64}, Row{128, 128, 64}, Row{64, 128, 64}, Row{96, 32, 64},
        Row{192, 128, 64}, Row{192, 192, 64}, Row{256, 256, 64}}) {
    const Plan plan = tessera::plan(training_problem(d, dv), device);
    EXPECT_EQ(plan.kernel, TESSERA_KERNEL_BWD_SM90);
    EXPECT_EQ(plan.steps[0].block_m, block_m) << d << ", " << dv;
    EXPECT_EQ(plan.steps[0].block_n, 128);
    EXPECT_EQ(plan.steps[0].num_items, 32 * 16 * 4 * (dv > 128 ? 2 : 1)) << "clusters of two blocks";
    EXPECT_LE(plan.steps[0].smem_bytes, device.smem_bytes);
  }
}

TEST(BwdSm90, TakesMasksByPositionUnequalHeadsSinksAlibiAnyScaleAndACotangentOfTheLse) {
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_BWD_SM90;
  Problem problem = training_problem(128, 128);
  problem.k = problem.v = problem.d_k = problem.d_v = layout(bfloat16, {4, 1000, 4, 128});
  problem.alignment = TESSERA_TOP_LEFT;
  problem.window_left = 300, problem.window_right = 20;
  problem.d_lse = problem.lse;
  problem.sink = problem.d_sink = layout(float32, {16});
  problem.deterministic = 1;
  problem.alibi_slopes = layout(float32, {4, 16});
  problem.has_scale = 1, problem.scale = -0.5;
  EXPECT_NO_THROW((void)tessera::plan(problem, device));
}

// A bit or an entry for each score needs registers: steps then have 64 queries.
TEST(BwdSm90, TakesSoftcapMaskBiasAndDropout) {
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_BWD_SM90;
  for (const auto& [head_dim, head_dim_v] : {std::pair{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}}) {
    Problem problem = training_problem(head_dim, head_dim_v);
    problem.dropout_p = 0.1;
    problem.mask = layout(boolean, {4, 1, 4096, 4096});
    problem.softcap = 30;
    EXPECT_EQ(tessera::plan(problem, device).steps[0].block_m, 64);
    problem.softcap = 0;
    problem.bias = layout(bfloat16, {1, 16, 4096, 4096}), problem.d_bias = layout(float32, {1, 16, 4096, 4096});
    EXPECT_EQ(tessera::plan(problem, device).steps[0].block_m, 64);
    problem.bias = problem.d_bias = layout(float32, {4, 16, 4096, 4096}), problem.deterministic = 1;
    EXPECT_EQ(tessera::plan(problem, device).steps[0].block_m, 64);
  }
}

TEST(BwdSm90, TakesPackedSequencesAndKeyLengths) {
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_BWD_SM90;
  Problem problem = packed_large_problem();
  problem.direction = TESSERA_BACKWARD;
  problem.lse = layout(float32, {16, 16384});
  problem.seqused_k = layout(int32, {8});
  problem.d_q = problem.d_k = problem.d_v = problem.d_o = problem.q;
  EXPECT_EQ(tessera::plan(problem, device).steps[0].num_items, (16384 / 128 + 8) * 16);
  for (tessera_layout* tensor : {&problem.q, &problem.k, &problem.v, &problem.o})
    *tensor = layout(bfloat16, {16384, 16, 256});
  problem.d_q = problem.d_k = problem.d_v = problem.d_o = problem.q;
  EXPECT_EQ(tessera::plan(problem, device).steps[0].num_items, (16384 / 128 + 8) * 16 * 2) << "pairs of blocks";
}

class BwdSm90Refusal : public testing::TestWithParam<Refusal> {};

TEST_P(BwdSm90Refusal, SaysWhy) {
  Problem problem = training_problem(128, 128);
  Device device = gpu();
  GetParam().spoil(problem, device);
  const Plan plan = tessera::plan(problem, device);
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_BWD_SM80);
  EXPECT_NE(refusal(plan, "bwd_sm90").find(GetParam().reason), std::string::npos) << refusal(plan, "bwd_sm90");
}

INSTANTIATE_TEST_SUITE_P(
    Row, BwdSm90Refusal,
    testing::Values(
        Refusal{"Ampere", "compute capability 8.0, must be 9.0", [](Problem&, Device& d) { d.arch = 80; }},
        Refusal{"Float32", "float32, accepted float16, bfloat16",
                [](Problem& p, Device&) { p = training_problem(64, 64, float32); }},
        Refusal{"SoftcapByColumns", "softcap: not supported at head sizes above 256",
                [](Problem& p, Device&) { p = training_problem(264, 64), p.softcap = 30; }},
        Refusal{"DropoutByColumns", "dropout_p: not supported at head sizes above 256",
                [](Problem& p, Device&) { p = training_problem(264, 264), p.dropout_p = 0.1; }},
        Refusal{"DeterministicByColumns", "deterministic: not supported at head sizes above 256",
                [](Problem& p, Device&) { p = training_problem(512, 512), p.deterministic = 1; }},
        Refusal{"HeadBytes", "q: rows of 200 bytes", [](Problem& p, Device&) { p = training_problem(100, 128); }},
        Refusal{"BlockMask", "block_mask: blocks of 32 x 128, must be multiples of 64",
                [](Problem& p, Device&) {
                  p.block_mask = layout(boolean, {1, 1, 128, 32});
                  p.mask_block_q = 32, p.mask_block_k = 128;
                }},
        Refusal{"BlockMaskByColumns", "block_mask: not supported at head sizes above 256",
                [](Problem& p, Device&) {
                  p = training_problem(264, 264);
                  p.block_mask = layout(boolean, {1, 1, 32, 32});
                  p.mask_block_q = p.mask_block_k = 128;
                }},
        Refusal{"SmallSoftcap", "softcap: below 0.25", [](Problem& p, Device&) { p.softcap = 0.125; }},
        Refusal{"SmallSoftcapFloat16", "softcap: below 2",
                [](Problem& p, Device&) { p = training_problem(128, 128, float16), p.softcap = 1.5; }},
        Refusal{"CappedBias", "softcap: not supported with bias",
                [](Problem& p, Device&) {
                  p.softcap = 30, p.bias = layout(float32, {1, 1, 4096, 4096});
                }},
        Refusal{"CappedAlibi", "softcap: not supported with alibi_slopes",
                [](Problem& p, Device&) { p.softcap = 30, p.alibi_slopes = layout(float32, {16}); }},
        Refusal{"SharedQueries", "d_bias: not supported where queries share its entries",
                [](Problem& p, Device&) {
                  p.bias = p.d_bias = layout(float32, {4, 16, 1, 4096});
                }},
        Refusal{"SharedDeterministic", "deterministic: not supported with a d_bias that sequences or heads share",
                [](Problem& p, Device&) {
                  p.bias = p.d_bias = layout(float32, {1, 16, 4096, 4096});
                  p.deterministic = 1;
                }},
        Refusal{"GradientStride", "d_k: row stride of 4104 bytes",
                [](Problem& p, Device&) { set_strides(p.d_k, 1, 2052), set_strides(p.d_k, 0, 4096 * 2052); }},
        Refusal{"OutputStride", "o: rows start at no multiples of 16 bytes",
                [](Problem& p, Device&) { set_strides(p.o, 1, 2051); }},
        Refusal{"NoKeys", "k: no rows",
                [](Problem& p, Device&) {
                  for (tessera_layout* tensor : {&p.k, &p.v, &p.d_k, &p.d_v}) tensor->shape[1] = 0;
                }},
        Refusal{"NoQueries", "q: no rows",
                [](Problem& p, Device&) {
                  for (tessera_layout* tensor : {&p.q, &p.o, &p.d_q, &p.d_o}) tensor->shape[1] = 0;
                  p.lse.shape[2] = 0;
                }},
        Refusal{"SharedMemory", "KiB of shared memory", [](Problem&, Device& d) { d.smem_bytes = 163 << 10; }}),
    [](const auto& row) { return std::string(row.param.name); });

// ---- kernels for comparison ----------------------------------------------------------------------------------------

struct ForComparison {
  const char* name;
  tessera_kernel kernel;
  bool backward;
  std::int64_t workspace_bytes;  // of 4 sequences of 4096, 16 heads, D 64
};
constexpr std::int64_t kHeadRows = 4 * 16 * 4096;
constexpr ForComparison kForComparison[] = {
    {"fwd_fa1", TESSERA_KERNEL_FWD_FA1, false, kHeadRows*(64 + 2) * 4},            // O, m and l in float32
    {"bwd_fa1", TESSERA_KERNEL_BWD_FA1, true, kHeadRows*(64 + 2) * 4},             // dQ, LSE and delta
    {"fwd_standard", TESSERA_KERNEL_FWD_STANDARD, false, kHeadRows * 4096 * 2},    // P
    {"bwd_standard", TESSERA_KERNEL_BWD_STANDARD, true, 2 * kHeadRows * 4096 * 2}  // P and dS
};

Problem comparison_problem(const ForComparison& row, std::int64_t d = 64, DType dtype = bfloat16) {
  Problem problem = training_problem(d, d, dtype);
  if (row.backward) return problem;
  Problem forward = large_problem(d, d, 4096, dtype);
  forward.causal = 1;
  return forward;
}

TEST(ForComparison, ServeWhoeverAsksForThemAndNobodyElse) {
  for (const ForComparison& row : kForComparison) {
    SCOPED_TRACE(row.name);
    const Problem problem = comparison_problem(row);
    Device device = gpu();
    EXPECT_EQ(refusal(tessera::plan(problem, device), row.name), "for comparison only: chosen on request");
    device.kernel = row.kernel;
    const Plan plan = tessera::plan(problem, device);
    EXPECT_EQ(plan.kernel, row.kernel);
    EXPECT_NEAR(static_cast<double>(plan.workspace_bytes), static_cast<double>(row.workspace_bytes), 256);
  }
}

// A problem that no kernel supports is refused by the kernels that a plan could choose, not by those on request.
TEST(ForComparison, AreNotHeardWhereAllRefuse) {
  Problem problem = large_problem(64, 64, 4096, float64);
  try {
    tessera::plan(problem, gpu());
    FAIL() << "float64 was taken";
  } catch (const std::exception& error) {
    EXPECT_EQ(std::string(error.what()).find("fwd_fa1"), std::string::npos) << error.what();
  }
}

// The requested kernel's reason for refusing a problem is in the exception, since no other kernel is considered.
std::string refusal_on_request(const Problem& problem, Device device, tessera_kernel kernel) {
  device.kernel = kernel;
  try {
    tessera::plan(problem, device);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(ForComparison, SayWhyNot) {
  for (const ForComparison& row : kForComparison) {
    SCOPED_TRACE(row.name);
    const auto refused = [&](const Problem& problem, const char* reason) {
      const std::string said = refusal_on_request(problem, gpu(), row.kernel);
      EXPECT_NE(said.find(std::string(row.name) + ": " + reason), std::string::npos) << said;
    };
    refused(comparison_problem(row, 64, float32), "float32, accepted float16, bfloat16");
    refused(comparison_problem(row, 160), "head size 160, at most 128");
    Problem problem = comparison_problem(row);
    problem.alibi_slopes = layout(float32, {16});
    refused(problem, "alibi_slopes: not supported");
    problem = comparison_problem(row);
    problem.softcap = 30;
    refused(problem, "softcap: not supported");
    problem = comparison_problem(row);
    problem.seqused_k = layout(int32, {4});
    refused(problem, "seqused_k: not supported");
    const bool standard = std::string(row.name).find("standard") != std::string::npos;
    problem = comparison_problem(row);
    problem.k.shape[2] = problem.v.shape[2] = 4;
    if (row.backward) problem.d_k.shape[2] = problem.d_v.shape[2] = 4;
    if (standard) refused(problem, "k: 4 heads, must be those of q, 16");
    if (!standard) {
      EXPECT_EQ(refusal_on_request(problem, gpu(), row.kernel), "");
    }
  }
}

TEST(ForComparison, StandardAttentionHoldsARowInRegisters) {
  Problem problem = large_problem(64, 64, 65536 + 8);
  EXPECT_NE(refusal_on_request(problem, gpu(), TESSERA_KERNEL_FWD_STANDARD).find("k: 65544 keys, at most 65536"),
            std::string::npos);
}

// The figure of the block sizes.
TEST(ForComparison, TheFirstSchedulesBlockIsChosenByTheEnvironment) {
  const Problem problem = large_problem(64, 64);
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_FWD_FA1;
  for (const std::int32_t keys : {32, 64, 128, 256}) {
    setenv("TESSERA_FA1_KEYS", std::to_string(keys).c_str(), 1);
    EXPECT_EQ(tessera::plan(problem, device).steps[0].block_n, keys);
  }
  setenv("TESSERA_FA1_KEYS", "100", 1);
  EXPECT_NE(refusal_on_request(problem, device, TESSERA_KERNEL_FWD_FA1).find("TESSERA_FA1_KEYS: 100, accepted"),
            std::string::npos);
  unsetenv("TESSERA_FA1_KEYS");
  EXPECT_EQ(tessera::plan(problem, device).steps[0].block_n, 128);
}

// ---- decode_sm90 ----------------------------------------------------------------------------------------------------

Problem decode_problem(std::int64_t d, std::int64_t queries = 1, DType dtype = bfloat16) {
  Problem problem;
  problem.q = problem.o = layout(dtype, {4, queries, 32, d});
  problem.k = problem.v = layout(dtype, {4, 8192, 8, d});
  return problem;
}

TEST(DecodeSm90, ServesFewRowsAgainstManyKeys) {
  for (const std::int64_t d : {8, 64, 72, 128, 200, 256}) {
    const Plan plan = tessera::plan(decode_problem(d), gpu());
    EXPECT_EQ(plan.kernel, TESSERA_KERNEL_DECODE_SM90) << refusal(plan, "decode_sm90");
    EXPECT_EQ(plan.steps[0].num_items, 132) << "a block a multiprocessor, whatever the sequences";
    EXPECT_LE(plan.steps[0].smem_bytes, gpu().smem_bytes) << d;
    EXPECT_GT(plan.workspace_bytes, 0);
  }
}

// With TMA the first keys in pages arrive later, but with many rows sooner; and the sums of a sequence may not depend
// on the batch.
TEST(DecodeSm90, BringsFewKeysInPagesByCpAsync) {
  struct Row {
    std::int64_t sequences, keys, queries;
    bool invariant, bulk;
  };
  for (const Row& row : {Row{1, 1024, 1, false, false}, Row{1, 2048, 1, false, false}, Row{2, 1024, 1, false, false},
                         Row{1, 1024, 4, false, false}, Row{1, 4096, 1, false, true}, Row{64, 1024, 1, false, true},
                         Row{1, 1024, 1, true, true}, Row{1, 1024, 8, false, true}, Row{1, 2048, 16, false, true}}) {
    Problem problem;
    problem.q = problem.o = layout(bfloat16, {row.sequences, row.queries, 64, 128});
    problem.k = problem.v = layout(bfloat16, {row.sequences * row.keys / 64, 64, 8, 128});
    problem.page_table = layout(int32, {row.sequences, row.keys / 64});
    problem.seqused_k = layout(int32, {row.sequences});
    problem.batch_invariant = row.invariant;
    Device device = gpu();
    device.kernel = TESSERA_KERNEL_DECODE_SM90;
    const Plan plan = tessera::plan(problem, device);
    ASSERT_EQ(plan.kernel, TESSERA_KERNEL_DECODE_SM90) << refusal(plan, "decode_sm90");
    const std::string config = launches(plan)[0].config;
    EXPECT_NE(config.find(row.bulk ? ".bulk = true" : ".bulk = false"), std::string::npos)
        << row.sequences << " x " << row.keys << ", " << row.queries << " queries: " << config;
  }
}

// A tile of 32 codes, at D = 64 of 64, lies in one page, in several, or comes row by row.
TEST(DecodeSm90, LoadsTilesOfCodesFromOnePageOrSeveral) {
  struct Row {
    std::int64_t page_size;
    bool bulk;
    int boxes, boxes_of_64;
  };
  for (const Row& row :
       {Row{64, true, 1, 1}, Row{32, true, 1, 2}, Row{48, true, 2, 4}, Row{16, true, 2, 4}, Row{8, false, 1, 1}}) {
    for (const std::int64_t d : {64, 128, 256}) {
      Problem problem;
      problem.q = problem.o = layout(bfloat16, {64, 1, 64, d});
      problem.k = problem.v = layout(float8_e4m3, {64 * 192, row.page_size, 8, d});
      problem.page_table = layout(int32, {64, 192});
      problem.seqused_k = layout(int32, {64});
      const Plan plan = tessera::plan(problem, gpu());
      ASSERT_EQ(plan.kernel, TESSERA_KERNEL_DECODE_SM90) << refusal(plan, "decode_sm90");
      const std::string config = launches(plan)[0].config;
      const auto expect = [&](const std::string& field) {
        EXPECT_NE(config.find(field), std::string::npos) << row.page_size << ": " << config;
      };
      expect(row.bulk ? ".bulk = true" : ".bulk = false");
      expect(".boxes = " + std::to_string(d == 64 ? row.boxes_of_64 : row.boxes));
      EXPECT_EQ(plan.steps[0].block_n, d == 64 && row.bulk ? 64 : d == 256 && !row.bulk ? 16 : 32);
    }
  }
}

// Eight rows need half of the products, and 32 share conversions; but parts of sequences are the same in every batch if
// that is asked for.
TEST(DecodeSm90, HasEightRowsOrMoreAWorkTileOfCodes) {
  struct Row {
    std::int64_t queries, d;
    bool invariant;
    int rows;
  };
  for (const Row& row : {Row{1, 128, false, 8}, Row{2, 128, false, 8}, Row{3, 128, false, 16}, Row{4, 256, false, 16},
                         Row{5, 128, false, 32}, Row{8, 64, false, 32}, Row{5, 256, false, 16}, Row{1, 128, true, 16},
                         Row{16, 128, false, 32}}) {
    Problem problem = decode_problem(row.d, row.queries);
    problem.k = problem.v = layout(float8_e4m3, {4, 8192, 8, row.d});
    problem.batch_invariant = row.invariant;
    Device device = gpu();
    device.kernel = TESSERA_KERNEL_DECODE_SM90;
    const Plan plan = tessera::plan(problem, device);
    EXPECT_EQ(plan.steps[0].block_m, row.rows) << row.queries << " queries, D = " << row.d;
    EXPECT_LE(plan.steps[0].smem_bytes, gpu().smem_bytes);
  }
}

TEST(DecodeSm90, HasSmallTilesOfFewCodes) {
  for (const std::int64_t keys : {1024, 8192}) {
    for (const bool invariant : {false, true}) {
      for (const std::int64_t page_size : {0, 16}) {
        Problem problem = decode_problem(128);
        problem.q = problem.o = layout(bfloat16, {1, 1, 32, 128});
        problem.k = problem.v = layout(float8_e4m3, {1, keys, 8, 128});
        if (page_size > 0) {
          problem.k = problem.v = layout(float8_e4m3, {keys / page_size, page_size, 8, 128});
          problem.page_table = layout(int32, {1, keys / page_size}), problem.seqused_k = layout(int32, {1});
        }
        problem.batch_invariant = invariant;
        const Plan plan = tessera::plan(problem, gpu());
        ASSERT_EQ(plan.kernel, TESSERA_KERNEL_DECODE_SM90) << refusal(plan, "decode_sm90");
        EXPECT_EQ(plan.steps[0].block_n, keys == 1024 && !invariant ? 16 : 32) << keys << " keys";
      }
    }
  }
}

// Of a short call twice as many warps have a tile of half as many codes.
TEST(DecodeSm90, HasSmallTilesOfCodesInShortCalls) {
  for (const bool paged : {false, true}) {
    for (const std::int64_t keys : {1024, 8192}) {
      Problem problem;
      problem.q = problem.o = layout(bfloat16, {1, 1, 32, 128});
      problem.k = problem.v = layout(float8_e4m3, {1, keys, 8, 128});
      if (paged) {
        problem.k = problem.v = layout(float8_e4m3, {keys / 16, 16, 8, 128});
        problem.page_table = layout(int32, {1, keys / 16}), problem.seqused_k = layout(int32, {1});
      }
      const Plan plan = tessera::plan(problem, gpu());
      ASSERT_EQ(plan.kernel, TESSERA_KERNEL_DECODE_SM90) << refusal(plan, "decode_sm90");
      EXPECT_EQ(plan.steps[0].block_n, keys == 1024 ? 16 : 32) << paged;
    }
  }
}

// Another tile of K and V is under way while warps meet: often where work tiles are short, or cut into many parts
// whatever the batch.
TEST(DecodeSm90, HasTwoStagesWhereWarpsMeetOften) {
  struct Row {
    std::int64_t sequences, keys;
    bool invariant;
    int stages;
  };
  for (const Row& row :
       {Row{64, 2048, false, 2}, Row{64, 2048, true, 2}, Row{16, 4096, false, 1}, Row{16, 4096, true, 2},
        Row{64, 8192, false, 1}, Row{64, 8192, true, 2}, Row{1, 8192, false, 1}, Row{1, 8192, true, 1}}) {
    Problem problem;
    problem.q = problem.o = layout(bfloat16, {row.sequences, 1, 32, 128});
    problem.k = problem.v = layout(bfloat16, {row.sequences, row.keys, 8, 128});
    problem.batch_invariant = row.invariant;
    const Plan plan = tessera::plan(problem, gpu());
    ASSERT_EQ(plan.kernel, TESSERA_KERNEL_DECODE_SM90) << refusal(plan, "decode_sm90");
    EXPECT_EQ(plan.steps[0].num_stages, row.stages)
        << row.sequences << " x " << row.keys << ", invariant " << row.invariant;
    EXPECT_LE(plan.steps[0].smem_bytes, gpu().smem_bytes);
  }
}

TEST(DecodeSm90, ServesMoreRowsAndFewerKeysOnRequest) {
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_DECODE_SM90;
  Problem few_keys = decode_problem(128);
  few_keys.k = few_keys.v = layout(bfloat16, {4, 100, 8, 128});
  const Plan others = tessera::plan(few_keys, gpu());
  EXPECT_EQ(others.kernel, TESSERA_KERNEL_FWD_SM80);
  EXPECT_GT(estimate_us(others, "decode_sm90"), estimate_us(others, "fwd_sm80"));
  EXPECT_EQ(tessera::plan(few_keys, device).kernel, TESSERA_KERNEL_DECODE_SM90);
  few_keys.batch_invariant = 1;
  EXPECT_EQ(tessera::plan(few_keys, gpu()).kernel, TESSERA_KERNEL_DECODE_SM90)
      << "the longest sequence may be another's";
  Problem rows = decode_problem(128, 5);  // 20
  rows.batch_invariant = 1;
  EXPECT_NE(tessera::plan(rows, gpu()).kernel, TESSERA_KERNEL_DECODE_SM90) << "what mixed_sm90 gives the other kernel";
  EXPECT_EQ(tessera::plan(rows, device).kernel, TESSERA_KERNEL_DECODE_SM90);
}

TEST(DecodeSm90, TakesMasksByPositionSinksAlibiSoftcapAnyScalePagesAndPackedQueries) {
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_DECODE_SM90;
  Problem problem = decode_problem(128, 8);
  problem.causal = 1, problem.window_left = 300, problem.softcap = 30;
  problem.has_scale = 1, problem.scale = -0.5;
  problem.lse = layout(float32, {4, 32, 8});
  problem.sink = layout(float32, {32});
  problem.alibi_slopes = layout(float32, {4, 32});
  EXPECT_NO_THROW((void)tessera::plan(problem, device));
  set_pages(problem, 4 * 256, 1);
  EXPECT_NO_THROW((void)tessera::plan(problem, device));
  problem.q = problem.o = layout(bfloat16, {20, 32, 128});
  problem.lse = layout(float32, {32, 20});
  problem.page_table = layout(int32, {4, 256}), problem.seqused_k = layout(int32, {4});
  problem.cu_seqlens_q = layout(int32, {5}), problem.max_seqlen_q = 8;
  EXPECT_NO_THROW((void)tessera::plan(problem, device));
}

// Whatever masks.
TEST(DecodeSm90, TakesCausalFlagsAndTreesOfDraftedTokens) {
  for (const std::int64_t queries : {4, 8, 16, 17}) {
    for (const bool tree : {false, true}) {
      Problem problem = decode_problem(128, queries);
      if (tree) {
        problem.tree_mask = layout(int32, {4, queries, 1});
      } else {
        problem.causal_seqs = layout(boolean, {4});
      }
      Device device = gpu();
      device.kernel = TESSERA_KERNEL_DECODE_SM90;
      const Plan plan = tessera::plan(problem, device);
      EXPECT_EQ(plan.kernel, TESSERA_KERNEL_DECODE_SM90) << refusal(plan, "decode_sm90");
    }
  }
}

// Microseconds of a call by each kernel, an H200 on 2026-11-27 (docs/lab/decode_sm90.md): packed causal queries, all
// sequences with as many, keys in pages of 16. 0: not supported. fwd_sm90's times are those of a merge by combine, but
// for 1 x 1024 with 16 queries, which clusters merge (predicted, not measured).
struct FewQueries {
  std::int64_t heads, heads_kv, sequences, keys, head_dim, queries;
  double decode_sm90, fwd_sm80, fwd_sm90;
};
constexpr FewQueries kFewQueries[] = {
    {32, 8, 1, 8192, 128, 8, 18.3, 41.5, 17.0},       {32, 8, 1, 8192, 128, 32, 40.6, 64.0, 39.1},
    {32, 8, 1, 512, 128, 16, 9.6, 21.2, 9.7},         {32, 8, 1, 512, 128, 32, 10.4, 27.5, 12.2},
    {32, 8, 1, 1024, 128, 16, 11.0, 21.7, 10.4},      {32, 8, 1, 1024, 128, 32, 12.6, 26.3, 13.6},
    {32, 8, 1, 2048, 128, 32, 16.5, 30.1, 16.2},      {32, 8, 2, 8192, 128, 32, 70.6, 100.1, 56.1},
    {32, 8, 64, 2048, 128, 8, 185.6, 459.2, 135.6},   {32, 8, 64, 2048, 128, 16, 324.2, 582.8, 137.6},
    {32, 8, 64, 2048, 128, 48, 0, 725.4, 222.0},      {32, 8, 1, 131072, 128, 8, 167.0, 467.5, 137.5},
    {32, 8, 1, 131072, 128, 32, 524.2, 743.5, 239.1}, {32, 8, 64, 256, 128, 1, 24.8, 28.6, 0},
    {8, 8, 64, 256, 128, 1, 24.4, 27.3, 0},
};

// Within 5 % of the fastest. mixed_sm90 is fwd_sm90 here, but for 2 to 4 % of its time.
TEST(DecodeSm90, APlanTakesWhatWasFastestForFewQueries) {
  for (const FewQueries& cell : kFewQueries) {
    Problem problem;
    const std::int64_t pages = cell.keys / 16;
    problem.q = problem.o = layout(bfloat16, {cell.sequences * cell.queries, cell.heads, cell.head_dim});
    problem.k = problem.v = layout(bfloat16, {cell.sequences * pages, 16, cell.heads_kv, cell.head_dim});
    problem.cu_seqlens_q = layout(int32, {cell.sequences + 1}), problem.max_seqlen_q = cell.queries;
    problem.page_table = layout(int32, {cell.sequences, pages}), problem.seqused_k = layout(int32, {cell.sequences});
    problem.causal = 1, problem.max_seqlen_k = cell.keys;
    const Plan plan = tessera::plan(problem, gpu());
    const double chosen = plan.kernel == TESSERA_KERNEL_DECODE_SM90 ? cell.decode_sm90
                          : plan.kernel == TESSERA_KERNEL_FWD_SM80  ? cell.fwd_sm80
                                                                    : cell.fwd_sm90;
    double fastest = std::numeric_limits<double>::infinity();
    for (const double us : {cell.decode_sm90, cell.fwd_sm80, cell.fwd_sm90}) {
      if (us > 0) fastest = std::min(fastest, us);
    }
    SCOPED_TRACE(std::to_string(cell.heads) + "/" + std::to_string(cell.heads_kv) + " " +
                 std::to_string(cell.sequences) + " x " + std::to_string(cell.keys) + ", D " +
                 std::to_string(cell.head_dim) + ", " + std::to_string(cell.queries) + " queries: " + describe(plan));
    EXPECT_GT(chosen, 0);
    EXPECT_LE(chosen, 1.05 * fastest);
  }
}

// Where most sequences have a token a longer one's work tiles would leave their blocks without rows.
TEST(DecodeSm90, LeavesAFewLongerSequencesToMixedBatches) {
  Problem problem;
  problem.q = problem.o = layout(bfloat16, {64 + 8 * 12, 32, 128});
  problem.k = problem.v = layout(bfloat16, {72 * 128, 16, 8, 128});
  problem.cu_seqlens_q = layout(int32, {73}), problem.max_seqlen_q = 12;
  problem.page_table = layout(int32, {72, 128}), problem.seqused_k = layout(int32, {72});
  problem.causal = 1;
  const Plan plan = tessera::plan(problem, gpu());
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_MIXED_SM90);
  EXPECT_GT(estimate_us(plan, "decode_sm90"), estimate_us(plan, "mixed_sm90"));
}

// fwd_sm90 has the heads of a KV head in one tile, whose time does not depend on its rows: that is sooner than
// decode_sm90's work tiles.
TEST(FwdSm90, TakesFewQueriesOfGroupedHeadsWhereTheyFillTheGpu) {
  struct Row {
    std::int64_t sequences, queries, heads;
    tessera_kernel kernel;
  };
  for (const Row& row : {Row{16, 9, 32, TESSERA_KERNEL_FWD_SM90}, Row{16, 16, 32, TESSERA_KERNEL_FWD_SM90},
                         Row{16, 32, 16, TESSERA_KERNEL_FWD_SM90}, Row{16, 24, 8, TESSERA_KERNEL_FWD_SM90},
                         Row{1, 24, 8, TESSERA_KERNEL_DECODE_SM90}, Row{16, 17, 32, TESSERA_KERNEL_FWD_SM90},
                         Row{16, 63, 32, TESSERA_KERNEL_FWD_SM90}, Row{1, 16, 32, TESSERA_KERNEL_FWD_SM90},
                         Row{1, 17, 32, TESSERA_KERNEL_FWD_SM90}, Row{1, 32, 32, TESSERA_KERNEL_FWD_SM90},
                         Row{4, 32, 32, TESSERA_KERNEL_FWD_SM90}, Row{1, 33, 32, TESSERA_KERNEL_FWD_SM90},
                         Row{5, 8, 32, TESSERA_KERNEL_FWD_SM90}, Row{16, 4, 64, TESSERA_KERNEL_FWD_SM90},
                         Row{16, 8, 64, TESSERA_KERNEL_FWD_SM90}, Row{16, 9, 64, TESSERA_KERNEL_FWD_SM90}}) {
    Problem problem;
    problem.q = problem.o = layout(bfloat16, {row.sequences, row.queries, row.heads, 128});
    problem.k = problem.v = layout(bfloat16, {row.sequences, 8192, 8, 128});
    const Plan plan = tessera::plan(problem, gpu());
    EXPECT_EQ(plan.kernel, row.kernel) << row.sequences << " x " << row.queries << " x " << row.heads << ": "
                                       << refusal(plan, "decode_sm90") << "; " << refusal(plan, "fwd_sm90");
  }
}

// With batch_invariant the number of sequences does not decide.
TEST(FwdSm90, TakesFewQueriesOfAnyBatchAlikeWhereItMayNotMatter) {
  for (const std::int64_t queries : {5, 8, 20}) {
    std::set<std::int32_t> kernels;
    for (const std::int64_t sequences : {1, 3, 5, 16, 64}) {
      Problem problem;
      problem.q = problem.o = layout(bfloat16, {sequences, queries, 32, 128});
      problem.k = problem.v = layout(bfloat16, {sequences, 8192, 8, 128});
      problem.batch_invariant = 1;
      kernels.insert(tessera::plan(problem, gpu()).kernel);
    }
    EXPECT_EQ(kernels.size(), 1u) << queries;
  }
}

// Parts that do not depend on the batch: more of them, each with a place of its own.
TEST(DecodeSm90, ABatchThatMayNotMatterCostsWorkspace) {
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_DECODE_SM90;
  Problem problem = decode_problem(128);
  const std::int64_t bytes = tessera::plan(problem, device).workspace_bytes;
  problem.batch_invariant = 1;
  const Plan plan = tessera::plan(problem, device);
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_DECODE_SM90);
  EXPECT_GT(plan.workspace_bytes, 7 * bytes);
}

class DecodeSm90Refusal : public testing::TestWithParam<Refusal> {};

TEST_P(DecodeSm90Refusal, SaysWhy) {
  Problem problem = decode_problem(128);
  Device device = gpu();
  GetParam().spoil(problem, device);
  const Plan plan = tessera::plan(problem, device);
  EXPECT_NE(plan.kernel, TESSERA_KERNEL_DECODE_SM90);
  EXPECT_NE(refusal(plan, "decode_sm90").find(GetParam().reason), std::string::npos) << refusal(plan, "decode_sm90");
}

INSTANTIATE_TEST_SUITE_P(
    Row, DecodeSm90Refusal,
    testing::Values(
        Refusal{"Ampere", "compute capability 8.0, must be 9.0", [](Problem&, Device& d) { d.arch = 80; }},
        Refusal{"Float32", "float32, accepted float16, bfloat16",
                [](Problem& p, Device&) { p = decode_problem(64, 1, float32); }},
        Refusal{"HeadSize", "head size 264, at most 256", [](Problem& p, Device&) { p = decode_problem(264); }},
        Refusal{"Prompt", "33 queries x 4 heads a KV head, at most 128 rows",
                [](Problem& p, Device&) { p = decode_problem(128, 33); }},
        Refusal{"Bias", "bias: not supported",
                [](Problem& p, Device&) {
                  p.bias = layout(float32, {1, 1, 1, 8192});
                }},
        Refusal{"Mask", "mask: not supported",
                [](Problem& p, Device&) {
                  p.mask = layout(boolean, {1, 1, 1, 8192});
                }},
        Refusal{"Dropout", "dropout_p: not supported", [](Problem& p, Device&) { p.dropout_p = 0.5; }},
        Refusal{"RowStride", "k: rows start at no multiples of 16 bytes",
                [](Problem& p, Device&) { set_strides(p.k, 1, 1025); }},
        Refusal{"NoPages", "k: no pages", [](Problem& p, Device&) { set_pages(p, 0, 16); }},
        Refusal{"SharedMemory", "KiB of shared memory", [](Problem&, Device& d) { d.smem_bytes = 80 << 10; }}),
    [](const auto& row) { return std::string(row.param.name); });

// ---- mixed_sm90 -----------------------------------------------------------------------------------------------------

// Six sequences with at most 64 queries each, 32 heads over 8, keys in pages.
Problem step_problem(std::int64_t d = 128) {
  Problem problem;
  problem.q = problem.o = layout(bfloat16, {100, 32, d});
  problem.k = problem.v = layout(bfloat16, {1000, 16, 8, d});
  problem.page_table = layout(int32, {6, 256}), problem.seqused_k = layout(int32, {6});
  problem.cu_seqlens_q = layout(int32, {7}), problem.max_seqlen_q = 64;
  problem.causal = 1;
  return problem;
}

// Which work tiles the kernel for many rows has a list made on the GPU says.
TEST(MixedSm90, LaunchesAKernelForFewRowsBesideThatForMany) {
  Problem problem = step_problem();
  const Plan plan = tessera::plan(problem, gpu());
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_MIXED_SM90) << refusal(plan, "mixed_sm90");
  EXPECT_EQ(plan.decode_queries, 4) << "times 4 heads: the rows of a work";
  const auto all = launches(plan);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_STREQ(all[0].kernel, "live_tiles");
  EXPECT_STREQ(all[1].kernel, "fwd_sm90");
  EXPECT_STREQ(all[2].kernel, "decode_sm90");
  EXPECT_NE(describe(plan).find("sequences of at most 4 queries by decode_sm90, in a launch of its own"),
            std::string::npos);
  ASSERT_EQ(launches(plan, false).size(), 1u);
  EXPECT_STREQ(launches(plan, false)[0].kernel, "fwd_sm80_persistent") << "all sequences, where rows are not aligned";
}

// Where most sequences have few of the 100 queries; else fwd_sm90 alone, with heads in one tile.
TEST(MixedSm90, TakesChunksOfFewQueries) {
  Problem problem = step_problem();
  for (const std::int64_t queries : {28, 32}) {
    problem.max_seqlen_q = queries;
    EXPECT_EQ(tessera::plan(problem, gpu()).kernel, TESSERA_KERNEL_FWD_SM90) << queries;
  }
  for (const std::int64_t queries : {40, 63}) {
    problem.max_seqlen_q = queries;
    const Plan plan = tessera::plan(problem, gpu());
    EXPECT_EQ(plan.kernel, TESSERA_KERNEL_MIXED_SM90) << queries << ": " << refusal(plan, "mixed_sm90");
    const auto all = launches(plan);
    ASSERT_EQ(all.size(), 3u);
    EXPECT_STREQ(all[1].kernel, "fwd_sm90");
  }
  problem.max_seqlen_q = 8;
  EXPECT_EQ(tessera::plan(problem, gpu()).kernel, TESSERA_KERNEL_FWD_SM90) << "32 rows, in one tile";
  problem.batch_invariant = 1;
  EXPECT_EQ(tessera::plan(problem, gpu()).kernel, TESSERA_KERNEL_MIXED_SM90) << "as beside longer chunks";
}

// Microseconds of tokens, one each of 2048 to 65536 keys, and chunks in one call, an H100 at dbf9cac
// (bench/results/2026-11-25-h100-serving-3.json): the plan's choice is within 5 % of the fastest.
TEST(MixedSm90, APlanTakesWhatWasFastest) {
  struct Row {
    std::int64_t tokens, chunks, queries, keys;
    double fwd_sm80, fwd_sm90, mixed_sm90;
  };
  for (const Row& row : {Row{16, 1, 512, 4096, 873.0, 256.0, 138.0}, Row{16, 1, 32, 1024, 67.2, 61.3, 42.2},
                         Row{64, 4, 256, 2048, 1138, 557.3, 242.3}, Row{64, 1, 512, 8192, 4125, 2179, 767.8},
                         Row{128, 2, 1024, 8192, 2137, 884.5, 531.6}, Row{16, 1, 16, 4096, 312.2, 217.5, 119.9},
                         Row{16, 8, 16, 4096, 520.2, 267.7, 181.9}, Row{64, 1, 63, 8192, 715.7, 737.6, 234.6},
                         Row{64, 8, 12, 2048, 452.0, 556.6, 237.8}, Row{16, 1, 48, 32768, 1235, 1650, 856.8}}) {
    Problem problem;
    const std::int64_t batch = row.tokens + row.chunks, pages = row.keys / 16;
    problem.q = problem.o = layout(bfloat16, {row.tokens + row.chunks * row.queries, 32, 128});
    problem.k = problem.v = layout(bfloat16, {batch * pages, 16, 8, 128});
    problem.cu_seqlens_q = layout(int32, {batch + 1}), problem.max_seqlen_q = row.queries;
    problem.page_table = layout(int32, {batch, pages}), problem.seqused_k = layout(int32, {batch});
    problem.causal = 1, problem.max_seqlen_k = row.keys;
    const Plan plan = tessera::plan(problem, gpu());
    ASSERT_NE(plan.kernel, TESSERA_KERNEL_DECODE_SM90) << describe(plan);
    const double chosen = plan.kernel == TESSERA_KERNEL_FWD_SM80   ? row.fwd_sm80
                          : plan.kernel == TESSERA_KERNEL_FWD_SM90 ? row.fwd_sm90
                                                                   : row.mixed_sm90;
    EXPECT_LE(chosen, 1.05 * std::min({row.fwd_sm80, row.fwd_sm90, row.mixed_sm90}))
        << row.tokens << " + " << row.chunks << " x " << row.queries << " of " << row.keys << ": " << describe(plan);
  }
}

// Chunks of few queries beside tokens: both by decode_sm90, each in a launch of its own, in which all of the GPU reads
// keys. Beside few sequences of few keys fwd_sm80 has all of them, and with batch_invariant a sequence's kernel does
// not depend on how many others there are.
TEST(MixedSm90, DecodesChunksOfFewQueriesBesideTokens) {
  for (const std::int64_t sequences : {5, 17, 72}) {
    Problem problem;
    problem.q = problem.o = layout(bfloat16, {sequences - 1 + 32, 32, 128});
    problem.k = problem.v = layout(bfloat16, {sequences * 256, 16, 8, 128});
    problem.cu_seqlens_q = layout(int32, {sequences + 1}), problem.max_seqlen_q = 32;
    problem.page_table = layout(int32, {sequences, 256}), problem.seqused_k = layout(int32, {sequences});
    problem.causal = 1;
    const Plan plan = tessera::plan(problem, gpu());
    EXPECT_EQ(plan.kernel, TESSERA_KERNEL_MIXED_SM90) << refusal(plan, "mixed_sm90");
    const auto all = launches(plan);
    ASSERT_EQ(all.size(), 2u) << sequences;
    for (const auto& launch : all) EXPECT_STREQ(launch.kernel, "decode_sm90") << sequences;
  }
  Problem problem;
  problem.q = problem.o = layout(bfloat16, {36, 32, 128});
  problem.k = problem.v = layout(bfloat16, {20480, 16, 8, 128});
  problem.cu_seqlens_q = layout(int32, {6}), problem.max_seqlen_q = 32;
  problem.page_table = layout(int32, {5, 4096}), problem.seqused_k = layout(int32, {5});
  problem.causal = 1;
  const Plan plan = tessera::plan(problem, gpu());
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_MIXED_SM90) << refusal(plan, "mixed_sm90");
  EXPECT_EQ(plan.decode_queries, 4);
  const auto all = launches(plan);
  ASSERT_EQ(all.size(), 2u);
  for (const auto& launch : all) EXPECT_STREQ(launch.kernel, "decode_sm90");
  problem.max_seqlen_k = 255;
  EXPECT_EQ(tessera::plan(problem, gpu()).kernel, TESSERA_KERNEL_FWD_SM80);
  problem.max_seqlen_k = 0, problem.batch_invariant = 1;
  const Plan invariant = tessera::plan(problem, gpu());
  EXPECT_EQ(invariant.kernel, TESSERA_KERNEL_MIXED_SM90);
  EXPECT_STRNE(launches(invariant)[0].kernel, "decode_sm90");
}

// The prefill kernel's tile is that of the longest chunk, not of a mean that tokens bring down.
TEST(MixedSm90, HasTheTileOfChunksAlone) {
  Problem problem = step_problem();
  problem.max_seqlen_q = 1000;
  problem.q = problem.o = layout(bfloat16, {2000, 32, 128});
  const Plan mixed = tessera::plan(problem, gpu());
  EXPECT_EQ(mixed.kernel, TESSERA_KERNEL_MIXED_SM90);
  problem.page_table = layout(int32, {2, 256}), problem.seqused_k = layout(int32, {2});
  problem.cu_seqlens_q = layout(int32, {3});
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_FWD_SM90;
  const Plan alone = tessera::plan(problem, device);
  EXPECT_EQ(mixed.steps[0].block_m, alone.steps[0].block_m);
  EXPECT_EQ(mixed.steps[0].block_n, alone.steps[0].block_n);
}

TEST(MixedSm90, KeepsBothKernelsWorkspaces) {
  const Plan mixed = tessera::plan(step_problem(), gpu());
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_FWD_SM90;
  Problem unsplit = step_problem();  // as in a mixed batch
  unsplit.batch_invariant = 1;
  const Plan many = tessera::plan(unsplit, device);
  device.kernel = TESSERA_KERNEL_DECODE_SM90;
  Problem one_each = step_problem();
  one_each.max_seqlen_q = 4;
  const Plan few = tessera::plan(one_each, device);
  EXPECT_GE(mixed.shared_bytes, many.shared_bytes + few.shared_bytes);
  EXPECT_LT(mixed.shared_bytes, many.shared_bytes + few.shared_bytes + 1024) << "the list of six sequences' work tiles";
  EXPECT_GT(mixed.steps[0].num_items, few.steps[0].num_items);
}

class MixedSm90Refusal : public testing::TestWithParam<Refusal> {};

TEST_P(MixedSm90Refusal, SaysWhy) {
  Problem problem = step_problem();
  Device device = gpu();
  GetParam().spoil(problem, device);
  const Plan plan = tessera::plan(problem, device);
  EXPECT_NE(plan.kernel, TESSERA_KERNEL_MIXED_SM90);
  EXPECT_NE(refusal(plan, "mixed_sm90").find(GetParam().reason), std::string::npos) << refusal(plan, "mixed_sm90");
}

INSTANTIATE_TEST_SUITE_P(
    Row, MixedSm90Refusal,
    testing::Values(
        Refusal{"Ampere", "compute capability 8.0, must be 9.0", [](Problem&, Device& d) { d.arch = 80; }},
        Refusal{"Dense", "queries are not packed", [](Problem& p, Device&) { p = decode_problem(128, 100); }},
        Refusal{"NoCache", "no cache: neither page_table nor seqused_k",
                [](Problem& p, Device&) {
                  p.k = p.v = layout(bfloat16, {100, 8, 128});
                  p.page_table = p.seqused_k = {}, p.cu_seqlens_k = layout(int32, {7});
                }},
        Refusal{"ManyHeads", "more than 16 heads a KV head",
                [](Problem& p, Device&) {
                  p.k = p.v = layout(bfloat16, {1000, 16, 1, 128});
                }},
        Refusal{"FewQueries", "no sequence has more than 4 queries", [](Problem& p, Device&) { p.max_seqlen_q = 4; }},
        Refusal{"OneSequence", "one sequence",
                [](Problem& p, Device&) {
                  p.page_table = layout(int32, {1, 256}), p.seqused_k = layout(int32, {1});
                  p.cu_seqlens_q = layout(int32, {2});
                }},
        Refusal{"Dropout", "dropout_p: not supported", [](Problem& p, Device&) { p.dropout_p = 0.5; }}),
    [](const auto& row) { return std::string(row.param.name); });

// With few queries a sequence fwd_sm80 serves all of them in one launch.
TEST(MixedSm90, LeavesFewQueriesToOneKernel) {
  Problem problem = step_problem();
  problem.max_seqlen_q = 8;
  const Plan plan = tessera::plan(problem, gpu());
  EXPECT_NE(plan.kernel, TESSERA_KERNEL_MIXED_SM90);
  EXPECT_GT(estimate_us(plan, "mixed_sm90"), estimate_us(plan, plan.family));
}

// ---- fwd_sm80: bulk copies -----------------------------------------------------------------------------------------

// Of the mma.sync forward kernels at D = 128, which one a plan means shows in its shared memory: tiles and, by bulk
// copies, four barriers a stage; else rows spread over persistent blocks, which keep two works' bounds.
constexpr std::int64_t kTiles128 = (128 + 4 * 64) * (128 * 2 + 16);
constexpr std::int64_t kTwoWorks = 2 * 104;

std::int64_t smem_of_sm80(const Problem& problem, std::int32_t arch) {
  Device device = gpu(arch);
  device.kernel = TESSERA_KERNEL_FWD_SM80;
  return tessera::plan(problem, device).steps[0].smem_bytes;
}

TEST(FwdSm80, TakesBulkCopiesFromHopperOn) {
  const Problem problem = large_problem(128, 128);
  EXPECT_EQ(smem_of_sm80(problem, 89), kTiles128 + kTwoWorks);
  for (const std::int32_t arch : {90, 100, 120}) EXPECT_EQ(smem_of_sm80(problem, arch), kTiles128 + 2 * 4 * 8) << arch;
}

TEST(FwdSm80, TakesNoBulkCopiesWhereTmaDoesNotTakeTheLayout) {
  Problem shared_heads = large_problem(128, 128);
  shared_heads.k.strides[2] = 0;  // every head's keys are the same
  EXPECT_EQ(smem_of_sm80(shared_heads, 90), kTiles128 + kTwoWorks);
  Problem pages = large_problem(128, 128);
  set_pages(pages, 64, 64);
  EXPECT_EQ(smem_of_sm80(pages, 90), kTiles128 + kTwoWorks);
}

TEST(FwdSm80, TakesNoBulkCopiesWhereToldSo) {
  setenv("TESSERA_FWD_SM80_BULK", "0", 1);
  EXPECT_EQ(smem_of_sm80(large_problem(128, 128), 90), kTiles128 + kTwoWorks);
  unsetenv("TESSERA_FWD_SM80_BULK");
}

// ---- a plan's description of its launches ---------------------------------------------------------------------------

TEST(PlannedLaunches, AreTheKernelsThatRun) {
  const Plan plan = tessera::plan(large_problem(128, 128), gpu());
  const auto aligned = launches(plan);
  ASSERT_EQ(aligned.size(), 1u);
  EXPECT_STREQ(aligned[0].kernel, "fwd_sm90");
  EXPECT_EQ(aligned[0].smem_bytes, plan.steps[0].smem_bytes);
  EXPECT_EQ(aligned[0].threads, 32 * plan.steps[0].num_warps);
  EXPECT_NE(std::string(aligned[0].config).find(".block_n = " + std::to_string(plan.steps[0].block_n)),
            std::string::npos);
  const auto unaligned = launches(plan, false);
  ASSERT_EQ(unaligned.size(), 1u);
  EXPECT_STREQ(unaligned[0].kernel, "fwd_sm80") << "which loads by any width";
  EXPECT_NE(std::string(unaligned[0].config).find(".aligned = false"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(json(plan))["launches_unaligned"][0]["config"], unaligned[0].config);
  tessera_launch none;
  EXPECT_STREQ(tessera_plan_launch(&plan, 1, 1, &none).message, "index: 1, the plan has 1 launches, counted from 0");
  const std::string text = describe(plan);
  EXPECT_NE(text.find("where data is not aligned to 16 bytes:"), std::string::npos) << text;
  EXPECT_NE(text.find("fwd_sm90, "), std::string::npos) << text;
}

TEST(PlannedLaunches, NameEachKernelOfAFamily) {
  EXPECT_STREQ(launches(tessera::plan(large_problem(128, 128), gpu(80)))[0].kernel, "fwd_sm80_persistent");
  EXPECT_STREQ(launches(tessera::plan(large_problem(256, 256), gpu(100)))[0].kernel, "fwd_sm80_pairs");
}

TEST(PlannedLaunches, OfSplitKeysEndWithTheMerge) {
  Problem decode = large_problem(128, 128);
  decode.q = decode.o = layout(bfloat16, {1, 1, 16, 128});
  decode.k = decode.v = layout(bfloat16, {1, 16384, 4, 128});
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_FWD_SM80;
  const Plan plan = tessera::plan(decode, device);
  ASSERT_GT(plan.steps[0].num_splits, 1);
  const auto parts_and_merge = launches(plan);
  ASSERT_EQ(parts_and_merge.size(), 2u);
  EXPECT_EQ(parts_and_merge[0].blocks, plan.steps[0].num_items);
  EXPECT_STREQ(parts_and_merge[1].kernel, "combine");
}

// ---- fwd_sm80: the parts that keys come in --------------------------------------------------------------------------

struct SplitRow {
  std::int64_t batch, heads_kv, d, keys;
  std::int32_t parts;
};
std::ostream& operator<<(std::ostream& out, const SplitRow& row) {
  return out << "batch " << row.batch << " heads_kv " << row.heads_kv << " d " << row.d << " keys " << row.keys;
}

Problem decode_problem(const SplitRow& row) {
  Problem problem;
  problem.q = problem.o = layout(bfloat16, {row.batch, 1, 32, row.d});
  problem.k = problem.v = layout(bfloat16, {row.batch, row.keys, row.heads_kv, row.d});
  return problem;
}

class FwdSm80Splits : public testing::TestWithParam<SplitRow> {};

TEST_P(FwdSm80Splits, FillTheGpuWithTheFewestParts) {
  const SplitRow& row = GetParam();
  Problem problem = decode_problem(row);
  Device device = gpu();
  device.kernel = TESSERA_KERNEL_FWD_SM80;
  const Plan plan = tessera::plan(problem, device);
  EXPECT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM80);
  EXPECT_EQ(plan.steps[0].num_splits, row.parts);
  EXPECT_EQ(plan.steps[0].num_items, row.parts * row.heads_kv * row.batch);
  EXPECT_EQ(plan.shared_bytes > 0, row.parts > 1);
  problem.batch_invariant = 1;
  EXPECT_EQ(tessera::plan(problem, device).steps[0].num_splits, 1) << "the same sums whatever else is in the batch";
}

// 132 multiprocessors hold 4 blocks each at d = 128, 3 at 256.
INSTANTIATE_TEST_SUITE_P(
    Row, FwdSm80Splits,
    testing::Values(SplitRow{1, 8, 128, 128, 1}, SplitRow{1, 8, 128, 8192, 32},  // of 256 keys, the least
                    SplitRow{1, 8, 128, 65536, 64}, SplitRow{8, 8, 128, 8192, 8}, SplitRow{64, 8, 128, 8192, 1},
                    SplitRow{64, 32, 128, 8192, 1},   // 3.9 rounds
                    SplitRow{64, 8, 256, 8192, 3}));  // 1.3 rounds would leave two thirds of the second idle

// ---- a GPU that is not here -----------------------------------------------------------------------------------------

TEST(DescribedGpu, IsTheUsualOneOfItsArchitecture) {
  for (const std::int32_t arch : {80, 86, 87, 89, 90, 100, 103, 110, 120, 121}) {
    const Device described = cuda_arch(arch);
    EXPECT_EQ(described.arch, arch);
    EXPECT_GT(described.cores, 0);
    EXPECT_GE(described.smem_bytes, 99 << 10);
    EXPECT_STREQ(tessera_kernel_name(plan(large_problem(128, 128), described).kernel),
                 arch == 90 ? "fwd_sm90" : "fwd_sm80");
  }
  for (const std::int32_t arch : {0, 75, 81, 130, -1}) {
    Device untouched = cuda_arch(90);
    const tessera_status status = tessera_device_cuda_arch(arch, &untouched);
    EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(status.message).find("accepted 80, 86"), std::string::npos) << status.message;
    EXPECT_EQ(untouched.arch, 90);
  }
  EXPECT_EQ(tessera_device_cuda_arch(90, nullptr).code, TESSERA_INVALID_ARGUMENT);
}

TEST(DescribedGpu, PlansSayThatItIsNotHere) {
  Device device = cuda_arch(90);
  EXPECT_NE(
      describe(plan(large_problem(128, 128), device)).find("none of this machine's: compute capability 9.0 (H100)"),
      std::string::npos);
  device.name[0] = '\0';
  device.cores = 78;
  EXPECT_NE(describe(plan(large_problem(128, 128), device)).find("compute capability 9.0, 78 multiprocessors"),
            std::string::npos);
}

TEST(DescribedGpu, OneOfThisMachinesIsNamed) {
  Device device = cuda_arch(90);
  device.ordinal = 3;
  std::strcpy(device.name, "a GPU");
  const std::string text = describe(plan(large_problem(128, 128), device));
  EXPECT_NE(text.find("GPU 3: a GPU, compute capability 9.0, 132 multiprocessors"), std::string::npos) << text;
}

TEST(DescribedGpu, ExecutesNothing) {
  Problem problem;
  problem.q = problem.k = problem.v = problem.o = layout(float16, {1, 8, 1, 64});
  const Plan planned = plan(problem, cuda_arch(90));
  std::vector<std::uint16_t> data(8 * 64);
  std::vector<std::byte> workspace(workspace_bytes(planned));
  tessera_buffers buffers{};
  buffers.q = buffers.k = buffers.v = data.data();
  std::vector<std::uint16_t> o(8 * 64, 7);
  buffers.o = o.data();
  const tessera_status status = tessera_forward(&planned, &buffers, workspace.data(), workspace.size(), nullptr);
  EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(status.message).find("device.ordinal: -1"), std::string::npos) << status.message;
  EXPECT_EQ(o, std::vector<std::uint16_t>(8 * 64, 7));
}

}  // namespace
}  // namespace tessera::test
