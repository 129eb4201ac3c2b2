// fwd_sm90's table of tiles, and the variable that overrides it.
#include "cuda/families/fwd_sm90_tiles.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/cuda.hpp"
#include "cuda/kernels.hpp"
#include "cuda/runtime/environment.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "tessera/tensor.hpp"

namespace tessera::cuda {
namespace {

constexpr int64_t kHopperSmemBytes = 227 << 10, kMany = 1 << 20;
constexpr Area kAreas[] = {Area::kFull, Area::kCausal, Area::kPartial, Area::kOptions};

tessera_device hopper() {
  tessera_device device{};
  device.backend = TESSERA_BACKEND_CUDA;
  device.arch = 90, device.cores = 132, device.threads = 1, device.smem_bytes = kHopperSmemBytes;
  return device;
}

constexpr int64_t kHeads = 16;

// bfloat16, as many keys as queries.
tessera_problem dense_problem(int64_t batch, int64_t length, int64_t head_dim) {
  tessera_problem problem;
  tessera_problem_init(&problem);
  problem.q = problem.k = problem.v = problem.o = layout(bfloat16, {batch, length, kHeads, head_dim});
  return problem;
}

std::vector<KernelSpec> launches_of(const tessera_plan& plan) {
  LaunchList launches;
  const tessera_status status = lower(plan, tessera_buffers{}, nullptr, launches);
  EXPECT_EQ(status.code, TESSERA_OK) << status.message;
  return collect(launches);
}

void expect_fits_shared_memory(const Sm90Tile& tile) {
  FwdSm90Config config{};
  config.dtype = Dtype::kBFloat16;
  config.head_dim = tile.head_dim, config.head_dim_v = tile.head_dim_v;
  tile.apply(config);
  EXPECT_LE(smem_bytes(config), kHopperSmemBytes) << config_text(config);
}

TEST(CudaTiles, EveryRowFitsSharedMemory) {
  for (const Sm90Tile& tile : sm90_tiles()) expect_fits_shared_memory(tile);
}

TEST(CudaTiles, EveryProblemHasARow) {
  for (const int64_t head_dim : {1, 64, 65, 128, 192, 256})
    for (const int64_t head_dim_v : {1, 64, 65, 128, 192, 256})
      for (const Area area : kAreas)
        for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{4096}, INT64_MAX}) {
          const auto tile = find_sm90_tile({head_dim, head_dim_v, area, rows, kMany});
          ASSERT_TRUE(tile) << head_dim << " " << head_dim_v << " " << static_cast<int>(area) << " " << rows;
          EXPECT_EQ(tile->area, area);
          EXPECT_GE(tile->head_dim, head_dim);
          EXPECT_GE(tile->head_dim_v, head_dim_v);
          EXPECT_LE(tile->rows, rows);
        }
  EXPECT_FALSE(find_sm90_tile({257, 64, Area::kFull, 4096, kMany}));
}

TEST(CudaTiles, AStaircaseHasNoClusters) {
  for (const Sm90Tile& tile : sm90_tiles()) {
    for (const bool causal : {false, true}) {
      FwdSm90Config config{};
      config.varying_tile_cost = causal;
      tile.apply(config);
      EXPECT_EQ(config.cluster, causal ? 1 : tile.cluster) << tile.head_dim << " " << tile.head_dim_v;
    }
  }
}

// A row after one that fits everything it fits is never chosen.
TEST(CudaTiles, EveryRowIsTaken) {
  for (const Sm90Tile& tile : sm90_tiles()) {
    const auto found = find_sm90_tile({tile.head_dim, tile.head_dim_v, tile.area, tile.rows, kMany});
    const bool taken =
        found && found->rows == tile.rows && found->head_dim == tile.head_dim && found->head_dim_v == tile.head_dim_v;
    EXPECT_TRUE(taken) << tile.head_dim << " " << tile.head_dim_v << " from " << tile.rows;
  }
}

// Where whole tiles would leave multiprocessors idle, half ones, of about the same shared memory.
TEST(CudaTiles, FewRowsHaveHalfTiles) {
  for (const Area area : kAreas) {
    const Sm90Tile whole = *find_sm90_tile({64, 64, area, 512, kMany});
    ASSERT_TRUE(whole.halved());
    const int64_t block_m = whole.consumers * 64, few = area == Area::kCausal ? block_m : block_m / 2;
    EXPECT_EQ(find_sm90_tile({64, 64, area, 512, few})->consumers, whole.consumers / 2);
    EXPECT_EQ(find_sm90_tile({64, 64, area, 512, few})->block_n, whole.block_n * 2);
    EXPECT_EQ(find_sm90_tile({64, 64, area, 512, few + 1})->consumers, whole.consumers);
  }
  for (const Sm90Tile& tile : sm90_tiles()) {
    const auto half = tile.halved();
    ASSERT_EQ(half.has_value(), tile.consumers == 4);
    if (half) expect_fits_shared_memory(*half);
  }
  // Which of them it is decides the last bits.
  const tessera_device device = hopper();
  for (const bool invariant : {false, true}) {
    tessera_problem problem = dense_problem(1, 1024, 64);
    problem.batch_invariant = invariant;
    tessera_plan plan;
    ASSERT_EQ(tessera_make_plan(&problem, &device, &plan).code, TESSERA_OK);
    EXPECT_EQ(plan.steps[0].block_m, invariant ? 256 : 128);
  }
}

