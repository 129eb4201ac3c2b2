// Finding NVRTC, its report on a kernel, and the path from a config to a cubin. Tests that need NVRTC are skipped
// without it; none needs a GPU.
#include "cuda/runtime/nvrtc.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "cuda/kernels.hpp"
#include "cuda/runtime/codegen.hpp"
#include "cuda/runtime/jit.hpp"
#include "cuda/runtime/sources.hpp"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class CudaCompiler : public testing::Test {
 protected:
  void SetUp() override {
    const tessera_status status = open_compiler(compiler);
    if (status.code != TESSERA_OK) GTEST_SKIP() << status.message;
    std::string pattern = fs::temp_directory_path() / "tessera-nvrtc-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder = pattern;
  }
  void TearDown() override {
    if (!folder.empty()) fs::remove_all(folder);
  }

  CompilerInfo compiler;
  fs::path folder;
};

constexpr CombineConfig kConfig{Dtype::kFloat16, Dtype::kFloat32, false};

TEST(CudaCodegen, NamesTheTemplateAndItsConfig) {
  const std::string source = source_of(spec_of(kConfig));
  EXPECT_PRED2(contains, source, "#include \"tessera/combine/kernel.cuh\"");
  EXPECT_PRED2(contains, source,
               "__launch_bounds__(128, 5)\ntessera_combine(const __grid_constant__ tessera::CombineParams p)");
  EXPECT_PRED2(contains, source,
               "tessera::combine<tessera::CombineConfig{.dtype = tessera::Dtype{1}, .part_dtype = tessera::Dtype{0}, "
               ".chunks = false}>(p);");
}

TEST(CudaCodegen, SaysHowManyBlocksAClusterHas) {
  FwdSm90Config config{};
  config.dtype = Dtype::kBFloat16, config.head_dim = config.head_dim_v = 128, config.block_n = 128;
  config.consumers = config.k_stages = config.v_stages = config.q_stages = 2, config.o_chunks = config.cluster = 1;
  EXPECT_PRED2(contains, source_of(spec_of(config)), "__launch_bounds__(384, 1)\ntessera_fwd_sm90(");
  config.cluster = 2;
  EXPECT_PRED2(contains, source_of(spec_of(config)),
               "__launch_bounds__(384, 1) __cluster_dims__(2, 1, 1)\ntessera_fwd_sm90(");
  EXPECT_PRED2(contains, source_of(spec_of(config)),
               ".cluster = 2, .varlen = false, .block_mask = false, .live_tiles = false, .pack_gqa = false, "
               ".split = false, .score = ");
}

TEST(CudaCodegen, AssertsWhatHostAndDeviceAgreeOn) {
  FwdConfig config{};
  config.head_dim = config.head_dim_v = config.block_m = 64, config.block_n = 32, config.stages = 2;
  config.dtype = Dtype::kFloat16;
  EXPECT_PRED2(contains, source_of(spec_of(config)),
               "static_assert(sizeof(tessera::FwdSharedMemory<" + config_text(config) +
                   ">) == " + std::to_string(smem_bytes(config)) + ", ");
  EXPECT_PRED2(contains, source_of(spec_of(kConfig)), "static_assert(tessera::kCombineWarps == 4, ");
}

// A claim that does not hold is an error in words of this project's.
TEST_F(CudaCompiler, RefusesAFalseClaim) {
  KernelSpec spec = spec_of(kConfig);
  spec.claim = "tessera::kCombineWarps == 5";
  Binary binary;
  const tessera_status status = compile_kernel(source_of(spec), symbol_of(spec), 80, binary);
  EXPECT_EQ(status.code, TESSERA_INTERNAL);
  EXPECT_PRED2(contains, status.message, "as the host launches it");
}

TEST(CudaCodegen, EveryFieldIsPartOfTheKey) {
  FwdConfig config{};
  const ConfigValues before = config_values(config);
  config.score.dropout = true;
  const ConfigValues after = config_values(config);
  EXPECT_EQ(before.count, after.count);
  EXPECT_NE(before.value, after.value);
  EXPECT_PRED2(contains, config_text(config), ".dropout = true");
}

TEST(CudaSources, EmbedTheKernels) {
  bool found = false;
  for (int i = 0; i < kNumKernelHeaders; ++i) {
    if (std::string(kKernelHeaders[i].name) != "tessera/combine/kernel.cuh") continue;
    found = true;
    EXPECT_PRED2(contains, kKernelHeaders[i].text, "combine");
  }
  EXPECT_TRUE(found);
}

