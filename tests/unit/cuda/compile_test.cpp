// Compiles the prebuilt kernels of every architecture: no spills, stack or registers beyond the limits of their row
// (slightly more spills and stack by another compiler than the rows'), and no wgmma that ptxas serialises.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/cuda.hpp"
#include "cuda/families/fwd_sm90_tiles.hpp"
#include "cuda/kernels.hpp"
#include "cuda/prebuilt.hpp"
#include "cuda/runtime/launch_list.hpp"
#include "cuda/runtime/nvrtc.hpp"
#include "tessera/tensor.hpp"

namespace tessera::cuda {
namespace {

// What costs as much as serialised products and is not called so. C7508: registers stay as they were at the launch;
// C7517: a wait that the source does not contain, where accumulators in flight are accessed.
std::string hidden_loss(const std::string& log) {
  for (const char* words : {"'setmaxnreg' ignored", "warpgroup.wait is injected"}) {
    if (log.find(words) != std::string::npos) return words;
  }
  return "";
}

// Every `parts`-th of an architecture's kernels.
struct Rows {
  int32_t arch;
  size_t part, parts;
};

class CudaCompile : public testing::TestWithParam<Rows> {};

TEST_P(CudaCompile, StaysWithinItsRow) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  const auto [arch, part, parts] = GetParam();
  const bool rows_compiler = compiler.version == kRowsCompiler;
  const int32_t more_spill = rows_compiler ? 0 : kOtherSpillBytes, more_stack = rows_compiler ? 0 : kOtherStackBytes;
  const std::vector<PrebuiltKernel> kernels = prebuilt_kernels(arch);
  for (size_t n = part - 1; n < kernels.size(); n += parts) {
    const PrebuiltKernel& kernel = kernels[n];
    SCOPED_TRACE(std::string(kernel.spec.name) + "<" + kernel.spec.config + "> for " + target_name(arch));
    Binary binary;
    std::string log;
    const tessera_status status = compile_kernel(source_of(kernel.spec), symbol_of(kernel.spec), arch, binary, &log);
    if (status.code != TESSERA_OK) {
      ADD_FAILURE() << status.message << "\n" << log;
      continue;
    }
    EXPECT_LE(binary.registers, kernel.limits.registers);
    EXPECT_LE(binary.spill_bytes, kernel.limits.spill_bytes + more_spill) << log;
    EXPECT_LE(binary.stack_bytes, kernel.limits.stack_bytes + more_stack) << log;
    EXPECT_EQ(binary.wgmma_serialized, 0) << log;
    EXPECT_EQ(hidden_loss(log), "") << log;
    EXPECT_EQ(binary.arch, arch) << "NVRTC " << version_text(compiler.version) << " compiles for an older one";
  }
}

// ptxas has a report on code alone. Hopper has a third of all kernels, and the longest.
std::vector<Rows> prebuilt_rows() {
  std::vector<Rows> rows;
  for (const Target& target : prebuilt_targets()) {
    const size_t parts = target.arch == 90 ? 4 : 1;
    for (size_t part = 1; part <= parts && !target.ptx; ++part) rows.push_back({target.arch, part, parts});
  }
  return rows;
}

std::string name_of(const testing::TestParamInfo<Rows>& rows) {
  const auto [arch, part, parts] = rows.param;
  return target_name(arch) + (parts > 1 ? "_" + std::to_string(part) + "_of_" + std::to_string(parts) : "");
}

INSTANTIATE_TEST_SUITE_P(Prebuilt, CudaCompile, testing::ValuesIn(prebuilt_rows()), name_of);

// Every row of fwd_sm90's table, whole and halved, also those that no prebuilt kernel has.
std::vector<Sm90Tile> whole_and_halved() {
  std::vector<Sm90Tile> tiles;
  for (const Sm90Tile& tile : sm90_tiles()) {
    tiles.push_back(tile);
    if (const auto half = tile.halved()) tiles.push_back(*half);
  }
  return tiles;
}

// A row for options serves them all, and each is a kernel of its own.
std::vector<ScoreConfig> scores_of(const Sm90Tile& tile) {
  if (tile.area != Area::kOptions) return {ScoreConfig{}};
  std::vector<ScoreConfig> scores(6);
  scores[0].softcap = scores[1].alibi = scores[2].dropout = scores[3].mask = scores[4].bias = scores[5].bias = true;
  scores[4].bias_dtype = Dtype::kBFloat16;  // and of the last one float32
  return scores;
}

// A work tile's bounds, which bias and causal sequences of any length push out of registers outside the loop over the
// keys. Most kernels spill at most 160 bytes. Packed rows with a bias and three consumers spill 476 at head size 96
// (368 until the scheduler of other warps had one loop), 200 at 128, and 224 at 64, where a row may be huge: to
// improve.
constexpr int64_t kMostOptionSpillBytes = 476;

class CudaCompileSm90Tile : public testing::TestWithParam<Sm90Tile> {};

TEST_P(CudaCompileSm90Tile, OverlapsItsProducts) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  constexpr int32_t kArch = 90;
  const Sm90Tile& tile = GetParam();
  struct Kind {
    bool causal, varlen;
    int page_rows;
  };
  // Dense, varlen, by boxes of 16 rows of a page, and of a whole block.
  for (const auto& [causal, varlen, page_rows] :
       {Kind{false, false, 0}, Kind{true, false, 0}, Kind{false, true, 0}, Kind{true, true, 0}, Kind{false, true, 16},
        Kind{true, true, 16}, Kind{true, true, tile.block_n}}) {
    if (tile.area == (causal ? Area::kFull : Area::kCausal)) continue;  // packed batches are varlen, and may be causal
    if (tile.area == Area::kOptions && !(causal && page_rows == 16))
      continue;  // which has the most beside in registers
    for (const ScoreConfig& score : scores_of(tile)) {
      FwdSm90Config config{};
      config.dtype = Dtype::kBFloat16;
      config.head_dim = tile.head_dim, config.head_dim_v = tile.head_dim_v;
      config.varying_tile_cost = causal, config.varlen = varlen, config.score = score;
      tile.apply(config);
      if (page_rows > 0) config.page_rows = page_rows, config.cluster = 1;
      const KernelSpec spec = spec_of(config);
      SCOPED_TRACE(spec.config);
      Binary binary;
      std::string log;
      const tessera_status status = compile_kernel(source_of(spec), symbol_of(spec), kArch, binary, &log);
      ASSERT_EQ(status.code, TESSERA_OK) << status.message << "\n" << log;
      EXPECT_LE(binary.spill_bytes, score.any() ? kMostOptionSpillBytes : 0) << log;
      EXPECT_EQ(binary.wgmma_serialized, 0) << log;
      EXPECT_EQ(hidden_loss(log), "") << log;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Prebuilt, CudaCompileSm90Tile, testing::ValuesIn(whole_and_halved()));

// The n-th launch of a problem, compiled for the device's architecture.
void compile_launch(const tessera_problem& problem, const tessera_device& device, int n, Binary& binary,
                    std::string& log, std::string& config) {
  tessera_plan plan;
  const tessera_status planned = tessera_make_plan(&problem, &device, &plan);
  ASSERT_EQ(planned.code, TESSERA_OK) << planned.message;
  LaunchList list;
  ASSERT_EQ(lower(plan, tessera_buffers{}, nullptr, list).code, TESSERA_OK);
  const KernelSpec spec = list[n].spec();
  config = spec.config;
  const tessera_status status = compile_kernel(source_of(spec), symbol_of(spec), device.arch, binary, &log);
  ASSERT_EQ(status.code, TESSERA_OK) << config << ": " << status.message << "\n" << log;
}

// What bwd_sm90 is compiled into beside the prebuilt kernels: as a plan has it, by a block or, above head sizes of 128,
// by pairs; (192, 128) by either.
class CudaCompileBwdSm90 : public testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(CudaCompileBwdSm90, OverlapsItsProducts) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  tessera_device device{};
  ASSERT_EQ(tessera_device_cuda_arch(90, &device).code, TESSERA_OK);
  device.kernel = TESSERA_KERNEL_BWD_SM90;
  struct Kind {
    DType dtype;
    bool window = false, packed = false, deterministic = false, alibi = false;
    bool softcap = false, dropout = false, mask = false;
    std::optional<DType> bias = {};  // its type, with dBias
  };
  for (const auto& [dtype, window, packed, deterministic, alibi, softcap, dropout, mask, bias] :
       {Kind{.dtype = bfloat16, .window = true}, Kind{.dtype = bfloat16, .packed = true},
        Kind{.dtype = float16, .packed = true}, Kind{bfloat16, true, true, false, true},
        Kind{bfloat16, true, true, false, true, false, true, true, bfloat16},
        Kind{.dtype = bfloat16, .deterministic = true}, Kind{bfloat16, true, true, true, true},
        Kind{float16, true, true, true, true}, Kind{.dtype = bfloat16, .softcap = true},
        Kind{.dtype = float16, .softcap = true}, Kind{.dtype = bfloat16, .dropout = true},
        Kind{.dtype = bfloat16, .mask = true}, Kind{bfloat16, true, true, true, false, true, true, true},
        Kind{bfloat16, true, true, true, true, false, true, true, bfloat16},
        Kind{float16, true, true, true, true, false, true, true, float32}}) {
    const auto [head_dim, head_dim_v] = GetParam();
    tessera_problem p;
    tessera_problem_init(&p);
    constexpr int64_t kRows = 4096, kHeads = 4;
    p.direction = TESSERA_BACKWARD, p.causal = 1, p.deterministic = deterministic;
    p.q = p.k = layout(dtype, {1, kRows, kHeads, head_dim}), p.v = p.o = layout(dtype, {1, kRows, kHeads, head_dim_v});
    p.lse = layout(float32, {1, kHeads, kRows});
    if (packed) {
      p.q = p.k = layout(dtype, {kRows, kHeads, head_dim}), p.v = p.o = layout(dtype, {kRows, kHeads, head_dim_v});
      p.lse = layout(float32, {kHeads, kRows});
      p.cu_seqlens_q = p.cu_seqlens_k = layout(int32, {2});
      p.max_seqlen_q = p.max_seqlen_k = kRows;
    }
    p.d_q = p.d_k = p.q, p.d_v = p.d_o = p.v;
    if (window) p.window_left = 1000;
    if (alibi) p.alibi_slopes = layout(float32, {kHeads}), p.has_scale = 1, p.scale = -1;
    if (softcap) p.softcap = 30;
    if (dropout) p.dropout_p = 0.1;
    if (mask) p.mask = layout(boolean, {kRows, kRows});
    if (bias) {
      p.bias = layout(*bias, {1, kHeads, kRows, kRows});
      p.d_bias = layout(float32, {1, kHeads, kRows, kRows});
    }
    Binary binary;
    std::string log, config;
    ASSERT_NO_FATAL_FAILURE(compile_launch(p, device, 1, binary, log, config));
    SCOPED_TRACE(config);
    EXPECT_LE(binary.registers, 128);
    // A softcap at head size 128, packed rows at (192, 128) and all options at once at 256 lack registers for far rows
    // (attention/far_rows). This should be improved. Without spills, the stack is one that the compiler no longer uses.
    const bool all_options = alibi && mask && bias;
    const bool lacks_registers =
        (softcap && head_dim == 128) || (packed && head_dim == 192) || (all_options && head_dim == 256);
    EXPECT_LE(binary.spill_bytes, lacks_registers ? 48 : 0) << log;
    EXPECT_LE(binary.stack_bytes, lacks_registers ? 16 : 8) << log;
    EXPECT_EQ(binary.wgmma_serialized, 0) << log;
    EXPECT_EQ(hidden_loss(log), "") << log;
  }
}

INSTANTIATE_TEST_SUITE_P(Prebuilt, CudaCompileBwdSm90,
                         testing::Values(std::tuple{64, 64}, std::tuple{96, 96}, std::tuple{128, 128},
                                         std::tuple{192, 128}, std::tuple{192, 192}, std::tuple{256, 256}));

// A block that has a head.
TEST(CudaCompileBwdSm90WholeHead, OverlapsItsProducts) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  tessera_device device{};
  ASSERT_EQ(tessera_device_cuda_arch(90, &device).code, TESSERA_OK);
  device.kernel = TESSERA_KERNEL_BWD_SM90;
  for (const bool window : {false, true}) {
    tessera_problem p;
    tessera_problem_init(&p);
    constexpr int64_t kBatch = 64, kRows = 512, kHeads = 8;
    p.direction = TESSERA_BACKWARD, p.causal = 1;
    p.q = p.k = p.v = p.o = p.d_o = p.d_q = p.d_k = p.d_v = layout(bfloat16, {kBatch, kRows, kHeads, 64});
    p.lse = layout(float32, {kBatch, kHeads, kRows});
    if (window) p.window_left = 100;
    Binary binary;
    std::string log, config;
    ASSERT_NO_FATAL_FAILURE(compile_launch(p, device, 1, binary, log, config));
    SCOPED_TRACE(config);
    EXPECT_NE(config.find(".whole_head = true"), std::string::npos);
    EXPECT_LE(binary.registers, 168);
    EXPECT_EQ(binary.spill_bytes, 0) << log;
    EXPECT_EQ(binary.wgmma_serialized, 0) << log;
    EXPECT_EQ(hidden_loss(log), "") << log;
  }
}