// What dense problems are compiled for knows nothing of packed batches and of key lengths.
TEST(CudaSm90Kernel, IsForUnevenSequencesWhereThereAreSome) {
  constexpr int64_t kBatch = 4, kLength = 4096, kHeadDim = 128;
  const tessera_problem dense = dense_problem(kBatch, kLength, kHeadDim);
  tessera_problem used = dense, packed = dense;
  used.seqused_k = layout(int32, {kBatch});
  packed.q = packed.k = packed.v = packed.o = layout(bfloat16, {kBatch * kLength, kHeads, kHeadDim});
  packed.cu_seqlens_q = packed.cu_seqlens_k = layout(int32, {kBatch + 1});
  const tessera_device device = hopper();
  for (const tessera_problem& problem : {dense, used, packed}) {
    tessera_plan plan;
    const tessera_status planned = tessera_make_plan(&problem, &device, &plan);
    ASSERT_EQ(planned.code, TESSERA_OK) << planned.message;
    ASSERT_EQ(plan.kernel, TESSERA_KERNEL_FWD_SM90);
    const std::vector<KernelSpec> launched = launches_of(plan);
    ASSERT_EQ(launched.size(), 1u);
    const bool varlen = problem.seqused_k.rank + problem.cu_seqlens_q.rank > 0;
    EXPECT_NE(launched[0].config.find(varlen ? ".varlen = true" : ".varlen = false"), std::string::npos)
        << launched[0].config;
  }
}

class CudaForcedTile : public testing::Test {
 protected:
  void TearDown() override { unsetenv(kForcedTile); }
};

// The columns after the first four of a row, as the search writes them.
std::string text_of(const Sm90Tile& tile) {
  FwdSm90Config config{};
  tile.apply(config);
  std::string text;
  for (const int value :
       {config.block_n, config.consumers, config.k_stages, config.v_stages, config.q_stages, config.cluster}) {
    text += (text.empty() ? "" : ",") + std::to_string(value);
  }
  return text;
}

TEST_F(CudaForcedTile, StandsForTheTable) {
  for (const std::string text : {"80,3,3,3,3,1", "128,2,2,2,2,2", "16,2,1,8,8,1"}) {
    setenv(kForcedTile, text.c_str(), 1);
    const auto tile = find_sm90_tile({64, 64, Area::kFull, 512, kMany});
    ASSERT_TRUE(tile) << text;
    EXPECT_EQ(text_of(*tile), text);
  }
}

// Only the plan reads the environment: the launch is the planned one.
TEST_F(CudaForcedTile, StaysThePlansOwn) {
  const tessera_device device = hopper();
  const tessera_problem problem = dense_problem(4, 4096, 128);

  setenv(kForcedTile, "80,3,3,2,3,1", 1);
  tessera_plan plan;
  const tessera_status planned = tessera_make_plan(&problem, &device, &plan);
  ASSERT_EQ(planned.code, TESSERA_OK) << planned.message;
  setenv(kForcedTile, "128,2,2,2,2,1", 1);
  std::vector<KernelSpec> launched = launches_of(plan);
  ASSERT_EQ(launched.size(), 1u);
  EXPECT_NE(launched[0].config.find(".block_n = 80, .consumers = 3, .k_stages = 3, .v_stages = 2, .q_stages = 3"),
            std::string::npos)
      << launched[0].config;
}

TEST_F(CudaForcedTile, IsNoneWhenItIsNoTile) {
  for (const char* text : {"128", "128,2,2,2,2", "128,2,2,2,2,1,", "128,2,2,2,2,1,1", "128;2;2;2;2;1", "128,2,2,2,2,1x",
                           "100,2,2,2,2,1", "128,5,2,2,5,1", "128,3,2,2,2,1", "128,3,2,2,4,1", "128,2,0,2,2,1",
                           "-128,2,2,2,2,1", "128,2,2,2,2,0", "128,2,2,2,2,3", "no"}) {
    setenv(kForcedTile, text, 1);
    EXPECT_FALSE(find_sm90_tile({64, 64, Area::kFull, 512, kMany})) << text;
  }
}

}  // namespace
}  // namespace tessera::cuda