TEST(CudaPtxasLog, IsRead) {
  const std::string log =
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
      "ptxas info    : Used 255 registers, used 0 barriers\n"
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...\n"
      "ptxas info    : Compiling entry function 'mine' for 'sm_90a'\n"
      "ptxas info    : Function properties for mine\n"
      "ptxas         .     256 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
      "ptxas info    : Used 80 registers, used 1 barriers, 256 bytes cumulative stack size\n";
  Binary binary;
  ASSERT_TRUE(read_ptxas_log(log, "mine", binary));
  EXPECT_EQ(binary.registers, 80);
  EXPECT_EQ(binary.stack_bytes, 256);
  EXPECT_EQ(binary.spill_bytes, 32);
  EXPECT_EQ(binary.wgmma_serialized, 1);
  EXPECT_FALSE(read_ptxas_log(log, "absent", binary));
}

// All of ptxas's reasons (C7510 to C7520): the flag depends on the words that they share.
TEST(CudaPtxasLog, EveryReasonToSerializeIsSeen) {
  for (const char* reason :
       {"the presence of Extern calls", "wgmma pipeline crossing function boundary at a function call",
        "insufficient register resources", "insufficient register resources for the wgmma pipeline",
        "ill formed pipeline stage",
        "non wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline stage",
        "non wgmma instructions defining input registers of a wgmma between start and end of the pipeline stage",
        "non wgmma instructions reading accumulator registers of  a wgmma between start and end of the pipeline stage",
        "program dependence on compiler-inserted WG.AR in divergent path",
        "program dependence on compiler-inserted WG.DP in divergent path"}) {
    const std::string log =
        std::string(
            "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ") +
        reason + " in the function 'mine'\nptxas info    : Compiling entry function 'mine' for 'sm_90a'\n" +
        "ptxas info    : Used 80 registers\n";
    Binary binary;
    ASSERT_TRUE(read_ptxas_log(log, "mine", binary));
    EXPECT_EQ(binary.wgmma_serialized, 1) << reason;
  }
}

// Runs before the other tests that need NVRTC, so that none is cached yet: the error says what is wrong and where it
// searched.
TEST(CudaCompilerSearch, SaysWhatWasWrong) {
  const char* given = std::getenv("TESSERA_NVRTC");
  const std::string before = given ? given : "";
  setenv("TESSERA_NVRTC", "/nowhere/libnvrtc.so", 1);
  CompilerInfo info;
  const tessera_status status = find_compiler(info);
  given ? setenv("TESSERA_NVRTC", before.c_str(), 1) : unsetenv("TESSERA_NVRTC");
  if (status.code == TESSERA_OK) GTEST_SKIP() << "found before by another test of this process";
  EXPECT_EQ(status.code, TESSERA_UNSUPPORTED);
  EXPECT_PRED2(contains, status.message, "TESSERA_NVRTC: /nowhere/libnvrtc.so, accepted");
  EXPECT_EQ(std::string(status.message).find('\n'), std::string::npos);
}

TEST_F(CudaCompiler, IsWhatItsFilesName) {
  EXPECT_GE(compiler.version, 12080);
  EXPECT_TRUE(fs::exists(compiler.path)) << compiler.path;
}

TEST_F(CudaCompiler, CompilesOnceAndFindsItAgain) {
  Cache cache(folder);
  const KernelSpec spec = spec_of(kConfig);
  Binary compiled, cached;
  Origin origin{};
  tessera_status status = build_binary(spec, 90, cache, compiled, &origin);
  ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  EXPECT_EQ(origin, Origin::kCompiled);
  EXPECT_EQ(compiled.cubin.substr(1, 3), "ELF");
  EXPECT_EQ(compiled.symbol, "tessera_combine");
  EXPECT_GT(compiled.registers, 0);

  double least_ms = 1e9;  // of a few: the machine may have other work
  for (int i = 0; i < 5; ++i) {
    Cache from_disk(folder);
    const auto begin = std::chrono::steady_clock::now();
    status = build_binary(spec, 90, from_disk, cached, &origin);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    least_ms = std::min(least_ms, took.count());
    ASSERT_EQ(status.code, TESSERA_OK) << status.message;
    EXPECT_EQ(origin, Origin::kCached);
    EXPECT_EQ(cached.cubin, compiled.cubin);
  }
  EXPECT_LT(least_ms, 5);

  Cache again(folder);
  status = build_binary(spec, 80, again, cached, &origin);
  ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  EXPECT_EQ(origin, Origin::kCompiled) << "another architecture";
  EXPECT_NE(cached.cubin, compiled.cubin);
}