// By clusters of four.
TEST(CudaCompileBwdSm90D512, OverlapsItsProducts) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  tessera_device device{};
  ASSERT_EQ(tessera_device_cuda_arch(90, &device).code, TESSERA_OK);
  for (const DType dtype : {bfloat16, float16}) {
    for (const bool window : {false, true}) {
      tessera_problem p;
      tessera_problem_init(&p);
      p.direction = TESSERA_BACKWARD, p.causal = 1;
      p.q = p.k = p.v = p.o = p.d_o = p.d_q = p.d_k = p.d_v = layout(dtype, {1, 4096, 4, 512});
      p.lse = layout(float32, {1, 4, 4096});
      if (window) p.window_left = 1000;
      Binary binary;
      std::string log, config;
      ASSERT_NO_FATAL_FAILURE(compile_launch(p, device, 1, binary, log, config));
      SCOPED_TRACE(config);
      EXPECT_LE(binary.registers, 168);
      EXPECT_EQ(binary.spill_bytes, 0) << log;
      EXPECT_EQ(binary.wgmma_serialized, 0) << log;
      EXPECT_EQ(hidden_loss(log), "") << log;
    }
  }
}

// fwd_sm90 and bwd_sm90 by a block mask's lists, and the kernel that makes them.
class CudaCompileBlockMask : public testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(CudaCompileBlockMask, OverlapsItsProducts) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  tessera_device device{};
  ASSERT_EQ(tessera_device_cuda_arch(90, &device).code, TESSERA_OK);
  const auto [head_dim, keys] = GetParam();
  struct Kind {
    bool causal = false, options = false, d_bias = false, deterministic = false;
  };
  for (const auto& [causal, options, d_bias, deterministic] :
       {Kind{}, Kind{.causal = true}, Kind{.causal = true, .options = true}, Kind{.causal = true, .d_bias = true},
        Kind{.deterministic = true}, Kind{.causal = true, .options = true, .deterministic = true}}) {
    for (const tessera_direction direction : {TESSERA_FORWARD, TESSERA_BACKWARD}) {
      const bool backward = direction == TESSERA_BACKWARD;
      if (backward ? keys != 64 : d_bias || deterministic) continue;  // its code is one for all keys
      if (backward && head_dim > 128 && deterministic) continue;      // by pairs of blocks
      device.kernel = backward ? TESSERA_KERNEL_BWD_SM90 : TESSERA_KERNEL_FWD_SM90;
      tessera_problem p;
      tessera_problem_init(&p);
      constexpr int64_t kRows = 4096, kHeads = 8;
      p.q = p.k = p.v = p.o = layout(bfloat16, {2, kRows, kHeads, head_dim});
      p.direction = direction;
      if (backward) p.d_o = p.d_q = p.d_k = p.d_v = p.q, p.lse = layout(float32, {2, kHeads, kRows});
      p.causal = causal, p.deterministic = deterministic;
      if (options) p.dropout_p = 0.1, p.alibi_slopes = layout(float32, {kHeads});
      if (d_bias) {
        p.bias = layout(bfloat16, {2, kHeads, kRows, kRows});
        p.d_bias = layout(float32, {2, kHeads, kRows, kRows});
      }
      p.mask_block_q = 64, p.mask_block_k = keys;
      p.block_mask = layout(boolean, {1, kHeads, kRows / 64, kRows / keys});
      for (int launch = 0; launch < (backward ? 4 : 2);
           ++launch) {  // the lists, the products, the preprocess and the postprocess
        Binary binary;
        std::string log, config;
        ASSERT_NO_FATAL_FAILURE(compile_launch(p, device, launch, binary, log, config));
        SCOPED_TRACE(config);
        EXPECT_EQ(binary.spill_bytes, 0) << log;
        EXPECT_LE(binary.stack_bytes, 8) << log;  // as above
        EXPECT_EQ(binary.wgmma_serialized, 0) << log;
        EXPECT_EQ(hidden_loss(log), "") << log;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Prebuilt, CudaCompileBlockMask,
                         testing::Combine(testing::Values(64, 96, 128, 192, 256), testing::Values(64, 128)));

// Work tiles by a list: the list, and fwd_sm90 that reads it.
TEST(CudaCompileMixedSm90, SpillsNothing) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  tessera_device device{};
  ASSERT_EQ(tessera_device_cuda_arch(90, &device).code, TESSERA_OK);
  tessera_problem p;
  tessera_problem_init(&p);
  p.q = p.o = layout(bfloat16, {600, 32, 128});
  p.k = p.v = layout(bfloat16, {1000, 16, 8, 128});
  p.page_table = layout(int32, {20, 256}), p.seqused_k = layout(int32, {20});
  p.cu_seqlens_q = layout(int32, {21}), p.max_seqlen_q = 500, p.causal = 1;
  for (const int launch : {0, 1}) {
    Binary binary;
    std::string log, config;
    ASSERT_NO_FATAL_FAILURE(compile_launch(p, device, launch, binary, log, config));
    EXPECT_NE(config.find(launch == 0 ? "LiveTilesConfig" : ".live_tiles = true"), std::string::npos) << config;
    EXPECT_EQ(binary.spill_bytes, 0) << config << log;
    EXPECT_EQ(hidden_loss(log), "");
  }
}

// fwd_sm90 of a few tokens, whose parts clusters merge: of 64 rows by two consumers and, at D = 64, of 256 by four.
class CudaCompileMergedSm90 : public testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(CudaCompileMergedSm90, SpillsNothing) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  tessera_device device{};
  ASSERT_EQ(tessera_device_cuda_arch(90, &device).code, TESSERA_OK);
  device.kernel = TESSERA_KERNEL_FWD_SM90;
  const auto [head_dim, queries] = GetParam();
  setenv("TESSERA_FWD_SM90_SPLITS", "8,8", 1);  // a plan may take combine
  for (const bool packed : {false, true}) {
    tessera_problem p;
    tessera_problem_init(&p);
    constexpr int64_t kKeys = 8192, kPage = 16;
    p.q = p.o = layout(bfloat16, {1, queries, 8, head_dim});
    p.k = p.v = layout(bfloat16, {1, kKeys, 1, head_dim});
    p.causal = 1;
    if (packed) {
      p.q = p.o = layout(bfloat16, {queries, 8, head_dim});
      p.k = p.v = layout(bfloat16, {kKeys / kPage, kPage, 1, head_dim});
      p.page_table = layout(int32, {1, kKeys / kPage}), p.seqused_k = layout(int32, {1});
      p.cu_seqlens_q = layout(int32, {2}), p.max_seqlen_q = queries;
    }
    Binary binary;
    std::string log, config;
    ASSERT_NO_FATAL_FAILURE(compile_launch(p, device, 0, binary, log, config));
    EXPECT_NE(config.find(".merge_blocks = 8"), std::string::npos) << config;
    EXPECT_EQ(binary.spill_bytes, 0) << config << log;
    EXPECT_EQ(binary.wgmma_serialized, 0) << config << log;
    EXPECT_EQ(hidden_loss(log), "") << config;
  }
  unsetenv("TESSERA_FWD_SM90_SPLITS");
}

INSTANTIATE_TEST_SUITE_P(Prebuilt, CudaCompileMergedSm90,
                         testing::Combine(testing::Values(64, 96, 128, 256), testing::Values(8, 32)));

// What decode_sm90 is compiled into beside the prebuilt kernels.
class CudaCompileDecodeSm90 : public testing::TestWithParam<int64_t> {};

TEST_P(CudaCompileDecodeSm90, SpillsNothingInItsLoop) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  tessera_device device{};
  ASSERT_EQ(tessera_device_cuda_arch(90, &device).code, TESSERA_OK);
  device.kernel = TESSERA_KERNEL_DECODE_SM90;
  struct Kind {
    bool paged, invariant, options, masks, codes = false;
  };
  for (const auto& [paged, invariant, options, masks, codes] :
       {Kind{false, true, false, false}, Kind{true, false, true, false}, Kind{true, true, true, false},
        Kind{false, false, false, true}, Kind{true, false, true, true}, Kind{false, false, false, false, true},
        Kind{true, true, true, true, true}}) {
    tessera_problem p;
    tessera_problem_init(&p);
    constexpr int64_t kPages = 256, kPage = 16, kHeads = 4;
    p.q = p.o = layout(float16, {2, 1, 2 * kHeads, GetParam()});
    p.k = p.v = layout(float16, {2, kPages * kPage, kHeads, GetParam()});
    p.seqused_k = layout(int32, {2});
    if (paged) {
      p.k = p.v = layout(float16, {2 * kPages, kPage, kHeads, GetParam()});
      p.page_table = layout(int32, {2, kPages});
    }
    if (codes) p.k.dtype = p.v.dtype = paged ? TESSERA_FLOAT8_E5M2 : TESSERA_FLOAT8_E4M3;
    if (codes && paged) p.k_descale = p.v_descale = layout(float32, {2 * kPages, kPage, kHeads});
    p.batch_invariant = invariant;
    if (masks) p.tree_mask = layout(int32, {2, 1, 1}), p.causal_seqs = layout(boolean, {2});
    if (options) p.softcap = 30, p.alibi_slopes = layout(float32, {2 * kHeads}), p.has_scale = 1, p.scale = -1;
    Binary binary;
    std::string log, config;
    ASSERT_NO_FATAL_FAILURE(compile_launch(p, device, 0, binary, log, config));
    SCOPED_TRACE(config);
    // Two numbers of a part, once a part, beside accumulators of 128 registers.
    const bool full = GetParam() == 256 && paged && invariant && !codes;
    EXPECT_LE(binary.spill_bytes, full ? 16 : 0) << log;
    EXPECT_LE(binary.stack_bytes, full ? 8 : 0) << log;
  }
}