TEST_F(CudaCompiler, WritesPtxForGpusThatItDoesNotKnow) {
  const KernelSpec spec = spec_of(kConfig);
  Binary binary;
  const tessera_status status = compile_kernel(source_of(spec), symbol_of(spec), {80, true}, binary);
  ASSERT_EQ(status.code, TESSERA_OK) << status.message;
  EXPECT_TRUE(binary.ptx);
  EXPECT_EQ(binary.arch, 80);
  EXPECT_NE(binary.cubin.find(".target sm_80"), std::string::npos);
  EXPECT_NE(binary.cubin.find(".entry tessera_combine("), std::string::npos);
  EXPECT_EQ(binary.cubin.back(), '\0') << "a C string, as the driver takes it";
}

// What is prebuilt stays so when another kernel's text changes.
TEST(CudaSources, AKernelsKeyHasItsOwnHeaders) {
  const auto digest = [](const char* header) { return headers_digest(std::string("#include \"") + header + '"'); };
  const Digest none = headers_digest("// nothing");
  EXPECT_EQ(digest("not/embedded.hpp"), none);
  EXPECT_NE(digest("tessera/types.hpp"), none);
  EXPECT_NE(digest("tessera/types.hpp"), digest("tessera/combine/kernel.cuh")) << "which includes others";
  EXPECT_NE(digest("tessera/fwd_sm80/kernel.cuh"), digest("tessera/bwd_sm80/kernel.cuh"));
  EXPECT_EQ(headers_digest("#include \"tessera/types.hpp\"\n#include \"tessera/combine/kernel.cuh\""),
            digest("tessera/combine/kernel.cuh"));
}

// Two products in a loop, in so many blocks a multiprocessor; `between` runs beside the first.
std::string two_products(int blocks, const std::string& between) {
  return R"(#include "tessera/ptx/wgmma.cuh"
using namespace tessera;
extern "C" __global__ void __launch_bounds__(128, )" +
         std::to_string(blocks) + R"() products(float* out, unsigned long long a, unsigned long long b, int n) {
  using Product = ptx::Wgmma<Dtype::kBFloat16, 64, false>;
  float d[32], e[32];
  for (int i = 0; i < 32; ++i) d[i] = e[i] = 0.0f;
#pragma unroll 1
  for (int k = 0; k < n; ++k) {
    ptx::wgmma_pin(d);
    ptx::wgmma_pin(e);
    ptx::wgmma_fence();
    Product::ss(d, a + k, b, 1);
    ptx::wgmma_commit_group();
    )" + between +
         R"(
    Product::ss(e, b + k, a, 1);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(d);
    ptx::wgmma_pin(e);
  }
  for (int i = 0; i < 32; ++i) out[128 * i + threadIdx.x] = d[i] + e[i];
}
)";
}

// Codes are CUDA 13.0's; another release may find another reason for the same program.
TEST_F(CudaCompiler, SeesProductsThatPtxasSerializes) {
  struct {
    const char* what;
    int blocks;
    const char* between;
    int32_t serialized;
  } const kernels[] = {
      {"nothing between", 1, "", 0},
      {"C7511: 64 registers for 64 accumulators", 8, "", 1},
      {"C7512: 72 registers", 7, "", 1},
      {"C7518: accumulators written in a branch", 1,
       "if (out[threadIdx.x] > 0.0f) for (int i = 0; i < 32; ++i) d[i] *= 2.0f;", 1},
      {"C7520: a product in a branch", 1, "if (n > 7 && threadIdx.x / 32 == 1) Product::ss(d, b + k, a, 1);", 1},
  };
  for (const auto& kernel : kernels) {
    Binary binary;
    std::string log;
    const tessera_status status =
        compile_kernel(two_products(kernel.blocks, kernel.between), "products", 90, binary, &log);
    ASSERT_EQ(status.code, TESSERA_OK) << status.message << "\n" << log;
    EXPECT_EQ(binary.wgmma_serialized, kernel.serialized) << kernel.what << "\n" << log;
  }
}

TEST_F(CudaCompiler, ErrorsAreOneLine) {
  Binary binary;
  std::string log;
  tessera_status status = compile_kernel("extern \"C\" __global__ void k() { not a program }", "k", 80, binary, &log);
  EXPECT_EQ(status.code, TESSERA_INTERNAL);
  EXPECT_PRED2(contains, status.message, "cannot compile k for sm_80");
  EXPECT_PRED2(contains, status.message, "error");
  EXPECT_EQ(std::string(status.message).find('\n'), std::string::npos);
  EXPECT_PRED2(contains, log, "k.cu(1)");
  status = compile_kernel("extern \"C\" __global__ void k() {}", "k", 999, binary);
  EXPECT_EQ(status.code, TESSERA_UNSUPPORTED);
  EXPECT_PRED2(contains, status.message, "does not compile for sm_999");
}

}  // namespace
}  // namespace tessera::cuda