INSTANTIATE_TEST_SUITE_P(Prebuilt, CudaCompileDecodeSm90, testing::Values(64, 128, 256));

// fwd_sm80 over 8-bit caches, which no prebuilt kernel has.
class CudaCompileFwdSm80Codes : public testing::TestWithParam<int> {};

TEST_P(CudaCompileFwdSm80Codes, SpillsNothing) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  for (const int32_t arch : {80, 90}) {
    tessera_device device{};
    ASSERT_EQ(tessera_device_cuda_arch(arch, &device).code, TESSERA_OK);
    device.kernel = TESSERA_KERNEL_FWD_SM80;
    constexpr int64_t kPages = 64, kPage = 16, kHeads = 4, kQueries = 256;
    const bool float16_queries = arch == 90;  // the other two forms of a product with scales of each value
    tessera_problem p;
    tessera_problem_init(&p);
    p.q = p.o = layout(float16_queries ? float16 : bfloat16, {2, kQueries, 2 * kHeads, GetParam()});
    p.k = p.v = layout(float8_e4m3, {2 * kPages, kPage, kHeads, GetParam()});
    p.page_table = layout(int32, {2, kPages}), p.seqused_k = layout(int32, {2});
    p.k_descale = p.v_descale = layout(float32, {2 * kPages, kPage, kHeads});
    Binary binary;
    std::string log, config;
    ASSERT_NO_FATAL_FAILURE(compile_launch(p, device, 0, binary, log, config));
    SCOPED_TRACE(config);
    EXPECT_EQ(binary.spill_bytes, 0) << log;
    EXPECT_EQ(binary.stack_bytes, 0) << log;
  }
}

INSTANTIATE_TEST_SUITE_P(OnFirstUse, CudaCompileFwdSm80Codes, testing::Values(64, 128, 256));

// What append is compiled into for a cache of 8 bits beside the prebuilt kernels, with the conversion of each GPU.
TEST(CudaCompileAppend, SpillsNothing) {
  CompilerInfo compiler;
  const tessera_status found = open_compiler(compiler);
  if (found.code != TESSERA_OK) GTEST_SKIP() << found.message;
  for (const int32_t arch : {80, 90}) {
    for (const AppendConfig& config : {AppendConfig{Dtype::kFloat16, Dtype::kFloat8E5M2, true},
                                       AppendConfig{Dtype::kFloat32, Dtype::kFloat8E4M3, true},
                                       AppendConfig{Dtype::kBFloat16, Dtype::kFloat8E4M3, false}}) {
      const KernelSpec spec = spec_of(config);
      SCOPED_TRACE(spec.config + " for " + target_name(arch));
      Binary binary;
      std::string log;
      ASSERT_EQ(compile_kernel(source_of(spec), symbol_of(spec), arch, binary, &log).code, TESSERA_OK) << log;
      EXPECT_LE(binary.registers, spec.limits.registers);
      EXPECT_EQ(binary.spill_bytes, 0) << log;
      EXPECT_EQ(binary.stack_bytes, 0) << log;
    }
  }
}

}  // namespace
}  // namespace tessera::cuda
